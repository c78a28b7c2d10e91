"""The malloc path, in the order in which a request meets the rules.

* `sizes.round_size`: a request is rounded up. Up to 1 MiB goes to the small pool, more to the large pool.
* `find_free`: best fit, the smallest free block of that stream that is large enough; `max_split_size_mb` refuses
  some, expandable segments prefer a hole to the growing tail.
* `obtain`, on a miss: garbage collection, then a new segment from the driver, or new pages of an expandable segment.
  If the driver refuses: release cached blocks that would be enough, then all of them, and ask once more; then out of
  memory.
* `hand_out`: a block that is larger than needed is split, low part handed out, if the rest is worth keeping.
"""

from __future__ import annotations

from simulator.allocator import (
    blocks,
    driver,
    expandable_segments,
    free,
    free_lists,
    garbage_collection,
    private_pools,
    release_blocks,
    sizes,
    statistics,
)
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel

round_size = kernel(sizes.round_size, inline=True)
segment_size = kernel(sizes.segment_size, inline=True)


@kernel(inline=True)
def expandable_size(m: Memory, block: int) -> int:
    """Size of a block together with the unmapped space right after it."""
    following = m[block + at.NEXT]
    if following != 0 and m[following + at.FLAGS] & at.UNMAPPED != 0:
        return m[block + at.SIZE] + m[following + at.SIZE]
    return m[block + at.SIZE]


@kernel
def prefer_hole(m: Memory, which: int, cursor: int) -> int:
    """Walk on from a best fit in an expandable segment while the next block would waste less address space."""
    block = free_lists.block_at(m, which, cursor)
    while m[block + at.FLAGS] & at.IS_EXPANDABLE != 0:
        following = free_lists.successor(m, which, cursor)
        if following < 0:
            break
        other = free_lists.block_at(m, which, following)
        if expandable_size(m, other) >= expandable_size(m, block):
            break
        cursor = following
        block = other
    return cursor


@kernel
def skip_expandable(m: Memory, which: int, cursor: int) -> int:
    """The first block from `cursor` on that is not expandable, or -1."""
    while cursor >= 0 and m[free_lists.block_at(m, which, cursor) + at.FLAGS] & at.IS_EXPANDABLE != 0:
        cursor = free_lists.successor(m, which, cursor)
    return cursor


@kernel(inline=True)
def find_free(m: Memory, which: int, size: int, expandable: bool) -> int:
    """get_free_block: cursor of the block to use, left in its set, or -1."""
    if m[at.GC_ON] == 1:
        m[m[which + at.SET_POOL] + at.P_CLOCK + m[which + at.SET_LARGE]] += 1
    cursor = free_lists.seek(m, which, size, free_lists.FIRST)
    if cursor < 0:
        return -1
    if m[free_lists.block_at(m, which, cursor) + at.FLAGS] & at.IS_EXPANDABLE != 0:
        cursor = prefer_hole(m, which, cursor) if expandable else skip_expandable(m, which, cursor)
        if cursor < 0:
            return -1
        if m[at.EXEMPT] == 1 and m[free_lists.block_at(m, which, cursor) + at.FLAGS] & at.IS_EXPANDABLE != 0:
            return cursor
    found = free_lists.key_at(m, which, cursor)
    if size < m[at.MAX_SPLIT]:
        return cursor if found < m[at.MAX_SPLIT] else -1
    return cursor if found - size < m[at.NON_SPLIT_ROUNDING] else -1


@kernel
def alloc_block(m: Memory, which: int, size: int, retry: bool) -> int:
    """alloc_block: a block of new memory (in a set only if expandable), OUT, or REJECTED."""
    wanted = segment_size(m, size)
    pool = m[which + at.SET_POOL]
    if retry:
        m[at.RETRIES] += 1
    if m[at.LIMIT] >= 0 and m[at.TOTAL_ALLOCATED] + wanted > m[at.LIMIT]:
        return at.OUT
    if m[at.REJECT_CAP] >= 0 and m[at.TOTAL_ALLOCATED] + wanted > m[at.REJECT_CAP]:
        m[at.REJECTIONS] += 1
        return at.REJECTED
    if m[at.EXPANDABLE_ON] == 1 and (m[pool + at.P_PRIVATE] == 0 or m[at.EXPANDABLE_IN_POOLS] == 1):
        block = expandable_segments.allocate_expandable(m, which, size)
    else:
        block = malloc_segment(m, which, wanted)
    if block >= 0:
        m[pool + at.P_MALLOC_COUNT] += 1
    return block


