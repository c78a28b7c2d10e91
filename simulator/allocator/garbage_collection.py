"""Garbage collection (`garbage_collection_threshold`): cached segments that were idle longest are given back."""

from __future__ import annotations

from simulator.allocator import blocks, free_lists, release_blocks
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel
def collect_older(m: Memory, limit: float, clock: int) -> tuple[int, int, int]:
    """One pass of the garbage collection: release blocks of age >= `limit`; (bytes, ages, count) released."""
    reclaimed = 0
    ages = 0
    count = 0
    for stream in range(m[at.NUM_STREAMS]):
        which = blocks.set_of(m, m[at.POOLS], 1, stream)
        cursor = free_lists.first(m, which)
        while cursor >= 0:
            block = free_lists.block_at(m, which, cursor)
            following = release_blocks.block_after(m, which, cursor)
            age = clock - m[block + at.GC_BASE]
            if not blocks.is_split(m, block) and age >= limit:
                if not release_blocks.assert_not_expandable(m, block):
                    return reclaimed, ages, count
                if m[block + at.FLAGS] & at.IS_EXPANDABLE == 0:
                    reclaimed += m[block + at.SIZE]
                    ages += age
                    count += 1
                    release_blocks.release_block(m, block)
            cursor = release_blocks.cursor_of(m, following)
    return reclaimed, ages, count


@kernel
def garbage_collect(m: Memory) -> None:
    """garbage_collect_cached_blocks: release the unsplit blocks of the default large pool that were idle longest."""
    clock = m[m[at.POOLS] + at.P_CLOCK + 1]
    target = m[at.TOTAL_ALLOCATED] - m[at.GC_THRESHOLD]
    if target <= 0:
        return
    total_age = 0
    count = 0
    for stream in range(m[at.NUM_STREAMS]):
        which = blocks.set_of(m, m[at.POOLS], 1, stream)
        cursor = free_lists.first(m, which)
        while cursor >= 0:
            block = free_lists.block_at(m, which, cursor)
            if not blocks.is_split(m, block):
                total_age += clock - m[block + at.GC_BASE]
                count += 1
            cursor = free_lists.successor(m, which, cursor)
    reclaimed = 0
    while reclaimed < target and count > 0:
        more, ages, gone = collect_older(m, total_age / count, clock)
        if gone == 0 or m[at.STOPPED] != 0:
            return
        reclaimed += more
        total_age -= ages
        count -= gone
