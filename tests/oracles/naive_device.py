"""The naive model's device: it hands out addresses, counts bytes and writes down every call."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.observed import VA_BASE, Entry, merge_pages

GRANULE = 2 << 20
RESERVATION = 32 << 20


def granules(size: int) -> int:
    """`size` rounded up to whole granules of 2 MiB."""
    return -(-size // GRANULE) * GRANULE


@dataclass
class NaiveDevice:
    """A GPU of `total` bytes of which `other` belong to other processes."""

    total: int
    va_base: int = VA_BASE
    placement: str = "first-fit"
    recorded: tuple[int, ...] = ()
    other: int = 0
    used: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)  # (address, bytes) taken, by address
    pages: set[tuple[int, int]] = field(default_factory=set)  # (address, bytes) mapped
    log: list[Entry] = field(default_factory=list)  # of the event under way: calls, and what the allocator adds
    placements: int = 0
    taken: int = 0  # driver: bytes of address space below `va_base`
    top: int = 0  # bump: nothing at or above this was ever used

    @property
    def left(self) -> int:
        """Bytes that can still be had (negative when other processes took more)."""
        return self.total - self.used - self.other

    def note(self, action: str, address: int, size: int, stream: int) -> None:
        """Write down an entry of the allocator's own trace among the calls."""
        self.log.append((action, address, size, stream))

    def malloc(self, size: int) -> int | None:
        """cudaMalloc: an address, or None."""
        if granules(size) > self.left:
            self.log.append(("X", 0, size))
            return None
        address = self.place(size)
        self.used += granules(size)
        self.log.append(("A", address, size))
        return address

    def free(self, address: int, size: int) -> None:
        """cudaFree."""
        self.ranges.remove((address, granules(size)))
        self.used -= granules(size)
        self.log.append(("F", address, size))

    def reserve(self, size: int) -> int:
        """cuMemAddressReserve."""
        address = self.place(size)
        self.log.append(("R", address, size))
        return address

    def free_range(self, address: int, size: int) -> None:
        """cuMemAddressFree."""
        self.ranges.remove((address, granules(size)))
        self.log.append(("V", address, size))

    def create(self, size: int) -> bool:
        """cuMemCreate: one page of physical memory; its address comes with `map`."""
        if size % GRANULE or size > self.left:
            self.log.append(("Y", 0, size))
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """cuMemRelease of a page that was never mapped."""
        self.used -= size

    def map(self, address: int, size: int) -> None:
        """cuMemMap of a created page."""
        self.pages.add((address, size))
        self.log_range("M", address, size)

    def unmap(self, address: int, size: int) -> None:
        """cuMemUnmap and cuMemRelease of a page."""
        self.pages.remove((address, size))
        self.used -= size
        self.log_range("U", address, size)

    def log_range(self, kind: str, address: int, size: int) -> None:
        """Log a page; it is one call with the page before it when that is its neighbour."""
        self.log[-1:] = merge_pages([*self.log[-1:], (kind, address, size)])

    def place(self, size: int) -> int:
        """Pick the address of a new range by the device's rule."""
        size = granules(size)
        self.placements += 1
        if self.placement == "recorded" and self.placements <= len(self.recorded):
            address = self.recorded[self.placements - 1]
        elif self.placement == "driver":
            address = self.driver_place(size)
        elif self.placement == "first-fit":
            address = self.va_base
            for start, length in self.ranges:
                if start - address >= size:
                    break
                address = start + length
        else:
            address = max(self.va_base, self.top)
        self.top = max(self.top, address + size)
        insort(self.ranges, (address, size))
        return address

    def driver_place(self, size: int) -> int:
        """The lowest room in what was taken of the address space; else more of that, below it, in whole 32 MiB."""
        for address, length in self.rooms():
            if length >= size:
                return address
        self.taken += -(-size // RESERVATION) * RESERVATION
        return self.va_base - self.taken

    def rooms(self) -> Iterator[tuple[int, int]]:
        """Rooms between ranges, by address."""
        at = self.va_base - self.taken
        for start, length in [*self.ranges, (self.va_base, 0)]:
            yield at, start - at
            at = start + length
