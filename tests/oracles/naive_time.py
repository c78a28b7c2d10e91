"""A slow, plain model of simulated time: every piece of work is an object that knows what it waits for.

It stands beside the engine. Streams are chains of work; when a piece ends is asked of the chain, and is None while
some rank has not come to a collective yet. Events are served one at a time, always on the rank whose host clock is
lowest (then: the lowest rank), so that whatever is not known yet lies in the future. Memory is the naive allocator's,
which asks the same chains whether an event is complete.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.oracles.naive_allocator import Block, NaiveAllocator, OutOfMemoryError, visiting_order
from tests.oracles.naive_device import NaiveDevice
from tests.support.timed import Case, Groups, Row, Shown, relative


class DeadlockError(Exception):
    """Every rank that has events left waits for another."""


class BlockedError(Exception):
    """The event needs a time that is not known yet."""


class Work:
    """A piece of work on a stream: `find` says when it ends, or None."""

    def __init__(self, find: Callable[[], int | None]) -> None:
        self.find = find
        self.known: int | None = None
        self.asked = False

    def end(self) -> int | None:
        """When it ends; None where that is not known, or where the question comes back to itself."""
        if self.known is None and not self.asked:
            self.asked = True
            self.known = self.find()
            self.asked = False
        return self.known

    def __deepcopy__(self, memo: dict[int, Any]) -> Work:
        return self


def latest(times: Sequence[int | None]) -> int | None:
    """The latest of some times; None if one is not known."""
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None


def later(time: int | None, duration: int) -> int | None:
    return None if time is None else time + duration


NOTHING = Work(lambda: 0)


@dataclass
class Meetings:
    """Who has reached which collective: by group, ordinal and rank, the work that stands for its arrival there."""

    groups: Groups
    present: frozenset[int]
    arrivals: dict[tuple[str, int, int], Work] = field(default_factory=dict)

    def members(self, group: str, rank: int) -> list[int]:
        """The ranks of the trace that a rank meets in a group."""
        parts: list[Any] = list(self.groups[group])
        part = parts if isinstance(parts[0], int) else next(part for part in parts if rank in part)
        return [member for member in part if member in self.present]

    def start(self, group: str, ordinal: int, rank: int) -> int | None:
        """When collective `ordinal` of a rank's group starts."""
        arrived = [self.arrivals.get((group, ordinal, member)) for member in self.members(group, rank)]
        return latest([None if work is None else work.end() for work in arrived])


@dataclass
class Clock:
    """A rank's host clock and the work on each of its streams."""

    host: int = 0
    streams: dict[int, list[Work]] = field(default_factory=dict)

    def tail(self, stream: int) -> Work:
        return self.streams[stream][-1] if stream in self.streams else NOTHING

    def tails(self) -> list[Work]:
        return [works[-1] for works in self.streams.values()]

    def add(self, stream: int, find: Callable[[], int | None]) -> None:
        """More work on a stream."""
        self.streams.setdefault(stream, []).append(Work(find))

    def wait(self, works: Sequence[Work]) -> None:
        """The host waits for some works."""
        end = latest([self.host, *(work.end() for work in works)])
        if end is None:
            raise BlockedError
        self.host = end

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        return self


@dataclass
class Recorded:
    """An event recorded behind some work: true once the host clock has reached the work's end."""

    clock: Clock
    work: Work

    def __bool__(self) -> bool:
        end = self.work.end()
        return end is not None and end <= self.clock.host


def without_hold(mark: Any) -> Any:
    """What becomes of a mark when events are not held any more: only time counts."""
    return mark if isinstance(mark, Recorded) else True


class TimedAllocator(NaiveAllocator):
    """The naive allocator with events that complete by time."""

    def __init__(self, case: Case, clock: Clock) -> None:
        super().__init__(case.release, case.conf, NaiveDevice(case.total_bytes))
        self.clock = clock

    def marks(self) -> list[Any]:
        """What stands for the events recorded so far."""
        return [mark for stream in visiting_order(self.events) for mark, _ in self.events[stream]]

    def waits_for(self) -> list[Work]:
        """The works behind which those events were recorded; none for held ones."""
        return [mark.work for mark in self.marks() if isinstance(mark, Recorded)]

    def insert_events(self, block: Block) -> None:
        """An event on every stream that used the block: behind its work so far, or held."""
        for stream in sorted(block.stream_uses):
            block.event_count += 1
            mark: Any = False if self.hold else Recorded(self.clock, self.clock.tail(stream))
            self.events.setdefault(stream, []).append((mark, block))
        block.stream_uses = set()

    def hold_events(self, hold: bool) -> None:
        """Letting go completes those held so far, and no others."""
        self.hold = hold
        if not hold:
            for fifo in self.events.values():
                fifo[:] = [(without_hold(mark), block) for mark, block in fifo]

    def synchronize_and_free_events(self) -> None:
        """The host waits for every event; held ones take no time."""
        self.clock.wait(self.waits_for())
        super().synchronize_and_free_events()


