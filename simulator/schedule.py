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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simulator import engine
from simulator import layout as at
from simulator.machine import Machine
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


def _members(trace: Trace, name: str, rank: int) -> Group:
    """The ranks that `rank` meets in a group, itself included."""
    for part in trace.groups.get(name, ()):
        if rank in part:
            return part
    return (rank,)


def classify(trace: Trace) -> list[RankClass]:
    """The classes of a trace's ranks, in order of their lowest rank.

    Starts with ranks of equal events and splits a class while its members meet different classes in some group.
    """
    label: dict[int, object] = {}
    source: dict[int, RankEvents] = {}
    digests = [_digest(rank) if len(trace.ranks) > 1 else b"" for rank in trace.ranks]
    for entry, digest in zip(trace.ranks, digests, strict=True):
        for rank in entry.ranks:
            label[rank] = digest
            source[rank] = entry
    used = {id(entry): _groups_used(entry.events) for entry in trace.ranks}
    meets = {rank: [_members(trace, name, rank) for name in used[id(source[rank])]] for rank in label}
    while any(meets.values()):
        refined: dict[int, object] = {
            rank: (label[rank], tuple(_met(label, members) for members in meets[rank])) for rank in label
        }
        numbers = {value: number for number, value in enumerate(dict.fromkeys(refined.values()))}
        if len(numbers) == len(set(label.values())):
            break
        label = {rank: numbers[value] for rank, value in refined.items()}
    return _collect(trace, label, source, used)


def _met(label: dict[int, object], members: Group) -> tuple[object, ...]:
    """The labels met in a group, as an order-free key."""
    return tuple(sorted({label[member] for member in members if member in label}, key=repr))


def _collect(
    trace: Trace, label: dict[int, object], source: dict[int, RankEvents], used: dict[int, list[str]]
) -> list[RankClass]:
    classes: dict[object, RankClass] = {}
    for rank in sorted(label):
        classes.setdefault(label[rank], RankClass([], source[rank])).ranks.append(rank)
    number = {key: i for i, key in enumerate(classes)}
    for item in classes.values():
        for name in used[id(item.source)]:
            met = _members(trace, name, item.ranks[0])
            item.peers[name] = tuple(sorted({number[label[rank]] for rank in met if rank in label}))
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


@dataclass
class Calls:
    """The collectives that one class has launched so far: for each group, their records in order."""

    read: int = 0  # how many launched collectives were seen
    records: dict[str, list[int]] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)  # first record of a group whose start is not known

    def note(self, machine: Machine) -> None:
        """See what was launched since the last look."""
        groups = machine.program.events.strings("group")
        launched = int(machine.memory[at.NUM_COLLECTIVES])
        for i in range(self.read, launched):
            record = int(machine.memory[at.COLLECTIVES]) + i * at.C_COLUMNS
            name = groups.get(int(machine.memory[record + at.C_EVENT])) or ""
            self.records.setdefault(name, []).append(record)
        self.read = launched


class Schedule:
    """Runs the machines of all classes to their ends. `serve` handles what a machine stops at, besides waits."""

    def __init__(self, classes: Sequence[RankClass], machines: Sequence[Machine]) -> None:
        self.classes = classes
        self.machines = machines
        self.calls = [Calls() for _ in machines]
        self.sequence = 0
        self.turns: list[tuple[int, int, int, int]] = []

    def push(self, number: int, time: int, priority: int = RANK_PRIORITY) -> None:
        """Queue a turn for a class."""
        heapq.heappush(self.turns, (time, priority, self.sequence, number))
        self.sequence += 1

    def run(self, serve: ServeFunction) -> None:
        """Take turns until every class is at its end; TraceError where all wait for each other."""
        waiting: dict[int, int] = {}
        for number in range(len(self.machines)):
            self.push(number, 0)
        while True:
            while self.turns:
                number = heapq.heappop(self.turns)[3]
                waiting.pop(number, None)
                if self._advance(number, serve):
                    waiting[number] = int(self.machines[number].memory[at.HOST])
                for other in self._start_collectives():
                    if other in waiting:
                        self.push(other, waiting.pop(other), START_PRIORITY)
            if not waiting:
                return
            self._let_poll(waiting, serve)

    def _advance(self, number: int, serve: ServeFunction, patient: int = -1) -> bool:
        """Run one class until it ends or waits; whether it waits."""
        machine = self.machines[number]
        end = len(machine.program)
        while True:
            status = machine.step(end, patient)
            if status in (at.PAUSED, at.WAIT):
                return status == at.WAIT
            serve(number, machine, status)

    def _start_collectives(self) -> set[int]:
        """Fix the start of every collective that all have reached; the classes that learned something."""
        changed: set[int] = set()
        for number, machine in enumerate(self.machines):
            self.calls[number].note(machine)
        again = True
        while again:
            fresh = {number for number in range(len(self.machines)) if self._fix_starts(number)}
            for number in fresh:
                engine.resolve_work(self.machines[number].memory)
            changed |= fresh
            again = bool(fresh)
        return changed

    def _fix_starts(self, number: int) -> bool:
        """Fix the starts of one class's collectives that are known by now."""
        calls = self.calls[number]
        memory = self.machines[number].memory
        fixed = False
        for name, records in calls.records.items():
            first = calls.open.get(name, 0)
            while first < len(records):
                arrivals = [self._arrival(peer, name, first) for peer in self.classes[number].peers[name]]
                if min(arrivals) < 0:
                    break
                memory[records[first] + at.C_START] = max(arrivals)
                first += 1
                fixed = True
            calls.open[name] = first
        return fixed

    def _arrival(self, number: int, group: str, ordinal: int) -> int:
        """When a class reached its collective `ordinal` of a group, or -1."""
        records = self.calls[number].records.get(group, ())
        return int(self.machines[number].memory[records[ordinal] + at.C_ARRIVAL]) if ordinal < len(records) else -1

    def _let_poll(self, waiting: dict[int, int], serve: ServeFunction) -> None:
        """Let the class that is furthest behind poll its unknown events as incomplete, if a poll is all it waits for."""
        pollers = [
            number
            for number in waiting
            if self.machines[number].program.events.op[self.machines[number].index] == Op.ALLOC
        ]
        if not pollers:
            raise self._deadlock(waiting)
        number = min(pollers, key=lambda item: (waiting[item], item))
        del waiting[number]
        if self._advance(number, serve, self.machines[number].index):
            waiting[number] = int(self.machines[number].memory[at.HOST])
        for other in self._start_collectives():
            if other in waiting:
                self.push(other, waiting.pop(other), START_PRIORITY)

    def _deadlock(self, waiting: Iterable[int]) -> TraceError:
        """The error where nobody can go on: names a collective that some rank never reaches."""
        number = min(waiting)
        calls, item = self.calls[number], self.classes[number]
        machine = self.machines[number]
        for name, records in calls.records.items():
            ordinal = calls.open.get(name, 0)
            missing = [peer for peer in item.peers[name] if self._arrival(peer, name, ordinal) < 0]
            if ordinal < len(records) and missing and missing != [number]:
                index = int(machine.memory[records[ordinal] + at.C_EVENT])
                other = self.classes[next(peer for peer in missing if peer != number)].ranks[0]
                return EventError(
                    f"collective {ordinal} of group '{name}' is never reached by rank {other}; give every rank of a"
                    " group the same collectives in the same order",
                    rank=item.ranks[0],
                    index=index,
                    field="group",
                )
        return EventError("waits for work that never ends", rank=item.ranks[0], index=machine.index)
