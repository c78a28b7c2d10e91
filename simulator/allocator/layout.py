"""How the allocator's state lies in memory: one int64 array, records in it, and the names of their words.

The array is a small heap. A record (a block, a leaf, a list node) is referred to by its offset; its words are read as
`m[block + SIZE]`. Offset 0 is "none". The header holds the scalars below; after it lie the streams, pools and sets of
the replay, then records in the order in which they were needed, up to `TOP`. The array only ever grows at its end, and
only between events (`Machine.grow`), so offsets stay valid.
"""

from __future__ import annotations

from typing import Final

from traces.model import Int64Array

Memory = Int64Array  # in compiled kernels a bare pointer (traces.jit.pointer)

# --- blocks: one record a Block object; the first eight words share a cache line -----------------------------------
PTR: Final = 0
SIZE: Final = 1
REQUESTED: Final = 2  # stale in free blocks, as in PyTorch
PREV: Final = 3  # address neighbours inside the same segment
NEXT: Final = 4
FLAGS: Final = 5
SET: Final = 6  # the free set it belongs to: pool, small or large, stream
TIE: Final = 7  # part of the order among free blocks of equal size: see free_lists.tie
BASE: Final = 8  # lowest address of its segment (order of 2.13 and later)
GC_BASE: Final = 9  # pool clock at its last insertion into a free set
EXPANDABLE: Final = 10  # its ExpandableSegment, or 0
OWNER: Final = 11  # dense id of a pending free
USES: Final = 12  # head of its list of stream uses (nodes), while HAS_USES
EVENTS: Final = 13  # outstanding events of a pending free
BLOCK_COLUMNS: Final = 16

# bits of FLAGS
ALLOCATED: Final = 1
LARGE: Final = 2
UNMAPPED: Final = 4
IS_EXPANDABLE: Final = 8
PENDING: Final = 16  # freed, waits for events (or for the end of a capture)
HAS_USES: Final = 32
BUSY: Final = ALLOCATED | PENDING | HAS_USES  # cannot be merged

# --- leaves of the ordered sets (free_lists.py) -----------------------------------------------------------------------
LEAF: Final = 32  # entries a leaf
LEAF_KEYS: Final = 0
LEAF_BLOCKS: Final = LEAF
LEAF_COUNT: Final = 2 * LEAF
LEAF_COLUMNS: Final = 2 * LEAF + 8

# --- sets: one record a (pool, small or large, stream) for free blocks, one beside it for unmapped blocks -----------
SET_COUNT: Final = 0  # leaves
SET_CAPACITY: Final = 1
SET_DIRECTORY: Final = 2  # list of leaves
SET_POOL: Final = 3  # record of the pool
SET_LARGE: Final = 4
SET_STREAM: Final = 5  # record of the stream
SET_UNMAPPED: Final = 6  # the set of unmapped blocks beside it
SET_COLUMNS: Final = 8

# --- ExpandableSegments ---------------------------------------------------------------------------------------------
X_BASE: Final = 0
X_BYTES: Final = 1
X_PAGE: Final = 2
X_SET: Final = 3
X_COLUMNS: Final = 4

# --- nodes: lists of stream uses, and FIFOs of recorded events ------------------------------------------------------
N_NEXT: Final = 0
N_STREAM: Final = 1  # of a use: record of the stream
N_BLOCK: Final = 1  # of an event
N_TIME: Final = 2  # of an event: complete when the host clock reaches it
N_SERIAL: Final = 3  # of an event: tells a reused record
N_CAPTURED: Final = 3  # of a use: recorded during a capture
N_COLUMNS: Final = 4

# --- streams, in the order of handles -------------------------------------------------------------------------------
S_HEAD: Final = 0  # FIFO of events
S_TAIL: Final = 1
S_CLOCK: Final = 2  # when its known work ends
S_WAITING: Final = 3  # 1: behind a collective whose start is not known yet
S_VALUE: Final = 4  # the stream's number in the trace
S_COLUMNS: Final = 5

# --- work: a list of items on streams behind an unresolved collective -----------------------------------------------
W_NEXT: Final = 0
W_KIND: Final = 1
W_STREAM: Final = 2
W_ISSUED: Final = 3  # host clock at the launch
W_DURATION: Final = 4
W_REF: Final = 5  # record of the collective, the event node, or the stream waited for
W_SERIAL: Final = 6
W_COLUMNS: Final = 7
WORK_KERNEL: Final = 0
WORK_COLLECTIVE: Final = 1
WORK_EVENT: Final = 2
WORK_WAIT: Final = 3

