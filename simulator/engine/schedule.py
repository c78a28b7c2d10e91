"""Several ranks together: which of them are simulated, and in what order they take turns.

Ranks with equal events, devices and peers behave alike; one *class* of them is simulated once. A rank runs until it
needs a time that another rank decides: the start of a collective, which is when the last of its group has reached it.
Turns are taken by (host clock, priority, sequence): starts of collectives come before ranks, ranks in their order.

A poll of events whose time is unknown needs no wait for the rank that is furthest behind: whatever the others still
have to do happens at or after its own clock, so those events are not complete yet.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simulator.allocator import layout as at
from simulator.engine import kernels as engine
from simulator.engine.machine import Machine
from traces.errors import EventError, TraceError
from traces.model import Events, Op, RankEvents, Strings, Trace

START_PRIORITY = 0
RANK_PRIORITY = 1

Group = tuple[int, ...]
#: Called with the class's number, its machine and the status it stopped with.
ServeFunction = Callable[[int, Machine, int], None]


@dataclass
class RankClass:
    """Ranks that behave alike: the events of one of them, and for each group name the classes it meets there."""

    ranks: list[int]
    source: RankEvents
    peers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def is_solo(self, own: int, group: str) -> bool:
        """Whether nobody of another class takes part in this group."""
        return set(self.peers.get(group, ())) <= {own}


def _digest(rank: RankEvents) -> bytes:
    """A digest of everything that decides a rank's replay and report."""
    events = rank.events
    digest = hashlib.blake2b(repr((rank.device, rank.initial, len(events))).encode())
    digest.update(np.ascontiguousarray(events.op).tobytes())
    for name in sorted(events.columns):
        column = events.columns[name]
        digest.update(name.encode())
        if isinstance(column, Strings):
            digest.update(repr(column.table).encode())
            column = column.codes  # type: ignore[assignment]
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


def _groups_used(events: Events) -> list[str]:
    """Names of the groups in whose collectives these events take part."""
    if "group" not in events.columns or not (events.op == Op.COLLECTIVE).any():
        return []
    groups = events.strings("group")
    codes = np.unique(groups.codes[events.op == Op.COLLECTIVE])
    return [groups.table[int(code)] for code in codes if code >= 0]


class Parts:
    """The parts of all groups that are in use: which one a rank belongs to, and its members that the trace has."""

    def __init__(self, trace: Trace, used: Iterable[str]) -> None:
        present = {rank for entry in trace.ranks for rank in entry.ranks}
        self.members: list[Group] = []
        self.of: dict[str, dict[int, int]] = {}
        for name in sorted(set(used)):
            of = self.of[name] = {}
            for part in trace.groups.get(name, ()):
                members = tuple(rank for rank in part if rank in present)
                of |= dict.fromkeys(members, len(self.members))
                self.members.append(members)

    def labels_met(self, label: Mapping[int, int]) -> list[int]:
        """For each part a number that says which labels meet there."""
        known: dict[Group, int] = {}
        return [
            known.setdefault(tuple(sorted({label[rank] for rank in members})), len(known)) for members in self.members
        ]


def classify(trace: Trace) -> list[RankClass]:
    """The classes of a trace's ranks, in order of their lowest rank.

    Starts with ranks of equal events and splits a class while its members meet different classes in some group.
    """
    digests = [_digest(entry) if len(trace.ranks) > 1 else b"" for entry in trace.ranks]
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    label = {rank: numbers[d] for entry, d in zip(trace.ranks, digests, strict=True) for rank in entry.ranks}
    source = {rank: entry for entry in trace.ranks for rank in entry.ranks}
    used = {id(entry): _groups_used(entry.events) for entry in trace.ranks}
    parts = Parts(trace, (name for names in used.values() for name in names))
    meets = {rank: [parts.of[name][rank] for name in used[id(source[rank])]] for rank in label}
    while True:
        met = parts.labels_met(label)
        refined = {rank: (label[rank], *(met[part] for part in meets[rank])) for rank in label}
        known = {value: number for number, value in enumerate(dict.fromkeys(refined.values()))}
        if len(known) == len(set(label.values())):
            return _collect(label, source, used, parts)
        label = {rank: known[value] for rank, value in refined.items()}


