"""What would keep a snapshot that we wrote from opening in PyTorch's viewer (MemoryViz.js), by the viewer's rules."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping
from typing import Any, Final

from simulator.snapshots.rewind import rewind
from simulator.snapshots.rules import possible_rules
from traces.errors import TraceError
from traces.snapshot.layout import ACTIONS, read_layout
from traces.snapshot.writer import PROTOCOL, plain
from traces.text import quoted

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
    rules, *_ = possible_rules(layout, None, "snapshot")
    for record in layout.devices:
        try:
            rewind(record, rules, "snapshot")
        except TraceError as error:
            problems.append(str(error))
    return problems
