"""PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) as numba kernels over arrays.

In the order in which a request meets the rules:

* `round_size`: a request is rounded up to 512 bytes, or to a division of a power of two.
* Up to 1 MiB goes to the small pool, more to the large pool. Each (pool, stream) has one ordered set of free blocks.
* `find_free`: best fit, the smallest free block of that stream that is large enough; `max_split_size_mb` refuses
  some, expandable segments prefer a hole to the growing tail.
* On a miss: garbage collection, then a new segment from the driver (2 MiB for small, 20 MiB below 10 MiB, else
  rounded to 2 MiB), or new pages of an expandable segment. If the driver refuses: release cached blocks that would be
  enough, then all of them, and ask once more; then out of memory.
* `hand_out`: a block that is larger than needed is split, low part handed out, if the rest is worth keeping.
* `free`: the block waits for the events of other streams that used it, then merges with free neighbours.

What differs between releases is a switch in the scalars (see `simulator.allocator.settings.Release`). Everything is
plain int64 arithmetic on the words of one array (`simulator.allocator.layout`).
"""

from __future__ import annotations

from simulator.allocator import freelist
from simulator.allocator.driver import device_free, give_address, log, round_granule, take_address
from simulator.allocator.layout import (
    ACTIVE,
    ACTIVE_BYTES,
    ALLOCATED,
    ALLOCATED_BYTES,
    ALLOCATION,
    BASE,
    BLOCK_COLUMNS,
    BUSY,
    CREATED,
    DEFERRED,
    DEFERRED_TAIL,
    DEVICE_ALLOCS,
    DEVICE_FREES,
    DEVICE_TOTAL,
    DEVICE_USED,
    DIVISIONS,
    DIVISIONS_ON,
    EVENTS,
    EXEMPT,
    EXPANDABLE,
    EXPANDABLE_ASSERTS,
    EXPANDABLE_IN_POOLS,
    EXPANDABLE_ON,
    FAILED_BYTES,
    FLAGS,
    FREE_BLOCK,
    FREE_EXPANDABLE,
    FREE_NODE,
    FREE_WORK,
    GC_BASE,
    GC_ON,
    GC_THRESHOLD,
    HAS_USES,
    HOLD,
    HOST,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    IS_EXPANDABLE,
    LARGE,
    LARGE_SEGMENT,
    LAST_WORK,
    LIMIT,
    LIVE_BLOCKS,
    LOG_ALLOC,
    LOG_CREATE_REFUSED,
    LOG_DEVICE_FREE,
    LOG_FREE_COMPLETED,
    LOG_FREE_REQUESTED,
    LOG_MALLOC,
    LOG_MALLOC_REFUSED,
    LOG_MAP,
    LOG_OOM,
    LOG_RELEASE_VA,
    LOG_RESERVE,
    LOG_UNMAP,
    MAX_SPLIT,
    N_BLOCK,
    N_CAPTURED,
    N_COLUMNS,
    N_NEXT,
    N_SERIAL,
    N_STREAM,
    N_TIME,
    NEVER,
    NEWEST_SCOPE,
    NEXT,
    NON_SPLIT_ROUNDING,
    NUM_BIRTHS,
    NUM_POOLS,
    NUM_SEGMENTS,
    NUM_STREAMS,
    ODD_PAGE_ERROR,
    ON_OOM_EARLY,
    ON_OOM_LATE,
    ONE_UNROUNDED,
    OOM_COUNTED,
    OOM_FREE,
    OOMS,
    OUTSTANDING,
    OVERSIZE_ALLOCATIONS,
    OVERSIZE_SEGMENTS,
    OWNER,
    P_ALIVE,
    P_CLOCK,
    P_COLUMNS,
    P_CREATED,
    P_EVER,
    P_MALLOC_COUNT,
    P_NO_SPLIT,
    P_ON_OOM,
    P_PRIVATE,
    P_RESERVED,
    P_SCOPE,
    P_SETS,
    P_USE_COUNT,
    PENDING,
    POOLS,
    PREV,
    PTR,
    QUEUED,
    REJECT_CAP,
    REJECTIONS,
    REQUESTED,
    REQUESTED_BYTES,
    RESERVED_BYTES,
    RETRIES,
    ROOM,
    S_CLOCK,
    S_COLUMNS,
    S_HEAD,
    S_TAIL,
    S_VALUE,
    S_WAITING,
    SCOPE_CAPTURES,
    SCOPES,
    SEARCH_AGAIN,
    SEGMENT,
    SERIAL,
    SET,
    SET_COLUMNS,
    SET_LARGE,
    SET_POOL,
    SET_STREAM,
    SET_UNMAPPED,
    SIZE,
    ST_ALLOCATED,
    ST_CURRENT,
    ST_PEAK,
    ST_PEAK_ALL,
    ST_POOL,
    STAT_ROW,
    STATS,
    STOP_EXPANDABLE_ASSERT,
    STOP_ODD_PAGE,
    STOP_SPLIT_RELEASED,
    STOPPED,
    STREAMS,
    SYNCS,
    TIE,
    TIE_BIRTH,
    TIE_BREAK,
    TIE_SEGMENT,
    TIMED,
    TOTAL_ALLOCATED,
    UNKNOWN,
    UNLIMITED,
    UNMAPPED,
    USES,
    VA_CHECKED,
    VA_RESERVE,
    W_COLUMNS,
    W_DURATION,
    W_ISSUED,
    W_KIND,
    W_NEXT,
    W_REF,
    W_SERIAL,
    W_STREAM,
    WORK,
    WORK_EVENT,
    X_BASE,
    X_BYTES,
    X_COLUMNS,
    X_PAGE,
    X_SET,
    Memory,
)
from traces.jit import kernel

MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 1 << 20  # kSmallSize
SMALL_BUFFER = 2 << 20  # kSmallBuffer
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc
ROUND_LARGE = 2 << 20  # kRoundLarge
ONE_EIB = 1 << 60
NEXT_POWER = 1 << 55  # so many divisions make no division: rounded to the next power of two
OUT = -1  # no memory
REJECTED = -2  # throw_on_cudamalloc_oom refused


# --- statistics ---------------------------------------------------------------------------------------------------


@kernel(inline=True)
def raise_row(m: Memory, row: int, large: int, amount: int) -> None:
    """Stat::increase in a row of statistics, for the pool and for both together."""
    cell = row + large * ST_POOL
    current = m[cell] + amount
    m[cell] = current
    m[cell + ST_ALLOCATED] += amount
    if current > m[cell + ST_PEAK]:
        m[cell + ST_PEAK] = current
    both = m[row] + m[row + ST_POOL]
    if both > m[row + ST_PEAK_ALL]:
        m[row + ST_PEAK_ALL] = both


