"""The layout of a torch memory snapshot, checked: plain dicts and lists in, typed columns out.

Serves the snapshots of torch 2.0 (blocks with `history`) to 2.15, and the bare list of segments that
`torch.cuda.memory_snapshot()` returns. Nothing is interpreted here beyond names, types and ranges; what the entries
mean is the matter of `simulator.snapshots`. Layout: `torch/cuda/memory.py`,
`_snapshot`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeGuard

from traces.errors import TraceError
from traces.model import BlockState
from traces.snapshot.names import Namer
from traces.text import quoted

PoolId = tuple[int, int]
DEFAULT_POOL: Final[PoolId] = (0, 0)

#: Addresses end below this, and so do sums of sizes (check.py allows no more).
LIMIT: Final = 1 << 62
_INTERVALS: Final = 16  # of the divisions table, for 1 MiB, 2 MiB, ... 32 GiB

# kinds of trace entries
ALLOC: Final = 0
FREE_REQUESTED: Final = 1
FREE_COMPLETED: Final = 2
SEGMENT_ALLOC: Final = 3
SEGMENT_FREE: Final = 4
SEGMENT_MAP: Final = 5
SEGMENT_UNMAP: Final = 6
OOM: Final = 7
ACTIONS: Final[Mapping[str, int]] = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "segment_alloc": SEGMENT_ALLOC,
    "segment_free": SEGMENT_FREE,
    "segment_map": SEGMENT_MAP,
    "segment_unmap": SEGMENT_UNMAP,
    "oom": OOM,
}
#: Entries that say nothing of the allocator's state.
IGNORED: Final = frozenset({"snapshot", "annotate", "user_defined"})

_STATES: Final[Mapping[str, BlockState]] = {
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",
    "inactive": "inactive",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a final segment; `requested` of an inactive one is a leftover of its last use."""

    address: int
    size: int
    requested: int
    state: BlockState


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as the snapshot lists it: a cudaMalloc segment, or a mapped range of an expandable one."""

    address: int
    size: int
    stream: int
    large: bool
    expandable: bool
    pool: PoolId
    blocks: tuple[Block, ...]

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + self.size


@dataclass
class Entries:
    """The trace entries of one device, oldest first, as columns.

    `address` is the free bytes of the device for an `oom`. `pool` is None where the file does not say it. `entry` is
    the index in the file's list, -1 for a completion that the recording left out.
    """

    kind: list[int] = field(default_factory=list)
    address: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    pool: list[PoolId | None] = field(default_factory=list)
    name: list[str | None] = field(default_factory=list)
    frames: list[str | None] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)
    time_us: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)

    def after(self, position: int) -> Entries:
        """The entries after one of them."""
        return Entries(**{name: values[position + 1 :] for name, values in vars(self).items()})


@dataclass(frozen=True)
class DeviceRecord:
    """What the snapshot holds of one device; `unknown` counts entries of unknown actions, by action."""

    device: int
    segments: tuple[Segment, ...]
    entries: Entries
    unknown: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Annotation:
    """The start or end of an annotated range (a `record_function`) on a device."""

    name: str
    device: int
    starts: bool
    time_us: int


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """`allocator_settings`: the string that the allocator parsed last, and values in force (None: not in the file)."""

    conf: str
    max_split_size: int | None  # bytes; 0: without limit
    garbage_collection_threshold: float | None
    expandable_segments: bool | None
    divisions: tuple[int, ...] | None


@dataclass(frozen=True)
class Layout:
    """A checked snapshot: its devices that hold anything, and the settings when it was taken.

    `settings` is None where the file has none (torch up to 2.2, or a bare list of segments). `since`
    is the oldest minor release of torch 2 that writes its fields, `until` the newest.
    """

    devices: tuple[DeviceRecord, ...]
    settings: RecordedSettings | None
    annotations: tuple[Annotation, ...]
    since: int
    until: int


def read_layout(snapshot: object, where: str, *, fill: bool = True) -> Layout:
    """Check the layout of an unpickled snapshot; `where` names the file in errors.

    `fill`: where a recording has only one half of its frees (`skip_actions`), the other half is put in.
    Raises TraceError, which names device, entry or segment, and key, where something is missing or wrong.
    """
    if isinstance(snapshot, list):
        snapshot = {"segments": snapshot, "device_traces": []}
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise TraceError(f"{where}: not a memory snapshot of torch: there is no list 'segments'")
    segments = _list(snapshot, "segments", where)
    traces = _list(snapshot, "device_traces", where) if "device_traces" in snapshot else []
    _refuse_shared(traces, f"{where}: key 'device_traces'")
    by_device = _segments(segments, where)
    settings = _settings(snapshot.get("allocator_settings"), f"{where}: allocator_settings")
    namer = Namer()
    devices = []
    for device in range(max(len(traces), 1 + max(by_device, default=-1))):
        entries = traces[device] if device < len(traces) else []
        if not isinstance(entries, list):
            raise TraceError(f"{where}: device {device}: its trace must be a list, is {quoted(entries)}")
        if not entries and device not in by_device:
            continue
        columns, unknown = _entries(entries, f"{where}: device {device}", namer)
        if fill:
            _complete_left_out(columns, by_device.get(device, ()))
        devices.append(DeviceRecord(device, by_device.get(device, ()), columns, unknown))
    since, until = _releases(snapshot, segments, traces)
    return Layout(tuple(devices), settings, _annotations(snapshot), since, until)


def _refuse_shared(lists: list[Any], place: str) -> None:
    """One long list in many places: no snapshot has that, and reading it again and again may never end."""
    filled = [id(item) for item in lists if isinstance(item, list) and item]
    if len(set(filled)) != len(filled):
        raise TraceError(f"{place}: holds the same list more than once")


def _list(item: dict[str, Any], key: str, place: str) -> list[Any]:
    value = item.get(key)
    if not isinstance(value, list):
        what = "missing" if key not in item else f"must be a list, is {quoted(value)}"
        raise TraceError(f"{place}: key '{key}': {what}")
    return value


def _int(item: dict[str, Any], key: str, place: str, low: int = 0) -> int:
    value = item.get(key)
    if type(value) is not int or not low <= value < LIMIT:
        if key not in item:
            raise TraceError(f"{place}: key '{key}': missing")
        raise TraceError(f"{place}: key '{key}': must be an integer from {low} to 2^62, is {quoted(value)}")
    return value


def _pool(item: dict[str, Any], key: str, place: str) -> PoolId | None:
    value = item.get(key)
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        first, second = value
        if type(first) is int and type(second) is int and 0 <= first < LIMIT and 0 <= second < LIMIT:
            return first, second
    raise TraceError(f"{place}: key '{key}': must be two integers, is {quoted(value)}")


# Settings


def _settings(settings: object, place: str) -> RecordedSettings | None:
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise TraceError(f"{place}: must be a dict, is {quoted(settings)}")
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF", settings.get("PYTORCH_ALLOC_CONF", ""))
    if not isinstance(conf, str) or len(conf) > 10_000 or not conf.isprintable():
        raise TraceError(f"{place}: key 'PYTORCH_CUDA_ALLOC_CONF': must be one line of text, is {quoted(conf)}")
    max_split = settings.get("max_split_size")
    if max_split is not None and type(max_split) is not int:
        raise TraceError(f"{place}: key 'max_split_size': must be an integer, is {quoted(max_split)}")
    threshold = settings.get("garbage_collection_threshold")
    if threshold is not None and not (
        isinstance(threshold, (int, float)) and math.isfinite(threshold) and 0 <= threshold < 1
    ):
        raise TraceError(f"{place}: key 'garbage_collection_threshold': must be from 0 to 1, is {quoted(threshold)}")
    expandable = settings.get("expandable_segments")
    return RecordedSettings(
        conf=conf,
        max_split_size=max_split if max_split is None or 0 < max_split < LIMIT else 0,
        garbage_collection_threshold=None if threshold is None else float(threshold),
        expandable_segments=None if expandable is None else expandable is True,
        divisions=_divisions(settings.get("roundup_power2_divisions"), place),
    )


def _divisions(table: object, place: str) -> tuple[int, ...] | None:
    """The 16 values of `roundup_power2_divisions`, keyed "1", "2", "4" ... "32768" (MiB)."""
    if table is None:
        return None
    if not isinstance(table, dict):
        raise TraceError(f"{place}: key 'roundup_power2_divisions': must be a dict, is {quoted(table)}")
    values = tuple(table.get(str(1 << i), 0) for i in range(_INTERVALS))
    for value in values:
        if type(value) is not int or not 0 <= value < (1 << 31) or value & (value - 1):
            raise TraceError(f"{place}: key 'roundup_power2_divisions': must hold powers of two, not {quoted(value)}")
    return values


# Segments


def _segments(segments: list[Any], where: str) -> dict[int, tuple[Segment, ...]]:
    """The segments by device, in address order."""
    by_device: dict[int, list[Segment]] = {}
    _refuse_shared([s.get("blocks") for s in segments if isinstance(s, dict)], f"{where}: segments, key 'blocks'")
    for i, segment in enumerate(segments):
        place = f"{where}: segment {i}"
        if not isinstance(segment, dict):
            raise TraceError(f"{place}: must be a dict, is {quoted(segment)}")
        device = segment.get("device", 0)
        if type(device) is not int or not 0 <= device < 1024:
            raise TraceError(f"{place}: key 'device': must be an integer from 0 to 1023, is {quoted(device)}")
        by_device.setdefault(device, []).append(_segment(segment, place))
    ordered = {device: tuple(sorted(found, key=lambda s: s.address)) for device, found in by_device.items()}
    for device, found in ordered.items():
        for one, other in pairwise(found):
            if one.end > other.address:
                raise TraceError(
                    f"{where}: device {device}: the segments at {one.address:#x} and {other.address:#x} overlap"
                )
    return ordered


def _segment(segment: dict[str, Any], place: str) -> Segment:
    address = _int(segment, "address", place, low=512)
    size = _int(segment, "total_size", place, low=1)
    kind = segment.get("segment_type")
    if kind not in ("small", "large"):
        raise TraceError(f"{place}: key 'segment_type': must be 'small' or 'large', is {quoted(kind)}")
    blocks = _blocks(_list(segment, "blocks", place), address, place)
    total = sum(block.size for block in blocks)
    if total != size:
        raise TraceError(f"{place}: its blocks sum to {quoted(total)} bytes, its total_size is {size}")
    if address + size > LIMIT or address % 512:
        raise TraceError(f"{place}: key 'address': {address} is no address of a segment")
    return Segment(
        address=address,
        size=size,
        stream=_int(segment, "stream", place),
        large=kind == "large",
        expandable=bool(segment.get("is_expandable", False)),
        pool=_pool(segment, "segment_pool_id", place) or DEFAULT_POOL,
        blocks=blocks,
    )


def _blocks(blocks: list[Any], address: int, place: str) -> tuple[Block, ...]:
    found = []
    for j, block in enumerate(blocks):
        here = f"{place}, block {j}"
        if not isinstance(block, dict):
            raise TraceError(f"{here}: must be a dict, is {quoted(block)}")
        size = _int(block, "size", here, low=1)
        if "address" in block and _int(block, "address", here) != address:
            raise TraceError(f"{here}: key 'address': is {block['address']}, but the block before it ends at {address}")
        state = block.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise TraceError(f"{here}: key 'state': must be one of {', '.join(_STATES)}, is {quoted(state)}")
        found.append(Block(address, size, _requested(block, size, _STATES[state], here), _STATES[state]))
        address += size
    return tuple(found)


def _requested(block: dict[str, Any], size: int, state: BlockState, place: str) -> int:
    """What the block was asked for; torch 2.0 keeps it in the newest item of `history`."""
    if "requested_size" in block:
        requested = _int(block, "requested_size", place)
    else:
        history = block.get("history")
        newest = history[0] if isinstance(history, list) and history else None
        requested = _int(newest, "real_size", place) if isinstance(newest, dict) else 0
        requested = requested or (0 if state == "inactive" else size)
    if state != "inactive" and not 0 <= requested <= size:
        raise TraceError(f"{place}: key 'requested_size': {requested} is more than the block's size, {size}")
    return requested


# Entries


def _entries(entries: list[Any], where: str, namer: Namer) -> tuple[Entries, dict[str, int]]:
    """The columns of one device's entries, and a count of those of unknown actions."""
    columns = Entries()
    unknown: Counter[str] = Counter()
    for i, entry in enumerate(entries):
        if type(entry) is not dict:
            raise TraceError(f"{where}, entry {i}: must be a dict, is {quoted(entry)}")
        action = entry.get("action")
        if type(action) is not str:
            raise TraceError(f"{where}, entry {i}: key 'action': must be text, is {quoted(action)}")
        kind = ACTIONS.get(action)
        if kind is None:
            if action not in IGNORED:
                unknown[action] += 1
            continue
        _append(columns, entry, kind, i, where)
        columns.name.append(namer.name(entry) if kind in (ALLOC, OOM) else None)
        columns.frames.append(namer.frames(entry))
    return columns, dict(unknown)