def _collect(
    label: Mapping[int, int], source: Mapping[int, RankEvents], used: Mapping[int, list[str]], parts: Parts
) -> list[RankClass]:
    """The classes of equal labels, with their peers."""
    classes: dict[int, RankClass] = {}
    for rank in sorted(label):
        classes.setdefault(label[rank], RankClass([], source[rank])).ranks.append(rank)
    number = {key: i for i, key in enumerate(classes)}
    for item in classes.values():
        for name in used[id(item.source)]:
            met = parts.members[parts.of[name][item.ranks[0]]]
            item.peers[name] = tuple(sorted({number[label[rank]] for rank in met}))
    return list(classes.values())


def solo_collectives(item: RankClass, own: int) -> npt.NDArray[np.bool_]:
    """The collective events of a class that meet nobody of another class."""
    events = item.source.events
    chosen = events.op == Op.COLLECTIVE
    if not chosen.any():
        return chosen
    groups = events.strings("group")
    solo = np.array([item.is_solo(own, name) for name in groups.table] + [True])  # code -1: no group
    return np.asarray(chosen & solo[groups.codes])


@dataclass(eq=False)
class Meeting:
    """A collective: the classes that take part, and the record of it in each of those that have reached it."""

    group: str
    ordinal: int  # how many collectives its group had before it
    peers: tuple[int, ...]
    arrived: dict[int, int] = field(default_factory=dict)
    start: int = 0  # the latest arrival so far


@dataclass
class Calls:
    """The collectives that one class has launched: how many, and those that their streams have not come to yet."""

    read: int = 0  # how many launches were seen
    counts: dict[str, int] = field(default_factory=dict)  # by group
    ahead: dict[int, deque[tuple[int, Meeting]]] = field(default_factory=dict)  # by stream: record and meeting