@kernel(inline=True)
def increase(m: Memory, stat: int, large: int, amount: int) -> None:
    """Stat::increase."""
    raise_row(m, STATS + stat * STAT_ROW, large, amount)


@kernel(inline=True)
def decrease(m: Memory, stat: int, large: int, amount: int) -> None:
    """Stat::decrease; what was freed follows from the other numbers."""
    m[STATS + stat * STAT_ROW + large * ST_POOL + ST_CURRENT] -= amount


@kernel(inline=True)
def change(m: Memory, stat: int, large: int, amount: int) -> None:
    """One net increase or decrease."""
    if amount > 0:
        increase(m, stat, large, amount)
    elif amount < 0:
        decrease(m, stat, large, -amount)


@kernel
def count_reserved(m: Memory, which: int, amount: int) -> None:
    """Bytes obtained from the driver (or given back, below 0), in total and for a private pool."""
    m[TOTAL_ALLOCATED] += amount
    change(m, RESERVED_BYTES, m[which + SET_LARGE], amount)
    pool = m[which + SET_POOL]
    if m[pool + P_PRIVATE] == 1:
        if amount > 0:
            raise_row(m, pool + P_RESERVED, m[which + SET_LARGE], amount)
            m[pool + P_EVER] = 1
        else:
            m[pool + P_RESERVED + m[which + SET_LARGE] * ST_POOL + ST_CURRENT] += amount


# --- rounding and pools -------------------------------------------------------------------------------------------


@kernel
def power_of_two_division(m: Memory, n: int) -> int:
    """roundup_power2_next_division, or -1 where plain rounding applies; `n` >= 512."""
    exponent = 0
    while n >> (exponent + 1) > 0:
        exponent += 1
    divisions = m[DIVISIONS + min(max(exponent - 20, 0), 15)]
    if divisions == 1 and m[ONE_UNROUNDED] == 1 and n > MIN_BLOCK:
        return n
    if divisions <= 1 or (divisions < NEXT_POWER and n <= MIN_BLOCK * divisions):
        return -1
    step = (1 << exponent) // divisions if divisions < NEXT_POWER else 1 << exponent
    return (n + step - 1) // step * step


@kernel(inline=True)
def round_size(m: Memory, n: int) -> int:
    """Size of the block that a request of `n` bytes asks for."""
    if n < MIN_BLOCK:
        return MIN_BLOCK
    if m[DIVISIONS_ON] == 1:
        rounded = power_of_two_division(m, n)
        if rounded >= 0:
            return rounded
    return (n + MIN_BLOCK - 1) & -MIN_BLOCK


@kernel(inline=True)
def segment_size(m: Memory, size: int) -> int:
    """get_allocation_size: bytes asked from the driver for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return m[LARGE_SEGMENT]
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


@kernel(inline=True)
def set_of(m: Memory, pool: int, large: int, stream: int) -> int:
    """The free set of a (pool, small or large, stream number)."""
    return m[pool + P_SETS] + (large * m[NUM_STREAMS] + stream) * SET_COLUMNS


@kernel(inline=True)
def stream_value(m: Memory, which: int) -> int:
    """The stream of a set, as the trace numbers it."""
    return m[m[which + SET_STREAM] + S_VALUE]


@kernel(inline=True)
def stream_at(m: Memory, number: int) -> int:
    """The record of a stream."""
    return m[STREAMS] + number * S_COLUMNS


@kernel(inline=True)
def pool_at(m: Memory, number: int) -> int:
    """The record of a pool; number 0 is the default pool."""
    return m[POOLS] + number * P_COLUMNS


@kernel(inline=True)
def current_pool(m: Memory) -> int:
    """The pool that requests go to now: the oldest open scope up to 2.9, the newest later."""
    if m[SCOPES] == 0:
        return m[POOLS]
    return m[pool_at(m, m[SCOPES] - 1 if m[NEWEST_SCOPE] == 1 else 0) + P_SCOPE]


@kernel(inline=True)
def capturing(m: Memory) -> bool:
    """Whether the allocator believes that a CUDA graph is being captured (up to 2.12: any open scope)."""
    return m[SCOPES] > 0 and m[SCOPE_CAPTURES] == 1


# --- blocks -------------------------------------------------------------------------------------------------------


@kernel(inline=True)
def is_large(m: Memory, block: int) -> int:
    """1 for a block of a large pool, 0 for one of a small pool."""
    return (m[block + FLAGS] & LARGE) // LARGE


@kernel(inline=True)
def new_block(m: Memory, ptr: int, size: int, which: int, flags: int) -> int:
    """A Block object without neighbours, in no set."""
    block = freelist.take(m, FREE_BLOCK, BLOCK_COLUMNS)
    m[LIVE_BLOCKS] += 1
    m[block + PTR] = ptr
    m[block + SIZE] = size
    m[block + REQUESTED] = 0
    m[block + PREV] = 0
    m[block + NEXT] = 0
    m[block + FLAGS] = flags
    m[block + SET] = which
    if m[TIE_BREAK] == TIE_BIRTH:
        m[block + TIE] = m[NUM_BIRTHS]
        m[NUM_BIRTHS] += 1
    return block


@kernel
def new_memory(m: Memory, ptr: int, size: int, which: int, flags: int, expandable: int) -> int:
    """A Block for memory (or address space) that was just obtained: it starts a segment."""
    block = new_block(m, ptr, size, which, flags)
    m[block + GC_BASE] = 0
    m[block + EXPANDABLE] = expandable
    m[block + BASE] = 0
    if m[TIE_BREAK] != TIE_BIRTH:
        m[block + TIE] = 0
    if m[TIE_BREAK] == TIE_SEGMENT:
        m[block + BASE] = ptr
        m[block + TIE] = m[NUM_SEGMENTS] << 35
        m[NUM_SEGMENTS] += 1
    return block


@kernel(inline=True)
def new_fragment(m: Memory, of: int, ptr: int, size: int) -> int:
    """A Block for a part of block `of`: same segment, set and flags."""
    block = new_block(m, ptr, size, m[of + SET], m[of + FLAGS])
    m[block + BASE] = m[of + BASE]
    m[block + GC_BASE] = 0
    m[block + EXPANDABLE] = m[of + EXPANDABLE]
    if m[TIE_BREAK] != TIE_BIRTH:
        m[block + TIE] = m[of + TIE]
    return block


@kernel(inline=True)
def drop_block(m: Memory, block: int) -> None:
    """Delete a Block object."""
    freelist.drop(m, FREE_BLOCK, block)
    m[block + FLAGS] = 0
    m[LIVE_BLOCKS] -= 1


@kernel(inline=True)
def is_split(m: Memory, block: int) -> bool:
    """Block::is_split."""
    return (m[block + PREV] | m[block + NEXT]) != 0


@kernel(inline=True)
def stamp(m: Memory, block: int) -> None:
    """BlockPool::insert_into_blocks: remember the pool's GC clock."""
    m[block + GC_BASE] = m[m[m[block + SET] + SET_POOL] + P_CLOCK + is_large(m, block)]


