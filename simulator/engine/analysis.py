"""What a finished replay means: peaks by phase, what was alive, fragmentation by cause, an out-of-memory explained.

Pure functions of a `Machine` that has run (and of what it measured); nothing here changes it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.allocator import layout as at
from simulator.engine import kernels as engine
from simulator.engine.machine import Machine
from simulator.engine.result import Fragmentation, FreePiece, LiveTensor, OutOfMemory, Peak, PhasePeak
from traces.model import Int64Array, Op, Strings
from traces.timelines.timeline import PhaseSpan, Region

LARGEST = 10  # tensors listed at the peak
_SHORT = {"load": "load", "forward": "fwd", "backward": "bwd", "optimizer": "step", "step": "step", "pipe": "pipe"}


# --- phases -----------------------------------------------------------------------------------------------------------


def phase_spans(machine: Machine) -> tuple[PhaseSpan, ...]:
    """The phases of a rank, from each `phase` event to the next."""
    events = machine.program.events
    at_marks = np.flatnonzero(events.op == Op.PHASE)
    marks, steps = at_marks.tolist(), events.ints("step")[at_marks].tolist()
    stops = [*marks[1:], len(events)][: len(marks)]
    names = events.strings("name")
    return tuple(
        PhaseSpan(names.get(mark) or "", step if step >= 0 else None, mark, stop)
        for mark, step, stop in zip(marks, steps, stops, strict=True)
    )


def regions(machine: Machine) -> tuple[Region, ...]:
    """The regions of a rank by their start. One ends with the events if nothing ends it, and an end of none is none."""
    events = machine.program.events
    names = events.strings("name")
    begun: list[tuple[str, int]] = []
    found: list[Region] = []
    for place in np.flatnonzero((events.op == Op.REGION_BEGIN) | (events.op == Op.REGION_END)).tolist():
        name = names.get(place) or ""
        if events.op[place] == Op.REGION_BEGIN:
            begun.append((name, place))
            continue
        depth = next((depth for depth in reversed(range(len(begun))) if begun[depth][0] == name), -1)
        if depth >= 0:
            found.append(Region(name, begun.pop(depth)[1], place, depth))
    found += [Region(name, start, len(events), depth) for depth, (name, start) in enumerate(begun)]
    return tuple(sorted(found, key=lambda region: region.start))


def phase_peaks(machine: Machine, spans: tuple[PhaseSpan, ...]) -> tuple[PhasePeak, ...]:
    """Peaks of every phase; phases of the same key (several micro-batches of a step) are taken together."""
    if not spans:
        return ()
    found: dict[str, PhasePeak] = {}
    ends = _first_and_last(spans)
    starts = [span.start for span in spans]  # each ends where the next one starts, and the last with the events
    columns = machine.out[:, engine.OUT_ALLOCATED], machine.out[:, engine.OUT_RESERVED]
    peaks, reserves = (np.maximum.reduceat(column, starts).tolist() for column in columns)
    lefts = columns[0][[span.stop - 1 for span in spans]].tolist()
    for span, peak, reserved, left in zip(spans, peaks, reserves, lefts, strict=True):
        for key in _phase_keys(span, ends):
            before = found.get(key)
            if before is not None:
                peak, reserved = max(peak, before.peak), max(reserved, before.peak_reserved)
            found[key] = PhasePeak(key, span.name, span.step, peak, left, reserved)
    return tuple(found.values())


def _first_and_last(spans: tuple[PhaseSpan, ...]) -> dict[str, tuple[int, int]]:
    """The first and the last step of each kind of phase."""
    ends: dict[str, tuple[int, int]] = {}
    for span in spans:
        short = _SHORT.get(span.name)
        if short is not None and span.step is not None:
            low, high = ends.get(short, (span.step, span.step))
            ends[short] = (min(low, span.step), max(high, span.step))
    return ends


def _phase_keys(span: PhaseSpan, ends: dict[str, tuple[int, int]]) -> list[str]:
    """`fwd_first`, `fwd_last` and the like for the first and last step of a phase; name and step for others."""
    short = _SHORT.get(span.name)
    if short == "load":
        return ["load"]
    if short is None or span.step is None:
        return [span.name if span.step is None else f"{span.name}.{span.step}"]
    keys = [f"{short}_{end}" for end, step in zip(("first", "last"), ends[short], strict=True) if span.step == step]
    return keys or [f"{short}.{span.step}"]


def phase_at(spans: tuple[PhaseSpan, ...], index: int) -> str | None:
    """The phase that event `index` belongs to, with its step."""
    found = bisect_right(spans, index, key=lambda span: span.start) - 1
    if found < 0:
        return None
    span = spans[found]
    return span.name if span.step is None else f"{span.name} {span.step}"


# --- what was alive ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alive:
    """The allocations alive after some event: dense ids, requested and block bytes, and the events that made them."""

    ids: Int64Array
    requested: Int64Array
    block_bytes: Int64Array
    events: Int64Array  # -1: before the recording


def alive_after(machine: Machine, index: int) -> Alive:
    """The allocations that were alive (not freed) after event `index`; -1: before the first."""
    program = machine.program
    count = len(program.ids)
    born = np.full(count, -1, dtype=np.int64)
    alive = np.zeros(count, dtype=np.bool_)
    early: dict[int, int] = {}
    position = {int(ident): i for i, ident in enumerate(program.ids)} if program.initial.segments else {}
    for segment in program.initial.segments:
        for block in segment.blocks:
            if block.id is not None:
                i = position[block.id]
                early[i] = block.requested
                alive[i] = block.state != "active_pending_free"
    ops, idents = program.ops[: index + 1], program.idents[: index + 1]
    allocs = np.flatnonzero(ops == Op.ALLOC)
    born[idents[allocs]] = allocs
    alive[idents[allocs]] = True
    alive[idents[np.flatnonzero(ops == Op.FREE)]] = False
    got = machine.ids[:count, 1]
    ids = np.flatnonzero(alive & (got > 0))
    events, requested = born[ids], np.zeros(len(ids), dtype=np.int64)
    requested[events >= 0] = program.args[events[events >= 0]]
    requested[events < 0] = [early[i] for i in ids[events < 0].tolist()]
    return Alive(ids, requested, got[ids], events)


def _categories(machine: Machine, alive: Alive) -> tuple[Int64Array, list[str]]:
    """Category code of each allocation, and the categories' names; unknown where the trace says nothing."""
    column: Strings = machine.program.events.strings("category")
    names = [*column.table, "unknown"]
    codes = np.full(len(alive.ids), len(names) - 1, dtype=np.int64)
    known = alive.events >= 0
    own = column.codes[alive.events[known]].astype(np.int64)
    codes[known] = np.where(own >= 0, own, len(names) - 1)
    return codes, names