class NaiveRank:
    """A rank: its rows, where it stands in them, its clock, its memory, and what it showed so far."""

    def __init__(self, case: Case, rank: int, rows: Sequence[Row], meetings: Meetings) -> None:
        self.rank = rank
        self.rows = rows
        self.launch_ns = case.launch_ns
        self.meetings = meetings
        self.index = 0
        self.clock = Clock()
        self.allocator = TimedAllocator(case, self.clock)
        self.blocks: dict[int, Block | None] = {}
        self.calls: dict[str, int] = {}  # group -> how many collectives were launched
        self.shown = Shown([], [], [], [], [], [], 0)

    @property
    def done(self) -> bool:
        return self.index == len(self.rows)

    def step(self) -> bool:
        """Serve the next event; False, with nothing changed, if it must wait."""
        row = self.rows[self.index]
        unknown = any(work.end() is None for work in self.allocator.waits_for())
        before = copy.deepcopy((self.allocator, self.blocks)) if unknown else (self.allocator, self.blocks)
        try:
            address = self.serve(row)
        except BlockedError:  # a malloc that must wait for every event finds out in the middle of its work
            self.allocator, self.blocks = before
            return False
        self.clock.host += row.get("host_ns", 0)
        self.index += 1
        self.note(row, address)
        return True

    def note(self, row: Row, address: int) -> None:
        stats, shown = self.allocator.stats, self.shown
        shown.times.append(self.clock.host)
        shown.addresses.append(relative(row, address))
        shown.reserved.append(stats["reserved_bytes"]["all"].current)
        shown.allocated.append(stats["allocated_bytes"]["all"].current)
        shown.active.append(stats["active_bytes"]["all"].current)
        shown.retries.append(self.allocator.counters["num_alloc_retries"])

    def serve(self, row: Row) -> int:
        """Serve an event; the address that its row shows."""
        match row["op"]:
            case "alloc":
                return self.malloc(row["id"], row["bytes"], row.get("stream", 0))
            case "free" | "record_stream" | "complete_free":
                return self.of_block(row)
            case "kernel" | "collective":
                self.launch(row)
            case "wait_stream":
                tails = [self.clock.tail(row.get("stream", 0)), self.clock.tail(row["on"])]
                self.clock.add(row.get("stream", 0), lambda: latest([work.end() for work in tails]))
            case "synchronize":
                stream = row.get("stream")
                self.clock.wait([self.clock.tail(stream)] if stream is not None else self.clock.tails())
                self.allocator.complete_events(stream)
            case "complete_events":
                self.allocator.complete_events(row["stream"])
            case "hold_events":
                self.allocator.hold_events(row["hold"])
            case "empty_cache":
                self.allocator.empty_cache()
        return 0

    def malloc(self, id_: int, size: int, stream: int) -> int:
        if size == 0:
            self.blocks[id_] = None
            return 0
        try:
            block = self.blocks[id_] = self.allocator.malloc(size, stream)
        except OutOfMemoryError:
            self.blocks[id_] = None
            return -1
        block.tenant = id_
        return block.ptr

    def of_block(self, row: Row) -> int:
        """The ops that concern an allocation."""
        block = self.blocks[row["id"]]
        if block is None:
            return 0
        address = block.ptr
        if row["op"] == "free":
            self.allocator.free(block)
        elif row["op"] == "record_stream":
            self.allocator.record_stream(block, row["stream"])
        elif block.tenant == row["id"]:
            self.allocator.complete_free(block)
        return address

    def launch(self, row: Row) -> None:
        """Work on a stream: not before the work in front of it, nor before it was launched."""
        stream, duration = row.get("stream", 0), row.get("duration_ns", 0)
        self.clock.host += self.launch_ns
        front, issued = self.clock.tail(stream), self.clock.host
        arrival = Work(lambda: latest([front.end(), issued]))
        if row["op"] == "kernel":
            self.clock.add(stream, lambda: later(arrival.end(), duration))
            return
        group = row["group"]
        ordinal = self.calls.get(group, 0)
        self.calls[group] = ordinal + 1
        self.meetings.arrivals[group, ordinal, self.rank] = arrival
        self.clock.add(stream, lambda: later(self.meetings.start(group, ordinal, self.rank), duration))

    def result(self) -> Shown:
        """What it showed, with the time at which the host and all streams are done with what ever ends."""
        ends = [work.end() for works in self.clock.streams.values() for work in works]
        duration = max([self.clock.host, *(end for end in ends if end is not None)])
        return Shown(**(vars(self.shown) | {"duration": duration}))


def naive(case: Case) -> Mapping[int, Shown]:
    """The case served by the model; DeadlockError where no rank can go on."""
    rows = dict(case.by_rank())
    meetings = Meetings(case.groups or {}, frozenset(rows))
    ranks = [NaiveRank(case, rank, rows[rank], meetings) for rank in sorted(rows)]
    while True:
        alive = sorted((rank for rank in ranks if not rank.done), key=lambda rank: (rank.clock.host, rank.rank))
        if not alive:
            return {rank.rank: rank.result() for rank in ranks}
        if not any(rank.step() for rank in alive):
            raise DeadlockError