class Schedule:
    """Runs the machines of all classes to their ends. `serve` handles what a machine stops at, besides waits."""

    def __init__(self, classes: Sequence[RankClass], machines: Sequence[Machine]) -> None:
        self.classes = classes
        self.machines = machines
        self.calls = [Calls() for _ in machines]
        self.meetings: dict[tuple[str, tuple[int, ...], int], Meeting] = {}  # those that some have not reached yet
        self.waiting: dict[int, int] = {}  # class -> its host clock
        self.stuck: set[int] = set()  # those of them that polled, and must wait all the same
        self.sequence = 0
        self.turns: list[tuple[int, int, int, int]] = []

    def push(self, number: int, time: int, priority: int = RANK_PRIORITY) -> None:
        """Queue a turn for a class."""
        heapq.heappush(self.turns, (time, priority, self.sequence, number))
        self.sequence += 1

    def run(self, serve: ServeFunction) -> None:
        """Take turns until every class is at its end; TraceError where all wait for each other."""
        for number in range(len(self.machines)):
            self.push(number, 0)
        while True:
            while self.turns:
                self._take_turn(heapq.heappop(self.turns)[3], serve)
            if not self.waiting:
                return
            if not self._let_poll(serve):
                self._end_with_the_dead()

    def _take_turn(self, number: int, serve: ServeFunction, patient: int = -1) -> None:
        """Run one class until it ends or waits, and queue those whose waits may be over by that."""
        self.waiting.pop(number, None)
        self.stuck.discard(number)
        if self._advance(number, serve, patient):
            self.waiting[number] = int(self.machines[number].memory[at.HOST])
        for other in self._start_collectives(number):
            if other in self.waiting:
                self.push(other, self.waiting.pop(other), START_PRIORITY)

    def _advance(self, number: int, serve: ServeFunction, patient: int) -> bool:
        """Run one class until it ends or waits; whether it waits."""
        machine = self.machines[number]
        while True:
            status = machine.step(len(machine.program), patient)
            if status in (at.PAUSED, at.WAIT):
                return status == at.WAIT
            serve(number, machine, status)

    # --- collectives ----------------------------------------------------------------------------------------------

    def _start_collectives(self, number: int) -> list[int]:
        """After a turn of a class: fix the starts that everyone has reached; the classes that learned something."""
        self._note_launches(number)
        changed: set[int] = set()
        fresh = [number]
        while fresh:
            ready = [meeting for item in fresh for meeting in self._note_arrivals(item)]
            for meeting in ready:
                self._begin(meeting)
            fresh = sorted({item for meeting in ready for item in meeting.arrived})
            for item in fresh:
                engine.resolve_work(self.machines[item].memory)
            changed.update(fresh)
        return sorted(changed)

    def _note_launches(self, number: int) -> None:
        """See which collectives a class has launched since the last look."""
        calls, memory, program = self.calls[number], self.machines[number].memory, self.machines[number].program
        launched = int(memory[at.NUM_COLLECTIVES])
        if launched == calls.read:
            return
        groups = program.events.strings("group")
        for i in range(calls.read, launched):
            record = int(memory[at.COLLECTIVES]) + i * at.C_COLUMNS
            event = int(memory[record + at.C_EVENT])
            ahead = calls.ahead.setdefault(int(program.streams[event]), deque())
            ahead.append((record, self._meeting(number, groups.get(event) or "")))
        calls.read = launched

    def _meeting(self, number: int, group: str) -> Meeting:
        """The collective that a class launches next in a group."""
        counts, peers = self.calls[number].counts, self.classes[number].peers[group]
        ordinal = counts.get(group, 0)
        counts[group] = ordinal + 1
        return self.meetings.setdefault((group, peers, ordinal), Meeting(group, ordinal, peers))

    def _note_arrivals(self, number: int) -> list[Meeting]:
        """See which collectives a class has reached; those of them that everyone has reached now."""
        memory = self.machines[number].memory
        ready = []
        for ahead in self.calls[number].ahead.values():
            while ahead and memory[ahead[0][0] + at.C_ARRIVAL] >= 0:
                record, meeting = ahead.popleft()
                meeting.arrived[number] = record
                meeting.start = max(meeting.start, int(memory[record + at.C_ARRIVAL]))
                if len(meeting.arrived) == len(meeting.peers):
                    ready.append(meeting)
        return ready

    def _begin(self, meeting: Meeting) -> None:
        """Tell everyone when a collective starts."""
        for number, record in meeting.arrived.items():
            self.machines[number].memory[record + at.C_START] = meeting.start
        del self.meetings[meeting.group, meeting.peers, meeting.ordinal]

    # --- where all wait -------------------------------------------------------------------------------------------

    def _let_poll(self, serve: ServeFunction) -> bool:
        """Let the class that is furthest behind poll its unknown events as incomplete; False where none polls."""
        pollers = [number for number in self.waiting if self._polls(number)]
        if not pollers:
            return False
        number = min(pollers, key=lambda item: (self.waiting[item], item))
        index = self.machines[number].index
        self._take_turn(number, serve, index)
        if number in self.waiting and self.machines[number].index == index:
            self.stuck.add(number)
        return True

    def _end_with_the_dead(self) -> None:
        """End the classes that wait for one that has failed, as a launcher does; TraceError where none has."""
        if not any(machine.ended for machine in self.machines):
            raise self._deadlock()
        for number in self.waiting:
            self.machines[number].end_here()
        self.waiting.clear()

    def _polls(self, number: int) -> bool:
        """Whether a waiting class only asks whether events are complete."""
        if number in self.stuck:
            return False
        machine = self.machines[number]
        return bool(machine.program.ops[machine.index] == Op.ALLOC)

    def _deadlock(self) -> TraceError:
        """The error where nobody can go on: names a collective that some rank never reaches."""
        number = min(self.waiting)
        rank = self.classes[number].ranks[0]
        for meeting in self.meetings.values():
            if number in meeting.arrived:
                index = int(self.machines[number].memory[meeting.arrived[number] + at.C_EVENT])
                other = next(self.classes[peer].ranks[0] for peer in meeting.peers if peer not in meeting.arrived)
                return EventError(
                    f"collective {meeting.ordinal} of group '{meeting.group}' is never reached by rank {other}; give"
                    " every rank of a group the same collectives in the same order",
                    rank=rank,
                    index=index,
                    field="group",
                )
        return EventError("waits for work that never ends", rank=rank, index=self.machines[number].index)
