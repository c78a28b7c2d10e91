"""Memory snapshots as files that PyTorch's own tools open: the viewer (MemoryViz.js) and `torch.cuda._memory_viz`.

The viewer has an unpickler of its own, which knows few opcodes, and it draws what it can rewind: from the final
segments back through the trace. `write_snapshot` writes plain builtins with pickle protocol 4; `check_viewer` says
what would keep a snapshot from opening.
"""

from __future__ import annotations

import gzip
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import numpy as np

from traces.errors import OutputError, TraceError
from traces.files import write_atomically
from traces.snapshot.layout import ACTIONS, read_layout
from traces.snapshot.rewind import SizeRules, rewind
from traces.text import path_text, quoted

PROTOCOL: Final = 4

#: Opcodes that the viewer's unpickler knows.
_KNOWN_NAMES: Final = (
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_DICT EMPTY_LIST EMPTY_TUPLE DICT LIST "
    "TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE "
    "NEWFALSE SHORT_BINUNICODE BINUNICODE"
)
_KNOWN: Final = frozenset(_KNOWN_NAMES.split())
_SEGMENT_KEYS: Final = ("device", "address", "total_size", "stream", "blocks")
_BLOCK_KEYS: Final = ("size", "state")
_MAX_PROBLEMS: Final = 20


def write_snapshot(snapshot: Mapping[str, Any], path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a snapshot (torch's layout) as a pickle of protocol 4; gzipped where the path ends in `.gz`.

    Numbers of numpy become plain ones. Nothing appears under the path before all is written. Raises OutputError where
    the file exists and `force` is not given, cannot be written, or where the snapshot holds more than plain data.
    """
    try:
        data = pickle.dumps(plain(snapshot), protocol=PROTOCOL)
    except RecursionError:
        raise OutputError(f"{path_text(path)}: the snapshot is nested too deeply to be written") from None
    except TypeError as error:
        raise OutputError(f"{path_text(path)}: {error}") from None
    with write_atomically(path, force=force) as file:
        if path_text(path).endswith(".gz"):
            _compress(data, file)
        else:
            file.write(data)


def _compress(data: bytes, file: IO[bytes]) -> None:
    """Gzip without a name or a time, so that equal snapshots are equal files."""
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as stream:
        stream.write(data)


def plain(value: Any) -> Any:
    """`value` in dict, list, tuple, str, int, float, bool and None alone; TypeError where it holds anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(item) for item in value]
    raise TypeError(f"a snapshot holds only plain data, not a {type(value).__name__}")


def check_viewer(snapshot: Mapping[str, Any]) -> list[str]:
    """What would keep the viewer from opening this snapshot, one line each; empty where nothing would.

    The rules are those of MemoryViz.js: the opcodes that it knows; the keys that it reads; a trace for every device;
    and that the final segments can be rewound through the whole trace, each block in use inside a segment throughout.
    """
    try:
        copy = plain(snapshot)
        data = pickle.dumps(copy, protocol=PROTOCOL)
    except (TypeError, RecursionError) as error:
        return [str(error)]
    problems = _opcodes(data) + _keys(copy)
    return problems[:_MAX_PROBLEMS] if problems else _rewinds(copy)


def _opcodes(data: bytes) -> list[str]:
    """Opcodes that the viewer's unpickler does not know, and numbers that it cannot hold."""
    unknown: dict[str, None] = {}
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _KNOWN:
            unknown[f"the viewer does not know the pickle opcode {opcode.name}"] = None
        if opcode.name == "LONG1" and argument is not None and not -(1 << 63) <= argument < 1 << 63:
            unknown[f"the number {quoted(argument)} has more than 8 bytes"] = None
    return list(unknown)


def _keys(snapshot: dict[str, Any]) -> list[str]:
    """Keys that the viewer reads and that are missing or wrong."""
    segments, traces = snapshot.get("segments"), snapshot.get("device_traces")
    if not isinstance(segments, list) or not isinstance(traces, list):
        return ["'segments' and 'device_traces' must be lists"]
    problems = []
    for i, segment in enumerate(segments):
        missing = [key for key in _SEGMENT_KEYS if key not in segment]
        missing += [f"blocks: {key}" for block in segment.get("blocks", ()) for key in _BLOCK_KEYS if key not in block]
        if missing:
            problems.append(f"segment {i}: missing {', '.join(dict.fromkeys(missing))}")
        elif not isinstance(segment["device"], int) or not 0 <= segment["device"] < len(traces):
            problems.append(f"segment {i}: there is no trace of device {quoted(segment['device'])}")
    for device, entries in enumerate(traces):
        problems += _entry_keys(device, entries)
    return problems


def _entry_keys(device: int, entries: Any) -> list[str]:
    if not isinstance(entries, list):
        return [f"device {device}: its trace must be a list"]
    problems = []
    categories = set()
    for i, entry in enumerate(entries):
        action = entry.get("action")
        needed = ("action", "size", "stream", "device_free" if action == "oom" else "addr")
        missing = [key for key in needed if key not in entry]
        if action in ACTIONS and missing:
            problems.append(f"device {device}, entry {i}: missing {', '.join(missing)}")
        if "category" in entry:
            categories.add(entry["category"])
    if categories and "unknown" not in categories:
        problems.append(f"device {device}: the viewer needs one entry of category 'unknown' where entries have any")
    return problems


def _rewinds(snapshot: dict[str, Any]) -> list[str]:
    """Whether the state can be taken back through every trace."""
    problems = []
    try:
        layout = read_layout(snapshot, "snapshot", fill=False)
    except TraceError as error:
        return [str(error)]
    for record in layout.devices:
        try:
            rewind(record, SizeRules(layout.settings, layout.since), "snapshot")
        except TraceError as error:
            problems.append(str(error))
    return problems
