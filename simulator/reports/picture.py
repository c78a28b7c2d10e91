"""What a page draws of a replay: which category every event changes, and the lives of all blocks and segments.

Pure functions of a `Machine` that has run with its log; only made where a page is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from simulator.allocator import driver
from simulator.allocator import layout as at
from simulator.engine import kernels as engine
from simulator.engine.machine import Machine
from simulator.engine.result import LOG_KINDS, Blocks, EventLog, Moment, Picture, Segments
from traces.model import BoolArray, InitialBlock, Int64Array, Op, Strings
from traces.timelines.timeline import PhaseSpan

#: Phases whose peak and end are moments; where a trace has more, those with the highest peaks.
MOST_PHASES: Final = 12
#: Moments that are chosen by their share of the events where there are hardly any others.
FEWEST: Final = 8
UNKNOWN: Final = "unknown"

_ALLOC: Final = LOG_KINDS.index("alloc")
_FREED: Final = LOG_KINDS.index("free_completed")
_MALLOC: Final = LOG_KINDS.index("A")
_RELEASED: Final = LOG_KINDS.index("F")
_MAP: Final = LOG_KINDS.index("M")
_UNMAP: Final = LOG_KINDS.index("U")
_NEVER: Final = 1 << 62


def picture_of(machine: Machine, log: EventLog, spans: tuple[PhaseSpan, ...], failed: tuple[int, ...] = ()) -> Picture:
    """The picture of one rank: `log` is the machine's whole log, `failed` the out-of-memory events worth a look."""
    tensors = _tensors(machine)
    events = machine.program.events
    return Picture(
        categories=tensors.categories,
        names=events.strings("name").table,
        frames=events.strings("frames").table,
        changed=_changed(machine, tensors),
        before=_before(machine, tensors),
        blocks=_blocks(machine, log, tensors),
        segments=_segments(machine, log),
        moments=tuple(Moment(tuple(labels), event) for event, labels in _chosen(machine, spans, failed).items()),
    )


@dataclass(frozen=True)
class _Tensors:
    """By dense id: category, name, frames, block bytes, requested ones, and the event that frees it.

    That is -1 before the first, the number of events for never.
    """

    categories: tuple[str, ...]
    category: Int64Array
    name: Int64Array
    frames: Int64Array
    bytes: Int64Array
    requested: Int64Array
    freed: Int64Array


def _tensors(machine: Machine) -> _Tensors:
    program = machine.program
    count = len(program.ids)
    column: Strings = program.events.strings("category")
    categories = tuple(dict.fromkeys((*column.table, UNKNOWN)))
    unknown = categories.index(UNKNOWN)
    allocs, frees = np.flatnonzero(program.ops == Op.ALLOC), np.flatnonzero(program.ops == Op.FREE)
    category = np.full(count, unknown, dtype=np.int64)
    codes = column.codes[allocs].astype(np.int64)
    category[program.idents[allocs]] = np.where(codes >= 0, codes, unknown)
    name, frames = np.full((2, count), -1, dtype=np.int64)
    name[program.idents[allocs]] = program.events.strings("name").codes[allocs]
    frames[program.idents[allocs]] = program.events.strings("frames").codes[allocs]
    freed = np.full(count, len(program), dtype=np.int64)
    size = machine.ids[:count, 1].astype(np.int64)
    requested = size.copy()
    requested[program.idents[allocs]] = np.minimum(size[program.idents[allocs]], program.events.ints("bytes")[allocs])
    freed[program.idents[frees]] = frees
    for ident, block in _early(machine):
        requested[ident] = block.requested
        if block.state == "active_pending_free":
            freed[ident] = -1
    return _Tensors(categories, category, name, frames, size, requested, freed)


def _early(machine: Machine) -> list[tuple[int, InitialBlock]]:
    """Every block, with its dense id, that was in use before the first event."""
    program = machine.program
    blocks = [block for segment in program.initial.segments for block in segment.blocks if block.id is not None]
    if not blocks:
        return []
    position = {int(ident): place for place, ident in enumerate(program.ids)}
    return [(position[block.id], block) for block in blocks if block.id is not None]


