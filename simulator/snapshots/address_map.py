"""Reserved memory and the blocks in use in it, at one moment of a recording.

Only bookkeeping: where memory was obtained, and which addresses in it are in use. It is walked backwards by
`simulator.snapshots.rewind` and forwards by `simulator.snapshots.causes`; no rule of the allocator stands here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from traces.snapshot.layout import DEFAULT_POOL, PoolId


class MapError(Exception):
    """What is asked for contradicts what is there; the text says how, without the place in the file."""


@dataclass(slots=True)
class Range:
    """A cudaMalloc segment, or a mapped range of an expandable one, and the addresses in use in it.

    `large` is None while nothing tells the pool; `pool` the private pool's id.
    """

    start: int
    end: int
    stream: int
    expandable: bool
    large: bool | None
    pool: PoolId = DEFAULT_POOL
    active: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    def gap_after(self, index: int) -> int:
        """Bytes from the active address `index` to the next one, or to the end."""
        following = self.active[index + 1] if index + 1 < len(self.active) else self.end
        return following - self.active[index]

    def free_from(self, address: int) -> int:
        """Bytes from a free address to the next one in use, or to the end."""
        i = bisect_left(self.active, address)
        return (self.active[i] if i < len(self.active) else self.end) - address


class AddressMap:
    """Ranges in address order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, Range] = {}
        self.reserved = 0

    def __iter__(self) -> Iterator[Range]:
        return (self._ranges[start] for start in self._starts)

    def at(self, address: int) -> Range | None:
        """The range that holds `address`."""
        i = bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        found = self._ranges[self._starts[i]]
        return found if address < found.end else None

    def ending_at(self, address: int) -> Range | None:
        """The range that ends where `address` begins."""
        i = bisect_left(self._starts, address) - 1
        if i < 0:
            return None
        found = self._ranges[self._starts[i]]
        return found if found.end == address else None

    def starting_at(self, address: int) -> Range | None:
        """The range that starts at `address`."""
        return self._ranges.get(address)

    def add(self, new: Range) -> None:
        """Memory was obtained. Raises MapError where some of it is there already."""
        i = bisect_left(self._starts, new.start)
        before = self._ranges[self._starts[i - 1]] if i else None
        after = self._starts[i] if i < len(self._starts) else new.end
        if (before is not None and before.end > new.start) or after < new.end:
            raise MapError(f"the {new.size} bytes at {new.start:#x} overlap another segment")
        self._starts.insert(i, new.start)
        self._ranges[new.start] = new
        self.reserved += new.size

    def remove(self, found: Range) -> None:
        """Forget a range. Raises MapError where something in it is in use."""
        if found.active:
            raise MapError(f"the segment at {found.start:#x} holds a block in use, at {found.active[0]:#x}")
        del self._starts[bisect_left(self._starts, found.start)]
        del self._ranges[found.start]
        self.reserved -= found.size

    def take_segment(self, address: int, size: int) -> Range:
        """Remove the cudaMalloc segment of just these bounds, with nothing in use; returns it."""
        found = self._ranges.get(address)
        if found is None or found.size != size or found.expandable:
            raise MapError(f"there is no segment of {size} bytes at {address:#x}")
        self.remove(found)
        return found

    def cut(self, address: int, size: int) -> Range:
        """Remove part of a mapped range, with nothing in use; returns the range that it was part of (as it was)."""
        found = self.at(address)
        end = address + size
        if found is None or not found.expandable or end > found.end:
            raise MapError(f"the {size} bytes at {address:#x} are not all mapped")
        first, last = bisect_left(found.active, address), bisect_left(found.active, end)
        if first < last:
            raise MapError(f"the {size} bytes at {address:#x} hold a block in use, at {found.active[first]:#x}")
        below, above = found.active[:first], found.active[first:]
        self.remove(replace(found, active=[]))
        if address > found.start:
            self.add(replace(found, end=address, active=below))
        if end < found.end:
            self.add(replace(found, start=end, active=above))
        return found

    def map(self, new: Range) -> Range:
        """Add a mapped range and join it with the mapped ranges of its stream and kind that touch it."""
        before, after = self.ending_at(new.start), self._ranges.get(new.end)
        self.add(new)
        for other in (before, after):
            if other is not None and other.expandable and other.stream == new.stream and _alike(other, new):
                new = self._join(new, other)
        return new

    def _join(self, one: Range, other: Range) -> Range:
        low, high = (one, other) if one.start < other.start else (other, one)
        joined = replace(
            low,
            end=high.end,
            large=other.large if other.large is not None else one.large,
            pool=other.pool if other.pool != DEFAULT_POOL else one.pool,
            active=low.active + high.active,
        )
        for part in (low, high):
            self.remove(replace(part, active=[]))
        self.add(joined)
        return joined

    def use(self, address: int, least: int) -> tuple[Range, int]:
        """An address comes into use, for `least` bytes at least; its range, and its place among those in use."""
        found = self.at(address)
        if found is None:
            raise MapError(f"the address {address:#x} is in no segment")
        i = bisect_left(found.active, address)
        following = found.active[i] if i < len(found.active) else found.end
        if address + least > following:
            what = "is in use already" if following == address else f"has only {following - address} bytes free"
            raise MapError(f"the address {address:#x} {what}")
        insort(found.active, address)
        return found, i

    def drop(self, address: int) -> Range:
        """An address goes out of use; its range."""
        found = self.at(address)
        i = bisect_left(found.active, address) if found is not None else 0
        if found is None or i == len(found.active) or found.active[i] != address:
            raise MapError(f"the address {address:#x} is not in use")
        del found.active[i]
        return found


def _alike(one: Range, other: Range) -> bool:
    """Whether two touching mapped ranges can be of one expandable segment."""
    pools = one.pool == other.pool or DEFAULT_POOL in (one.pool, other.pool)
    return pools and (one.large is None or other.large is None or one.large == other.large)
