"""The blocks of a private pool at one point, and the pool with those blocks again: how PyTorch's trees of CUDA graphs
record a graph after others were replayed (Note [Checkpointing PrivatePoolState] in CUDACachingAllocator.cpp)."""

from __future__ import annotations

from simulator.allocator import free, malloc, release_blocks
from simulator.allocator import layout as at
from traces.jit import kernel, pointer
from traces.model import Int64Array

#: Columns of a checkpoint's blocks, in address order inside their segment; the last takes the restored block.
COLUMNS = 4
(C_ADDRESS, C_BYTES, C_OWNER, C_BLOCK) = range(COLUMNS)
#: In the place of an owner (a dense id): a free block, one without memory.
FREE = -1
UNMAPPED = -2


@kernel
def restore_segment(memory: Int64Array, rows: Int64Array, head: int) -> None:
    """setSegmentStateToCheckpoint: all blocks are allocated, one after the other, then those that were free are freed.

    `head` is the free block with which the segment begins. Stops where the segment has not the room.
    """
    m = pointer(memory)
    block = head
    for i in range(rows.shape[0]):
        if rows[i, C_OWNER] == UNMAPPED:
            continue
        size = rows[i, C_BYTES]
        unfit = block == 0 or m[block + at.FLAGS] & (at.BUSY | at.UNMAPPED) != 0
        if unfit or m[block + at.PTR] != rows[i, C_ADDRESS] or m[block + at.SIZE] < size:
            m[at.STOPPED] = at.STOP_RESTORE
            return
        cursor = release_blocks.cursor_of(m, block)
        rows[i, C_BLOCK] = malloc.hand_out(m, block, cursor, size, size, m[block + at.SIZE] > size)
        block = m[rows[i, C_BLOCK] + at.NEXT]
    for i in range(rows.shape[0]):
        if rows[i, C_OWNER] == FREE:
            free.free(m, rows[i, C_BLOCK], 0)