@kernel
def insert_free(m: Memory, block: int) -> None:
    """Put a block into its free set."""
    stamp(m, block)
    freelist.insert(m, m[block + SET], m[block + SIZE], freelist.tie(m, block), block)


@kernel
def erase_free(m: Memory, block: int) -> None:
    """Take a block out of its free set."""
    freelist.erase(m, m[block + SET], m[block + SIZE], freelist.tie(m, block), block)


@kernel
def insert_unmapped(m: Memory, block: int) -> None:
    """Put a block into its set of unmapped blocks."""
    freelist.insert(m, m[m[block + SET] + SET_UNMAPPED], m[block + PTR], freelist.FIRST, block)


@kernel
def erase_unmapped(m: Memory, block: int) -> None:
    """Take a block out of its set of unmapped blocks."""
    freelist.erase(m, m[m[block + SET] + SET_UNMAPPED], m[block + PTR], freelist.FIRST, block)


@kernel(inline=True)
def can_merge(m: Memory, block: int, neighbour: int) -> bool:
    """Whether try_merge_blocks would absorb `neighbour` into `block`."""
    if neighbour == 0 or m[neighbour + FLAGS] & BUSY != 0:
        return False
    return (m[neighbour + FLAGS] ^ m[block + FLAGS]) & UNMAPPED == 0


@kernel(inline=True)
def absorb_left(m: Memory, block: int, left: int) -> None:
    """Grow `block` over its left neighbour, which is in no set any more."""
    m[block + PTR] = m[left + PTR]
    m[block + SIZE] += m[left + SIZE]
    before = m[left + PREV]
    m[block + PREV] = before
    if before != 0:
        m[before + NEXT] = block
    drop_block(m, left)


@kernel(inline=True)
def absorb_right(m: Memory, block: int, right: int) -> None:
    """Grow `block` over its right neighbour, which is in no set any more."""
    m[block + SIZE] += m[right + SIZE]
    after = m[right + NEXT]
    m[block + NEXT] = after
    if after != 0:
        m[after + PREV] = block
    drop_block(m, right)


@kernel(inline=True)
def link_before(m: Memory, fresh: int, block: int) -> None:
    """Make `fresh` the left neighbour of `block`."""
    left = m[block + PREV]
    m[fresh + PREV] = left
    m[fresh + NEXT] = block
    m[block + PREV] = fresh
    if left != 0:
        m[left + NEXT] = fresh


@kernel
def link_after(m: Memory, fresh: int, block: int) -> None:
    """Make `fresh` the right neighbour of `block`."""
    right = m[block + NEXT]
    m[fresh + NEXT] = right
    m[fresh + PREV] = block
    m[block + NEXT] = fresh
    if right != 0:
        m[right + PREV] = fresh


# --- the free path ------------------------------------------------------------------------------------------------


@kernel(inline=True)
def free_block(m: Memory, block: int) -> None:
    """free_block: the block is nobody's any more; merge it with free neighbours and put it into its set."""
    which = m[block + SET]
    large = is_large(m, block)
    size = m[block + SIZE]
    log(m, LOG_FREE_COMPLETED, m[block + PTR], m[block + REQUESTED], stream_value(m, which))
    m[block + FLAGS] &= ~PENDING
    left = m[block + PREV]
    right = m[block + NEXT]
    merge_left = can_merge(m, block, left)
    merge_right = can_merge(m, block, right)
    cursor = -1
    if merge_right:
        cursor = freelist.find(m, which, m[right + SIZE], freelist.tie(m, right), right)
    if merge_left:
        if merge_right:
            freelist.erase_at(m, which, cursor)
        cursor = freelist.find(m, which, m[left + SIZE], freelist.tie(m, left), left)
        absorb_left(m, block, left)
    if merge_right:
        absorb_right(m, block, right)
    stamp(m, block)
    if cursor >= 0:
        freelist.replace(m, which, cursor, m[block + SIZE], freelist.tie(m, block), block)
    else:
        freelist.insert(m, which, size, freelist.tie(m, block), block)
    if m[block + FLAGS] & IS_EXPANDABLE == 0:
        split = is_split(m, block)
        change(m, INACTIVE_SPLIT, large, int(split) - int(merge_left) - int(merge_right))
        change(m, INACTIVE_SPLIT_BYTES, large, size if split else size - m[block + SIZE])
    decrease(m, ACTIVE, large, 1)
    decrease(m, ACTIVE_BYTES, large, size)
    decrease(m, REQUESTED_BYTES, large, m[block + REQUESTED])


@kernel
def new_node(m: Memory) -> int:
    """An unused list node."""
    node = freelist.take(m, FREE_NODE, N_COLUMNS)
    m[node + N_NEXT] = 0
    return node


@kernel
def drop_node(m: Memory, node: int) -> None:
    """Give a list node back."""
    freelist.drop(m, FREE_NODE, node)
    m[node + N_SERIAL] = -1


@kernel
def queue_work(m: Memory, kind: int, stream: int, duration: int, ref: int) -> int:
    """Note an item for a stream that waits behind a collective."""
    item = freelist.take(m, FREE_WORK, W_COLUMNS)
    m[item + W_NEXT] = 0
    m[item + W_KIND] = kind
    m[item + W_STREAM] = stream
    m[item + W_ISSUED] = m[HOST]
    m[item + W_DURATION] = duration
    m[item + W_REF] = ref
    if m[LAST_WORK] != 0:
        m[m[LAST_WORK] + W_NEXT] = item
    else:
        m[WORK] = item
    m[LAST_WORK] = item
    m[QUEUED] += 1
    return item


@kernel
def event_time(m: Memory, stream: int, node: int) -> int:
    """When an event recorded now on `stream` completes; one behind an unresolved collective is noted as work."""
    if m[HOLD] == 1:
        return NEVER
    if m[TIMED] == 0:
        return 0
    if m[stream + S_WAITING] == 0:
        return m[stream + S_CLOCK]
    item = queue_work(m, WORK_EVENT, stream, 0, node)
    m[item + W_SERIAL] = m[SERIAL]
    return UNKNOWN


