"""Sizes: what a request is rounded up to, and how much memory is obtained for it.

A request is rounded up to 512 bytes, or to a division of a power of two. A new segment has 2 MiB for small blocks,
20 MiB for those below 10 MiB, else the block's size rounded up to 2 MiB.

Plain Python that `malloc` compiles as it stands, so that a snapshot's reader can use the same rules without numba;
`m` is anything that gives the settings' words of `layout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.allocator import layout as at

if TYPE_CHECKING:
    from simulator.allocator.conf import AllocatorSettings
    from simulator.allocator.releases import Release

MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 1 << 20  # kSmallSize
SMALL_BUFFER = 2 << 20  # kSmallBuffer
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc
ROUND_LARGE = 2 << 20  # kRoundLarge
ONE_EIB = 1 << 60


def words(settings: AllocatorSettings, release: Release) -> dict[int, int]:
    """The words that these rules read."""
    found = {at.DIVISIONS + i: value for i, value in enumerate(settings.bounded_divisions)}
    return found | {
        at.DIVISIONS_ON: int(any(settings.roundup_power2_divisions)),
        at.ONE_UNROUNDED: int(release.divisions_one_unrounded),
        at.LARGE_SEGMENT: settings.large_segment_size,
    }


def round_size(m: Any, n: int) -> int:
    """Size of the block that a request of `n` bytes asks for (also roundup_power2_next_division)."""
    if n < MIN_BLOCK:
        return MIN_BLOCK
    if m[at.DIVISIONS_ON] == 1:
        exponent = 0
        while n >> (exponent + 1) > 0:
            exponent += 1
        divisions = m[at.DIVISIONS + min(max(exponent - 20, 0), 15)]
        if divisions == 1 and m[at.ONE_UNROUNDED] == 1 and n > MIN_BLOCK:
            return n
        if divisions >= at.NEXT_POWER or (divisions > 1 and n > MIN_BLOCK * divisions):
            step = (1 << exponent) // divisions if divisions < at.NEXT_POWER else 1 << exponent
            return (n + step - 1) // step * step
    return (n + MIN_BLOCK - 1) & -MIN_BLOCK


def segment_size(m: Any, size: int) -> int:
    """get_allocation_size: bytes asked from the driver for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return int(m[at.LARGE_SEGMENT])
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