def _changed(machine: Machine, tensors: _Tensors) -> npt.NDArray[np.int16]:
    program = machine.program
    own = (program.ops == Op.ALLOC) | (program.ops == Op.FREE)
    changed = np.full(len(program), -1, dtype=np.int16)
    changed[own] = tensors.category[program.idents[own]]
    return changed


def _before(machine: Machine, tensors: _Tensors) -> tuple[int, ...]:
    """Allocated bytes before the first event: nothing is known of their categories."""
    return tuple(machine.initial_bytes[0] if name == UNKNOWN else 0 for name in tensors.categories)


# --- lives ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lives:
    """Things at addresses, from log entry `born` (-1: before the first) until entry `died`."""

    address: Int64Array
    born: Int64Array
    died: Int64Array
    what: Int64Array  # of blocks: dense id
    bytes: Int64Array
    stream: Int64Array
    expandable: BoolArray


@dataclass(frozen=True)
class _Births:
    address: Int64Array
    entry: Int64Array
    what: Int64Array
    bytes: Int64Array
    stream: Int64Array
    expandable: BoolArray


def _lives(births: _Births, ends: Int64Array, ended: Int64Array) -> _Lives:
    """Births matched with the next end at the same address (`ends` are addresses, `ended` log entries)."""
    count = len(births.address)
    address = np.concatenate([births.address, ends])
    entry = np.concatenate([births.entry, ended])
    order = np.lexsort((entry, address))
    following = np.full(len(order), -1, dtype=np.int64)
    same = address[order[:-1]] == address[order[1:]]
    following[order[:-1]] = np.where(same, order[1:], -1)
    after = following[:count]
    died = np.where(after >= count, entry[after], _NEVER)
    place = order[order < count]  # by address
    return _Lives(
        births.address[place],
        births.entry[place],
        died[place],
        births.what[place],
        births.bytes[place],
        births.stream[place],
        births.expandable[place],
    )


def _event_of(log: EventLog, entries: Int64Array, events: int) -> Int64Array:
    """The events of log entries: -1 stays, what never comes is after the last."""
    known = np.clip(entries, 0, max(0, len(log.event) - 1))
    found = log.event[known] if len(log.event) else known
    return np.where(entries < 0, -1, np.where(entries == _NEVER, events, found)).astype(np.int64)


def _blocks(machine: Machine, log: EventLog, tensors: _Tensors) -> Blocks:
    lives = _block_lives(machine, log)
    what, events = lives.what, len(machine.program)
    return Blocks(
        address=lives.address,
        bytes=tensors.bytes[what],
        requested=tensors.requested[what],
        category=tensors.category[what],
        name=tensors.name[what],
        frames=tensors.frames[what],
        born=_event_of(log, lives.born, events),
        freed=tensors.freed[what],
        died=_event_of(log, lives.died, events),
    )


def _block_lives(machine: Machine, log: EventLog) -> _Lives:
    program = machine.program
    born, freed = np.flatnonzero(log.kind == _ALLOC), np.flatnonzero(log.kind == _FREED)
    early_address = []
    for segment in program.initial.segments:
        address = segment.address
        for block in segment.blocks:
            if block.id is not None:
                early_address.append(address)
            address += block.bytes
    early = np.array([ident for ident, _ in _early(machine)], dtype=np.int64)
    idents = np.concatenate([early, program.idents[log.event[born]].astype(np.int64)])
    nothing = np.zeros(len(idents), dtype=np.int64)
    births = _Births(
        address=np.concatenate([np.array(early_address, dtype=np.int64), log.address[born]]),
        entry=np.concatenate([np.full(len(early), -1, dtype=np.int64), born]),
        what=idents,
        bytes=machine.ids[idents, 1].astype(np.int64),
        stream=nothing,
        expandable=nothing.astype(np.bool_),
    )
    return _lives(births, log.address[freed], freed)