@kernel
def insert_events(m: Memory, block: int) -> None:
    """insert_events: an event on every stream that used the block."""
    use = m[block + USES]
    while use != 0:
        following = m[use + N_NEXT]
        stream = m[use + N_STREAM]
        m[ROOM] += W_COLUMNS
        m[use + N_NEXT] = 0
        m[use + N_BLOCK] = block
        m[use + N_SERIAL] = m[SERIAL]
        m[use + N_TIME] = event_time(m, stream, use)
        m[SERIAL] += 1
        if m[stream + S_HEAD] != 0:
            m[m[stream + S_TAIL] + N_NEXT] = use
        else:
            m[stream + S_HEAD] = use
        m[stream + S_TAIL] = use
        m[OUTSTANDING] += 1
        m[block + EVENTS] += 1
        use = following
    m[block + USES] = 0
    m[block + FLAGS] &= ~HAS_USES


@kernel
def pop_event(m: Memory, stream: int) -> None:
    """Drop the first event of a stream; its block is freed with its last event."""
    node = m[stream + S_HEAD]
    block = m[node + N_BLOCK]
    m[stream + S_HEAD] = m[node + N_NEXT]
    drop_node(m, node)
    m[OUTSTANDING] -= 1
    m[block + EVENTS] -= 1
    if m[block + EVENTS] == 0:
        free_block(m, block)


@kernel
def drop_captured_uses(m: Memory, block: int) -> None:
    """Forget the stream uses of a block that were recorded during a capture."""
    use = m[block + USES]
    m[block + USES] = 0
    while use != 0:
        following = m[use + N_NEXT]
        if m[use + N_CAPTURED] == 1:
            m[ROOM] += W_COLUMNS
            drop_node(m, use)
        else:
            m[use + N_NEXT] = m[block + USES]
            m[block + USES] = use
        use = following


@kernel
def process_deferred(m: Memory) -> None:
    """insert_events_deferred_until_no_capture."""
    while m[DEFERRED] != 0:
        node = m[DEFERRED]
        m[DEFERRED] = m[node + N_NEXT]
        block = m[node + N_BLOCK]
        drop_node(m, node)
        drop_captured_uses(m, block)
        if m[block + USES] != 0:
            insert_events(m, block)
        else:
            m[block + FLAGS] &= ~HAS_USES
            free_block(m, block)


@kernel(inline=True)
def visited(m: Memory, turn: int) -> int:
    """The stream whose FIFO is polled at this turn.

    PyTorch goes in the order of a hash map keyed by CUDAStream, which for its first pool streams is the default
    stream and then the others from the last to the first (seen in recordings of 2.9.1 to 2.15.0).
    """
    return stream_at(m, 0 if turn == 0 else m[NUM_STREAMS] - turn)


@kernel
def process_events(m: Memory) -> None:
    """process_events: on each stream, pop events from the front while they are complete."""
    process_deferred(m)
    for turn in range(m[NUM_STREAMS]):
        stream = visited(m, turn)
        while m[stream + S_HEAD] != 0 and m[m[stream + S_HEAD] + N_TIME] <= m[HOST]:
            pop_event(m, stream)


@kernel
def synchronize_and_free_events(m: Memory) -> None:
    """synchronize_and_free_events: the host waits for every event."""
    m[SYNCS] += 1
    process_deferred(m)
    for turn in range(m[NUM_STREAMS]):
        stream = visited(m, turn)
        while m[stream + S_HEAD] != 0:
            time = m[m[stream + S_HEAD] + N_TIME]
            if time < UNKNOWN:
                m[HOST] = max(m[HOST], time)
            pop_event(m, stream)


@kernel
def record_stream(m: Memory, block: int, stream: int) -> None:
    """recordStream: the block is in use on another stream."""
    if m[m[block + SET] + SET_STREAM] == stream:
        return
    if m[block + FLAGS] & HAS_USES == 0:
        m[block + FLAGS] |= HAS_USES
        m[block + USES] = 0
    use = m[block + USES]
    while use != 0 and m[use + N_STREAM] != stream:
        use = m[use + N_NEXT]
    if use == 0:
        use = new_node(m)
        m[ROOM] -= W_COLUMNS  # set aside: when the block is freed, each use may become an item of work
        m[use + N_STREAM] = stream
        m[use + N_NEXT] = m[block + USES]
        m[use + N_CAPTURED] = 0
        m[block + USES] = use
    if capturing(m):
        m[use + N_CAPTURED] = 1


@kernel(inline=True)
def free(m: Memory, block: int, owner: int) -> None:
    """free: `owner` is the dense id of the allocation."""
    large = is_large(m, block)
    m[block + FLAGS] &= ~ALLOCATED
    decrease(m, ALLOCATION, large, 1)
    decrease(m, ALLOCATED_BYTES, large, m[block + SIZE])
    log(m, LOG_FREE_REQUESTED, m[block + PTR], m[block + REQUESTED], stream_value(m, m[block + SET]))
    if m[block + SIZE] >= m[MAX_SPLIT]:
        decrease(m, OVERSIZE_ALLOCATIONS, 0, 1)
    if m[block + FLAGS] & HAS_USES == 0:
        free_block(m, block)
    else:
        free_later(m, block, owner)


@kernel
def free_later(m: Memory, block: int, owner: int) -> None:
    """The part of `free` for a block that other streams used."""
    m[block + FLAGS] |= PENDING
    m[block + OWNER] = owner
    m[block + EVENTS] = 0
    if not capturing(m):
        insert_events(m, block)
        return
    node = new_node(m)
    m[node + N_BLOCK] = block
    if m[DEFERRED] != 0:
        m[m[DEFERRED_TAIL] + N_NEXT] = node
    else:
        m[DEFERRED] = node
    m[DEFERRED_TAIL] = node


@kernel
def drop_deferred(m: Memory, block: int) -> None:
    """Take a block off the list of frees deferred by a capture, and forget its stream uses."""
    before = 0
    node = m[DEFERRED]
    while node != 0 and m[node + N_BLOCK] != block:
        before = node
        node = m[node + N_NEXT]
    if node == 0:
        return
    if before != 0:
        m[before + N_NEXT] = m[node + N_NEXT]
    else:
        m[DEFERRED] = m[node + N_NEXT]
    if m[DEFERRED_TAIL] == node:
        m[DEFERRED_TAIL] = before
    drop_node(m, node)
    while m[block + USES] != 0:
        use = m[block + USES]
        m[block + USES] = m[use + N_NEXT]
        m[ROOM] += W_COLUMNS
        drop_node(m, use)
    m[block + FLAGS] &= ~HAS_USES


