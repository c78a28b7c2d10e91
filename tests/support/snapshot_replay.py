"""A recorded snapshot's causes replayed by the naive model, and compared with what the snapshot shows.

This is the proof that a reader's trace means what the recording showed, independent of the product's kernels: the
naive allocator (`tests/oracles/naive_allocator.py`) serves the events from the rewound state, and every entry it writes
must be the recording's, in its order, and so must the segments at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simulator.engine.result import LOG_KINDS
from simulator.snapshots.reader import RankRecording, Recording
from tests.oracles.naive_allocator import Block, NaiveAllocator, OutOfMemoryError, Segment
from tests.oracles.naive_device import NaiveDevice
from traces.model import Events, InitialSegment, Op, RankEvents, Strings, Trace

Entry = tuple[str, int, int]
SHOWN = frozenset(LOG_KINDS) - frozenset("XRVY")  # what a snapshot's trace shows of the device's calls
STATES = {"allocated": "active_allocated", "pending_free": "active_pending_free", "inactive": "inactive"}


@dataclass
class Divergence:
    """The first difference: where, what was expected, and what came."""

    place: str
    expected: Any
    got: Any


class NoBlockError(Exception):
    """An event needs the block of an allocation that failed."""


class Replay:
    """One rank's events on a naive allocator."""

    def __init__(self, trace: Trace, rank: RankEvents) -> None:
        device = trace.device_of(rank)
        assert trace.release is not None
        self.device = NaiveDevice(
            device.total_bytes - device.context_bytes, placement="recorded", recorded=device.segment_addresses
        )
        self.allocator = NaiveAllocator(trace.release, trace.conf, self.device)
        self.blocks: dict[int, Block | None] = {}
        for segments in _by_space(rank):
            self._load(segments)
        self.device.log = []

    def _load(self, segments: list[InitialSegment]) -> None:
        """Build a segment of the state at the start: one of cudaMalloc, or all mapped ranges of an expandable one."""
        first = segments[0]
        allocator, device = self.allocator, self.device
        if first.pool_id and first.pool_id not in allocator.private_pools:
            allocator.pool_create(first.pool_id)
        halves = allocator.private_pools[first.pool_id] if first.pool_id else None
        small, large = (halves.small, halves.large) if halves else (allocator.small_blocks, allocator.large_blocks)
        pool = small if first.pool == "small" else large
        pieces: list[tuple[int, int, Any]] = []  # address, bytes, InitialBlock or None for unmapped
        space = None
        base, end = first.address, first.address + first.bytes
        if first.expandable:
            assert first.va_address is not None
            assert first.va_bytes is not None
            page = (2 << 20) if pool.small else allocator.settings.large_segment_size
            space = Segment(first.va_address, first.va_bytes, page, device)
            base, end = first.va_address, first.va_address + first.va_bytes
        cursor = base
        for segment in segments:
            if segment.address > cursor:
                pieces.append((cursor, segment.address - cursor, None))
            cursor = segment.address
            for block in segment.blocks:
                pieces.append((cursor, block.bytes, block))
                cursor += block.bytes
            device.used += -(-segment.bytes // (2 << 20)) * (2 << 20)
            allocator.total_allocated_memory += segment.bytes
            allocator.count("reserved_bytes", pool, segment.bytes)
            if space is not None:
                for page_start in range(segment.address, segment.address + segment.bytes, space.page):
                    space.mapped.add((page_start - base) // space.page)
                    device.pages.add((page_start, space.page))
        if cursor < end:
            pieces.append((cursor, end - cursor, None))
        device.ranges.append((base, -(-(end - base) // (2 << 20)) * (2 << 20)))
        device.ranges.sort()
        counter = allocator.new_backing()
        before: Block | None = None
        for address, size, block in pieces:
            if allocator.release == (2, 12):
                counter = allocator.new_backing()
            made = Block(first.stream, size, pool, address, counter, space, mapped=block is not None)
            made.link(before, None)
            if before is None:
                allocator.heads.append(made)
            before = made
            if block is None:
                pool.insert_unmapped(made)
            elif block.id is None:
                pool.insert(made)
            else:
                made.requested_size = block.requested
                self.blocks[block.id] = made
                made.allocated = block.state == "active_allocated"
                made.event_count = 0 if made.allocated else 1

    def serve(self, events: Events) -> list[list[Entry]]:
        """Serve the events; the entries that each caused. Stops at one whose allocation failed in the replay."""
        ids, sizes, streams = events.ints("id"), events.ints("bytes"), events.ints("stream")
        logs = []
        for index, op in enumerate(events.op.tolist()):
            self.device.log = []
            try:
                self._event(Op(op), index, int(ids[index]), int(sizes[index]), int(streams[index]), events)
            except NoBlockError:
                break
            logs.append([_entry(entry) for entry in self.device.log if entry[0] in SHOWN])
        return logs

    def _event(self, op: Op, index: int, ident: int, size: int, stream: int, events: Events) -> None:
        allocator = self.allocator
        if op == Op.ALLOC:
            try:
                self.blocks[ident] = allocator.malloc(size, stream)
            except OutOfMemoryError:
                self.blocks[ident] = None
        elif op == Op.FREE:
            allocator.free(self._block(ident))
        elif op == Op.RECORD_STREAM:
            allocator.record_stream(self._block(ident), stream)
        elif op == Op.COMPLETE_FREE:
            block = self._block(ident)
            if not block.free:
                allocator.complete_free(block)
        elif op == Op.EMPTY_CACHE:
            allocator.empty_cache()
        elif op == Op.HOLD_EVENTS:
            allocator.hold_events(bool(events.bools("hold")[index]))
        elif op == Op.SET_MEMORY_FRACTION:
            allocator.set_memory_fraction(float(events.floats("fraction")[index]))
        elif op == Op.SET_ALLOCATOR:
            allocator.set_allocator(events.strings("conf").get(index) or "")
        elif op == Op.OTHER_PROCESS:
            self.device.other = size
        elif op in (Op.POOL_CREATE, Op.POOL_BEGIN, Op.POOL_END, Op.POOL_RELEASE):
            pool = int(events.ints("pool")[index])
            {
                Op.POOL_CREATE: allocator.pool_create,
                Op.POOL_BEGIN: allocator.pool_begin,
                Op.POOL_END: allocator.pool_end,
                Op.POOL_RELEASE: allocator.pool_release,
            }[op](pool)
        elif op != Op.PHASE:
            raise AssertionError(op)

    def _block(self, ident: int) -> Block:
        block = self.blocks[ident]
        if block is None:
            raise NoBlockError(f"id {ident}")
        return block

    def segments(self) -> list[dict[str, Any]]:
        """The final segments, as `RankRecording.segments` has them."""
        found = self.allocator.snapshot()["segments"]
        return [
            {
                "address": s["address"],
                "total_size": s["total_size"],
                "stream": s["stream"],
                "segment_type": "large" if s["large"] else "small",
                "is_expandable": s["expandable"],
                "blocks": [(size, requested, STATES[state]) for size, requested, state, *_ in s["blocks"]],
            }
            for s in found
        ]


def _entry(entry: tuple[str | int, ...]) -> Entry:
    kind, address, size, *_ = entry
    return str(kind), int(address), int(size)


def _by_space(rank: RankEvents) -> list[list[InitialSegment]]:
    """The initial segments, with mapped ranges of one expandable segment together."""
    groups: dict[Any, list[InitialSegment]] = {}
    for i, segment in enumerate(rank.initial.segments if rank.initial else ()):
        key = (segment.stream, segment.pool, segment.pool_id, segment.va_address) if segment.expandable else i
        groups.setdefault(key, []).append(segment)
    return list(groups.values())


def first_divergence(recording: Recording, number: int = 0, *, stale: bool = True) -> Divergence | None:
    """Replay rank `number` of a recording; the first difference from it, or None.

    `stale`: compare what inactive blocks last served too (not known for blocks from before a cut recording).
    """
    rank, shown = recording.trace.ranks[number], recording.ranks[number]
    replay = Replay(recording.trace, rank)
    logs = replay.serve(rank.events)
    return _compare_logs(shown, logs, len(rank.events)) or _compare_segments(shown, replay.segments(), stale)


def _compare_logs(shown: RankRecording, logs: list[list[Entry]], events: int) -> Divergence | None:
    expected: list[list[Entry]] = [[] for _ in range(events)]
    for kind, event, address, size in zip(
        shown.log.kind.tolist(),
        shown.log.event.tolist(),
        shown.log.address.tolist(),
        shown.log.bytes.tolist(),
        strict=True,
    ):
        if event < 0:
            return Divergence("an entry without an event", LOG_KINDS[kind], None)
        expected[event].append((LOG_KINDS[kind], address, size))
    for event, (want, got) in enumerate(zip(expected, logs, strict=False)):
        # An `oom` shows what was free, which is no consequence; a wait frees blocks of several streams in any order.
        if _canonical(want) != _canonical(got):
            return Divergence(f"event {event}", want, got)
    return None if len(logs) == events else Divergence(f"event {len(logs)}", "a block", "a failed allocation")


def _canonical(entries: list[Entry]) -> list[Entry]:
    plain = [(kind, 0 if kind == "oom" else address, size) for kind, address, size in entries]
    result: list[Entry] = []
    run: list[Entry] = []
    for entry in plain:
        if entry[0] == "free_completed":
            run.append(entry)
        else:
            result += [*sorted(run), entry]
            run = []
    return result + sorted(run)


def _compare_segments(shown: RankRecording, got: list[dict[str, Any]], stale: bool) -> Divergence | None:
    want = [dict(segment) for segment in shown.segments]
    for segment in want:
        segment.pop("pool_id")
    if not stale:
        want, got = [_without_stale(s) for s in want], [_without_stale(s) for s in got]
    for one, other in zip(want, got, strict=False):
        if one != other:
            return Divergence("final segments", one, other)
    return None if len(want) == len(got) else Divergence("number of final segments", len(want), len(got))


def _without_stale(segment: dict[str, Any]) -> dict[str, Any]:
    blocks = [(size, 0 if state == "inactive" else n, state) for size, n, state in segment["blocks"]]
    return {**segment, "blocks": blocks}


def with_release(recording: Recording, release: str) -> Recording:
    """The same recording, said to be of another release."""
    return replace(recording, trace=replace(recording.trace, release=release))


__all__ = ["Divergence", "Replay", "Strings", "first_divergence", "with_release"]
