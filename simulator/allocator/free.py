"""The free path: a block waits for the events of other streams that used it, then merges with free neighbours."""

from __future__ import annotations

from simulator.allocator import blocks, driver, free_lists, private_pools, statistics
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel(inline=True)
def free_block(m: Memory, block: int) -> None:
    """free_block: the block is nobody's any more; merge it with free neighbours and put it into its set."""
    which = m[block + at.SET]
    large = blocks.is_large(m, block)
    size = m[block + at.SIZE]
    driver.log(m, at.LOG_FREE_COMPLETED, m[block + at.PTR], m[block + at.REQUESTED], blocks.stream_value(m, which))
    m[block + at.FLAGS] &= ~at.PENDING
    left = m[block + at.PREV]
    right = m[block + at.NEXT]
    merge_left = blocks.can_merge(m, block, left)
    merge_right = blocks.can_merge(m, block, right)
    cursor = -1
    if merge_right:
        cursor = free_lists.find(m, which, m[right + at.SIZE], free_lists.tie(m, right), right)
    if merge_left:
        if merge_right:
            free_lists.erase_at(m, which, cursor)
        cursor = free_lists.find(m, which, m[left + at.SIZE], free_lists.tie(m, left), left)
        blocks.absorb_left(m, block, left)
    if merge_right:
        blocks.absorb_right(m, block, right)
    blocks.stamp(m, block)
    if cursor >= 0:
        free_lists.replace(m, which, cursor, m[block + at.SIZE], free_lists.tie(m, block), block)
    else:
        free_lists.insert(m, which, size, free_lists.tie(m, block), block)
    if m[block + at.FLAGS] & at.IS_EXPANDABLE == 0:
        split = blocks.is_split(m, block)
        statistics.change(m, at.INACTIVE_SPLIT, large, int(split) - int(merge_left) - int(merge_right))
        statistics.change(m, at.INACTIVE_SPLIT_BYTES, large, size if split else size - m[block + at.SIZE])
    statistics.decrease(m, at.ACTIVE, large, 1)
    statistics.decrease(m, at.ACTIVE_BYTES, large, size)
    statistics.decrease(m, at.REQUESTED_BYTES, large, m[block + at.REQUESTED])


@kernel
def new_node(m: Memory) -> int:
    """An unused list node."""
    node = free_lists.take(m, at.FREE_NODE, at.N_COLUMNS)
    m[node + at.N_NEXT] = 0
    return node


@kernel
def drop_node(m: Memory, node: int) -> None:
    """Give a list node back."""
    free_lists.drop(m, at.FREE_NODE, node)
    m[node + at.N_SERIAL] = -1


@kernel
def queue_work(m: Memory, kind: int, stream: int, duration: int, ref: int) -> int:
    """Note an item for a stream that waits behind a collective."""
    item = free_lists.take(m, at.FREE_WORK, at.W_COLUMNS)
    m[item + at.W_NEXT] = 0
    m[item + at.W_KIND] = kind
    m[item + at.W_STREAM] = stream
    m[item + at.W_ISSUED] = m[at.HOST]
    m[item + at.W_DURATION] = duration
    m[item + at.W_REF] = ref
    if m[at.LAST_WORK] != 0:
        m[m[at.LAST_WORK] + at.W_NEXT] = item
    else:
        m[at.WORK] = item
    m[at.LAST_WORK] = item
    m[at.QUEUED] += 1
    return item


@kernel
def event_time(m: Memory, stream: int, node: int) -> int:
    """When an event recorded now on `stream` completes; one behind an unresolved collective is noted as work."""
    if m[at.HOLD] == 1:
        return at.NEVER
    if m[at.TIMED] == 0:
        return 0
    if m[stream + at.S_WAITING] == 0:
        return m[stream + at.S_CLOCK]
    item = queue_work(m, at.WORK_EVENT, stream, 0, node)
    m[item + at.W_SERIAL] = m[at.SERIAL]
    return at.UNKNOWN


@kernel
def insert_events(m: Memory, block: int) -> None:
    """insert_events: an event on every stream that used the block."""
    use = m[block + at.USES]
    while use != 0:
        following = m[use + at.N_NEXT]
        stream = m[use + at.N_STREAM]
        m[at.ROOM] += at.W_COLUMNS
        m[use + at.N_NEXT] = 0
        m[use + at.N_BLOCK] = block
        m[use + at.N_SERIAL] = m[at.SERIAL]
        m[use + at.N_TIME] = event_time(m, stream, use)
        m[at.SERIAL] += 1
        if m[stream + at.S_HEAD] != 0:
            m[m[stream + at.S_TAIL] + at.N_NEXT] = use
        else:
            m[stream + at.S_HEAD] = use
        m[stream + at.S_TAIL] = use
        m[at.OUTSTANDING] += 1
        m[block + at.EVENTS] += 1
        use = following
    m[block + at.USES] = 0
    m[block + at.FLAGS] &= ~at.HAS_USES