def _append(columns: Entries, entry: dict[str, Any], kind: int, i: int, where: str) -> None:
    """One more entry, without its name."""
    key = "device_free" if kind == OOM else "addr"
    address, size, stream = entry.get(key), entry.get("size"), entry.get("stream")
    if not (
        type(address) is int
        and type(size) is int
        and type(stream) is int
        and 0 <= address < LIMIT
        and 0 < size < LIMIT
        and 0 <= stream < LIMIT
    ):
        place = f"{where}, entry {i}"
        address, size = _int(entry, key, place), _int(entry, "size", place, low=1)
        stream = _int(entry, "stream", place)
    if kind != OOM and (address + size > LIMIT or address == 0):
        raise TraceError(f"{where}, entry {i}: key 'addr': {address} is no address of {size} bytes")
    columns.kind.append(kind)
    columns.address.append(address)
    columns.size.append(size)
    columns.stream.append(stream)
    columns.pool.append(_pool(entry, "pool_id", f"{where}, entry {i}") if "pool_id" in entry else None)
    columns.entry.append(i)
    time = entry.get("time_us", 0)
    columns.time_us.append(time if _is_time(time) else 0)


def _is_time(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < LIMIT


def _complete_left_out(columns: Entries, segments: tuple[Segment, ...]) -> None:
    """Put in the frees' other halves where the recording skipped one kind of them (`skip_actions`)."""
    requested, completed = FREE_REQUESTED in columns.kind, FREE_COMPLETED in columns.kind
    if requested == completed or columns.kind.count(FREE_COMPLETED) == columns.kind[:1].count(FREE_COMPLETED) == 1:
        return  # both are there, or neither, or the recording begins between the halves of its only free
    pending = {b.address for s in segments for b in s.blocks if b.state == "active_pending_free"}
    old = Entries(**{name: list(values) for name, values in vars(columns).items()})
    last = {address: i for i, address in enumerate(old.address)}
    rows = []
    for i, kind in enumerate(old.kind):
        if kind == FREE_COMPLETED:
            rows.append((i, FREE_REQUESTED, -1))
        rows.append((i, kind, old.entry[i]))
        if kind == FREE_REQUESTED and not (old.address[i] in pending and last[old.address[i]] == i):
            rows.append((i, FREE_COMPLETED, -1))
    for name, values in vars(old).items():
        setattr(columns, name, [values[i] for i, _, _ in rows])
    columns.kind = [kind for _, kind, _ in rows]
    columns.entry = [entry for _, _, entry in rows]


# What else the file says


def _annotations(snapshot: dict[str, Any]) -> tuple[Annotation, ...]:
    """`external_annotations`, oldest first; what is not one is passed over."""
    found = []
    annotations = snapshot.get("external_annotations")
    for item in annotations if isinstance(annotations, list) else []:
        if not isinstance(item, dict):
            continue
        name, device, stage, time = (item.get(key) for key in ("name", "device", "stage", "time_us"))
        if isinstance(name, str) and type(device) is int and _is_time(time) and stage in ("START", "END"):
            found.append(Annotation(name, device, stage == "START", time))
    return tuple(sorted(found, key=lambda a: a.time_us))


#: Fields, and the minor release of torch 2 that first writes them, as seen in recordings of every release from 2.1 to
#: 2.15. (2.10 writes `user_metadata` too, and differs from 2.11 in nothing that a snapshot would show.)
_ENTRY_FIELDS: Final = {"time_us": 2, "compile_context": 8, "user_metadata": 11, "pool_id": 12, "internal_metadata": 15}
_SETTING_FIELDS: Final = {"graph_capture_record_stream_reuse": 9, "max_round_threshold": 13, "max_cached_size": 13}
_TOP_FIELDS: Final = {"allocator_settings": 3, "external_annotations": 5, "host_segments": 14, "host_traces": 14}
_SEGMENT_FIELDS: Final = {"segment_pool_id": 1, "is_expandable": 1}
_BLOCK_FIELDS: Final = {"address": 1}
_NEWEST: Final = 15


def _releases(snapshot: dict[str, Any], segments: list[Any], traces: list[Any]) -> tuple[int, int]:
    """The oldest and the newest minor release of torch 2 that write the fields seen."""
    entries = [trace[0] for trace in traces if trace] + [trace[-1] for trace in traces if trace]
    blocks = [block for segment in segments[:1] for block in segment["blocks"][:1]]
    if any("history" in block for segment in segments for block in segment["blocks"]):
        return 0, 0
    settings = snapshot.get("allocator_settings")
    places: list[tuple[list[Any], Mapping[str, int]]] = [
        ([snapshot], _TOP_FIELDS),
        ([settings] if settings else [], _SETTING_FIELDS),
        (segments[:1], _SEGMENT_FIELDS),
        (blocks, _BLOCK_FIELDS),
        (entries, _ENTRY_FIELDS),
    ]
    seen = [since for items, fields in places for name, since in fields.items() if any(name in item for item in items)]
    if any(entry.get("action") == "annotate" or "internal_metadata" in entry for trace in traces for entry in trace):
        seen.append(15)
    since = max(seen, default=0)
    missing = [
        first
        for items, fields in places
        for name, first in fields.items()
        if items and name != "internal_metadata" and not any(name in item for item in items)
    ]
    return since, min((first for first in missing if first > since), default=_NEWEST + 1) - 1