def peak_of(machine: Machine, spans: tuple[PhaseSpan, ...]) -> Peak:
    """What was alive when allocated bytes first reached their peak."""
    allocated = machine.out[:, engine.OUT_ALLOCATED]
    index = int(allocated.argmax()) if len(allocated) else -1
    before = machine.initial_bytes[0]
    return _alive_at(machine, spans, -1 if index < 0 or before >= allocated[index] else index)


def _alive_at(machine: Machine, spans: tuple[PhaseSpan, ...], index: int) -> Peak:
    """What was alive after event `index`; -1: before the first."""
    alive = alive_after(machine, index)
    codes, names = _categories(machine, alive)
    sums: dict[str, int] = {}
    for code in np.unique(codes):
        sums[names[code]] = sums.get(names[code], 0) + int(alive.block_bytes[codes == code].sum())
    order = np.lexsort((alive.ids, -alive.block_bytes))[:LARGEST]
    labels = machine.program.events.strings("name")
    largest = tuple(
        LiveTensor(
            id=int(machine.program.ids[alive.ids[i]]),
            bytes=int(alive.requested[i]),
            block_bytes=int(alive.block_bytes[i]),
            category=names[codes[i]],
            name=labels.get(int(alive.events[i])) if alive.events[i] >= 0 else None,
            event=int(alive.events[i]),
            phase=phase_at(spans, int(alive.events[i])) if alive.events[i] >= 0 else None,
        )
        for i in order
    )
    return Peak(
        event=index,
        phase=phase_at(spans, index) if index >= 0 else None,
        allocated=int(machine.out[index, engine.OUT_ALLOCATED]) if index >= 0 else machine.initial_bytes[0],
        reserved=int(machine.out[index, engine.OUT_RESERVED]) if index >= 0 else machine.initial_bytes[2],
        by_category=dict(sorted(sums.items(), key=lambda item: -item[1])),
        largest=largest,
    )


