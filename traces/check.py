"""Validation of a trace: what an event, a device, a group or an initial state must hold for a replay to mean anything.

Every reader calls `check`; traces built in Python can be given to it as well. Checks of events are whole-column numpy
operations, so that ten million events take about a second; the error reported is that of the earliest event.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, get_args

import numpy as np

import traces._lifecycle as _lifecycle
from traces.errors import ConfigError, EventError, TraceError
from traces.model import (
    CATEGORIES,
    DTYPES,
    FIELDS,
    FLOAT_FIELDS,
    INT_FIELDS,
    STRING_FIELDS,
    Device,
    Events,
    Initial,
    InitialBlock,
    InitialSegment,
    Int64Array,
    Op,
    Placement,
    RankEvents,
    Strings,
    Trace,
)
from traces.release import DEFAULT_RELEASE, version_of
from traces.text import quoted

#: Fields that an op cannot do without; every other field has a default.
REQUIRED: Final[Mapping[Op, tuple[str, ...]]] = {
    Op.ALLOC: ("id", "bytes"),
    Op.FREE: ("id",),
    Op.RECORD_STREAM: ("id", "stream"),
    Op.COMPLETE_EVENTS: ("stream",),
    Op.COMPLETE_FREE: ("id",),
    Op.SET_MEMORY_FRACTION: ("fraction",),
    Op.SET_ALLOCATOR: ("conf",),
    Op.OTHER_PROCESS: ("bytes",),
    Op.PHASE: ("name",),
    Op.COLLECTIVE: ("group",),
    Op.POOL_CREATE: ("pool",),
    Op.POOL_BEGIN: ("pool",),
    Op.POOL_END: ("pool",),
    Op.POOL_RELEASE: ("pool",),
    Op.POOL_CHECKPOINT: ("pool", "checkpoint"),
    Op.POOL_RESTORE: ("pool", "checkpoint"),
    Op.WAIT_STREAM: ("on",),
    Op.REGION_BEGIN: ("name",),
    Op.REGION_END: ("name",),
}

MAX_INT: Final = (1 << 63) - 1  #: largest id, size, stream, ...
MAX_ADDRESS: Final = 1 << 62  #: addresses are below this
MAX_DEVICE_BYTES: Final = 1 << 43  #: 8 TiB
MAX_RANK: Final = (1 << 31) - 1
MAX_LAUNCH_NS: Final = 10**12
MAX_TIME_NS: Final = 1 << 61  #: all durations of a trace together (73 years)
MIN_BLOCK: Final = 512  #: every address is a multiple of this (kMinBlockSize)
#: Traces with at most so many events have the lives of their ids checked without numba.
SMALL: Final = 200_000

_POOL_OPS: Final = (
    *(Op.POOL_CREATE, Op.POOL_BEGIN, Op.POOL_END, Op.POOL_RELEASE),
    *(Op.POOL_SWITCH, Op.POOL_CHECKPOINT, Op.POOL_RESTORE),
)


class Finding(NamedTuple):
    """Something wrong with one event: the earliest of them is raised."""

    event: int
    field: str
    reason: str


def check(trace: Trace) -> None:
    """Raise TraceError where the trace is not one that can be replayed.

    Of faults in events the earliest of the first faulty rank is raised, as an EventError with rank, index and field.
    """
    _check_head(trace)
    elapsed = 0.0
    seen: set[int] = set()
    for entry in trace.ranks:
        _check_ranks(entry, seen)
        place = f"rank {entry.ranks[0]}"
        if not 0 <= entry.device < max(1, len(trace.devices)):
            known = f"indices 0 to {len(trace.devices) - 1}" if trace.devices else "only the default one, 0"
            raise TraceError(f"{place}: field 'device': there is no device {quoted(entry.device)} ({known})")
        if entry.initial is not None:
            _check_initial(entry.initial, place)
        _check_columns(entry.events, place)
        findings = list(_faults(trace, entry))
        elapsed, finding = _too_long(entry, trace.device_of(entry), elapsed)
        if finding is not None:
            findings.append(finding)
        if findings:
            raise as_error(min(findings, key=lambda found: found.event), entry)


def as_error(finding: Finding, entry: RankEvents) -> EventError:
    """The error that says what is wrong with an event of this rank."""
    return EventError(finding.reason, rank=entry.ranks[0], index=finding.event, field=finding.field)


def missing(op: int, field: str) -> str:
    """The reason given where an op lacks a field that it needs."""
    return f"missing; '{Op(op).name.lower()}' needs it"


# The head of a trace: devices, groups, ranks


def _check_head(trace: Trace) -> None:
    try:
        version_of(DEFAULT_RELEASE if trace.release is None else trace.release)
    except ConfigError:
        place = "allocator: field 'release'"
        raise TraceError(f"{place}: write a release such as '2.13', not {quoted(trace.release)}") from None
    for i, device in enumerate(trace.devices):
        _check_device(device, f"device {i}")
    for name, parts in trace.groups.items():
        _check_group(name, parts)
    if not trace.ranks:
        raise TraceError("field 'ranks': the list is empty; a trace needs at least one rank")


def _between(value: int, low: int, high: int, place: str, field: str) -> None:
    if not low <= value <= high:
        raise TraceError(f"{place}: field '{field}': must be between {low} and {high}, is {quoted(value)}")


def _check_address(address: int, place: str, field: str) -> None:
    if not 0 < address < MAX_ADDRESS or address % MIN_BLOCK:
        raise TraceError(
            f"{place}: field '{field}': an address must be a multiple of {MIN_BLOCK} above 0 and below 2^62, "
            f"is {quoted(address)}"
        )


def _check_device(device: Device, place: str) -> None:
    _between(device.total_bytes, 1, MAX_DEVICE_BYTES, place, "total_bytes")
    _between(device.context_bytes, 0, device.total_bytes, place, "context_bytes")
    _between(device.launch_ns, 0, MAX_LAUNCH_NS, place, "launch_ns")
    _check_address(device.va_base, place, "va_base")
    if device.placement not in get_args(Placement):
        raise TraceError(
            f"{place}: field 'placement': must be 'first-fit', 'bump', 'recorded' or 'driver', "
            f"not {quoted(device.placement)}"
        )
    for i, address in enumerate(device.segment_addresses):
        _check_address(address, place, f"segment_addresses[{i}]")


def _check_group(name: str, parts: tuple[tuple[int, ...], ...]) -> None:
    place = f"group {quoted(name)}"
    if not parts or not all(parts):
        raise TraceError(f"{place}: has no ranks; list at least one")
    seen: set[int] = set()
    for rank in (rank for part in parts for rank in part):
        if not 0 <= rank <= MAX_RANK:
            raise TraceError(f"{place}: ranks are between 0 and {MAX_RANK}, not {quoted(rank)}")
        if rank in seen:
            raise TraceError(f"{place}: rank {rank} is listed twice")
        seen.add(rank)


def _check_ranks(entry: RankEvents, seen: set[int]) -> None:
    if not entry.ranks:
        raise TraceError("field 'rank': an empty list; name at least one rank")
    for rank in entry.ranks:
        if not 0 <= rank <= MAX_RANK:
            raise TraceError(f"field 'rank': ranks are between 0 and {MAX_RANK}, not {quoted(rank)}")
        if rank in seen:
            raise TraceError(f"rank {rank} appears twice; every rank has one list of events")
        seen.add(rank)


# The state at the start


def _check_initial(initial: Initial, where: str) -> None:
    ids: set[int] = set()
    for i, segment in enumerate(initial.segments):
        place = f"{where}, initial segment {i}"
        _check_segment(segment, place)
        address = segment.address
        for j, block in enumerate(segment.blocks):
            _check_block(block, f"{place}, block {j}")
            if block.id is not None and block.id in ids:
                raise TraceError(f"{place}, block {j}: id {block.id} appears twice")
            if block.id is not None:
                ids.add(block.id)
            address += block.bytes
        if address != segment.address + segment.bytes:
            total = address - segment.address
            raise TraceError(f"{place}: its blocks sum to {quoted(total)} bytes, the segment has {segment.bytes}")
    order = sorted(range(len(initial.segments)), key=lambda i: initial.segments[i].address)
    for a, b in itertools.pairwise(order):
        if initial.segments[a].address + initial.segments[a].bytes > initial.segments[b].address:
            raise TraceError(f"{where}: initial segments {min(a, b)} and {max(a, b)} overlap")


def _check_segment(segment: InitialSegment, place: str) -> None:
    _check_address(segment.address, place, "address")
    _between(segment.bytes, 1, MAX_ADDRESS - segment.address, place, "bytes")
    _between(segment.stream, 0, MAX_INT, place, "stream")
    _between(segment.pool_id, 0, MAX_INT, place, "pool_id")
    if segment.pool not in ("small", "large"):
        raise TraceError(f"{place}: field 'pool': must be 'small' or 'large', not {quoted(segment.pool)}")
    if segment.va_address is None and segment.va_bytes is None:
        return
    if segment.va_address is None or segment.va_bytes is None or not segment.expandable:
        raise TraceError(f"{place}: 'va_address' and 'va_bytes' go together, and only with 'expandable': true")
    _check_address(segment.va_address, place, "va_address")
    _between(segment.va_bytes, 1, MAX_ADDRESS - segment.va_address, place, "va_bytes")
    end = segment.address + segment.bytes
    if not segment.va_address <= segment.address <= end <= segment.va_address + segment.va_bytes:
        raise TraceError(f"{place}: the mapped range lies outside 'va_address' and 'va_bytes'")


def _check_block(block: InitialBlock, place: str) -> None:
    _between(block.bytes, 1, MAX_INT, place, "bytes")
    if block.state not in ("active_allocated", "active_pending_free", "inactive"):
        raise TraceError(
            f"{place}: the state must be 'active_allocated', 'active_pending_free' or 'inactive', "
            f"not {quoted(block.state)}"
        )
    if (block.id is None) != (block.state == "inactive"):
        wrong = "a free block has no id" if block.state == "inactive" else "a block in use needs an id"
        raise TraceError(f"{place}: {wrong} (state '{block.state}', id {quoted(block.id)})")
    if block.id is not None:
        _between(block.id, 0, MAX_INT, place, "id")
    # What an inactive block asked for is a leftover of its last use, and may be more than it now has.
    _between(block.requested, 0, MAX_INT if block.id is None else block.bytes, place, "requested bytes")


# Columns: their kinds, lengths and codes


def _check_columns(events: Events, place: str) -> None:
    count = len(events.op)
    if events.op.ndim != 1 or events.op.dtype != np.uint8:
        raise TraceError(f"{place}: column 'op' must be a list of uint8")
    for name, column in events.columns.items():
        if name not in FIELDS:
            raise TraceError(f"{place}: there is no column {quoted(name)}; unknown fields belong in 'extra'")
        _check_kind(name, column, place)
        if len(column) != count:
            raise TraceError(f"{place}: column '{name}' has {len(column)} values, 'op' has {count}")
    for name, values in events.extra.items():
        if name == "op" or name in FIELDS:
            raise TraceError(f"{place}: {quoted(name)} is a field of the format and cannot be in 'extra'")
        if values and not (min(values) >= 0 and max(values) < count):
            raise TraceError(f"{place}: unknown field {quoted(name)} has values for events that do not exist")


def _check_kind(name: str, column: object, place: str) -> None:
    if name in STRING_FIELDS:
        if not isinstance(column, Strings):
            raise TraceError(f"{place}: column '{name}' must hold text")
        codes = column.codes
        if codes.ndim != 1 or codes.dtype != np.int32:
            raise TraceError(f"{place}: the codes of column '{name}' must be a list of int32")
        if len(codes) and not (codes.min() >= -1 and codes.max() < len(column.table)):
            raise TraceError(f"{place}: column '{name}' has codes outside its table of {len(column.table)}")
        return
    dtype = DTYPES[name]
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype != dtype:
        raise TraceError(f"{place}: column '{name}' must be a list of {np.dtype(dtype).name}")


# Events: what is wrong with which, earliest first


def _first(mask: Any) -> int:
    """The index of the first true value, or -1."""
    index = int(mask.argmax()) if len(mask) else -1
    return index if index >= 0 and mask[index] else -1


def _faults(trace: Trace, entry: RankEvents) -> Iterator[Finding]:
    events = entry.events
    if not len(events):
        return
    unknown = _first(events.op > max(Op))
    if unknown >= 0:
        yield Finding(unknown, "op", f"there is no op of number {int(events.op[unknown])}")
        events = events.take(slice(unknown))
        if not len(events):
            return
    counts = np.bincount(events.op, minlength=len(Op))
    present = tuple(op for op in Op if counts[op])
    yield from _absent(events, present)
    yield from _ranges(events)
    yield from _addresses(events, trace.release)
    yield from _fractions(events)
    yield from _categories(events)
    if Op.COLLECTIVE in present:
        yield from _collectives(trace, entry, events)
    if any(op in present for op in _POOL_OPS):
        yield from _pools(events, entry.initial)
    yield from _lives(events, entry.initial)


def _is_absent(events: Events, field: str) -> Any:
    """A mask of the events that lack `field`, or None where absence cannot be told from the default (0)."""
    if field in STRING_FIELDS:
        return events.strings(field).codes < 0
    if field in FLOAT_FIELDS:
        return np.isnan(events.floats(field))
    if INT_FIELDS[field] < 0:
        return events.ints(field) == INT_FIELDS[field]
    return None


def _absent(events: Events, present: tuple[Op, ...]) -> Iterator[Finding]:
    """Ops that lack a field they need."""
    for field in dict.fromkeys(field for op in present for field in REQUIRED.get(op, ())):
        absent = _is_absent(events, field)
        if absent is None:
            continue
        needs = np.zeros(len(Op), dtype=np.bool_)
        needs[[op for op in present if field in REQUIRED.get(op, ())]] = True
        index = _first(needs[events.op] & absent)
        if index >= 0:
            yield Finding(index, field, missing(int(events.op[index]), field))


def _ranges(events: Events) -> Iterator[Finding]:
    """Integers below what their field allows; -1 is "absent" where the field has no other default."""
    for field, default in INT_FIELDS.items():
        column = events.columns.get(field)
        if column is None:
            continue
        assert isinstance(column, np.ndarray)
        if column.min() >= min(default, 0) and field not in ("stream", "pool"):
            continue
        bad = column < min(default, 0)
        if field == "stream":
            bad = (column < 0) & ((events.op != Op.SYNCHRONIZE) | (column < -1))
        elif field == "pool":
            bad |= column == 0
        index = _first(bad)
        if index >= 0:
            least = 1 if field == "pool" else 0
            yield Finding(index, field, f"must be {least} or more, is {int(column[index])}")


def _addresses(events: Events, release: str | None) -> Iterator[Finding]:
    if "address" not in events.columns:
        return
    address = events.ints("address")
    bad = (address != -1) & ((address <= 0) | (address >= MAX_ADDRESS))
    bad &= ~((address == 0) & (events.ints("bytes") == 0))  # 0 bytes are at address 0
    if version_of(release or DEFAULT_RELEASE) >= (2, 4):
        # Up to 2.3 `roundup_power2_divisions:1` left sizes as they were, and so the addresses after them.
        bad |= (address & (MIN_BLOCK - 1) != 0) & (address > 0)
    index = _first(bad)
    if index >= 0:
        reason = f"an address must be a multiple of {MIN_BLOCK} above 0 and below 2^62, is {int(address[index])}"
        yield Finding(index, "address", reason)


def _fractions(events: Events) -> Iterator[Finding]:
    if "fraction" not in events.columns:
        return
    fraction = events.floats("fraction")
    index = _first((fraction < 0) | (fraction > 1))
    if index >= 0:
        yield Finding(index, "fraction", f"must be between 0 and 1, is {float(fraction[index])}")


def _categories(events: Events) -> Iterator[Finding]:
    column = events.strings("category")
    bad = [code for code, name in enumerate(column.table) if name not in CATEGORIES]
    index = _first(np.isin(column.codes, bad)) if bad else -1
    if index >= 0:
        reason = f"{quoted(column.get(index))} is not a category; one of {', '.join(CATEGORIES)}"
        yield Finding(index, "category", reason)


def _collectives(trace: Trace, entry: RankEvents, events: Events) -> Iterator[Finding]:
    """Collectives of a group that does not exist, or that this rank is not in."""
    column = events.strings("group")
    at = np.flatnonzero(events.op == Op.COLLECTIVE)
    codes, firsts = np.unique(column.codes[at], return_index=True)
    for code, first in zip(codes.tolist(), at[firsts].tolist(), strict=True):
        if code < 0:
            continue
        name = column.table[code]
        if name not in trace.groups:
            yield Finding(first, "group", f"there is no group {quoted(name)}; name it under 'groups'")
            continue
        members = {rank for part in trace.groups[name] for rank in part}
        outside = [rank for rank in entry.ranks if rank not in members]
        if outside:
            yield Finding(first, "group", f"rank {outside[0]} is not in group {quoted(name)}; add it under 'groups'")


def _pools(events: Events, initial: Initial | None) -> Iterator[Finding]:
    """The first wrong step in the life of a private pool (allocator: createOrIncref, beginAllocateToPool, ...)."""
    at = np.flatnonzero(np.isin(events.op, _POOL_OPS))
    recorded = {segment.pool_id for segment in initial.segments if segment.pool_id} if initial else set()
    uses: dict[int, int] = {}
    begun: set[int] = set()
    kept: set[tuple[int, int]] = set()
    columns = (at, events.op[at], events.ints("pool")[at], events.ints("checkpoint")[at])
    for index, op, pool, checkpoint in zip(*(column.tolist() for column in columns), strict=True):
        reason = ""
        if op == Op.POOL_BEGIN and pool in begun:
            reason = f"pool {pool} is begun already; end it first"
        elif op == Op.POOL_END and pool not in begun:
            reason = f"pool {pool} ends without having begun"
        elif op == Op.POOL_RELEASE and pool not in recorded and not uses.get(pool):
            known = "more often than it was created or begun" if pool in uses else "but was never created or begun"
            reason = f"pool {pool} is released {known}"
        elif op == Op.POOL_SWITCH and pool != -1 and pool not in begun:
            reason = f"pool {pool} has not begun"
        elif op == Op.POOL_CHECKPOINT and pool not in recorded and pool not in uses:
            reason = f"pool {pool} was never created or begun"
        elif op == Op.POOL_RESTORE and (pool, checkpoint) not in kept:
            reason = f"pool {pool} has no checkpoint {checkpoint}"
        if reason:
            yield Finding(index, "pool", reason)
            return
        if op in (Op.POOL_CREATE, Op.POOL_BEGIN):
            uses[pool] = uses.get(pool, 0) + 1
        if op == Op.POOL_BEGIN:
            begun.add(pool)
        elif op == Op.POOL_END:
            begun.discard(pool)
        elif op == Op.POOL_CHECKPOINT:
            kept.add((pool, checkpoint))
        elif op == Op.POOL_RELEASE:
            uses[pool] = uses.get(pool, 0) - 1


def _too_long(entry: RankEvents, device: Device, elapsed: float) -> tuple[float, Finding | None]:
    """The time that all events so far can take together, in ns, and the event that makes it more than a clock holds."""
    events, ranks = entry.events, len(entry.ranks)
    for field in ("duration_ns", "host_ns"):
        column = events.columns.get(field)
        if column is None or not len(events):
            continue
        assert isinstance(column, np.ndarray)
        total = elapsed + ranks * float(column.sum(dtype=np.float64))
        if total > MAX_TIME_NS:
            index = max(_first(elapsed + ranks * np.cumsum(column, dtype=np.float64) > MAX_TIME_NS), 0)
            return total, Finding(index, field, "the times of the trace add up to more than 2^61 ns")
        elapsed = total
    if device.launch_ns:
        launches = np.cumsum((events.op == Op.KERNEL) | (events.op == Op.COLLECTIVE), dtype=np.float64)
        index = _first(elapsed + ranks * device.launch_ns * launches > MAX_TIME_NS)
        if index >= 0:
            return elapsed, Finding(index, "op", "with the device's launch_ns, times add up to more than 2^61 ns")
        elapsed += ranks * device.launch_ns * float(launches[-1]) if len(launches) else 0.0
    return elapsed, None


# The life of every id


@functools.cache
def _compiled() -> Any:
    """The life-cycle kernel as machine code; numba is loaded here and nowhere else in this package."""
    from traces.jit import kernel

    return kernel(_lifecycle.life_cycle)


def _lives(events: Events, initial: Initial | None) -> Iterator[Finding]:
    """The first event that breaks the life of its id."""
    ids = events.ints("id")
    blocks = [block for segment in initial.segments for block in segment.blocks] if initial else []
    held = [block for block in blocks if block.id is not None]
    held_ids = np.array([block.id for block in held], dtype=np.int64)
    slots, held_slots, count = _slots(ids, held_ids)
    states = np.zeros(count, dtype=np.uint8)
    states[held_slots] = [_lifecycle.LIVE if b.state == "active_allocated" else _lifecycle.FREED for b in held]
    if len(events) <= SMALL:
        index, fault = _lifecycle.life_cycle(events.op.tolist(), slots.tolist(), states)
    else:
        index, fault = _compiled()(np.ascontiguousarray(events.op), np.ascontiguousarray(slots), states)
    if fault:
        yield Finding(int(index), "id", _life_reason(int(fault), events, int(index)))


def _slots(ids: Int64Array, held: Int64Array) -> tuple[Int64Array, Int64Array, int]:
    """Numbers for ids, dense enough for an array of states: the ids themselves, or their ranks among all of them."""
    top = max(-1, *(int(array.max()) for array in (ids, held) if len(array)))
    if top < 4 * (len(ids) + len(held)) + 1024:
        return ids, held, top + 1
    known, places = np.unique(np.concatenate([ids, held]), return_inverse=True)
    places = places.astype(np.int64, copy=False)
    places[: len(ids)][ids < 0] = -1
    return places[: len(ids)], places[len(ids) :], len(known)


def _life_reason(fault: int, events: Events, index: int) -> str:
    ids = events.ints("id")
    number = int(ids[index])

    def before(op: Op) -> str:
        at = np.flatnonzero((ids[:index] == number) & (events.op[:index] == op))
        return f" (event {int(at[0])})" if len(at) else " (before the first event)"

    never = f"id {number} was never allocated before"
    return {
        _lifecycle.ALLOCATED_TWICE: f"id {number} was allocated before{before(Op.ALLOC)}; an id is allocated once",
        _lifecycle.FREE_OF_UNKNOWN: f"free of an unknown id: {never}",
        _lifecycle.FREED_TWICE: f"id {number} was freed before{before(Op.FREE)}",
        _lifecycle.USE_OF_UNKNOWN: f"record_stream of an unknown id: {never}",
        _lifecycle.USE_OF_FREED: f"id {number} was freed before{before(Op.FREE)}; a stream can use it only until then",
        _lifecycle.COMPLETES_UNKNOWN: f"complete_free of an unknown id: {never}",
        _lifecycle.COMPLETES_LIVE: f"id {number} has not been freed; complete_free follows its free",
        _lifecycle.COMPLETES_TWICE: f"the free of id {number} was completed before{before(Op.COMPLETE_FREE)}",
    }[fault]