@kernel
def malloc_segment(m: Memory, which: int, wanted: int) -> int:
    """cudaMalloc of a segment: its one block, in no set; OUT if the driver refuses."""
    if driver.round_granule(wanted) > driver.device_free(m):
        driver.log(m, at.LOG_MALLOC_REFUSED, 0, wanted, blocks.stream_value(m, which))
        return at.OUT
    large = m[which + at.SET_LARGE]
    address = driver.take_address(m, wanted)
    m[at.DEVICE_USED] += driver.round_granule(wanted)
    m[at.DEVICE_ALLOCS] += 1
    block = blocks.new_memory(m, address, wanted, which, at.LARGE * large, 0)
    statistics.increase(m, at.SEGMENT, large, 1)
    statistics.count_reserved(m, which, wanted)
    if wanted >= m[at.MAX_SPLIT]:
        statistics.increase(m, at.OVERSIZE_SEGMENTS, 0, 1)
    driver.log(m, at.LOG_MALLOC, address, wanted, blocks.stream_value(m, which))
    return block


@kernel
def borrow_on_oom(m: Memory, which: int, size: int) -> int:
    """try_mempool_fallback: a free block of a pool that was opted in with use_on_oom, for the default pool; or OUT."""
    if m[m[which + at.SET_POOL] + at.P_PRIVATE] == 1:
        return at.OUT
    for order in range(m[at.CREATED]):
        pool = private_pools.nth_private_pool(m, order)
        if pool != 0 and m[pool + at.P_ON_OOM] == 1:
            other = m[pool + at.P_SETS] + which - m[m[at.POOLS] + at.P_SETS]
            cursor = find_free(m, other, size, False)
            if cursor >= 0:
                return free_lists.block_at(m, other, cursor)
    return at.OUT


@kernel
def retry(m: Memory, which: int, size: int) -> int:
    """The last resort: release everything that is cached and ask once more. The pool itself is not searched again."""
    release_blocks.release_cached_blocks(m)
    if m[at.SEARCH_AGAIN] == 1:
        cursor = find_free(m, which, size, m[at.EXPANDABLE_ON] == 1)
        if cursor >= 0:
            return free_lists.block_at(m, which, cursor)
    return alloc_block(m, which, size, True)


@kernel
def obtain(m: Memory, which: int, size: int) -> int:
    """What malloc does when the pool has no block; a block, OUT or REJECTED. Stops early where PyTorch would fail."""
    if m[at.GC_ON] == 1:
        garbage_collection.garbage_collect(m)
        if m[at.STOPPED] != 0:
            return at.OUT
    block = alloc_block(m, which, size, False)
    if block != at.OUT or m[at.STOPPED] != 0:
        return block
    if m[at.ON_OOM_EARLY] == 1:
        block = borrow_on_oom(m, which, size)
        if block != at.OUT:
            return block
    if release_blocks.release_available_cached_blocks(m, which, size):
        block = alloc_block(m, which, size, False)
    if block != at.OUT or m[at.STOPPED] != 0:
        return block
    if not private_pools.capturing(m):
        block = retry(m, which, size)
    if block == at.OUT and m[at.ON_OOM_LATE] == 1:
        block = borrow_on_oom(m, which, size)
    return block


@kernel(inline=True)
def should_split(m: Memory, block: int, size: int, expandable: bool) -> bool:
    """should_split."""
    remaining = m[block + at.SIZE] - size
    if m[m[m[block + at.SET] + at.SET_POOL] + at.P_NO_SPLIT] == 1:
        return False
    if expandable or m[block + at.FLAGS] & at.LARGE == 0:
        return remaining >= sizes.MIN_BLOCK
    return size < m[at.MAX_SPLIT] and remaining > sizes.SMALL_SIZE