# --- fragmentation ----------------------------------------------------------------------------------------------------


def fragmentation_of(machine: Machine) -> Fragmentation:
    """Where reserved bytes were when they first reached their peak."""
    memory = machine.memory
    index = int(memory[at.PEAK_EVENT])
    reserved = int(memory[at.PEAK_RESERVED])
    allocated, active = machine.initial_bytes[:2]
    if index >= 0:
        allocated, active = (int(value) for value in machine.out[index, : engine.OUT_RESERVED])
    alive = alive_after(machine, index)
    requested = int(alive.requested.sum())
    rounded = int(engine.round_sizes(machine.memory, alive.requested).sum()) if len(alive.ids) else 0
    rounded = min(rounded, allocated)
    return Fragmentation(
        event=index,
        reserved=reserved,
        requested=requested,
        rounding=rounded - requested,
        unsplit_remainder=allocated - rounded,
        pending=active - allocated,
        stranded=int(memory[at.PEAK_STRANDED]),
        cached_segments=int(memory[at.PEAK_CACHED]),
    )


# --- out of memory ----------------------------------------------------------------------------------------------------


def free_pieces(machine: Machine) -> tuple[FreePiece, ...]:
    """Free blocks by pool and stream, largest sum first."""
    memory = machine.memory
    sums: dict[tuple[str, int], list[int]] = {}
    for block in machine.free_blocks():
        which = memory[block + at.SET]
        pool = "large" if memory[which + at.SET_LARGE] else "small"
        if memory[memory[which + at.SET_POOL] + at.P_PRIVATE]:
            pool += " (private)"
        key = (pool, int(memory[memory[which + at.SET_STREAM] + at.S_VALUE]))
        sums.setdefault(key, []).append(int(memory[block + at.SIZE]))
    pieces = [FreePiece(pool, stream, len(sizes), sum(sizes), max(sizes)) for (pool, stream), sizes in sums.items()]
    return tuple(sorted(pieces, key=lambda piece: (-piece.bytes, piece.pool, piece.stream)))


def out_of_memory(machine: Machine, spans: tuple[PhaseSpan, ...]) -> OutOfMemory:
    """Explain the allocation that failed at `machine.index`, right after it failed."""
    program, memory, index = machine.program, machine.memory, machine.index
    pieces = free_pieces(machine)
    before = machine.out[: index + 1]
    return OutOfMemory(
        event=index,
        id=int(program.ids[program.idents[index]]),
        name=program.events.strings("name").get(index),
        phase=phase_at(spans, index),
        requested=int(program.args[index]),
        rounded=int(memory[at.FAILED_BYTES]),
        stream=int(program.stream_values[program.streams[index]]),
        device_free=int(memory[at.OOM_FREE]),
        reserved=int(machine.out[index, engine.OUT_RESERVED]),
        allocated=int(machine.out[index, engine.OUT_ALLOCATED]),
        free_in_segments=sum(piece.bytes for piece in pieces),
        largest_free=max((piece.largest for piece in pieces), default=0),
        pieces=pieces,
        peak_allocated_before=int(before[:, engine.OUT_ALLOCATED].max()),
        peak_reserved_before=max(int(before[:, engine.OUT_RESERVED].max()), machine.stat(at.RESERVED_BYTES)["all"][1]),
        alive=_alive_at(machine, spans, index),
    )


def host_times(machine: Machine) -> npt.NDArray[np.int64] | None:
    """The host clock after every event, where the trace has simulated time."""
    if not machine.program.timed:
        return None
    return np.ascontiguousarray(machine.out[:, engine.OUT_TIME])
