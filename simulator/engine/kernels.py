"""The event loop of one rank: serve a trace's events until something needs the outside.

`run` goes through the columns of a rank's events and stops with a status: done, room needed in the arrays, an event
that Python serves (settings, reports), an out-of-memory to look at, or a wait for other ranks. It can always be
called again from where it stopped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.allocator import freelist
from simulator.allocator.allocator import (
    capturing,
    complete_events,
    complete_free,
    free,
    has_unknown_event,
    insert_free,
    insert_unmapped,
    is_large,
    is_split,
    link_after,
    malloc,
    new_fragment,
    new_memory,
    pool_at,
    raise_row,
    record_stream,
    release_cached_blocks,
    served_at_once,
    stream_at,
)
from simulator.allocator.layout import (
    ACTIVE,
    ACTIVE_BYTES,
    ALLOCATED,
    ALLOCATED_BYTES,
    ALLOCATION,
    BLOCK_COLUMNS,
    CONTROL,
    CREATED,
    DEVICE_ALLOCS,
    DEVICE_FREES,
    DONE,
    EMPTY_IN_CAPTURE,
    EVENT,
    EVENTS,
    EXPANDABLE,
    FAILED,
    FLAGS,
    FREE_EXPANDABLE,
    GROW,
    HAS_USES,
    HOLD,
    HOST,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    IS_EXPANDABLE,
    LEAF_COLUMNS,
    LIVE_BLOCKS,
    LIVE_LEAVES,
    LOG_ROOM,
    LOGGED,
    LOGGING,
    MAX_SPLIT,
    NEXT,
    NO_SPLIT_POOLS,
    NUM_POOLS,
    NUM_STATS,
    NUM_STREAMS,
    OOMS,
    OTHER_BYTES,
    OUT_OF_MEMORY,
    OUTSTANDING,
    OVERSIZE_ALLOCATIONS,
    OVERSIZE_SEGMENTS,
    OWNER,
    P_ALIVE,
    P_CREATED,
    P_EVER,
    P_MALLOC_COUNT,
    P_NO_SPLIT,
    P_ON_OOM,
    P_RESERVED,
    P_SCOPE,
    P_USE_COUNT,
    PAUSED,
    PEAK_CACHED,
    PEAK_EVENT,
    PEAK_RESERVED,
    PEAK_STRANDED,
    PENDING,
    PREV,
    PTR,
    QUEUED,
    REJECTIONS,
    REQUESTED,
    REQUESTED_BYTES,
    RESERVED_BYTES,
    RETRIES,
    ROOM,
    SCOPES,
    SEGMENT,
    SET,
    SET_COLUMNS,
    SET_LARGE,
    SET_POOL,
    SETS,
    SIZE,
    ST_ALLOCATED,
    ST_BASE,
    ST_CURRENT,
    ST_PEAK,
    ST_PEAK_ALL,
    ST_POOL,
    STAT_ROW,
    STATS,
    STOP_CAPTURE,
    STOPPED,
    SYNCS,
    TIMED,
    TOP,
    TOTAL_ALLOCATED,
    UNMAPPED,
    WAIT,
    X_BASE,
    X_BYTES,
    X_COLUMNS,
    X_PAGE,
    X_SET,
    Memory,
)
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
) = range(23)

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


@kernel(inline=True)
def words_needed(m: Memory) -> int:
    """A bound on the words that one event may take from the top of the memory.

    A release can cut every free block in three, and every new block may need a leaf entry; directories double.
    """
    return (m[LIVE_BLOCKS] + 32) * (2 * BLOCK_COLUMNS + 16) + (m[LIVE_LEAVES] + 8) * (LEAF_COLUMNS + 8)


@kernel(inline=True)
def has_room(m: Memory) -> bool:
    """Whether the memory and the log can take whatever one event may add."""
    if m[TOP] + words_needed(m) > m[ROOM]:
        return False
    return m[LOGGING] == 0 or m[LOGGED] + 4 * m[LIVE_BLOCKS] + 64 <= m[LOG_ROOM]


@kernel
def stat_row(m: Memory, number: int) -> int:
    """The rows of statistics: those of the allocator, then reserved_bytes of every pool."""
    if number < NUM_STATS:
        return STATS + number * STAT_ROW
    return pool_at(m, number - NUM_STATS) + P_RESERVED


@kernel
def reset_peak(m: Memory) -> None:
    """resetPeakStats: every peak becomes the current value."""
    for number in range(NUM_STATS + m[NUM_POOLS]):
        row = stat_row(m, number)
        for pool in range(2):
            cell = row + pool * ST_POOL
            m[cell + ST_PEAK] = m[cell]
        m[row + ST_PEAK_ALL] = m[row] + m[row + ST_POOL]


@kernel
def reset_accumulated(m: Memory) -> None:
    """resetAccumulatedStats: allocated and freed counts, and the plain counters, become 0."""
    for number in range(NUM_STATS + m[NUM_POOLS]):
        for pool in range(2):
            cell = stat_row(m, number) + pool * ST_POOL
            m[cell + ST_ALLOCATED] = 0
            m[cell + ST_BASE] = m[cell]
    for counter in (RETRIES, OOMS, SYNCS, DEVICE_ALLOCS, DEVICE_FREES, REJECTIONS):
        m[counter] = 0


@kernel
def create_pool(m: Memory, pool: int) -> None:
    """createOrIncref of a private pool."""
    if m[pool + P_ALIVE] == 1:
        m[pool + P_USE_COUNT] += 1
        return
    m[pool + P_ALIVE] = 1
    m[pool + P_USE_COUNT] = 1
    m[pool + P_MALLOC_COUNT] = 0
    m[pool + P_CREATED] = m[CREATED]
    m[CREATED] += 1


@kernel
def end_scope(m: Memory, pool: int) -> None:
    """endAllocateToPool: take the pool off the list of scopes."""
    kept = 0
    for i in range(m[SCOPES]):
        if m[pool_at(m, i) + P_SCOPE] != pool:
            m[pool_at(m, kept) + P_SCOPE] = m[pool_at(m, i) + P_SCOPE]
            kept += 1
    m[SCOPES] = kept


@kernel
def serve_pool(m: Memory, op: int, packed: int) -> None:
    """The private pool events."""
    pool = pool_at(m, packed & POOL_MASK)
    if op == POOL_CREATE:
        create_pool(m, pool)
        if packed & POOL_NO_SPLIT != 0 and m[NO_SPLIT_POOLS] == 1:
            m[pool + P_NO_SPLIT] = 1
        if packed & POOL_ON_OOM != 0:
            m[pool + P_ON_OOM] = 1
    elif op == POOL_BEGIN:
        create_pool(m, pool)
        m[pool_at(m, m[SCOPES]) + P_SCOPE] = pool
        m[SCOPES] += 1
    elif op == POOL_END:
        end_scope(m, pool)
    elif m[pool + P_USE_COUNT] > 0:
        m[pool + P_USE_COUNT] -= 1
        if m[pool + P_USE_COUNT] == 0:
            m[pool + P_NO_SPLIT] = 0
            m[pool + P_ON_OOM] = 0


@kernel
def must_wait(m: Memory) -> bool:
    """Whether a pending free waits for work whose time other ranks decide."""
    return m[TIMED] == 1 and m[OUTSTANDING] > 0 and m[QUEUED] > 0 and has_unknown_event(m)


@kernel
def serve_rare(m: Memory, op: int, block: int, ident: int, arg: int, number: int) -> int:
    """Every op but alloc and free; a status other than DONE where the event was not served.

    `block` is the block of the event's id (0: none), `number` the dense number of its stream (-1: all).
    """
    if op == RECORD_STREAM:
        if block > 0:
            record_stream(m, block, stream_at(m, number))
    elif op == KERNEL:
        launch_kernel(m, stream_at(m, number), arg)
    elif op == COLLECTIVE:
        launch_collective(m, stream_at(m, number), arg)
    elif op == WAIT_STREAM:
        wait_stream(m, stream_at(m, number), stream_at(m, arg))
    elif op == HOLD_EVENTS:
        m[HOLD] = arg
        if arg == 0:
            for i in range(m[NUM_STREAMS]):
                complete_events(m, stream_at(m, i), True)
    elif op == COMPLETE_EVENTS:
        complete_events(m, stream_at(m, number), False)
    elif op == COMPLETE_FREE:
        complete_free(m, block, ident)
    elif op == SYNCHRONIZE:
        if not synchronize(m, number):
            return WAIT
    elif op == EMPTY_CACHE:
        if must_wait(m):
            return WAIT
        if capturing(m) and m[EMPTY_IN_CAPTURE] == 0:
            m[STOPPED] = STOP_CAPTURE
        else:
            release_cached_blocks(m)
    elif op == RESET_PEAK:
        reset_peak(m)
    elif op == RESET_ACCUMULATED:
        reset_accumulated(m)
    elif op == OTHER_PROCESS:
        m[OTHER_BYTES] = arg
    elif op >= POOL_CREATE and op <= POOL_RELEASE:
        serve_pool(m, op, arg)
    elif op != PHASE:
        return CONTROL
    return DONE


@kernel
def giveable(m: Memory, block: int) -> int:
    """How much of a free block the allocator could give back: all of an unsplit segment, or whole pages."""
    if m[block + FLAGS] & IS_EXPANDABLE == 0:
        return m[block + SIZE] if m[block + PREV] == 0 and m[block + NEXT] == 0 else 0
    segment = m[block + EXPANDABLE]
    page = m[segment + X_PAGE]
    begin = (m[block + PTR] - m[segment + X_BASE] + page - 1) // page
    end = (m[block + PTR] + m[block + SIZE] - m[segment + X_BASE]) // page
    return max(end - begin, 0) * page


@kernel
def note_peak(m: Memory, reserved: int) -> None:
    """Reserved bytes reached a new peak: what of them is free, and what could be given back."""
    m[PEAK_RESERVED] = reserved
    m[PEAK_EVENT] = m[EVENT]
    cached = 0
    free_bytes = 0
    for i in range(m[NUM_POOLS] * 2 * m[NUM_STREAMS]):
        which = m[SETS] + i * SET_COLUMNS
        cursor = freelist.first(m, which)
        while cursor >= 0:
            free_bytes += freelist.key_at(m, which, cursor)
            cached += giveable(m, freelist.block_at(m, which, cursor))
            cursor = freelist.successor(m, which, cursor)
    m[PEAK_CACHED] = cached
    m[PEAK_STRANDED] = free_bytes - cached


@kernel(inline=True)
def write_out(m: Memory, out: Memory, columns: int, index: int) -> None:
    """What stands after an event."""
    at = index * columns
    row = STATS + ALLOCATED_BYTES * STAT_ROW
    out[at + OUT_ALLOCATED] = m[row] + m[row + ST_POOL]
    row = STATS + ACTIVE_BYTES * STAT_ROW
    out[at + OUT_ACTIVE] = m[row] + m[row + ST_POOL]
    row = STATS + RESERVED_BYTES * STAT_ROW
    reserved = m[row] + m[row + ST_POOL]
    out[at + OUT_RESERVED] = reserved
    if reserved > m[PEAK_RESERVED]:
        note_peak(m, reserved)
    if columns > OUT_PLAIN:
        out[at + OUT_TIME] = m[HOST]
        if columns == OUT_FULL:
            row = STATS + SEGMENT * STAT_ROW
            out[at + OUT_SEGMENTS] = m[row] + m[row + ST_POOL]
            out[at + OUT_RETRIES] = m[RETRIES]
            out[at + OUT_OOMS] = m[OOMS]


@kernel(inline=True)
def serve(m: Memory, ids: Memory, op: int, ident: int, arg: int, stream: int, patient: bool) -> tuple[int, int]:
    """Serve one event: a status, and the address that the event's row shows (0 none, -1 out of memory)."""
    if op == ALLOC:
        if arg == 0:
            return DONE, 0
        if m[TIMED] == 1 and must_wait(m) and not (patient and served_at_once(m, arg, stream)):
            return WAIT, 0
        block = malloc(m, arg, stream)
        if block < 0:
            return OUT_OF_MEMORY, -1
        ids[2 * ident] = block
        ids[2 * ident + 1] = m[block + SIZE]
        return DONE, m[block + PTR]
    if op == FREE:
        block = ids[2 * ident]
        if block == 0:
            return DONE, 0
        address = m[block + PTR]
        if m[block + FLAGS] & HAS_USES == 0:
            ids[2 * ident] = 0
        free(m, block, ident)
        return DONE, address
    block = ids[2 * ident] if op in (RECORD_STREAM, COMPLETE_FREE) else 0
    address = m[block + PTR] if block > 0 and op == RECORD_STREAM else 0
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
            return GROW, index
        m[EVENT] = index
        status, address = serve(
            m, ids, op_of[index], ident_of[index], arg_of[index], stream_of[index], patient == index
        )
        if status != DONE and status != OUT_OF_MEMORY:
            return status, index
        if m[STOPPED] != 0:
            return FAILED, index
        if host_ns.shape[0] > 0:
            m[HOST] += host_ns[index]
        if columns == OUT_FULL:
            out[index * columns + OUT_ADDRESS] = address
        write_out(m, out, columns, index)
        if status == OUT_OF_MEMORY:
            return status, index
    return PAUSED, stop


