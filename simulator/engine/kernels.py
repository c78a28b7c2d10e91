"""The event loop of one rank: serve a trace's events until something needs the outside.

`run` goes through the columns of a rank's events and stops with a status: done, room needed in the arrays, an event
that Python serves (settings, reports), an out-of-memory to look at, or a wait for other ranks. It can always be
called again from where it stopped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.allocator import blocks, free, free_lists, malloc, private_pools, release_blocks, statistics
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from simulator.engine.streams import launch_collective, launch_kernel, resolve, synchronize, wait_stream
from traces.jit import kernel, pointer
from traces.model import Int64Array

# The ops in the order of traces.model.Op, as plain integers for the kernels.
(
    ALLOC,
    FREE,
    RECORD_STREAM,
    HOLD_EVENTS,
    COMPLETE_EVENTS,
    COMPLETE_FREE,
    SYNCHRONIZE,
    EMPTY_CACHE,
    RESET_PEAK,
    RESET_ACCUMULATED,
    SET_MEMORY_FRACTION,
    SET_ALLOCATOR,
    OTHER_PROCESS,
    SNAPSHOT,
    STATISTICS,
    PHASE,
    KERNEL,
    COLLECTIVE,
    POOL_CREATE,
    POOL_BEGIN,
    POOL_END,
    POOL_RELEASE,
    WAIT_STREAM,
    REGION_BEGIN,
    REGION_END,
    POOL_SWITCH,
) = range(26)
TAKE_OVER = 255  # an alloc with `was`

# columns of `out`: what stood after an event
OUT_ALLOCATED = 0
OUT_ACTIVE = 1
OUT_RESERVED = 2
OUT_TIME = 3
OUT_ADDRESS = 4
OUT_SEGMENTS = 5
OUT_RETRIES = 6
OUT_OOMS = 7
OUT_FULL = 8  # columns with everything
OUT_TIMED = 4  # columns with the clock
OUT_PLAIN = 3

# `pool` events pack their flags above the pool's number
POOL_MASK = (1 << 32) - 1
POOL_NO_SPLIT = 1 << 32
POOL_ON_OOM = 1 << 33
POOL_CAPTURE = 1 << 34


@kernel(inline=True)
def words_needed(m: Memory) -> int:
    """A bound on the words that one event may take from the top of the memory.

    A release can cut every free block in three, and every new block may need a leaf entry; directories double.
    """
    return (m[at.LIVE_BLOCKS] + 32) * (2 * at.BLOCK_COLUMNS + 16) + (m[at.LIVE_LEAVES] + 8) * (at.LEAF_COLUMNS + 8)


@kernel(inline=True)
def has_room(m: Memory) -> bool:
    """Whether the memory and the log can take whatever one event may add."""
    if m[at.TOP] + words_needed(m) > m[at.ROOM]:
        return False
    return m[at.LOGGING] == 0 or m[at.LOGGED] + 4 * m[at.LIVE_BLOCKS] + 64 <= m[at.LOG_ROOM]


@kernel
def stat_row(m: Memory, number: int) -> int:
    """The rows of statistics: those of the allocator, then reserved_bytes of every pool."""
    if number < at.NUM_STATS:
        return at.STATS + number * at.STAT_ROW
    return private_pools.pool_at(m, number - at.NUM_STATS) + at.P_RESERVED


@kernel
def reset_peak(m: Memory) -> None:
    """resetPeakStats: every peak becomes the current value."""
    for number in range(at.NUM_STATS + m[at.NUM_POOLS]):
        row = stat_row(m, number)
        for pool in range(2):
            cell = row + pool * at.ST_POOL
            m[cell + at.ST_PEAK] = m[cell]
        m[row + at.ST_PEAK_ALL] = m[row] + m[row + at.ST_POOL]


@kernel
def reset_accumulated(m: Memory) -> None:
    """resetAccumulatedStats: allocated and freed counts, and the plain counters, become 0."""
    for number in range(at.NUM_STATS + m[at.NUM_POOLS]):
        for pool in range(2):
            cell = stat_row(m, number) + pool * at.ST_POOL
            m[cell + at.ST_ALLOCATED] = 0
            m[cell + at.ST_BASE] = m[cell]
    for counter in (at.RETRIES, at.OOMS, at.SYNCS, at.DEVICE_ALLOCS, at.DEVICE_FREES, at.REJECTIONS):
        m[counter] = 0


@kernel
def serve_pool(m: Memory, op: int, packed: int) -> None:
    """The private pool events."""
    pool = private_pools.pool_at(m, packed & POOL_MASK)
    if op == POOL_CREATE:
        private_pools.create_pool(m, pool)
        if packed & POOL_NO_SPLIT != 0 and m[at.NO_SPLIT_POOLS] == 1:
            m[pool + at.P_NO_SPLIT] = 1
        if packed & POOL_ON_OOM != 0:
            m[pool + at.P_ON_OOM] = 1
    elif op == POOL_BEGIN:
        private_pools.begin_scope(m, pool, 1 if packed & POOL_CAPTURE != 0 else 0)
    elif op == POOL_END:
        private_pools.end_scope(m, pool)
    elif op == POOL_SWITCH:
        m[at.SERVING] = pool
    elif m[pool + at.P_USE_COUNT] > 0:
        m[pool + at.P_USE_COUNT] -= 1
        if m[pool + at.P_USE_COUNT] == 0:
            m[pool + at.P_NO_SPLIT] = 0
            m[pool + at.P_ON_OOM] = 0


@kernel
def must_wait(m: Memory) -> bool:
    """Whether a pending free waits for work whose time other ranks decide."""
    return m[at.TIMED] == 1 and m[at.OUTSTANDING] > 0 and m[at.QUEUED] > 0 and free.has_unknown_event(m)


@kernel
def serve_rare(m: Memory, op: int, block: int, ident: int, arg: int, number: int) -> int:
    """Every op but alloc and free; a status other than DONE where the event was not served.

    `block` is the block of the event's id (0: none), `number` the dense number of its stream (-1: all).
    """
    if op == RECORD_STREAM:
        if block > 0:
            free.record_stream(m, block, blocks.stream_at(m, number))
    elif op == KERNEL:
        launch_kernel(m, blocks.stream_at(m, number), arg)
    elif op == COLLECTIVE:
        launch_collective(m, blocks.stream_at(m, number), arg)
    elif op == WAIT_STREAM:
        wait_stream(m, blocks.stream_at(m, number), blocks.stream_at(m, arg))
    elif op == HOLD_EVENTS:
        m[at.HOLD] = arg
        if arg == 0:
            for i in range(m[at.NUM_STREAMS]):
                free.complete_events(m, blocks.stream_at(m, i), True)
    elif op == COMPLETE_EVENTS:
        free.complete_events(m, blocks.stream_at(m, number), False)
    elif op == COMPLETE_FREE:
        free.complete_free(m, block, ident)
    elif op == SYNCHRONIZE:
        if not synchronize(m, number):
            return at.WAIT
    elif op == EMPTY_CACHE:
        if must_wait(m):
            return at.WAIT
        if private_pools.capturing(m) and m[at.EMPTY_IN_CAPTURE] == 0:
            m[at.STOPPED] = at.STOP_CAPTURE
        elif arg != 0:
            release_blocks.release_cached_blocks_of(m, private_pools.pool_at(m, arg))
        else:
            release_blocks.release_cached_blocks(m)
    elif op == RESET_PEAK:
        reset_peak(m)
    elif op == RESET_ACCUMULATED:
        reset_accumulated(m)
    elif op == OTHER_PROCESS:
        m[at.OTHER_BYTES] = arg
    elif (op >= POOL_CREATE and op <= POOL_RELEASE) or op == POOL_SWITCH:
        serve_pool(m, op, arg)
    elif op != PHASE and op != REGION_BEGIN and op != REGION_END:
        return at.CONTROL
    return at.DONE


@kernel
def giveable(m: Memory, block: int) -> int:
    """How much of a free block the allocator could give back: all of an unsplit segment, or whole pages."""
    if m[block + at.FLAGS] & at.IS_EXPANDABLE == 0:
        return m[block + at.SIZE] if m[block + at.PREV] == 0 and m[block + at.NEXT] == 0 else 0
    segment = m[block + at.EXPANDABLE]
    page = m[segment + at.X_PAGE]
    begin = (m[block + at.PTR] - m[segment + at.X_BASE] + page - 1) // page
    end = (m[block + at.PTR] + m[block + at.SIZE] - m[segment + at.X_BASE]) // page
    return max(end - begin, 0) * page


@kernel
def note_peak(m: Memory, reserved: int) -> None:
    """Reserved bytes reached a new peak: what of them is free, and what could be given back."""
    m[at.PEAK_RESERVED] = reserved
    m[at.PEAK_EVENT] = m[at.EVENT]
    cached = 0
    free_bytes = 0
    for i in range(m[at.NUM_POOLS] * 2 * m[at.NUM_STREAMS]):
        which = m[at.SETS] + i * at.SET_COLUMNS
        cursor = free_lists.first(m, which)
        while cursor >= 0:
            free_bytes += free_lists.key_at(m, which, cursor)
            cached += giveable(m, free_lists.block_at(m, which, cursor))
            cursor = free_lists.successor(m, which, cursor)
    m[at.PEAK_CACHED] = cached
    m[at.PEAK_STRANDED] = free_bytes - cached


@kernel(inline=True)
def write_out(m: Memory, out: Memory, columns: int, index: int) -> None:
    """What stands after an event."""
    begin = index * columns
    row = at.STATS + at.ALLOCATED_BYTES * at.STAT_ROW
    out[begin + OUT_ALLOCATED] = m[row] + m[row + at.ST_POOL]
    row = at.STATS + at.ACTIVE_BYTES * at.STAT_ROW
    out[begin + OUT_ACTIVE] = m[row] + m[row + at.ST_POOL]
    row = at.STATS + at.RESERVED_BYTES * at.STAT_ROW
    reserved = m[row] + m[row + at.ST_POOL]
    out[begin + OUT_RESERVED] = reserved
    if reserved > m[at.PEAK_RESERVED]:
        note_peak(m, reserved)
    if columns > OUT_PLAIN:
        out[begin + OUT_TIME] = m[at.HOST]
        if columns == OUT_FULL:
            row = at.STATS + at.SEGMENT * at.STAT_ROW
            out[begin + OUT_SEGMENTS] = m[row] + m[row + at.ST_POOL]
            out[begin + OUT_RETRIES] = m[at.RETRIES]
            out[begin + OUT_OOMS] = m[at.OOMS]


@kernel(inline=True)
def serve(m: Memory, ids: Memory, op: int, ident: int, arg: int, stream: int, patient: bool) -> tuple[int, int]:
    """Serve one event: a status, and the address that the event's row shows (0 none, -1 out of memory)."""
    if op == ALLOC:
        if arg == 0:
            return at.DONE, 0
        if m[at.TIMED] == 1 and must_wait(m) and not (patient and malloc.served_at_once(m, arg, stream)):
            return at.WAIT, 0
        block = malloc.malloc(m, arg, stream)
        if block < 0:
            return at.OUT_OF_MEMORY, -1
        ids[2 * ident] = block
        ids[2 * ident + 1] = m[block + at.SIZE]
        return at.DONE, m[block + at.PTR]
    if op == FREE:
        block = ids[2 * ident]
        if block == 0:
            return at.DONE, 0
        address = m[block + at.PTR]
        if m[block + at.FLAGS] & at.HAS_USES == 0:
            ids[2 * ident] = 0
        free.free(m, block, ident)
        return at.DONE, address
    block = ids[2 * ident] if op in (RECORD_STREAM, COMPLETE_FREE) else 0
    address = m[block + at.PTR] if block > 0 and op == RECORD_STREAM else 0
    return serve_rare(m, op, block, ident, arg, stream), address