@kernel
def complete_free(m: Memory, block: int, owner: int) -> None:
    """This pending free completes now, whatever its events say; nothing happens if it is not pending any more."""
    if block == 0 or m[block + FLAGS] & PENDING == 0 or m[block + OWNER] != owner:
        return
    drop_deferred(m, block)
    for number in range(m[NUM_STREAMS]):
        stream = stream_at(m, number)
        before = 0
        node = m[stream + S_HEAD]
        while node != 0:
            following = m[node + N_NEXT]
            if m[node + N_BLOCK] != block:
                before = node
            else:
                if before != 0:
                    m[before + N_NEXT] = following
                else:
                    m[stream + S_HEAD] = following
                if following == 0:
                    m[stream + S_TAIL] = before
                drop_node(m, node)
                m[OUTSTANDING] -= 1
            node = following
    m[block + EVENTS] = 0
    free_block(m, block)


@kernel
def complete_events(m: Memory, stream: int, held_only: bool) -> None:
    """The events recorded so far on `stream` (or those of them that are held) complete; the next malloc will see it."""
    node = m[stream + S_HEAD]
    while node != 0:
        if not held_only or m[node + N_TIME] == NEVER:
            m[node + N_TIME] = -1
        node = m[node + N_NEXT]


@kernel
def has_unknown_event(m: Memory) -> bool:
    """Whether some pending free waits behind a collective whose start is not known yet."""
    for number in range(m[NUM_STREAMS]):
        node = m[stream_at(m, number) + S_HEAD]
        while node != 0:
            if m[node + N_TIME] == UNKNOWN:
                return True
            node = m[node + N_NEXT]
    return False


# --- giving memory back -------------------------------------------------------------------------------------------


@kernel
def release_block(m: Memory, block: int) -> None:
    """release_block: cudaFree of a whole segment."""
    if is_split(m, block):
        m[STOPPED] = STOP_SPLIT_RELEASED
        return
    which = m[block + SET]
    size = m[block + SIZE]
    m[DEVICE_FREES] += 1
    log(m, LOG_DEVICE_FREE, m[block + PTR], size, stream_value(m, which))
    m[DEVICE_USED] -= round_granule(size)
    give_address(m, m[block + PTR], size)
    m[m[which + SET_POOL] + P_MALLOC_COUNT] -= 1
    decrease(m, SEGMENT, is_large(m, block), 1)
    count_reserved(m, which, -size)
    if size >= m[MAX_SPLIT]:
        decrease(m, OVERSIZE_SEGMENTS, 0, 1)
    erase_free(m, block)
    drop_block(m, block)


@kernel
def cursor_of(m: Memory, block: int) -> int:
    """Cursor of a block in its free set; -1 for no block, or for fresh memory that is in no set."""
    if block == 0:
        return -1
    which = m[block + SET]
    cursor = freelist.seek(m, which, m[block + SIZE], freelist.tie(m, block))
    while cursor >= 0 and freelist.key_at(m, which, cursor) == m[block + SIZE]:
        found = freelist.block_at(m, which, cursor)
        if found == block:
            return cursor
        if freelist.tie(m, found) != freelist.tie(m, block):
            break
        cursor = freelist.successor(m, which, cursor)
    return -1


@kernel
def block_after(m: Memory, which: int, cursor: int) -> int:
    """The block that follows a cursor in the set, or 0."""
    following = freelist.successor(m, which, cursor)
    return freelist.block_at(m, which, following) if following >= 0 else 0


@kernel
def unmap_block(m: Memory, block: int) -> None:
    """unmap_block: give back the whole pages inside a free block of an expandable segment."""
    which = m[block + SET]
    segment = m[block + EXPANDABLE]
    page = m[segment + X_PAGE]
    base = m[segment + X_BASE]
    begin = base + (m[block + PTR] - base + page - 1) // page * page
    end = base + (m[block + PTR] + m[block + SIZE] - base) // page * page
    if end <= begin:
        return
    erase_free(m, block)
    before = begin - m[block + PTR]
    after = m[block + PTR] + m[block + SIZE] - end
    if before > 0:
        fragment = new_fragment(m, block, m[block + PTR], before)
        link_before(m, fragment, block)
        insert_free(m, fragment)
    if after > 0:
        fragment = new_fragment(m, block, end, after)
        link_after(m, fragment, block)
        insert_free(m, fragment)
    m[block + PTR] = begin
    m[block + SIZE] = end - begin
    m[block + FLAGS] |= UNMAPPED
    left = m[block + PREV]
    right = m[block + NEXT]
    if can_merge(m, block, left):
        erase_unmapped(m, left)
        absorb_left(m, block, left)
    if can_merge(m, block, right):
        erase_unmapped(m, right)
        absorb_right(m, block, right)
    insert_unmapped(m, block)
    m[DEVICE_USED] -= (end - begin) // page * round_granule(page)
    m[DEVICE_FREES] += 1
    m[m[which + SET_POOL] + P_MALLOC_COUNT] -= 1
    count_reserved(m, which, begin - end)
    log(m, LOG_UNMAP, begin, end - begin, stream_value(m, which))
    if not is_split(m, block):
        erase_unmapped(m, block)
        drop_expandable(m, segment)
        drop_block(m, block)


@kernel
def release_blocks(m: Memory, pool: int, large: int) -> None:
    """release_blocks: every unsplit free block of a BlockPool, then the whole pages of expandable ones."""
    for expandable in range(2):
        for stream in range(m[NUM_STREAMS]):
            which = set_of(m, pool, large, stream)
            cursor = freelist.first(m, which)
            while cursor >= 0:
                block = freelist.block_at(m, which, cursor)
                following = block_after(m, which, cursor)
                if m[block + FLAGS] & IS_EXPANDABLE != 0:
                    if expandable == 1:
                        unmap_block(m, block)
                elif expandable == 0 and not is_split(m, block):
                    release_block(m, block)
                cursor = cursor_of(m, following)


@kernel
def nth_private_pool(m: Memory, order: int) -> int:
    """The living private pool that was created as number `order`, or 0."""
    for number in range(1, m[NUM_POOLS]):
        pool = pool_at(m, number)
        if m[pool + P_ALIVE] == 1 and m[pool + P_CREATED] == order:
            return pool
    return 0


@kernel
def release_private_pools(m: Memory) -> None:
    """Release the pools that nobody uses any more, in order of creation (PyTorch: of a hash map)."""
    for order in range(m[CREATED]):
        pool = nth_private_pool(m, order)
        if pool != 0 and m[pool + P_USE_COUNT] == 0:
            release_blocks(m, pool, 0)
            release_blocks(m, pool, 1)
            if m[pool + P_MALLOC_COUNT] == 0:
                m[pool + P_ALIVE] = 0


@kernel
def release_cached_blocks(m: Memory) -> None:
    """release_cached_blocks of the default pool id: empty_cache, and the last resort of a malloc."""
    if not capturing(m):
        synchronize_and_free_events(m)
        release_blocks(m, m[POOLS], 1)
        release_blocks(m, m[POOLS], 0)
    release_private_pools(m)


