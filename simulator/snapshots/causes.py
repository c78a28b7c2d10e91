"""From the steps of a recorded device to the events that cause them, and the consequences to compare.

A snapshot records consequences. The events written here are their causes: allocations with the address that was
recorded, frees, completions of frees that another stream held up, calls of empty_cache, private pools. A replay of
these events, with the recorded addresses of segments, repeats every entry of the recording in its order.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from simulator.allocator import sizes as allocator
from simulator.engine.result import LOG_KINDS, RECORDED, EventLog
from simulator.snapshots.address_map import Range
from simulator.snapshots.limits import Limits
from simulator.snapshots.rewind import Start
from simulator.snapshots.roles import Roles, find_roles
from simulator.snapshots.rules import Rules
from simulator.snapshots.survey import AddressSpace, Kind, Placed, Step, Survey
from traces.model import (
    DEFAULT_DEVICE,
    STRING_FIELDS,
    Column,
    Device,
    Events,
    Initial,
    InitialBlock,
    InitialSegment,
    Int64Array,
    Op,
    Strings,
)
from traces.snapshot.layout import (
    ACTIONS,
    DEFAULT_POOL,
    OOM,
    Annotation,
    DeviceRecord,
    PoolId,
)

#: A device's address range for expandable segments is 9/8 of its memory; ranges not shown are put this far apart.
_FAR: Final = 1 << 44


@dataclass(frozen=True)
class ExpectedLog(EventLog):
    """What the recording shows; `entry` is the index in the file's list.

    X, R, V and Y are in no snapshot. `event` is -1 where none is known. An `oom` has address 0 and the rounded size.
    """

    entry: Int64Array

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class Causes:
    """The events of one device, its state at the start, its kind of device, and what to expect."""

    events: Events
    initial: Initial | None
    device: Device
    expandable_at_start: bool
    pools: dict[PoolId, int]
    log: ExpectedLog
    notes: tuple[str, ...]


def find_causes(
    record: DeviceRecord,
    start: Start,
    survey: Survey,
    limits: Limits,
    rules: Rules,
    annotations: tuple[Annotation, ...] = (),
) -> Causes:
    """The events that cause a surveyed recording."""
    roles = find_roles(record.entries, tuple(mark for mark in annotations if mark.device in (record.device, -1)))
    writer = _Writer(record, start, survey, limits, rules, roles)
    phases = _phases(roles, survey)
    for number, step in enumerate(survey.steps):
        for name, count in phases.get(number, ()):
            writer.emit(Op.PHASE, name=name, step=count)
        writer.step(number, step)
    device = Device(
        limits.name,
        limits.total,
        placement="recorded",
        segment_addresses=_addresses(survey, limits, writer.modes, rules),
        va_base=DEFAULT_DEVICE.va_base,
    )
    return Causes(
        events=writer.events(),
        initial=_initial(start, survey, device, rules, writer),
        device=device,
        expandable_at_start=writer.expandable_at_start,
        pools=writer.pools,
        log=writer.log(),
        notes=tuple(writer.notes()),
    )


class _Writer:
    """Collects the events, and the event of every entry."""

    def __init__(
        self, record: DeviceRecord, start: Start, survey: Survey, limits: Limits, rules: Rules, roles: Roles
    ) -> None:
        self.roles = roles
        self.entries, self.rules, self.limits, self.survey = record.entries, rules, limits, survey
        self.ops: list[int] = []
        self.columns: dict[str, dict[int, Any]] = {}
        self.event_of = [-1] * len(self.entries)
        self.ids: dict[int, int] = {a: i + 1 for i, a in enumerate(sorted(start.blocks))}
        self.initial_ids = dict(self.ids)
        self.next_id = len(self.ids) + 1
        self.pools: dict[PoolId, int] = {}
        self.open_pools: set[PoolId] = set()
        streams = [s.stream for s in record.segments] + self.entries.stream + [r.stream for r in start.ranges]
        self.held_on = _held_on(survey, limits, record, max(streams, default=0) + 1)
        self.guessed = self.orphans = 0
        self.modes = _modes(survey, rules)
        self.expandable_at_start = self.expandable = self.modes[0] if self.modes else rules.settings.expandable_segments
        self.toggles = 0
        for found in start.ranges:
            if found.pool != DEFAULT_POOL:
                self.pool(found.pool)
                self.open_pools.add(found.pool)
        if any(step.deferred for step in survey.steps):
            self.emit(Op.HOLD_EVENTS, hold=True)
        if limits.fraction is not None:
            self.emit(Op.SET_MEMORY_FRACTION, fraction=limits.fraction)

    def emit(self, op: Op, members: list[int] | tuple[int, ...] = (), **fields: object) -> int:
        """Append an event that causes the entries `members`; its index."""
        index = len(self.ops)
        self.ops.append(op)
        for name, value in fields.items():
            if value is not None:
                self.columns.setdefault(name, {})[index] = value
        for i in members:
            self.event_of[i] = index
        return index

    def pool(self, pool: PoolId) -> int:
        """The number of a private pool in the trace."""
        return self.pools.setdefault(pool, len(self.pools) + 1)

    # Steps

    def step(self, number: int, step: Step) -> None:
        """Write the events of one step."""
        if number in self.limits.others:
            self.emit(Op.OTHER_PROCESS, bytes=self.limits.others[number])
        if step.kind is Kind.FREE:
            self._free(number, step)
        elif step.kind is Kind.MALLOC:
            self._malloc(number, step)
        else:
            for i in step.early:
                self._complete(i)
            if step.kind is Kind.RELEASE:
                self._release(step.releases)
            elif step.kind is Kind.ORPHAN:
                self.orphans += 1

    def _free(self, number: int, step: Step) -> None:
        ident = self.ids[self.entries.address[step.members[0]]]
        if step.deferred:
            self.emit(Op.RECORD_STREAM, id=ident, stream=self.held_on[number])
        self.emit(Op.FREE, step.members, id=ident)
        if not step.deferred:
            del self.ids[self.entries.address[step.members[0]]]

    def _complete(self, i: int) -> None:
        self.emit(Op.COMPLETE_FREE, [i], id=self.ids.pop(self.entries.address[i]))

    def _release(self, releases: list[int]) -> None:
        """empty_cache, after the private pools that it releases have been given up."""
        for pool in dict.fromkeys(self.survey.released_pools[i] for i in releases):
            if pool in self.open_pools:
                self.emit(Op.POOL_RELEASE, pool=self.pool(pool))
                self.open_pools.discard(pool)
        self.emit(Op.EMPTY_CACHE, releases)

    def _malloc(self, number: int, step: Step) -> None:
        """An allocation, with what has to happen before it, and what its refusal completed after it."""
        releases, pressed = step.releases, number in self.limits.pressed
        waited_for = _waited_for(number, step, self.limits)
        idents = {i: self.ids[self.entries.address[i]] for i in waited_for}
        for i in (*step.early, *step.late):
            if i not in idents or idents[i] in self.initial_ids.values():
                self._complete(i)
                idents.pop(i, None)
        late = [self.ids.pop(self.entries.address[i]) for i in idents]
        if releases and not pressed:
            self._release(releases)
            self.guessed += 1
        self._follow_mode(number)
        members = [i for i in step.members if self.event_of[i] < 0]
        self._alloc(step, members)
        for ident in late:
            self.emit(Op.COMPLETE_FREE, id=ident)  # nothing happens where the replay's own wait has completed it

    def _alloc(self, step: Step, members: list[int]) -> None:
        e, i = self.entries, step.end
        if step.pool != DEFAULT_POOL:
            if step.pool not in self.open_pools:
                self.emit(Op.POOL_CREATE, pool=self.pool(step.pool))
                self.open_pools.add(step.pool)
            self.emit(Op.POOL_BEGIN, pool=self.pool(step.pool))
        address = None if step.oom else e.address[i]
        ident = self.next_id
        self.next_id += 1
        said = {"name": e.name[i], "frames": e.frames[i], "category": self.roles.categories[i]}
        self.emit(Op.ALLOC, members, id=ident, bytes=e.size[i], stream=e.stream[i], address=address, **said)
        if address is not None:
            self.ids[address] = ident
        if step.pool != DEFAULT_POOL:
            self.emit(Op.POOL_END, pool=self.pool(step.pool))
            self.emit(Op.POOL_RELEASE, pool=self.pool(step.pool))

    def _follow_mode(self, number: int) -> None:
        """Switch expandable segments where what was obtained shows that the program did."""
        if self.modes and self.modes[number] != self.expandable:
            self.expandable = self.modes[number]
            self.toggles += 1
            self.emit(Op.SET_ALLOCATOR, conf=self.rules.with_expandable(self.expandable))

    # Results

    def events(self) -> Events:
        """The events as columns."""
        count = len(self.ops)
        columns: dict[str, Column] = {}
        for name, values in self.columns.items():
            if name in STRING_FIELDS:
                texts: list[str | None] = [None] * count
                for index, value in values.items():
                    texts[index] = value
                columns[name] = Strings.encode(texts)
            elif name == "hold":
                columns[name] = _filled(count, values, False, np.bool_)
            elif name == "fraction":
                columns[name] = _filled(count, values, np.nan, np.float64)
            else:
                default = 0 if name in ("bytes", "stream") else -1
                columns[name] = _filled(count, values, default, np.int64)
        return Events(np.array(self.ops, dtype=np.uint8), columns)

    def log(self) -> ExpectedLog:
        """The entries of the recording, as consequences of the events."""
        e = self.entries
        shown = [i for i in range(len(e)) if e.entry[i] >= 0]
        codes = {ACTIONS[action]: LOG_KINDS.index(kind) for kind, action in RECORDED.items()}
        return ExpectedLog(
            kind=np.array([codes[e.kind[i]] for i in shown], dtype=np.uint8),
            address=np.array([0 if e.kind[i] == OOM else e.address[i] for i in shown], dtype=np.int64),
            bytes=np.array([e.size[i] for i in shown], dtype=np.int64),
            stream=np.array([e.stream[i] for i in shown], dtype=np.int64),
            event=np.array([self.event_of[i] for i in shown], dtype=np.int64),
            entry=np.array([e.entry[i] for i in shown], dtype=np.int64),
        )

    def notes(self) -> list[str]:
        """What was assumed on the way."""
        found = []
        if self.guessed:
            found.append(
                f"{self.guessed} times cached segments were given back right before new memory was obtained: replayed "
                "as empty_cache (memory pressure looks the same)"
            )
        if self.toggles:
            found.append("expandable segments were switched while recording; they are switched where it first shows")
        if self.orphans:
            found.append(f"{self.orphans} times memory was obtained for an allocation that the recording does not have")
        return found


def _waited_for(number: int, step: Step, limits: Limits) -> list[int]:
    """The completions for which a refused malloc waited itself; those before them it had found done."""
    found_done = len(step.early)
    if step.would_fit >= 0 and (step.oom or (step.releases and number in limits.pressed)):
        # Done before the search, these would have served the request: it was its own wait that completed them.
        found_done = step.would_fit - 1
    return [*step.early[found_done:], *step.late]


def _held_on(survey: Survey, limits: Limits, record: DeviceRecord, first: int) -> dict[int, int]:
    """For each deferred free, by step, a stream that stands for those that hold it up: `first` or one above.

    A wait completes frees stream by stream, those of a stream in order; streams are visited from the last to the
    first. Frees that a malloc waited for are spread over streams so that they complete in the order recorded.
    """
    addresses = record.entries.address
    streams: dict[int, int] = {}
    pending: dict[int, int] = {}  # address -> step
    for number, step in enumerate(survey.steps):
        if step.kind is Kind.FREE and step.deferred:
            pending[addresses[step.members[0]]] = number
            streams[number] = first
        waited_for = _waited_for(number, step, limits) if step.kind is Kind.MALLOC else []
        frees = [pending[addresses[i]] for i in waited_for if addresses[i] in pending]
        descents = sum(later < sooner for sooner, later in pairwise(frees))
        for k, free in enumerate(frees):
            descents -= k > 0 and free < frees[k - 1]
            streams[free] = first + descents
        for i in (*step.early, *step.late):
            pending.pop(addresses[i], None)
    return streams


def _filled(count: int, values: dict[int, Any], default: Any, dtype: Any) -> Any:
    column = np.full(count, default, dtype=dtype)
    column[list(values)] = list(values.values())
    return column


def _modes(survey: Survey, rules: Rules) -> list[bool]:
    """For each step, whether expandable segments were on: as in the memory obtained last before, or first after.

    Private pools say nothing: they may have an allocator of their own. Empty where nothing shows a switch.
    """
    shown: list[tuple[int, bool]] = [
        (k, step.expandable)
        for k, step in enumerate(survey.steps)
        if step.takes and step.pool == DEFAULT_POOL and step.kind is Kind.MALLOC
    ]
    end = rules.settings.expandable_segments
    if all(mode == end for _, mode in shown):
        return []
    modes: list[bool] = []
    current, last = shown[0][1], 0
    for k, mode in shown:
        if mode != current:
            # The first block split as only the new mode does tells of the switch before new memory does.
            first = min((s for s in survey.split_finely if last < s < k), default=k) if mode else k
            modes.extend([current] * (first - len(modes)))
            current = mode
        last = k
    return modes + [current] * (len(survey.steps) - len(modes))


def _phases(roles: Roles, survey: Survey) -> dict[int, list[tuple[str, int | None]]]:
    """Phases by the number of the step before which they begin."""
    begins = [step.members[0] for step in survey.steps]
    found: dict[int, list[tuple[str, int | None]]] = {}
    for entry, name, count in roles.phases:
        found.setdefault(bisect_left(begins, entry), []).append((name, None if name == "load" else count))
    return found


def _addresses(survey: Survey, limits: Limits, modes: list[bool], rules: Rules) -> tuple[int, ...]:
    """The addresses that the driver gave, in the order in which a replay asks for them."""
    ordered: list[tuple[int, int]] = []
    far = -(-survey.top // _FAR) * _FAR
    for placed in survey.placed:
        number, address = placed.step, placed.address
        if placed.refused and not _reserves(survey.steps[number], placed, limits, modes, rules):
            if placed.shown < 0:
                continue
            number = placed.shown
        if address < 0:
            far += _FAR
            address = far
        ordered.append((number, address))
    return tuple(address for _, address in sorted(ordered, key=lambda item: item[0]))


def _reserves(step: Step, placed: Placed, limits: Limits, modes: list[bool], rules: Rules) -> bool:
    """Whether an allocation that ran out of memory asked for an address range before it did."""
    expandable = modes[placed.step] if modes else rules.settings.expandable_segments
    return expandable and (limits.limit is None or step.after + step.needed <= limits.limit)


# The state at the start


def _initial(start: Start, survey: Survey, device: Device, rules: Rules, writer: _Writer) -> Initial | None:
    """The rewound state, with free blocks in the gaps."""
    if not start.ranges:
        return None
    spaces = dict(survey.spaces)
    segments = []
    ranges = {found.start: found for found in start.ranges}
    for address in survey.order:
        found = ranges[address]
        segment = InitialSegment(
            address=found.start,
            bytes=found.size,
            stream=found.stream,
            pool="large" if found.large else "small",
            expandable=found.expandable,
            blocks=_tiles(found, start, survey.sizes, writer.initial_ids),
            pool_id=writer.pools.get(found.pool, 0),
        )
        if found.expandable:
            segment = _in_space(segment, spaces[(found.stream, bool(found.large), found.pool)], device, rules)
        segments.append(segment)
    return Initial(tuple(segments))


def _in_space(segment: InitialSegment, space: AddressSpace, device: Device, rules: Rules) -> InitialSegment:
    """A mapped range with the address range around it: 9/8 of the device from its lowest page."""
    page = rules.page_size(segment.pool == "large") if segment.pool == "large" else allocator.SMALL_BUFFER
    size = max(device.total_bytes + device.total_bytes // 8, space.top - space.base)
    return replace(segment, va_address=space.base, va_bytes=-(-size // page) * page)


def _tiles(found: Range, start: Start, sizes: dict[int, int], ids: dict[int, int]) -> tuple[InitialBlock, ...]:
    """The blocks of a range: those in use, and free ones between them."""
    blocks = []
    cursor = found.start
    for address in found.active:
        if address > cursor:
            blocks.append(InitialBlock(None, address - cursor, 0, "inactive"))
        held = start.blocks[address]
        blocks.append(InitialBlock(ids[address], sizes[address], held.requested, held.state))
        cursor = address + sizes[address]
    if cursor < found.end:
        blocks.append(InitialBlock(None, found.end - cursor, 0, "inactive"))
    return tuple(blocks)
