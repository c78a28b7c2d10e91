"""Giving memory back to the driver: cached segments without a split, and whole pages of expandable ones."""

from __future__ import annotations

from simulator.allocator import blocks, driver, expandable_segments, free, free_lists, private_pools, statistics
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel
def release_block(m: Memory, block: int) -> None:
    """release_block: cudaFree of a whole segment."""
    if blocks.is_split(m, block):
        m[at.STOPPED] = at.STOP_SPLIT_RELEASED
        return
    which = m[block + at.SET]
    size = m[block + at.SIZE]
    m[at.DEVICE_FREES] += 1
    driver.log(m, at.LOG_DEVICE_FREE, m[block + at.PTR], size, blocks.stream_value(m, which))
    m[at.DEVICE_USED] -= driver.round_granule(size)
    driver.give_address(m, m[block + at.PTR], size)
    m[m[which + at.SET_POOL] + at.P_MALLOC_COUNT] -= 1
    statistics.decrease(m, at.SEGMENT, blocks.is_large(m, block), 1)
    statistics.count_reserved(m, which, -size)
    if size >= m[at.MAX_SPLIT]:
        statistics.decrease(m, at.OVERSIZE_SEGMENTS, 0, 1)
    blocks.erase_free(m, block)
    blocks.drop_block(m, block)


@kernel
def cursor_of(m: Memory, block: int) -> int:
    """Cursor of a block in its free set; -1 for no block, or for fresh memory that is in no set."""
    if block == 0:
        return -1
    which = m[block + at.SET]
    cursor = free_lists.seek(m, which, m[block + at.SIZE], free_lists.tie(m, block))
    while cursor >= 0 and free_lists.key_at(m, which, cursor) == m[block + at.SIZE]:
        found = free_lists.block_at(m, which, cursor)
        if found == block:
            return cursor
        if free_lists.tie(m, found) != free_lists.tie(m, block):
            break
        cursor = free_lists.successor(m, which, cursor)
    return -1


@kernel
def block_after(m: Memory, which: int, cursor: int) -> int:
    """The block that follows a cursor in the set, or 0."""
    following = free_lists.successor(m, which, cursor)
    return free_lists.block_at(m, which, following) if following >= 0 else 0


@kernel
def release_blocks(m: Memory, pool: int, large: int) -> None:
    """release_blocks: every unsplit free block of a BlockPool, then the whole pages of expandable ones."""
    for expandable in range(2):
        for stream in range(m[at.NUM_STREAMS]):
            which = blocks.set_of(m, pool, large, stream)
            cursor = free_lists.first(m, which)
            while cursor >= 0:
                block = free_lists.block_at(m, which, cursor)
                following = block_after(m, which, cursor)
                if m[block + at.FLAGS] & at.IS_EXPANDABLE != 0:
                    if expandable == 1:
                        expandable_segments.unmap_block(m, block)
                elif expandable == 0 and not blocks.is_split(m, block):
                    release_block(m, block)
                cursor = cursor_of(m, following)


@kernel
def release_private_pool(m: Memory, pool: int) -> None:
    """Release a pool if nobody uses it any more."""
    if m[pool + at.P_ALIVE] == 0 or m[pool + at.P_USE_COUNT] > 0:
        return
    release_blocks(m, pool, 0)
    release_blocks(m, pool, 1)
    if m[pool + at.P_MALLOC_COUNT] == 0:
        m[pool + at.P_ALIVE] = 0


@kernel
def release_private_pools(m: Memory) -> None:
    """Release the pools that nobody uses any more, in order of creation (PyTorch: of a hash map)."""
    for order in range(m[at.CREATED]):
        pool = private_pools.nth_private_pool(m, order)
        if pool != 0:
            release_private_pool(m, pool)


@kernel
def release_cached_blocks_of(m: Memory, pool: int) -> None:
    """release_cached_blocks of a private pool's id, as the end of a MemPool has it."""
    if m[pool + at.P_ALIVE] == 1 and m[pool + at.P_USE_COUNT] == 0:
        free.synchronize_and_free_events(m, pool)
        release_private_pool(m, pool)


@kernel
def release_cached_blocks(m: Memory) -> None:
    """release_cached_blocks of the default pool id: empty_cache, and the last resort of a malloc."""
    if not private_pools.capturing(m):
        free.synchronize_and_free_events(m, 0)
        release_blocks(m, m[at.POOLS], 1)
        release_blocks(m, m[at.POOLS], 0)
    release_private_pools(m)


@kernel
def assert_not_expandable(m: Memory, block: int) -> bool:
    """Whether a release that walks the set may pass over this block; old releases fail an assertion if expandable."""
    if m[block + at.FLAGS] & at.IS_EXPANDABLE != 0 and m[at.EXPANDABLE_ASSERTS] == 1:
        m[at.STOPPED] = at.STOP_EXPANDABLE_ASSERT
        return False
    return True


@kernel
def release_available_cached_blocks(m: Memory, which: int, size: int) -> bool:
    """release_available_cached_blocks: oversize blocks of this stream, the smallest that is enough or the largest."""
    if m[at.MAX_SPLIT] == at.UNLIMITED:
        return False
    key = max(size, m[at.MAX_SPLIT])
    cursor = free_lists.seek(m, which, key, free_lists.FIRST)
    if cursor >= 0:
        block = free_lists.block_at(m, which, cursor)
        if not assert_not_expandable(m, block):
            return False
        if m[block + at.FLAGS] & at.IS_EXPANDABLE == 0:
            release_block(m, block)
            return True
        cursor = free_lists.predecessor(m, which, cursor)
    else:
        cursor = free_lists.last(m, which)
    released = 0
    while cursor >= 0 and released < key and free_lists.key_at(m, which, cursor) >= m[at.MAX_SPLIT]:
        block = free_lists.block_at(m, which, cursor)
        before = free_lists.predecessor(m, which, cursor)
        following = free_lists.block_at(m, which, before) if before >= 0 else 0
        if not assert_not_expandable(m, block):
            return False
        if m[block + at.FLAGS] & at.IS_EXPANDABLE == 0:
            released += m[block + at.SIZE]
            release_block(m, block)
            if m[at.STOPPED] != 0:
                return False
        cursor = cursor_of(m, following)
    return released >= key