@kernel(inline=True)
def hand_out(m: Memory, block: int, cursor: int, n: int, size: int, split: bool) -> int:
    """alloc_found_block: split if asked, count, and mark as allocated. `cursor` is -1 for a block in no set."""
    which = m[block + at.SET]
    large = blocks.is_large(m, block)
    was_split = blocks.is_split(m, block)
    counted = m[block + at.FLAGS] & at.IS_EXPANDABLE == 0
    found = block
    if split:
        found = blocks.new_fragment(m, block, m[block + at.PTR], size)
        blocks.link_before(m, found, block)
        m[block + at.PTR] += size
        m[block + at.SIZE] -= size
        blocks.stamp(m, block)
        if cursor >= 0:
            free_lists.replace(m, which, cursor, m[block + at.SIZE], free_lists.tie(m, block), block)
        else:
            free_lists.insert(m, which, m[block + at.SIZE], free_lists.tie(m, block), block)
        if counted and was_split:
            statistics.decrease(m, at.INACTIVE_SPLIT_BYTES, large, size)
        elif counted:
            statistics.increase(m, at.INACTIVE_SPLIT_BYTES, large, m[block + at.SIZE])
            statistics.increase(m, at.INACTIVE_SPLIT, large, 1)
    else:
        if cursor >= 0:
            free_lists.erase_at(m, which, cursor)
        if counted and was_split:
            statistics.decrease(m, at.INACTIVE_SPLIT_BYTES, large, m[block + at.SIZE])
            statistics.decrease(m, at.INACTIVE_SPLIT, large, 1)
    taken = m[found + at.SIZE]
    m[found + at.FLAGS] |= at.ALLOCATED
    m[found + at.REQUESTED] = n
    driver.log(m, at.LOG_ALLOC, m[found + at.PTR], n, blocks.stream_value(m, which))
    statistics.increase(m, at.ALLOCATION, large, 1)
    statistics.increase(m, at.ALLOCATED_BYTES, large, taken)
    statistics.increase(m, at.ACTIVE, large, 1)
    statistics.increase(m, at.ACTIVE_BYTES, large, taken)
    statistics.increase(m, at.REQUESTED_BYTES, large, n)
    if taken >= m[at.MAX_SPLIT]:
        statistics.increase(m, at.OVERSIZE_ALLOCATIONS, 0, 1)
    return found


@kernel
def note_failure(m: Memory, size: int) -> int:
    """Remember a failure for the report, whether PyTorch counts it or not."""
    m[at.OOM_COUNTED] += 1
    m[at.FAILED_BYTES] = size
    m[at.OOM_FREE] = max(driver.device_free(m), 0)
    return at.OUT


@kernel
def malloc_miss(m: Memory, which: int, n: int, size: int) -> int:
    """malloc for a request that no free block of its pool can serve."""
    block = obtain(m, which, size)
    if m[at.STOPPED] != 0:
        return at.OUT
    if block == at.OUT:
        m[at.OOMS] += 1
        driver.log(m, at.LOG_OOM, max(driver.device_free(m), 0), size, blocks.stream_value(m, which))
    if block < 0:
        return note_failure(m, size)
    borrowed = m[block + at.SET] != which
    split = should_split(m, block, size, m[at.EXPANDABLE_ON] == 1 and not borrowed)
    return hand_out(m, block, release_blocks.cursor_of(m, block), n, size, split)


@kernel
def served_at_once(m: Memory, n: int, stream: int) -> bool:
    """Whether a malloc would surely be served without waiting for pending frees: from the pool, or by the driver."""
    if private_pools.capturing(m) or n >= sizes.ONE_EIB:
        return True
    free.process_events(m)
    size = round_size(m, n)
    which = blocks.set_of(m, private_pools.current_pool(m), 1 if size > sizes.SMALL_SIZE else 0, stream)
    clock = m[which + at.SET_POOL] + at.P_CLOCK + m[which + at.SET_LARGE]
    before = m[clock]
    cursor = find_free(m, which, size, m[at.EXPANDABLE_ON] == 1)
    m[clock] = before  # this was only a look
    wanted = segment_size(m, size)
    if m[at.EXPANDABLE_ON] == 1:
        wanted = (size + wanted - 1) // wanted * wanted + m[at.LARGE_SEGMENT]
    within = m[at.LIMIT] < 0 or m[at.TOTAL_ALLOCATED] + wanted <= m[at.LIMIT]
    return cursor >= 0 or (within and driver.round_granule(wanted) <= driver.device_free(m))


@kernel(inline=True)
def malloc(m: Memory, n: int, stream: int) -> int:
    """malloc of `n` > 0 bytes on a stream (its number): the block, or OUT."""
    if n >= sizes.ONE_EIB:
        return note_failure(m, n)
    if (m[at.OUTSTANDING] | m[at.DEFERRED]) != 0 and not private_pools.capturing(m):
        free.process_events(m)
    size = round_size(m, n)
    which = blocks.set_of(m, private_pools.current_pool(m), 1 if size > sizes.SMALL_SIZE else 0, stream)
    expandable = m[at.EXPANDABLE_ON] == 1
    cursor = find_free(m, which, size, expandable)
    if cursor < 0:
        return malloc_miss(m, which, n, size)
    block = free_lists.block_at(m, which, cursor)
    return hand_out(m, block, cursor, n, size, should_split(m, block, size, expandable))
