"""What a device did, step by step: its entries grouped into mallocs, frees and calls of empty_cache.

The walk goes forwards from the rewound state and keeps the books (what is reserved, what is in use), so that each
malloc is known with the memory that it met. Which of a malloc's consequences were forced by a lack of memory is then
the matter of `simulator.snapshots.limits`, the events that cause the steps that of `simulator.snapshots.causes`.
Entry pattern of a malloc (`DeviceCachingAllocator::malloc`): completions seen by polling; segments released by
garbage collection; then nothing, or a segment obtained, or, after a refusal: partial maps, cached segments released,
completions waited for, every cached segment released, and a segment obtained or an `oom`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from simulator.allocator import sizes as allocator
from simulator.snapshots.address_map import AddressMap, MapError, Range
from simulator.snapshots.guesses import Ages, Sizes
from simulator.snapshots.rewind import Start
from simulator.snapshots.rules import Rules
from traces.errors import TraceError
from traces.snapshot.layout import (
    ALLOC,
    DEFAULT_POOL,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    DeviceRecord,
    Entries,
    PoolId,
)

_TAKES: Final = frozenset({SEGMENT_ALLOC, SEGMENT_MAP})
_RELEASES: Final = frozenset({SEGMENT_FREE, SEGMENT_UNMAP})


class Kind(Enum):
    """What a step is."""

    MALLOC = "malloc"  # it ends with `alloc` or `oom`
    FREE = "free"
    RELEASE = "release"  # empty_cache
    COMPLETE = "complete"  # pending frees that complete, with nothing after them
    ORPHAN = "orphan"  # memory obtained for an allocation that the recording does not have


@dataclass(slots=True)
class Step:
    """Entries that one call of the program caused, as positions in the device's columns.

    `early` are completions at its beginning, `late` those amid the steps that follow a refusal. `end` is the position
    of its last entry. The rest is about mallocs: `before` are the bytes reserved at its beginning, `peak` the most
    during it, `after` at its end; `needed` is what it asks of the driver for a whole new segment.
    """

    kind: Kind
    end: int
    members: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    deferred: bool = False  # a free that other streams hold up
    before: int = 0
    peak: int = 0
    after: int = 0
    needed: int = 0
    pool: PoolId = DEFAULT_POOL
    stream: int = 0
    large: bool = False
    takes: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    expandable: bool = False  # what it obtained was mapped
    mapped_before_release: bool = False  # the driver ran out of pages amid the first attempt
    spared: bool = False  # something that empty_cache would have released, or waited for, was left
    in_passes: bool = False  # it released large segments in an order that one call of empty_cache does not have
    idle_large: bool = False  # at its beginning there was a cached whole segment that garbage collection may take
    would_fit: int = -1  # how many of the `early` completions it takes for a block that fits; -1: all do not suffice
    fits_still: bool = False  # such a block was there even after the last release
    obtained: int = 0  # bytes obtained after the last release
    oom: bool = False
    device_free: int = 0  # what the driver had left at an `oom`


@dataclass(slots=True)
class AddressSpace:
    """An expandable segment: where its address range begins, how much of it is mapped, how far it was ever mapped."""

    base: int
    mapped: int
    top: int
    loose: bool  # it was there before the recording, so that its base may be lower


@dataclass(slots=True)
class Placed:
    """An address range that the driver gave: `address` -1 where the recording does not show it.

    `step` is the number of the step that asked for it; `refused` where that was an `oom` (then `shown` is the number
    of the step that first mapped something there, or -1).
    """

    address: int
    step: int
    refused: bool = False
    shown: int = -1


@dataclass
class Survey:
    """A device's steps in order, the address ranges that the driver gave, and facts about the whole.

    `sizes` are those of the blocks at the start, by address, and `order` the segments at the start, oldest first, as
    far as the recording shows either.
    """

    steps: list[Step]
    placed: list[Placed]
    spaces: list[tuple[tuple[int, bool, PoolId], AddressSpace]]  # of the start, by stream, size class and pool
    released_pools: dict[int, PoolId]  # the pool of what an entry gave back
    sizes: dict[int, int]
    split_finely: set[int]  # steps whose block left a remainder that only expandable segments split off
    order: list[int]
    peak: int
    top: int  # an address above all seen


def survey(record: DeviceRecord, start: Start, rules: Rules, where: str) -> Survey:
    """Group a device's entries into steps. Raises TraceError where an entry contradicts the state before it."""
    walk = _Survey(record, start, rules)
    for i in range(len(record.entries)):
        try:
            walk.entry(i)
        except MapError as error:
            place = f"device {record.device}, entry {record.entries.entry[i]}"
            raise TraceError(f"{where}: {place}: {error}") from None
    return walk.finish()