# --- collectives of the rank, in order of launch --------------------------------------------------------------------
C_EVENT: Final = 0  # index of the trace's event
C_ARRIVAL: Final = 1  # when this rank reached it, or -1
C_START: Final = 2  # when it started everywhere, or -1
C_COLUMNS: Final = 3

# --- pools: the first is the default pool ---------------------------------------------------------------------------
P_USE_COUNT: Final = 0
P_MALLOC_COUNT: Final = 1  # cudaMalloc_count
P_NO_SPLIT: Final = 2
P_ON_OOM: Final = 3
P_ALIVE: Final = 4
P_SCOPE: Final = 5  # the pools of open scopes, oldest first, stand in this word of all pools, counted by SCOPES
P_CLOCK: Final = 6  # GC clocks of its small and large BlockPool
P_CREATED: Final = 8  # order of creation
P_PRIVATE: Final = 9  # 1 for all but the default pool
P_SETS: Final = 10  # its free sets: those of the small pool by stream, then those of the large pool
P_RESERVED: Final = 11  # reserved_bytes of the pool: a row of statistics, as below
P_EVER: Final = P_RESERVED + 12  # 1 once it reserved anything
P_CAPTURED: Final = P_EVER + 1  # 1 while it is open, and whoever draws from it has a stream that is captured
P_COLUMNS: Final = P_CAPTURED + 1

# --- scalars: settings, switches and counters, one int64 each ------------------------------------------------------
(
    MAX_SPLIT,
    NON_SPLIT_ROUNDING,
    LARGE_SEGMENT,
    EXPANDABLE_ON,
    GC_ON,  # a threshold is set and a limit exists
    GC_THRESHOLD,  # bytes
    LIMIT,  # allowed_max, or -1
    REJECT_CAP,  # bytes above which cudaMalloc is refused at once, or -1
    DIVISIONS_ON,
    TIE_BREAK,
    ONE_UNROUNDED,
    EXPANDABLE_IN_POOLS,
    EXPANDABLE_ASSERTS,
    ON_OOM_EARLY,
    ON_OOM_LATE,
    NEWEST_SCOPE,
    SCOPE_CAPTURES,
    EMPTY_IN_CAPTURE,
    NO_SPLIT_POOLS,
    VA_CHECKED,
    ODD_PAGE_ERROR,
    CAPACITY,  # physical bytes that the process may take
    DEVICE_TOTAL,
    OTHER_BYTES,  # taken by other processes
    DEVICE_USED,  # physical bytes taken by this allocator
    PLACEMENT,
    VA_TOP,
    VA_RECORDED,  # how many recorded addresses were used
    GAPS,  # set of gaps in the address space below the top
    STREAMS,  # record of the first stream
    POOLS,  # record of the default pool
    SETS,  # record of the first free set
    COLLECTIVES,  # record of the first collective
    LOG,  # first entry of the log
    LOG_ROOM,  # entries that the log can hold
    TOP,  # end of the memory in use
    ROOM,  # words that the memory has
    RECORDED,  # first of the recorded addresses,
    NUM_RECORDED,  # and how many they are
    NUM_STREAMS,
    NUM_POOLS,
    FREE_EXPANDABLE,
    NUM_SEGMENTS,  # order of creation of memory
    NUM_BIRTHS,  # order of construction of blocks
    FREE_BLOCK,  # heads of the lists of unused records
    LIVE_BLOCKS,
    FREE_LEAF,
    LIVE_LEAVES,
    FREE_NODE,
    FREE_WORK,
    DEFERRED,  # head of the list of frees deferred by a capture
    DEFERRED_TAIL,
    SCOPES,
    SERVING,  # record of the pool that requests go to now
    OUTSTANDING,  # events in all FIFOs
    HOLD,
    HOST,  # host clock, ns
    TIMED,
    LAUNCH_NS,
    SERIAL,
    WORK,  # first and last of the queued work
    LAST_WORK,
    QUEUED,  # items of queued work
    NUM_COLLECTIVES,
    EVENT,  # index of the event being served
    LOGGING,
    LOGGED,
    TOTAL_ALLOCATED,  # total_allocated_memory
    STOPPED,  # which error the kernel met
    CREATED,  # counter for P_CREATED
    RETRIES,
    OOMS,
    SYNCS,
    DEVICE_ALLOCS,
    DEVICE_FREES,
    REJECTIONS,
    FAILED_BYTES,  # the last failed allocation, rounded
    OOM_FREE,  # what the driver had left then
    OOM_COUNTED,  # how many OOMs were met, also those no counter sees
    VA_RESERVE,  # expandable_segments_reserve in bytes, or -1
    SEARCH_AGAIN,  # proposals that no release has: search the pool again after the retry,
    EXEMPT,  # and expandable blocks are exempt from max_split_size
    PEAK_RESERVED,  # reserved bytes at their first peak between events, and what was free in them
    PEAK_EVENT,
    PEAK_STRANDED,
    PEAK_CACHED,
) = range(86)
DIVISIONS: Final = 86  # 16 values
STATS: Final = DIVISIONS + 16  # see below