@kernel
def run(
    memory: Int64Array,
    id_table: Int64Array,
    ops: npt.NDArray[np.uint8],
    idents: npt.NDArray[np.int32],
    args: Int64Array,
    streams: npt.NDArray[np.int32],
    host_ns: Int64Array,
    table: Int64Array,
    columns: int,
    start: int,
    stop: int,
    patient: int,
) -> tuple[int, int]:
    """Serve events `start` to `stop`; the status and the index of the event it stopped at.

    `id_table` (2 x ids) holds each allocation's block (0: none yet, or failed, or freed) and the bytes it got. `idents`
    are dense ids, `streams` dense stream numbers (-1: all), `args` the one number an op takes beside them. `host_ns`
    may be empty. `table` (events x columns; 3, 4 or 8) takes what stands after each event. `patient` is the index of an
    event at which unknown completions count as incomplete, unless the host would have to wait for them. A status of
    OUT_OF_MEMORY comes after the event was served, every other one before.
    """
    m = pointer(memory)
    ids = pointer(id_table)
    out = pointer(table)
    op_of = pointer(ops)
    ident_of = pointer(idents)
    arg_of = pointer(args)
    stream_of = pointer(streams)
    for index in range(start, stop):
        if not has_room(m):
            return at.GROW, index
        m[at.EVENT] = index
        status, address = serve(
            m, ids, op_of[index], ident_of[index], arg_of[index], stream_of[index], patient == index
        )
        if status != at.DONE and status != at.OUT_OF_MEMORY:
            return status, index
        if m[at.STOPPED] != 0:
            return at.FAILED, index
        if host_ns.shape[0] > 0:
            m[at.HOST] += host_ns[index]
        if columns == OUT_FULL:
            out[index * columns + OUT_ADDRESS] = address
        write_out(m, out, columns, index)
        if status == at.OUT_OF_MEMORY:
            return status, index
    return at.PAUSED, stop


