"""What a cut recording's own choices tell of the state before it: sizes and ages that no entry names.

The allocator takes the smallest free block that fits, the lowest or oldest of several. So each allocation inside the
recording says something of the free blocks that it passed over: a block beside a free range that would have served
better must reach further into that range than was assumed; and of two segments with equally good free blocks, the one
taken was created first (from torch 2.13 on; before, the address decides).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

from simulator.snapshots.address_map import AddressMap, Range
from simulator.snapshots.rewind import Start
from simulator.snapshots.rules import Rules
from traces.snapshot.layout import PoolId

Key = tuple[int, bool, PoolId]


class Raised(NamedTuple):
    """A block of `found` that ends at `end`, not at `begin`; the free range after it goes up to `stop`."""

    found: Range
    begin: int
    end: int
    stop: int


class Sizes:
    """The sizes of the initial blocks that could be up to 1 MiB larger, raised where a choice shows that they are."""

    def __init__(self, start: Start, rules: Rules) -> None:
        self.known = start.sizes  # of all blocks in use, as they come and go
        self.initial = dict(start.sizes)
        self.most = dict(start.most)
        self.max_split = rules.settings.max_split_size
        self.lowest_first = rules.release.profile == "A"
        self.groups: dict[int, tuple[Range, list[int]]] = {}  # the blocks in question, by their segment
        self.largest: dict[int, int] = {}  # the most room after one of them, by segment; left out: not known
        for found in start.ranges:
            blocks = [address for address in found.active if address in self.most]
            if blocks:
                self.groups[found.start] = found, blocks

    def changed(self, found: Range) -> None:
        """A block of this segment came into use or was freed."""
        self.largest.pop(found.start, None)

    def freed(self, found: Range, address: int) -> None:
        """The block at `address` is gone: nothing more will be learned of its size."""
        self.changed(found)
        if self.most.pop(address, None) is not None:
            self.groups[found.start][1].remove(address)
            if not self.groups[found.start][1]:
                del self.groups[found.start]

    def note(self, memory: AddressMap, key: Key, needed: int, chosen: tuple[int, int] | None) -> list[Raised]:
        """An allocation of `needed` bytes took the free range `chosen` (address, bytes), or found none (None)."""
        raised = []
        for start, (first, blocks) in self.groups.items():
            if _key(first) != key or self.largest.get(start, needed) < needed:
                continue
            found = memory.starting_at(start) or first
            rooms = [self._room(found, address) for address in blocks]
            self.largest[start] = max(rooms)
            for address, room in zip(blocks, rooms, strict=True):
                begin = address + self.known[address]
                more = room - needed + 512
                if (
                    room >= needed
                    and self._preferred((room, begin), chosen)
                    and room < self.max_split  # else it is too large to be split for this
                    and self.known[address] + more <= self.most[address]
                ):
                    self.known[address] += more
                    self.initial[address] = self.known[address]
                    raised.append(Raised(found, begin, begin + more, begin + room))
        return raised

    def _room(self, found: Range, address: int) -> int:
        """Free bytes after a block of unsure size."""
        return found.gap_after(bisect_left(found.active, address)) - self.known[address]

    def _preferred(self, free: tuple[int, int], chosen: tuple[int, int] | None) -> bool:
        """Whether a free range (bytes, address) would have been taken rather than the chosen (address, bytes)."""
        if chosen is None:
            return True
        address, size = chosen
        return free[1] != address and (free[0] < size or (free == (size, min(free[1], address)) and self.lowest_first))


class Ages:
    """Which of the initial segments are older, by the choices between equally large free ranges (torch 2.13 on)."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self.initial = {found.start for found in ranges if not found.expandable}
        self.free: dict[tuple[Key, int], dict[int, int]] = {}  # (key, bytes) -> free range -> its segment
        self.older: dict[int, set[int]] = {}  # segment -> those that are younger
        self.released: list[tuple[Key, int, int]] = []  # by the call under way: key, bytes, segment

    def change(self, found: Range, sizes: dict[int, int], address: int, *, freed: bool) -> None:
        """Keep the index of free ranges: `address` is about to be used in `found`, or was just freed."""
        if found.start not in self.initial:
            return
        i = bisect_left(found.active, address)
        low = found.active[i - 1] + sizes[found.active[i - 1]] if i else found.start
        high = found.active[i] if i < len(found.active) else found.end
        used = address + sizes[address]
        self._set(found, low, high, there=freed)
        self._set(found, low, address, there=not freed)
        self._set(found, used, high, there=not freed)

    def fill(self, found: Range, sizes: dict[int, int]) -> None:
        """Enter the free ranges of an initial segment."""
        cursor = found.start
        for address in found.active:
            self._set(found, cursor, address, there=True)
            cursor = address + sizes[address]
        self._set(found, cursor, found.end, there=True)

    def raised(self, change: Raised) -> None:
        """A block turned out to be larger."""
        if change.found.start in self.initial:
            self._set(change.found, change.begin, change.stop, there=False)
            self._set(change.found, change.end, change.stop, there=True)

    def drop(self, found: Range) -> None:
        """A segment was given back; all of it was free."""
        self.released.append((_key(found), found.size, found.start))
        if found.start in self.initial:
            self._set(found, found.start, found.end, there=False)

    def end_call(self, backwards_too: bool) -> None:
        """One call gave back the segments dropped since the last: those of one size oldest first.

        With max_split_size a malloc may walk the free blocks from the largest to the smallest (`backwards_too`).
        """
        released, self.released = self.released, []
        for i, (one, other) in enumerate(pairwise(released)):
            if one[:2] != other[:2]:
                continue
            before = next((r[1] for r in reversed(released[:i]) if r[:2] != one[:2] and r[0] == one[0]), None)
            after = next((r[1] for r in released[i + 2 :] if r[:2] != one[:2] and r[0] == one[0]), None)
            rising = (before is not None and before < one[1]) or (
                before is None and after is not None and after > one[1]
            )
            falling = before is not None and before > one[1] and (after is None or after < one[1])
            if rising or not backwards_too:
                self._note_order(one[2], other[2])
            elif falling:
                self._note_order(other[2], one[2])
        for _, _, start in released:
            self.initial.discard(start)

    def _note_order(self, old: int, young: int) -> None:
        if old in self.initial and young in self.initial:
            self.older.setdefault(old, set()).add(young)

    def _set(self, found: Range, low: int, high: int, *, there: bool) -> None:
        if low >= high:
            return
        group = self.free.setdefault((_key(found), high - low), {})
        if there:
            group[low] = found.start
        else:
            group.pop(low, None)

    def note(self, found: Range, chosen: tuple[int, int]) -> None:
        """An allocation took the free range `chosen` (address, bytes) of `found`."""
        if found.start in self.initial:
            others = set(self.free.get((_key(found), chosen[1]), {}).values()) - {found.start}
            if others:
                self.older.setdefault(found.start, set()).update(others)

    def order(self, starts: list[int]) -> list[int]:
        """The segments, oldest first as far as the choices say, else by address."""
        ordered: list[int] = []
        done: set[int] = set()
        before: dict[int, set[int]] = {}
        for old, young in self.older.items():
            for segment in young:
                before.setdefault(segment, set()).add(old)
        waiting = sorted(starts)
        while waiting:
            ready = [s for s in waiting if before.get(s, set()) <= done] or waiting[:1]
            ordered += ready
            done.update(ready)
            waiting = [s for s in waiting if s not in done]
        return ordered


def _key(found: Range) -> Key:
    return found.stream, bool(found.large), found.pool