@kernel
def assert_not_expandable(m: Memory, block: int) -> bool:
    """Whether a release that walks the set may pass over this block; old releases fail an assertion if expandable."""
    if m[block + FLAGS] & IS_EXPANDABLE != 0 and m[EXPANDABLE_ASSERTS] == 1:
        m[STOPPED] = STOP_EXPANDABLE_ASSERT
        return False
    return True


@kernel
def release_available_cached_blocks(m: Memory, which: int, size: int) -> bool:
    """release_available_cached_blocks: oversize blocks of this stream, the smallest that is enough or the largest."""
    if m[MAX_SPLIT] == UNLIMITED:
        return False
    key = max(size, m[MAX_SPLIT])
    cursor = freelist.seek(m, which, key, freelist.FIRST)
    if cursor >= 0:
        block = freelist.block_at(m, which, cursor)
        if not assert_not_expandable(m, block):
            return False
        if m[block + FLAGS] & IS_EXPANDABLE == 0:
            release_block(m, block)
            return True
        cursor = freelist.predecessor(m, which, cursor)
    else:
        cursor = freelist.last(m, which)
    released = 0
    while cursor >= 0 and released < key and freelist.key_at(m, which, cursor) >= m[MAX_SPLIT]:
        block = freelist.block_at(m, which, cursor)
        before = freelist.predecessor(m, which, cursor)
        following = freelist.block_at(m, which, before) if before >= 0 else 0
        if not assert_not_expandable(m, block):
            return False
        if m[block + FLAGS] & IS_EXPANDABLE == 0:
            released += m[block + SIZE]
            release_block(m, block)
            if m[STOPPED] != 0:
                return False
        cursor = cursor_of(m, following)
    return released >= key


@kernel
def collect_older(m: Memory, limit: float, clock: int) -> tuple[int, int, int]:
    """One pass of the garbage collection: release blocks of age >= `limit`; (bytes, ages, count) released."""
    reclaimed = 0
    ages = 0
    count = 0
    for stream in range(m[NUM_STREAMS]):
        which = set_of(m, m[POOLS], 1, stream)
        cursor = freelist.first(m, which)
        while cursor >= 0:
            block = freelist.block_at(m, which, cursor)
            following = block_after(m, which, cursor)
            age = clock - m[block + GC_BASE]
            if not is_split(m, block) and age >= limit:
                if not assert_not_expandable(m, block):
                    return reclaimed, ages, count
                if m[block + FLAGS] & IS_EXPANDABLE == 0:
                    reclaimed += m[block + SIZE]
                    ages += age
                    count += 1
                    release_block(m, block)
            cursor = cursor_of(m, following)
    return reclaimed, ages, count


@kernel
def garbage_collect(m: Memory) -> None:
    """garbage_collect_cached_blocks: release the unsplit blocks of the default large pool that were idle longest."""
    clock = m[m[POOLS] + P_CLOCK + 1]
    target = m[TOTAL_ALLOCATED] - m[GC_THRESHOLD]
    if target <= 0:
        return
    total_age = 0
    count = 0
    for stream in range(m[NUM_STREAMS]):
        which = set_of(m, m[POOLS], 1, stream)
        cursor = freelist.first(m, which)
        while cursor >= 0:
            block = freelist.block_at(m, which, cursor)
            if not is_split(m, block):
                total_age += clock - m[block + GC_BASE]
                count += 1
            cursor = freelist.successor(m, which, cursor)
    reclaimed = 0
    while reclaimed < target and count > 0:
        more, ages, gone = collect_older(m, total_age / count, clock)
        if gone == 0 or m[STOPPED] != 0:
            return
        reclaimed += more
        total_age -= ages
        count -= gone


# --- expandable segments ------------------------------------------------------------------------------------------


@kernel
def new_expandable(m: Memory, which: int) -> int:
    """A new ExpandableSegment: address space for 9/8 of the device, nothing mapped."""
    page = m[LARGE_SEGMENT] if m[which + SET_LARGE] == 1 else SMALL_BUFFER
    size = m[DEVICE_TOTAL] + m[DEVICE_TOTAL] // 8
    if m[VA_RESERVE] >= 0:
        size = min(size, m[VA_RESERVE])
    size = (size + page - 1) // page * page
    segment = freelist.take(m, FREE_EXPANDABLE, X_COLUMNS)
    m[segment + X_BASE] = take_address(m, size)
    m[segment + X_BYTES] = size
    m[segment + X_PAGE] = page
    m[segment + X_SET] = which
    log(m, LOG_RESERVE, m[segment + X_BASE], size, stream_value(m, which))
    return segment


@kernel
def drop_expandable(m: Memory, segment: int) -> None:
    """Destroy an ExpandableSegment that has nothing mapped."""
    base = m[segment + X_BASE]
    log(m, LOG_RELEASE_VA, base, m[segment + X_BYTES], stream_value(m, m[segment + X_SET]))
    give_address(m, base, m[segment + X_BYTES])
    freelist.drop(m, FREE_EXPANDABLE, segment)


@kernel(inline=True)
def allocatable(m: Memory, block: int) -> bool:
    """Whether an expandable allocation may run over this block (mapped or not)."""
    return block != 0 and m[block + FLAGS] & BUSY == 0


@kernel
def has_address_space(m: Memory, block: int, size: int) -> bool:
    """Whether `block` and the allocatable blocks after it have together `size` bytes."""
    total = 0
    while total < size and allocatable(m, block):
        total += m[block + SIZE]
        block = m[block + NEXT]
    return total >= size


@kernel
def find_expandable_block(m: Memory, which: int, size: int) -> int:
    """find_expandable_block: the lowest place with enough address space, else a new segment; 0 if that is too small."""
    unmapped = m[which + SET_UNMAPPED]
    cursor = freelist.first(m, unmapped)
    while cursor >= 0:
        block = freelist.block_at(m, unmapped, cursor)
        if allocatable(m, m[block + PREV]):
            block = m[block + PREV]
        if has_address_space(m, block, size):
            return block
        cursor = freelist.successor(m, unmapped, cursor)
    segment = new_expandable(m, which)
    if m[VA_CHECKED] == 1 and m[segment + X_BYTES] < size:
        drop_expandable(m, segment)
        return 0
    flags = UNMAPPED | IS_EXPANDABLE | (LARGE if m[which + SET_LARGE] == 1 else 0)
    block = new_memory(m, m[segment + X_BASE], m[segment + X_BYTES], which, flags, segment)
    insert_unmapped(m, block)
    return block