@kernel
def finish_event(memory: Int64Array, table: Int64Array, columns: int, index: int) -> None:
    """Enter what stands after an event that was served outside `run`."""
    write_out(pointer(memory), pointer(table), columns, index)


@kernel
def resolve_work(memory: Int64Array) -> None:
    """`streams.resolve`, for callers from Python."""
    resolve(pointer(memory))


@kernel
def process_deferred(memory: Int64Array) -> None:
    """`free.process_deferred`, for callers from Python."""
    free.process_deferred(pointer(memory))


@kernel
def round_sizes(memory: Int64Array, requested: Int64Array) -> Int64Array:
    """The sizes of the blocks that requests ask for, by the settings now in force."""
    m = pointer(memory)
    rounded = np.empty_like(requested)
    for i in range(len(requested)):
        rounded[i] = malloc.round_size(m, requested[i])
    return rounded


# --- the state that a recording began with ------------------------------------------------------------------------


@kernel
def add_initial(m: Memory, stat: int, large: int, amount: int) -> None:
    """Raise a statistic's current value and peak, as allocated before the recording."""
    cell = at.STATS + stat * at.STAT_ROW + large * at.ST_POOL
    m[cell + at.ST_CURRENT] += amount
    m[cell + at.ST_ALLOCATED] += amount
    m[cell + at.ST_PEAK] = m[cell]
    row = at.STATS + stat * at.STAT_ROW
    m[row + at.ST_PEAK_ALL] = m[row] + m[row + at.ST_POOL]