@kernel
def pop_event(m: Memory, stream: int) -> None:
    """Drop the first event of a stream; its block is freed with its last event."""
    node = m[stream + at.S_HEAD]
    block = m[node + at.N_BLOCK]
    m[stream + at.S_HEAD] = m[node + at.N_NEXT]
    drop_node(m, node)
    m[at.OUTSTANDING] -= 1
    m[block + at.EVENTS] -= 1
    if m[block + at.EVENTS] == 0:
        free_block(m, block)


@kernel
def drop_captured_uses(m: Memory, block: int) -> None:
    """Forget the stream uses of a block that were recorded during a capture."""
    use = m[block + at.USES]
    m[block + at.USES] = 0
    while use != 0:
        following = m[use + at.N_NEXT]
        if m[use + at.N_CAPTURED] == 1:
            m[at.ROOM] += at.W_COLUMNS
            drop_node(m, use)
        else:
            m[use + at.N_NEXT] = m[block + at.USES]
            m[block + at.USES] = use
        use = following


@kernel
def process_deferred(m: Memory) -> None:
    """insert_events_deferred_until_no_capture."""
    while m[at.DEFERRED] != 0:
        node = m[at.DEFERRED]
        m[at.DEFERRED] = m[node + at.N_NEXT]
        block = m[node + at.N_BLOCK]
        drop_node(m, node)
        drop_captured_uses(m, block)
        if m[block + at.USES] != 0:
            insert_events(m, block)
        else:
            m[block + at.FLAGS] &= ~at.HAS_USES
            free_block(m, block)


@kernel(inline=True)
def visited(m: Memory, turn: int) -> int:
    """The stream whose FIFO is polled at this turn.

    PyTorch goes in the order of a hash map keyed by CUDAStream, which for its first pool streams is the default
    stream and then the others from the last to the first (seen in recordings of 2.9.1 to 2.15.0).
    """
    return blocks.stream_at(m, 0 if turn == 0 else m[at.NUM_STREAMS] - turn)


@kernel
def process_events(m: Memory) -> None:
    """process_events: on each stream, pop events from the front while they are complete."""
    process_deferred(m)
    for turn in range(m[at.NUM_STREAMS]):
        stream = visited(m, turn)
        while m[stream + at.S_HEAD] != 0 and m[m[stream + at.S_HEAD] + at.N_TIME] <= m[at.HOST]:
            pop_event(m, stream)


@kernel
def synchronize_and_free_events(m: Memory, pool: int) -> None:
    """synchronize_and_free_events: the host waits for every event, or for those of blocks of one pool (0: all)."""
    m[at.SYNCS] += 1
    process_deferred(m)
    for turn in range(m[at.NUM_STREAMS]):
        stream = visited(m, turn)
        kept = 0
        while m[stream + at.S_HEAD] != 0:
            node = m[stream + at.S_HEAD]
            if pool != 0 and m[m[m[node + at.N_BLOCK] + at.SET] + at.SET_POOL] != pool:
                m[stream + at.S_HEAD] = m[node + at.N_NEXT]
                m[node + at.N_NEXT] = kept
                kept = node
                continue
            time = m[node + at.N_TIME]
            if time < at.UNKNOWN:
                m[at.HOST] = max(m[at.HOST], time)
            pop_event(m, stream)
        put_back(m, stream, kept)


@kernel
def put_back(m: Memory, stream: int, node: int) -> None:
    """The events of a stream are those of a list, of which the last comes first."""
    if node != 0:
        m[stream + at.S_TAIL] = node
    while node != 0:
        before = m[node + at.N_NEXT]
        m[node + at.N_NEXT] = m[stream + at.S_HEAD]
        m[stream + at.S_HEAD] = node
        node = before


@kernel
def record_stream(m: Memory, block: int, stream: int) -> None:
    """recordStream: the block is in use on another stream."""
    if m[m[block + at.SET] + at.SET_STREAM] == stream:
        return
    if m[block + at.FLAGS] & at.HAS_USES == 0:
        m[block + at.FLAGS] |= at.HAS_USES
        m[block + at.USES] = 0
    use = m[block + at.USES]
    while use != 0 and m[use + at.N_STREAM] != stream:
        use = m[use + at.N_NEXT]
    if use == 0:
        use = new_node(m)
        m[at.ROOM] -= at.W_COLUMNS  # set aside: when the block is freed, each use may become an item of work
        m[use + at.N_STREAM] = stream
        m[use + at.N_NEXT] = m[block + at.USES]
        m[use + at.N_CAPTURED] = 0
        m[block + at.USES] = use
    if private_pools.capturing(m):
        m[use + at.N_CAPTURED] = 1