def _segments(machine: Machine, log: EventLog) -> Segments:
    lives, events = _segment_lives(machine, log), len(machine.program)
    born, died = _event_of(log, lives.born, events), _event_of(log, lives.died, events)
    return Segments(lives.address, lives.bytes, lives.stream, lives.expandable, born, died)


def _segment_lives(machine: Machine, log: EventLog) -> _Lives:
    """Segments, and mapped memory page by page: it is unmapped in other pieces than it was mapped in."""
    whole, pages = np.flatnonzero(log.kind == _MALLOC), np.flatnonzero(log.kind == _MAP)
    early = machine.program.initial.segments
    columns = [
        _pieces(log.address[whole], log.bytes[whole], log.stream[whole], whole, paged=False),
        _pieces(log.address[pages], log.bytes[pages], log.stream[pages], pages, paged=True),
    ]
    for paged in (False, True):
        held = [segment for segment in early if segment.expandable is paged]
        address, size, stream = (
            np.array([getattr(segment, key) for segment in held], dtype=np.int64)
            for key in ("address", "bytes", "stream")
        )
        columns.append(_pieces(address, size, stream, np.full(len(held), -1, dtype=np.int64), paged=paged))
    address, size, stream, entry, expandable = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    births = _Births(address, entry, np.zeros_like(address), size, stream, expandable.astype(np.bool_))
    released, unmapped = np.flatnonzero(log.kind == _RELEASED), np.flatnonzero(log.kind == _UNMAP)
    gone = _pieces(log.address[unmapped], log.bytes[unmapped], log.stream[unmapped], unmapped, paged=True)
    return _lives(
        births, np.concatenate([log.address[released], gone[0]]), np.concatenate([released.astype(np.int64), gone[3]])
    )


def _pieces(
    address: Int64Array, size: Int64Array, stream: Int64Array, entry: Int64Array, *, paged: bool
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    """Address, bytes, stream, log entry and kind (1: mapped) of pieces: of pages, or as they are."""
    entry = entry.astype(np.int64)
    if not paged:
        return address, size, stream, entry, np.zeros_like(address)
    counts = -(-size // driver.GRANULE)
    place = driver.GRANULE * (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts))
    first, whole = np.repeat(address, counts), np.repeat(size, counts)
    sizes = np.minimum(driver.GRANULE, whole - place)
    return first + place, sizes, np.repeat(stream, counts), np.repeat(entry, counts), np.ones_like(first)


# --- moments ----------------------------------------------------------------------------------------------------------


def _chosen(machine: Machine, spans: tuple[PhaseSpan, ...], failed: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """The events after which the state is kept, ascending, and what each is."""
    allocated = machine.out[:, engine.OUT_ALLOCATED]
    found: dict[int, list[str]] = {}
    if not len(allocated):
        return {}
    top = int(allocated.argmax())
    found.setdefault(top if allocated[top] > machine.initial_bytes[0] else -1, []).append("peak allocated")
    found.setdefault(int(machine.memory[at.PEAK_EVENT]), []).append("peak reserved")
    for index in failed:
        found.setdefault(index, []).append("out of memory")
    peaks = [span.start + int(allocated[span.start : span.stop].argmax()) for span in spans]
    highest = sorted(range(len(spans)), key=lambda place: (-int(allocated[peaks[place]]), place))[:MOST_PHASES]
    for place in sorted(highest):
        span = spans[place]
        name = span.name if span.step is None else f"{span.name} {span.step}"
        found.setdefault(peaks[place], []).append(f"peak of {name}")
        found.setdefault(span.stop - 1, []).append(f"end of {name}")
    found.setdefault(len(allocated) - 1, []).append("end of the trace")
    if len(found) < FEWEST:
        for tenth in range(1, 10):
            place = tenth * len(allocated) // 10
            if place not in found:
                found[place] = [f"after {tenth}0 % of the events"]
    return {index: tuple(found[index]) for index in sorted(found)}