@kernel
def map_block(m: Memory, block: int, size: int) -> bool:
    """map_block: obtain the pages under the first `size` bytes of an unmapped block."""
    which = m[block + SET]
    page = m[m[block + EXPANDABLE] + X_PAGE]
    mapped = min((size + page - 1) // page * page, m[block + SIZE])  # less than pages only in an odd initial state
    if page % ROUND_LARGE != 0 and m[ODD_PAGE_ERROR] == 1:
        m[STOPPED] = STOP_ODD_PAGE
        return False
    if page % ROUND_LARGE != 0 or mapped > device_free(m):
        log(m, LOG_CREATE_REFUSED, 0, page, stream_value(m, which))
        return False
    start = m[block + PTR]
    erase_unmapped(m, block)
    if mapped < m[block + SIZE]:
        rest = new_fragment(m, block, start + mapped, m[block + SIZE] - mapped)
        link_after(m, rest, block)
        insert_unmapped(m, rest)
        m[block + SIZE] = mapped
    m[block + FLAGS] &= ~UNMAPPED
    left = m[block + PREV]
    right = m[block + NEXT]
    if can_merge(m, block, left):
        erase_free(m, left)
        absorb_left(m, block, left)
    if can_merge(m, block, right):
        erase_free(m, right)
        absorb_right(m, block, right)
    insert_free(m, block)
    m[DEVICE_USED] += mapped
    m[DEVICE_ALLOCS] += 1
    count_reserved(m, which, mapped)
    log(m, LOG_MAP, start, mapped, stream_value(m, which))
    return True


@kernel
def allocate_expandable(m: Memory, which: int, size: int) -> int:
    """try_allocate_expandable_block: a free block of at least `size` bytes, left in its set; OUT if pages ran out."""
    block = find_expandable_block(m, which, size)
    if block == 0:
        return OUT
    if m[block + FLAGS] & UNMAPPED != 0 and not map_block(m, block, min(m[block + SIZE], size)):
        return OUT
    while m[block + SIZE] < size:
        following = m[block + NEXT]
        missing = size - m[block + SIZE]
        if following == 0 or not map_block(m, following, min(missing, m[following + SIZE])):
            return OUT
        block = following
    return block


# --- the malloc path ----------------------------------------------------------------------------------------------


@kernel(inline=True)
def expandable_size(m: Memory, block: int) -> int:
    """Size of a block together with the unmapped space right after it."""
    following = m[block + NEXT]
    if following != 0 and m[following + FLAGS] & UNMAPPED != 0:
        return m[block + SIZE] + m[following + SIZE]
    return m[block + SIZE]


@kernel
def prefer_hole(m: Memory, which: int, cursor: int) -> int:
    """Walk on from a best fit in an expandable segment while the next block would waste less address space."""
    block = freelist.block_at(m, which, cursor)
    while m[block + FLAGS] & IS_EXPANDABLE != 0:
        following = freelist.successor(m, which, cursor)
        if following < 0:
            break
        other = freelist.block_at(m, which, following)
        if expandable_size(m, other) >= expandable_size(m, block):
            break
        cursor = following
        block = other
    return cursor


@kernel
def skip_expandable(m: Memory, which: int, cursor: int) -> int:
    """The first block from `cursor` on that is not expandable, or -1."""
    while cursor >= 0 and m[freelist.block_at(m, which, cursor) + FLAGS] & IS_EXPANDABLE != 0:
        cursor = freelist.successor(m, which, cursor)
    return cursor


@kernel(inline=True)
def find_free(m: Memory, which: int, size: int, expandable: bool) -> int:
    """get_free_block: cursor of the block to use, left in its set, or -1."""
    if m[GC_ON] == 1:
        m[m[which + SET_POOL] + P_CLOCK + m[which + SET_LARGE]] += 1
    cursor = freelist.seek(m, which, size, freelist.FIRST)
    if cursor < 0:
        return -1
    if m[freelist.block_at(m, which, cursor) + FLAGS] & IS_EXPANDABLE != 0:
        cursor = prefer_hole(m, which, cursor) if expandable else skip_expandable(m, which, cursor)
        if cursor < 0:
            return -1
        if m[EXEMPT] == 1 and m[freelist.block_at(m, which, cursor) + FLAGS] & IS_EXPANDABLE != 0:
            return cursor
    found = freelist.key_at(m, which, cursor)
    if size < m[MAX_SPLIT]:
        return cursor if found < m[MAX_SPLIT] else -1
    return cursor if found - size < m[NON_SPLIT_ROUNDING] else -1


@kernel
def alloc_block(m: Memory, which: int, size: int, retry: bool) -> int:
    """alloc_block: a block of new memory (in a set only if expandable), OUT, or REJECTED."""
    wanted = segment_size(m, size)
    pool = m[which + SET_POOL]
    if retry:
        m[RETRIES] += 1
    if m[LIMIT] >= 0 and m[TOTAL_ALLOCATED] + wanted > m[LIMIT]:
        return OUT
    if m[REJECT_CAP] >= 0 and m[TOTAL_ALLOCATED] + wanted > m[REJECT_CAP]:
        m[REJECTIONS] += 1
        return REJECTED
    if m[EXPANDABLE_ON] == 1 and (m[pool + P_PRIVATE] == 0 or m[EXPANDABLE_IN_POOLS] == 1):
        block = allocate_expandable(m, which, size)
    else:
        block = malloc_segment(m, which, wanted)
    if block >= 0:
        m[pool + P_MALLOC_COUNT] += 1
    return block


@kernel
def malloc_segment(m: Memory, which: int, wanted: int) -> int:
    """cudaMalloc of a segment: its one block, in no set; OUT if the driver refuses."""
    if round_granule(wanted) > device_free(m):
        log(m, LOG_MALLOC_REFUSED, 0, wanted, stream_value(m, which))
        return OUT
    large = m[which + SET_LARGE]
    address = take_address(m, wanted)
    m[DEVICE_USED] += round_granule(wanted)
    m[DEVICE_ALLOCS] += 1
    block = new_memory(m, address, wanted, which, LARGE * large, 0)
    increase(m, SEGMENT, large, 1)
    count_reserved(m, which, wanted)
    if wanted >= m[MAX_SPLIT]:
        increase(m, OVERSIZE_SEGMENTS, 0, 1)
    log(m, LOG_MALLOC, address, wanted, stream_value(m, which))
    return block


@kernel
def borrow_on_oom(m: Memory, which: int, size: int) -> int:
    """try_mempool_fallback: a free block of a pool that was opted in with use_on_oom, for the default pool; or OUT."""
    if m[m[which + SET_POOL] + P_PRIVATE] == 1:
        return OUT
    for order in range(m[CREATED]):
        pool = nth_private_pool(m, order)
        if pool != 0 and m[pool + P_ON_OOM] == 1:
            other = m[pool + P_SETS] + which - m[m[POOLS] + P_SETS]
            cursor = find_free(m, other, size, False)
            if cursor >= 0:
                return freelist.block_at(m, other, cursor)
    return OUT


@kernel
def retry(m: Memory, which: int, size: int) -> int:
    """The last resort: release everything that is cached and ask once more. The pool itself is not searched again."""
    release_cached_blocks(m)
    if m[SEARCH_AGAIN] == 1:
        cursor = find_free(m, which, size, m[EXPANDABLE_ON] == 1)
        if cursor >= 0:
            return freelist.block_at(m, which, cursor)
    return alloc_block(m, which, size, True)


@kernel
def obtain(m: Memory, which: int, size: int) -> int:
    """What malloc does when the pool has no block; a block, OUT or REJECTED. Stops early where PyTorch would fail."""
    if m[GC_ON] == 1:
        garbage_collect(m)
        if m[STOPPED] != 0:
            return OUT
    block = alloc_block(m, which, size, False)
    if block != OUT or m[STOPPED] != 0:
        return block
    if m[ON_OOM_EARLY] == 1:
        block = borrow_on_oom(m, which, size)
        if block != OUT:
            return block
    if release_available_cached_blocks(m, which, size):
        block = alloc_block(m, which, size, False)
    if block != OUT or m[STOPPED] != 0:
        return block
    if not capturing(m):
        block = retry(m, which, size)
    if block == OUT and m[ON_OOM_LATE] == 1:
        block = borrow_on_oom(m, which, size)
    return block


@kernel(inline=True)
def should_split(m: Memory, block: int, size: int, expandable: bool) -> bool:
    """should_split."""
    remaining = m[block + SIZE] - size
    if m[m[m[block + SET] + SET_POOL] + P_NO_SPLIT] == 1:
        return False
    if expandable or m[block + FLAGS] & LARGE == 0:
        return remaining >= MIN_BLOCK
    return size < m[MAX_SPLIT] and remaining > SMALL_SIZE


@kernel(inline=True)
def hand_out(m: Memory, block: int, cursor: int, n: int, size: int, split: bool) -> int:
    """alloc_found_block: split if asked, count, and mark as allocated. `cursor` is -1 for a block in no set."""
    which = m[block + SET]
    large = is_large(m, block)
    was_split = is_split(m, block)
    counted = m[block + FLAGS] & IS_EXPANDABLE == 0
    found = block
    if split:
        found = new_fragment(m, block, m[block + PTR], size)
        link_before(m, found, block)
        m[block + PTR] += size
        m[block + SIZE] -= size
        stamp(m, block)
        if cursor >= 0:
            freelist.replace(m, which, cursor, m[block + SIZE], freelist.tie(m, block), block)
        else:
            freelist.insert(m, which, m[block + SIZE], freelist.tie(m, block), block)
        if counted and was_split:
            decrease(m, INACTIVE_SPLIT_BYTES, large, size)
        elif counted:
            increase(m, INACTIVE_SPLIT_BYTES, large, m[block + SIZE])
            increase(m, INACTIVE_SPLIT, large, 1)
    else:
        if cursor >= 0:
            freelist.erase_at(m, which, cursor)
        if counted and was_split:
            decrease(m, INACTIVE_SPLIT_BYTES, large, m[block + SIZE])
            decrease(m, INACTIVE_SPLIT, large, 1)
    taken = m[found + SIZE]
    m[found + FLAGS] |= ALLOCATED
    m[found + REQUESTED] = n
    log(m, LOG_ALLOC, m[found + PTR], n, stream_value(m, which))
    increase(m, ALLOCATION, large, 1)
    increase(m, ALLOCATED_BYTES, large, taken)
    increase(m, ACTIVE, large, 1)
    increase(m, ACTIVE_BYTES, large, taken)
    increase(m, REQUESTED_BYTES, large, n)
    if taken >= m[MAX_SPLIT]:
        increase(m, OVERSIZE_ALLOCATIONS, 0, 1)
    return found


@kernel
def note_failure(m: Memory, size: int) -> int:
    """Remember a failure for the report, whether PyTorch counts it or not."""
    m[OOM_COUNTED] += 1
    m[FAILED_BYTES] = size
    m[OOM_FREE] = max(device_free(m), 0)
    return OUT


@kernel
def malloc_miss(m: Memory, which: int, n: int, size: int) -> int:
    """malloc for a request that no free block of its pool can serve."""
    block = obtain(m, which, size)
    if m[STOPPED] != 0:
        return OUT
    if block == OUT:
        m[OOMS] += 1
        log(m, LOG_OOM, max(device_free(m), 0), size, stream_value(m, which))
    if block < 0:
        return note_failure(m, size)
    borrowed = m[block + SET] != which
    split = should_split(m, block, size, m[EXPANDABLE_ON] == 1 and not borrowed)
    return hand_out(m, block, cursor_of(m, block), n, size, split)


@kernel
def served_at_once(m: Memory, n: int, stream: int) -> bool:
    """Whether a malloc would surely be served without waiting for pending frees: from the pool, or by the driver."""
    if capturing(m) or n >= ONE_EIB:
        return True
    process_events(m)
    size = round_size(m, n)
    which = set_of(m, current_pool(m), 1 if size > SMALL_SIZE else 0, stream)
    clock = m[which + SET_POOL] + P_CLOCK + m[which + SET_LARGE]
    before = m[clock]
    cursor = find_free(m, which, size, m[EXPANDABLE_ON] == 1)
    m[clock] = before  # this was only a look
    wanted = segment_size(m, size)
    if m[EXPANDABLE_ON] == 1:
        wanted = (size + wanted - 1) // wanted * wanted + m[LARGE_SEGMENT]
    within = m[LIMIT] < 0 or m[TOTAL_ALLOCATED] + wanted <= m[LIMIT]
    return cursor >= 0 or (within and round_granule(wanted) <= device_free(m))


@kernel(inline=True)
def malloc(m: Memory, n: int, stream: int) -> int:
    """malloc of `n` > 0 bytes on a stream (its number): the block, or OUT."""
    if n >= ONE_EIB:
        return note_failure(m, n)
    if (m[OUTSTANDING] | m[DEFERRED]) != 0 and not capturing(m):
        process_events(m)
    size = round_size(m, n)
    which = set_of(m, current_pool(m), 1 if size > SMALL_SIZE else 0, stream)
    expandable = m[EXPANDABLE_ON] == 1
    cursor = find_free(m, which, size, expandable)
    if cursor < 0:
        return malloc_miss(m, which, n, size)
    block = freelist.block_at(m, which, cursor)
    return hand_out(m, block, cursor, n, size, should_split(m, block, size, expandable))