@kernel
def finish_event(memory: Int64Array, table: Int64Array, columns: int, index: int) -> None:
    """Enter what stands after an event that was served outside `run`."""
    write_out(pointer(memory), pointer(table), columns, index)


@kernel
def resolve_work(memory: Int64Array) -> None:
    """`streams.resolve`, for callers from Python."""
    resolve(pointer(memory))


# --- the state that a recording began with ------------------------------------------------------------------------


@kernel
def add_initial(m: Memory, stat: int, large: int, amount: int) -> None:
    """Raise a statistic's current value and peak, as allocated before the recording."""
    cell = STATS + stat * STAT_ROW + large * ST_POOL
    m[cell + ST_CURRENT] += amount
    m[cell + ST_ALLOCATED] += amount
    m[cell + ST_PEAK] = m[cell]
    row = STATS + stat * STAT_ROW
    m[row + ST_PEAK_ALL] = m[row] + m[row + ST_POOL]


@kernel
def count_initial(m: Memory, block: int) -> None:
    """Enter a block of the initial state into the statistics."""
    flags = m[block + FLAGS]
    size = m[block + SIZE]
    large = is_large(m, block)
    if flags & (ALLOCATED | PENDING) != 0:
        add_initial(m, ACTIVE, large, 1)
        add_initial(m, ACTIVE_BYTES, large, size)
        add_initial(m, REQUESTED_BYTES, large, m[block + REQUESTED])
        if flags & ALLOCATED != 0:
            add_initial(m, ALLOCATION, large, 1)
            add_initial(m, ALLOCATED_BYTES, large, size)
            if size >= m[MAX_SPLIT]:
                add_initial(m, OVERSIZE_ALLOCATIONS, 0, 1)
    elif flags & (IS_EXPANDABLE | UNMAPPED) == 0 and is_split(m, block):
        add_initial(m, INACTIVE_SPLIT, large, 1)
        add_initial(m, INACTIVE_SPLIT_BYTES, large, size)
    if flags & UNMAPPED == 0:
        add_initial(m, RESERVED_BYTES, large, size)
        raise_row(m, m[m[block + SET] + SET_POOL] + P_RESERVED, large, size)
        m[m[m[block + SET] + SET_POOL] + P_EVER] = 1