@kernel
def count_initial(m: Memory, block: int) -> None:
    """Enter a block of the initial state into the statistics."""
    flags = m[block + at.FLAGS]
    size = m[block + at.SIZE]
    large = blocks.is_large(m, block)
    if flags & (at.ALLOCATED | at.PENDING) != 0:
        add_initial(m, at.ACTIVE, large, 1)
        add_initial(m, at.ACTIVE_BYTES, large, size)
        add_initial(m, at.REQUESTED_BYTES, large, m[block + at.REQUESTED])
        if flags & at.ALLOCATED != 0:
            add_initial(m, at.ALLOCATION, large, 1)
            add_initial(m, at.ALLOCATED_BYTES, large, size)
            if size >= m[at.MAX_SPLIT]:
                add_initial(m, at.OVERSIZE_ALLOCATIONS, 0, 1)
    elif flags & (at.IS_EXPANDABLE | at.UNMAPPED) == 0 and blocks.is_split(m, block):
        add_initial(m, at.INACTIVE_SPLIT, large, 1)
        add_initial(m, at.INACTIVE_SPLIT_BYTES, large, size)
    if flags & at.UNMAPPED == 0:
        add_initial(m, at.RESERVED_BYTES, large, size)
        statistics.raise_row(m, m[m[block + at.SET] + at.SET_POOL] + at.P_RESERVED, large, size)
        m[m[m[block + at.SET] + at.SET_POOL] + at.P_EVER] = 1


@kernel
def load_expandable(memory: Int64Array, base: int, size: int, page: int, which: int) -> int:
    """An ExpandableSegment of the initial state."""
    m = pointer(memory)
    segment = free_lists.take(m, at.FREE_EXPANDABLE, at.X_COLUMNS)
    m[segment + at.X_BASE] = base
    m[segment + at.X_BYTES] = size
    m[segment + at.X_PAGE] = page
    m[segment + at.X_SET] = which
    return segment


@kernel
def load_segment(memory: Int64Array, ids: Int64Array, rows: Int64Array, which: int, expandable: int) -> None:
    """Build one segment of the initial state.

    `rows` are its blocks in address order: ptr, size, requested, flags, dense id or -1.
    """
    m = pointer(memory)
    left = 0
    total = 0
    for i in range(rows.shape[0]):
        if left == 0:
            block = blocks.new_memory(m, rows[i, 0], rows[i, 1], which, rows[i, 3], expandable)
        else:
            block = blocks.new_fragment(m, left, rows[i, 0], rows[i, 1])
            m[block + at.FLAGS] = rows[i, 3]
            blocks.link_after(m, block, left)
        m[block + at.REQUESTED] = rows[i, 2]
        if rows[i, 3] & at.UNMAPPED == 0:
            total += rows[i, 1]
        if rows[i, 4] >= 0:
            ids[2 * rows[i, 4]] = block
            ids[2 * rows[i, 4] + 1] = rows[i, 1]
            m[block + at.OWNER] = rows[i, 4]
            m[block + at.EVENTS] = 0
        left = block
    if expandable == 0:
        add_initial(m, at.SEGMENT, m[which + at.SET_LARGE], 1)
        if total >= m[at.MAX_SPLIT]:
            add_initial(m, at.OVERSIZE_SEGMENTS, 0, 1)
    block = left
    while block != 0:
        flags = m[block + at.FLAGS]
        if flags & at.UNMAPPED != 0:
            blocks.insert_unmapped(m, block)
        elif flags & (at.ALLOCATED | at.PENDING) == 0:
            blocks.insert_free(m, block)
        count_initial(m, block)
        block = m[block + at.PREV]
    m[at.TOTAL_ALLOCATED] += total
