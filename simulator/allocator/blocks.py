"""Blocks: pieces of a segment in address order, the free ones each in a set of their pool and stream."""

from __future__ import annotations

from simulator.allocator import free_lists
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel(inline=True)
def set_of(m: Memory, pool: int, large: int, stream: int) -> int:
    """The free set of a (pool, small or large, stream number)."""
    return m[pool + at.P_SETS] + (large * m[at.NUM_STREAMS] + stream) * at.SET_COLUMNS


@kernel(inline=True)
def stream_value(m: Memory, which: int) -> int:
    """The stream of a set, as the trace numbers it."""
    return m[m[which + at.SET_STREAM] + at.S_VALUE]


@kernel(inline=True)
def stream_at(m: Memory, number: int) -> int:
    """The record of a stream."""
    return m[at.STREAMS] + number * at.S_COLUMNS


@kernel(inline=True)
def is_large(m: Memory, block: int) -> int:
    """1 for a block of a large pool, 0 for one of a small pool."""
    return (m[block + at.FLAGS] & at.LARGE) // at.LARGE


@kernel(inline=True)
def new_block(m: Memory, ptr: int, size: int, which: int, flags: int) -> int:
    """A Block object without neighbours, in no set."""
    block = free_lists.take(m, at.FREE_BLOCK, at.BLOCK_COLUMNS)
    m[at.LIVE_BLOCKS] += 1
    m[block + at.PTR] = ptr
    m[block + at.SIZE] = size
    m[block + at.REQUESTED] = 0
    m[block + at.PREV] = 0
    m[block + at.NEXT] = 0
    m[block + at.FLAGS] = flags
    m[block + at.SET] = which
    if m[at.TIE_BREAK] == at.TIE_BIRTH:
        m[block + at.TIE] = m[at.NUM_BIRTHS]
        m[at.NUM_BIRTHS] += 1
    return block


@kernel
def new_memory(m: Memory, ptr: int, size: int, which: int, flags: int, expandable: int) -> int:
    """A Block for memory (or address space) that was just obtained: it starts a segment."""
    block = new_block(m, ptr, size, which, flags)
    m[block + at.GC_BASE] = 0
    m[block + at.EXPANDABLE] = expandable
    m[block + at.BASE] = 0
    if m[at.TIE_BREAK] != at.TIE_BIRTH:
        m[block + at.TIE] = 0
    if m[at.TIE_BREAK] == at.TIE_SEGMENT:
        m[block + at.BASE] = ptr
        m[block + at.TIE] = m[at.NUM_SEGMENTS] << 35
        m[at.NUM_SEGMENTS] += 1
    return block


@kernel(inline=True)
def new_fragment(m: Memory, of: int, ptr: int, size: int) -> int:
    """A Block for a part of block `of`: same segment, set and flags."""
    block = new_block(m, ptr, size, m[of + at.SET], m[of + at.FLAGS])
    m[block + at.BASE] = m[of + at.BASE]
    m[block + at.GC_BASE] = 0
    m[block + at.EXPANDABLE] = m[of + at.EXPANDABLE]
    if m[at.TIE_BREAK] != at.TIE_BIRTH:
        m[block + at.TIE] = m[of + at.TIE]
    return block


@kernel(inline=True)
def drop_block(m: Memory, block: int) -> None:
    """Delete a Block object."""
    free_lists.drop(m, at.FREE_BLOCK, block)
    m[block + at.FLAGS] = 0
    m[at.LIVE_BLOCKS] -= 1


@kernel(inline=True)
def is_split(m: Memory, block: int) -> bool:
    """Block::is_split."""
    return (m[block + at.PREV] | m[block + at.NEXT]) != 0


@kernel(inline=True)
def stamp(m: Memory, block: int) -> None:
    """BlockPool::insert_into_blocks: remember the pool's GC clock."""
    m[block + at.GC_BASE] = m[m[m[block + at.SET] + at.SET_POOL] + at.P_CLOCK + is_large(m, block)]


@kernel
def insert_free(m: Memory, block: int) -> None:
    """Put a block into its free set."""
    stamp(m, block)
    free_lists.insert(m, m[block + at.SET], m[block + at.SIZE], free_lists.tie(m, block), block)


@kernel
def erase_free(m: Memory, block: int) -> None:
    """Take a block out of its free set."""
    free_lists.erase(m, m[block + at.SET], m[block + at.SIZE], free_lists.tie(m, block), block)


@kernel
def insert_unmapped(m: Memory, block: int) -> None:
    """Put a block into its set of unmapped blocks."""
    free_lists.insert(m, m[m[block + at.SET] + at.SET_UNMAPPED], m[block + at.PTR], free_lists.FIRST, block)


@kernel
def erase_unmapped(m: Memory, block: int) -> None:
    """Take a block out of its set of unmapped blocks."""
    free_lists.erase(m, m[m[block + at.SET] + at.SET_UNMAPPED], m[block + at.PTR], free_lists.FIRST, block)


@kernel(inline=True)
def can_merge(m: Memory, block: int, neighbour: int) -> bool:
    """Whether try_merge_blocks would absorb `neighbour` into `block`."""
    if neighbour == 0 or m[neighbour + at.FLAGS] & at.BUSY != 0:
        return False
    return (m[neighbour + at.FLAGS] ^ m[block + at.FLAGS]) & at.UNMAPPED == 0


@kernel(inline=True)
def absorb_left(m: Memory, block: int, left: int) -> None:
    """Grow `block` over its left neighbour, which is in no set any more."""
    m[block + at.PTR] = m[left + at.PTR]
    m[block + at.SIZE] += m[left + at.SIZE]
    before = m[left + at.PREV]
    m[block + at.PREV] = before
    if before != 0:
        m[before + at.NEXT] = block
    drop_block(m, left)


@kernel(inline=True)
def absorb_right(m: Memory, block: int, right: int) -> None:
    """Grow `block` over its right neighbour, which is in no set any more."""
    m[block + at.SIZE] += m[right + at.SIZE]
    after = m[right + at.NEXT]
    m[block + at.NEXT] = after
    if after != 0:
        m[after + at.PREV] = block
    drop_block(m, right)


@kernel(inline=True)
def link_before(m: Memory, fresh: int, block: int) -> None:
    """Make `fresh` the left neighbour of `block`."""
    left = m[block + at.PREV]
    m[fresh + at.PREV] = left
    m[fresh + at.NEXT] = block
    m[block + at.PREV] = fresh
    if left != 0:
        m[left + at.NEXT] = fresh


@kernel
def link_after(m: Memory, fresh: int, block: int) -> None:
    """Make `fresh` the right neighbour of `block`."""
    right = m[block + at.NEXT]
    m[fresh + at.NEXT] = right
    m[fresh + at.PREV] = block
    m[block + at.NEXT] = fresh
    if right != 0:
        m[right + at.PREV] = fresh