# statistics: for each stat a row of 12: for small, large: current, allocated, peak, base; then the peak of both
(
    ALLOCATION,
    SEGMENT,
    ACTIVE,
    INACTIVE_SPLIT,
    ALLOCATED_BYTES,
    RESERVED_BYTES,
    ACTIVE_BYTES,
    INACTIVE_SPLIT_BYTES,
    REQUESTED_BYTES,
    OVERSIZE_ALLOCATIONS,
    OVERSIZE_SEGMENTS,
) = range(11)
STAT_NAMES: Final = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
    "oversize_allocations",
    "oversize_segments",
)
NUM_STATS: Final = 11
STAT_ROW: Final = 12
ST_CURRENT: Final = 0
ST_ALLOCATED: Final = 1
ST_PEAK: Final = 2
ST_BASE: Final = 3  # current when the accumulated counts were last reset: freed = base + allocated - current
ST_POOL: Final = 4  # columns a pool
ST_PEAK_ALL: Final = 8
SCALARS: Final = STATS + NUM_STATS * STAT_ROW

TIE_ADDRESS: Final = 0
TIE_BIRTH: Final = 1
TIE_SEGMENT: Final = 2

PLACE_FIRST_FIT: Final = 0
PLACE_BUMP: Final = 1
PLACE_RECORDED: Final = 2
PLACE_DRIVER: Final = 3

UNLIMITED: Final = (1 << 63) - 1  # max_split_size where it is not set
NEXT_POWER: Final = 1 << 55  # so many divisions make no division: rounded to the next power of two
NEVER: Final = 1 << 62  # a time that no clock reaches
UNKNOWN: Final = NEVER - 1  # ... because a collective's start is not known yet

# --- log: entries of five words -------------------------------------------------------------------------------------
L_KIND: Final = 0
L_EVENT: Final = 1
L_ADDRESS: Final = 2
L_BYTES: Final = 3
L_STREAM: Final = 4
L_COLUMNS: Final = 5
# kinds, in the order of result.LOG_KINDS
(
    LOG_MALLOC,
    LOG_MALLOC_REFUSED,
    LOG_DEVICE_FREE,
    LOG_RESERVE,
    LOG_RELEASE_VA,
    LOG_MAP,
    LOG_UNMAP,
    LOG_CREATE_REFUSED,
    LOG_ALLOC,
    LOG_FREE_REQUESTED,
    LOG_FREE_COMPLETED,
    LOG_OOM,
) = range(12)

# --- what `engine.run` reports back -----------------------------------------------------------------------------------
DONE: Final = 0
GROW: Final = 1  # arrays need room before the event can be served
CONTROL: Final = 2  # an event that Python serves: settings, reports
OUT_OF_MEMORY: Final = 3  # the event's allocation failed (reported after the event)
WAIT: Final = 4  # the event needs the start of a collective that is not known yet
FAILED: Final = 5  # undefined in PyTorch: see STOPPED
PAUSED: Final = 6  # reached the index asked for

# what a malloc gives in the place of a block
OUT: Final = -1  # no memory
REJECTED: Final = -2  # throw_on_cudamalloc_oom refused

# reasons in STOPPED
STOP_SPLIT_RELEASED: Final = 1  # max_split_size was lowered at run time: a split block would be released
STOP_EXPANDABLE_ASSERT: Final = 2  # before 2.6: GC or max_split release meets an expandable block
STOP_ODD_PAGE: Final = 3  # 2.15: page size that the driver refuses
STOP_CAPTURE: Final = 5  # before 2.8: empty_cache during a capture
STOP_RESTORE: Final = 6  # a pool cannot get the blocks of a checkpoint
STOP_ADDRESSES: Final = 4  # no address space is left above what was handed out