@kernel
def load_expandable(memory: Int64Array, base: int, size: int, page: int, which: int) -> int:
    """An ExpandableSegment of the initial state."""
    m = pointer(memory)
    segment = freelist.take(m, FREE_EXPANDABLE, X_COLUMNS)
    m[segment + X_BASE] = base
    m[segment + X_BYTES] = size
    m[segment + X_PAGE] = page
    m[segment + X_SET] = which
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
            block = new_memory(m, rows[i, 0], rows[i, 1], which, rows[i, 3], expandable)
        else:
            block = new_fragment(m, left, rows[i, 0], rows[i, 1])
            m[block + FLAGS] = rows[i, 3]
            link_after(m, block, left)
        m[block + REQUESTED] = rows[i, 2]
        if rows[i, 3] & UNMAPPED == 0:
            total += rows[i, 1]
        if rows[i, 4] >= 0:
            ids[2 * rows[i, 4]] = block
            ids[2 * rows[i, 4] + 1] = rows[i, 1]
            m[block + OWNER] = rows[i, 4]
            m[block + EVENTS] = 0
        left = block
    if expandable == 0:
        add_initial(m, SEGMENT, m[which + SET_LARGE], 1)
        if total >= m[MAX_SPLIT]:
            add_initial(m, OVERSIZE_SEGMENTS, 0, 1)
    block = left
    while block != 0:
        flags = m[block + FLAGS]
        if flags & UNMAPPED != 0:
            insert_unmapped(m, block)
        elif flags & (ALLOCATED | PENDING) == 0:
            insert_free(m, block)
        count_initial(m, block)
        block = m[block + PREV]
    m[TOTAL_ALLOCATED] += total