class _Survey:
    """The books while the entries are read."""

    def __init__(self, record: DeviceRecord, start: Start, rules: Rules) -> None:
        self.entries, self.rules, self.start = record.entries, rules, start
        self.map = AddressMap()
        self.sizes = dict(start.sizes)
        self.guesses = Sizes(replace(start, sizes=self.sizes), rules)
        self.ages = Ages(start.ranges if rules.release.profile == "C" else ())
        self.idle: dict[int, bool] = {}  # cached whole segments by address: whether large
        self.spaces: dict[tuple[int, bool, PoolId], list[AddressSpace]] = {}
        self.modes = _modes_of_takes(record.entries, start.pools)
        self.born: dict[int, int] = {}  # address in use -> number of the step that allocated it
        self.split_finely: set[int] = set()
        self.steps: list[Step] = []
        self.placed: list[Placed] = []
        self.refused: dict[tuple[int, bool, PoolId], Placed] = {}  # address ranges asked for, not yet seen
        self.released_pools: dict[int, PoolId] = {}
        self.buffer: list[int] = []
        self.pending: set[int] = {a for a, held in start.blocks.items() if held.state == "active_pending_free"}
        self.top = 0
        for found in start.ranges:
            self.map.add(replace(found, active=list(found.active)))
            self._note_idle(found)
            self.ages.fill(found, self.sizes)
            self.top = max(self.top, found.end)
            if found.expandable:
                self._initial_space(found)
        self.initial_spaces = [(key, space) for key, spaces in self.spaces.items() for space in spaces]
        self.peak = self.map.reserved

    def _initial_space(self, found: Range) -> None:
        spaces = self.spaces.setdefault(_key(found), [])
        if not spaces:
            spaces.append(AddressSpace(found.start, 0, 0, loose=True))
        spaces[0].base = min(spaces[0].base, found.start)
        spaces[0].top = max(spaces[0].top, found.end)
        spaces[0].mapped += found.size

    # Grouping

    def entry(self, i: int) -> None:
        """Take in entry `i`."""
        kind = self.entries.kind[i]
        if kind in (ALLOC, OOM):
            self._malloc(i, kind == OOM)
        elif kind == FREE_REQUESTED:
            self._flush()
            self._free(i)
        elif kind == FREE_COMPLETED and self._completes_at_once(i):
            self._complete(i)
            self.steps[-1].members.append(i)
            self.steps[-1].end = i
        else:
            self.buffer.append(i)

    def finish(self) -> Survey:
        self._flush()
        return Survey(
            steps=self.steps,
            placed=self.placed,
            spaces=self.initial_spaces,
            released_pools=self.released_pools,
            sizes=self.guesses.initial,
            split_finely=self.split_finely,
            order=self.ages.order([found.start for found in self.start.ranges]),
            peak=self.peak,
            top=self.top,
        )

    def _completes_at_once(self, i: int) -> bool:
        """Whether entry `i` is the other half of the free that is the entry before it."""
        e = self.entries
        return i > 0 and e.kind[i - 1] == FREE_REQUESTED and e.address[i - 1] == e.address[i] and not self.buffer

    def _free(self, i: int) -> None:
        e = self.entries
        following = i + 1 < len(e) and e.kind[i + 1] == FREE_COMPLETED and e.address[i + 1] == e.address[i]
        if not following:
            self.pending.add(e.address[i])
        self.steps.append(Step(Kind.FREE, i, [i], deferred=not following))

    def _flush(self) -> None:
        """End a run of entries that no malloc follows."""
        if not self.buffer:
            return
        run, self.buffer = self.buffer, []
        kinds = {self.entries.kind[i] for i in run}
        kind = Kind.ORPHAN if kinds & _TAKES else Kind.RELEASE if kinds & _RELEASES else Kind.COMPLETE
        step = Step(kind, run[-1], run)
        step.early = [i for i in run if self.entries.kind[i] == FREE_COMPLETED]
        step.releases = [i for i in run if self.entries.kind[i] in _RELEASES]
        self.steps.append(step)
        for i in run:
            self._apply(i)
        self.ages.end_call(backwards_too=False)

    def _malloc(self, i: int, oom: bool) -> None:
        """A malloc, and the entries before it that it caused."""
        e = self.entries
        if not self.buffer and not oom:
            self._hit(i)
            return
        run, self.buffer = self.buffer, []
        kinds = [self.entries.kind[j] for j in run]
        last_release = max((k for k, kind in enumerate(kinds) if kind in _RELEASES), default=-1)
        first_take = next((k for k, kind in enumerate(kinds) if kind in _TAKES), len(run))
        if not oom and last_release >= 0 and first_take == len(run):
            # Something was released, and then nothing had to be obtained: empty_cache, and a malloc that hits.
            self.buffer = run[: last_release + 1]
            self._flush()
            run, kinds, last_release = run[last_release + 1 :], kinds[last_release + 1 :], -1
            first_take = len(run)
        step = self._new_malloc(i, oom)
        step.members = [*run, i]
        memory = next((k for k, kind in enumerate(kinds) if kind != FREE_COMPLETED), len(run))
        step.early, step.late = run[:memory], [j for j in run[memory:] if self.entries.kind[j] == FREE_COMPLETED]
        step.takes = [j for j in run if self.entries.kind[j] in _TAKES]
        step.releases = [j for j in run if self.entries.kind[j] in _RELEASES]
        step.mapped_before_release = first_take < last_release or (oom and bool(step.takes))
        step.expandable = any(kind == SEGMENT_MAP for kind in kinds)
        self.steps.append(step)
        if step.takes or oom:
            step.pool = e.pool[i] or (self.start.pools[step.takes[-1]] if step.takes else DEFAULT_POOL)
            self._note_choice(step, e.size[i] if oom else self.rules.round_size(e.size[i]), None)
        for k, j in enumerate(run):
            self._apply(j)
            if k < memory and step.would_fit < 0 and self._fits(step, self.entries.address[j]):
                step.would_fit = k + 1
            step.peak = max(step.peak, self.map.reserved)
            if kinds[k] in _TAKES and k > last_release:
                step.obtained += self.entries.size[j]
            if k == last_release:
                step.fits_still = any(self._fits(step, self.entries.address[m]) for m in step.early)
                step.spared = bool(self.idle) or bool(self.pending)  # empty_cache waits for all of these
        self.ages.end_call(backwards_too=self.rules.limits_split)
        step.after = self.map.reserved
        step.in_passes = _in_passes(
            [
                (e.stream[j], e.size[j])
                for j in step.releases
                if e.kind[j] == SEGMENT_FREE
                and e.size[j] != allocator.SMALL_BUFFER
                and self.released_pools[j] == DEFAULT_POOL
            ]
        )
        if oom:
            self._refuse((step.stream, step.large, step.pool))
        else:
            self._use(i, step)

    def _hit(self, i: int) -> None:
        """A malloc that did nothing but take a free block."""
        step = self._new_malloc(i, False)
        step.members = [i]
        step.after = step.before
        self.steps.append(step)
        self._use(i, step)

    def _new_malloc(self, i: int, oom: bool) -> Step:
        """A malloc step, as far as its own entry tells."""
        e = self.entries
        size = e.size[i] if oom else self.rules.round_size(e.size[i])  # an `oom` has the rounded size
        step = Step(Kind.MALLOC, i, before=self.map.reserved, peak=self.map.reserved, oom=oom, stream=e.stream[i])
        step.device_free = e.address[i] if oom else 0
        step.large = size > allocator.SMALL_SIZE
        step.needed = self.rules.segment_size(size)
        step.idle_large = bool(self.rules.settings.garbage_collection_threshold) and True in self.idle.values()
        step.pool = e.pool[i] or DEFAULT_POOL  # `_use` knows better
        return step

    def _refuse(self, key: tuple[int, bool, PoolId]) -> None:
        """An `oom` of an expandable allocation leaves an address range in which nothing is mapped."""
        if not self.spaces.get(key) and key not in self.refused:
            self.refused[key] = Placed(-1, len(self.steps) - 1, refused=True)
            self.placed.append(self.refused[key])

    # The books

    def _use(self, i: int, step: Step) -> None:
        e = self.entries
        address, size = e.address[i], self.rules.round_size(e.size[i])
        found = self.map.at(address)
        if found is None:
            raise MapError(f"the address {address:#x} is in no segment")
        step.pool = e.pool[i] or found.pool
        free = found.free_from(address)
        self._check_below(found, address)
        if not step.takes and self.guesses.most:
            self._note_choice(step, size, (address, free))
        self.sizes[address] = self._taken(found, size, free, self._expandable_on(i))
        self.born[address] = len(self.steps) - 1
        if not step.takes:
            self.ages.note(found, (address, free))
        self.ages.change(found, self.sizes, address, freed=False)
        self.map.use(address, e.size[i])
        self.guesses.changed(found)
        self.idle.pop(found.start, None)

    def _note_choice(self, step: Step, size: int, chosen: tuple[int, int] | None) -> None:
        """Learn from what the allocator found, or did not find, for `size` bytes."""
        for raised in self.guesses.note(self.map, (step.stream, step.large, step.pool), size, chosen):
            self.ages.raised(raised)

    def _taken(self, found: Range, size: int, free: int, expandable_on: bool) -> int:
        """The size of the block cut from a free range (`should_split`)."""
        if found.expandable or not found.large or expandable_on:
            return min(size, free)
        whole = size >= self.rules.settings.max_split_size
        return free if whole or free - size <= allocator.SMALL_SIZE else size

    def _expandable_on(self, i: int) -> bool:
        """Whether expandable segments seem to be on: as in the memory obtained last before entry `i`."""
        if not self.modes:
            return self.rules.settings.expandable_segments
        k = bisect_right(self.modes, i, key=lambda mode: mode[0]) - 1
        return self.modes[max(k, 0)][1]

    def _check_below(self, found: Range, address: int) -> None:
        """Learn from an address right after a block that was thought to be larger: its remainder was split off."""
        k = bisect_left(found.active, address)
        below = found.active[k - 1] if k else address
        if below + self.sizes.get(below, 0) > address and below in self.born:
            self.split_finely.add(self.born[below])
            self.sizes[below] = address - below

    def _apply(self, i: int) -> None:
        """Enter an entry of a run into the books."""
        kind = self.entries.kind[i]
        if kind == FREE_COMPLETED:
            self._complete(i)
        elif kind == SEGMENT_ALLOC:
            self._obtain(i)
        elif kind == SEGMENT_MAP:
            self._map(i)
        elif kind == SEGMENT_FREE:
            found = self.map.take_segment(self.entries.address[i], self.entries.size[i])
            self.released_pools[i] = found.pool
            self.ages.drop(found)
            self.idle.pop(found.start, None)
        else:
            self._unmap(i)
        self.peak = max(self.peak, self.map.reserved)

    def _complete(self, i: int) -> None:
        address = self.entries.address[i]
        found = self.map.drop(address)
        self.born.pop(address, None)
        self.guesses.freed(found, address)
        self.ages.change(found, self.sizes, address, freed=True)
        self._note_idle(found)
        self.pending.discard(address)

    def _note_idle(self, found: Range) -> None:
        """Remember a cached segment that empty_cache would release."""
        if not found.active and not found.expandable and found.pool == DEFAULT_POOL:
            self.idle[found.start] = bool(found.large)

    def _range(self, i: int) -> Range:
        e = self.entries
        start, size = e.address[i], e.size[i]
        self.top = max(self.top, start + size)
        expandable = e.kind[i] == SEGMENT_MAP
        return Range(start, start + size, e.stream[i], expandable, size != allocator.SMALL_BUFFER, self.start.pools[i])

    def _obtain(self, i: int) -> None:
        new = self._range(i)
        self.map.add(new)
        self.placed.append(Placed(new.start, len(self.steps) - 1))

    def _map(self, i: int) -> None:
        new = self._range(i)
        key = _key(new)
        space = self._space_of(new, key)
        if space is None:
            space = AddressSpace(new.start, 0, 0, loose=False)
            self.spaces.setdefault(key, []).append(space)
            self._place(new.start, key)
        space.mapped += new.size
        space.top = max(space.top, new.end)
        self.map.map(new)

    def _place(self, base: int, key: tuple[int, bool, PoolId]) -> None:
        """A new address range shows; it may have been asked for by an earlier `oom`."""
        placed = self.refused.pop(key, None)
        if placed is None:
            self.placed.append(Placed(base, len(self.steps) - 1))
        else:
            placed.address, placed.shown = base, len(self.steps) - 1

    def _space_of(self, new: Range, key: tuple[int, bool, PoolId]) -> AddressSpace | None:
        """The expandable segment that a newly mapped range is part of, or None for a new one.

        Pages are mapped right after others, or at the base.
        """
        spaces = self.spaces.get(key, [])
        before = self.map.ending_at(new.start)
        if before is not None and before.expandable and _key(before) == key:
            below = [space for space in spaces if space.base <= before.start]
            return max(below, key=lambda space: space.base) if below else None
        for space in spaces:
            if space.base == new.start:
                return space
        for space in spaces:
            if space.loose and new.start < space.base:
                space.base = new.start
                return space
        return None

    def _unmap(self, i: int) -> None:
        e = self.entries
        found = self.map.cut(e.address[i], e.size[i])
        self.released_pools[i] = found.pool
        spaces = self.spaces.get(_key(found), [])
        below = [space for space in spaces if space.base <= found.start]
        if below:
            space = max(below, key=lambda s: s.base)
            space.mapped -= e.size[i]
            if space.mapped <= 0:
                spaces.remove(space)

    def _fits(self, step: Step, address: int) -> bool:
        """Whether the free block around `address` would serve the malloc."""
        found = self.map.at(address)
        if found is None or (found.stream, found.large, found.pool) != (step.stream, step.large, step.pool):
            return False
        below = [a for a in found.active if a < address]
        above = [a for a in found.active if a > address]
        low = below[-1] + self.sizes[below[-1]] if below else found.start
        i = step.end
        size = self.entries.size[i]
        return (above[0] if above else found.end) - low >= (size if step.oom else self.rules.round_size(size))


def _key(found: Range) -> tuple[int, bool, PoolId]:
    return found.stream, bool(found.large), found.pool


def _modes_of_takes(entries: Entries, pools: dict[int, PoolId]) -> list[tuple[int, bool]]:
    """Where memory was obtained for the default pool, and whether it was mapped."""
    return [
        (i, kind == SEGMENT_MAP) for i, kind in enumerate(entries.kind) if kind in _TAKES and pools[i] == DEFAULT_POOL
    ]


def _in_passes(released: list[tuple[int, int]]) -> bool:
    """Whether large segments, by (stream, size), were not released in ascending order, as empty_cache does."""
    return any(later < sooner for sooner, later in itertools.pairwise(released))