@kernel(inline=True)
def free(m: Memory, block: int, owner: int) -> None:
    """free: `owner` is the dense id of the allocation."""
    large = blocks.is_large(m, block)
    m[block + at.FLAGS] &= ~at.ALLOCATED
    statistics.decrease(m, at.ALLOCATION, large, 1)
    statistics.decrease(m, at.ALLOCATED_BYTES, large, m[block + at.SIZE])
    driver.log(
        m, at.LOG_FREE_REQUESTED, m[block + at.PTR], m[block + at.REQUESTED], blocks.stream_value(m, m[block + at.SET])
    )
    if m[block + at.SIZE] >= m[at.MAX_SPLIT]:
        statistics.decrease(m, at.OVERSIZE_ALLOCATIONS, 0, 1)
    if m[block + at.FLAGS] & at.HAS_USES == 0:
        free_block(m, block)
    else:
        free_later(m, block, owner)


@kernel
def free_later(m: Memory, block: int, owner: int) -> None:
    """The part of `free` for a block that other streams used."""
    m[block + at.FLAGS] |= at.PENDING
    m[block + at.OWNER] = owner
    m[block + at.EVENTS] = 0
    if not private_pools.capturing(m):
        insert_events(m, block)
        return
    node = new_node(m)
    m[node + at.N_BLOCK] = block
    if m[at.DEFERRED] != 0:
        m[m[at.DEFERRED_TAIL] + at.N_NEXT] = node
    else:
        m[at.DEFERRED] = node
    m[at.DEFERRED_TAIL] = node


@kernel
def drop_deferred(m: Memory, block: int) -> None:
    """Take a block off the list of frees deferred by a capture, and forget its stream uses."""
    before = 0
    node = m[at.DEFERRED]
    while node != 0 and m[node + at.N_BLOCK] != block:
        before = node
        node = m[node + at.N_NEXT]
    if node == 0:
        return
    if before != 0:
        m[before + at.N_NEXT] = m[node + at.N_NEXT]
    else:
        m[at.DEFERRED] = m[node + at.N_NEXT]
    if m[at.DEFERRED_TAIL] == node:
        m[at.DEFERRED_TAIL] = before
    drop_node(m, node)
    while m[block + at.USES] != 0:
        use = m[block + at.USES]
        m[block + at.USES] = m[use + at.N_NEXT]
        m[at.ROOM] += at.W_COLUMNS
        drop_node(m, use)
    m[block + at.FLAGS] &= ~at.HAS_USES


@kernel
def complete_free(m: Memory, block: int, owner: int) -> None:
    """This pending free completes now, whatever its events say; nothing happens if it is not pending any more."""
    if block == 0 or m[block + at.FLAGS] & at.PENDING == 0 or m[block + at.OWNER] != owner:
        return
    drop_deferred(m, block)
    for number in range(m[at.NUM_STREAMS]):
        stream = blocks.stream_at(m, number)
        before = 0
        node = m[stream + at.S_HEAD]
        while node != 0:
            following = m[node + at.N_NEXT]
            if m[node + at.N_BLOCK] != block:
                before = node
            else:
                if before != 0:
                    m[before + at.N_NEXT] = following
                else:
                    m[stream + at.S_HEAD] = following
                if following == 0:
                    m[stream + at.S_TAIL] = before
                drop_node(m, node)
                m[at.OUTSTANDING] -= 1
            node = following
    m[block + at.EVENTS] = 0
    free_block(m, block)


@kernel
def complete_events(m: Memory, stream: int, held_only: bool) -> None:
    """The events recorded so far on `stream` (or those of them that are held) complete; the next malloc will see it."""
    node = m[stream + at.S_HEAD]
    while node != 0:
        if not held_only or m[node + at.N_TIME] == at.NEVER:
            m[node + at.N_TIME] = -1
        node = m[node + at.N_NEXT]


@kernel
def has_unknown_event(m: Memory) -> bool:
    """Whether some pending free waits behind a collective whose start is not known yet."""
    for number in range(m[at.NUM_STREAMS]):
        node = m[blocks.stream_at(m, number) + at.S_HEAD]
        while node != 0:
            if m[node + at.N_TIME] == at.UNKNOWN:
                return True
            node = m[node + at.N_NEXT]
    return False
