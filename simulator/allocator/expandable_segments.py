"""Expandable segments: address space for the whole device, mapped page by page from its beginning."""

from __future__ import annotations

from simulator.allocator import blocks, driver, free_lists, sizes, statistics
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel
def new_expandable(m: Memory, which: int) -> int:
    """A new ExpandableSegment: address space for 9/8 of the device, nothing mapped."""
    page = m[at.LARGE_SEGMENT] if m[which + at.SET_LARGE] == 1 else sizes.SMALL_BUFFER
    size = m[at.DEVICE_TOTAL] + m[at.DEVICE_TOTAL] // 8
    if m[at.VA_RESERVE] >= 0:
        size = min(size, m[at.VA_RESERVE])
    size = (size + page - 1) // page * page
    segment = free_lists.take(m, at.FREE_EXPANDABLE, at.X_COLUMNS)
    m[segment + at.X_BASE] = driver.take_address(m, size)
    m[segment + at.X_BYTES] = size
    m[segment + at.X_PAGE] = page
    m[segment + at.X_SET] = which
    driver.log(m, at.LOG_RESERVE, m[segment + at.X_BASE], size, blocks.stream_value(m, which))
    return segment


@kernel
def drop_expandable(m: Memory, segment: int) -> None:
    """Destroy an ExpandableSegment that has nothing mapped."""
    base = m[segment + at.X_BASE]
    driver.log(m, at.LOG_RELEASE_VA, base, m[segment + at.X_BYTES], blocks.stream_value(m, m[segment + at.X_SET]))
    driver.give_address(m, base, m[segment + at.X_BYTES])
    free_lists.drop(m, at.FREE_EXPANDABLE, segment)


@kernel(inline=True)
def allocatable(m: Memory, block: int) -> bool:
    """Whether an expandable allocation may run over this block (mapped or not)."""
    return block != 0 and m[block + at.FLAGS] & at.BUSY == 0


@kernel
def has_address_space(m: Memory, block: int, size: int) -> bool:
    """Whether `block` and the allocatable blocks after it have together `size` bytes."""
    total = 0
    while total < size and allocatable(m, block):
        total += m[block + at.SIZE]
        block = m[block + at.NEXT]
    return total >= size


@kernel
def find_expandable_block(m: Memory, which: int, size: int) -> int:
    """find_expandable_block: the lowest place with enough address space, else a new segment; 0 if that is too small."""
    unmapped = m[which + at.SET_UNMAPPED]
    cursor = free_lists.first(m, unmapped)
    while cursor >= 0:
        block = free_lists.block_at(m, unmapped, cursor)
        if allocatable(m, m[block + at.PREV]):
            block = m[block + at.PREV]
        if has_address_space(m, block, size):
            return block
        cursor = free_lists.successor(m, unmapped, cursor)
    segment = new_expandable(m, which)
    if m[at.VA_CHECKED] == 1 and m[segment + at.X_BYTES] < size:
        drop_expandable(m, segment)
        return 0
    flags = at.UNMAPPED | at.IS_EXPANDABLE | (at.LARGE if m[which + at.SET_LARGE] == 1 else 0)
    block = blocks.new_memory(m, m[segment + at.X_BASE], m[segment + at.X_BYTES], which, flags, segment)
    blocks.insert_unmapped(m, block)
    return block


@kernel
def map_block(m: Memory, block: int, size: int) -> bool:
    """map_block: obtain the pages under the first `size` bytes of an unmapped block."""
    which = m[block + at.SET]
    page = m[m[block + at.EXPANDABLE] + at.X_PAGE]
    mapped = min((size + page - 1) // page * page, m[block + at.SIZE])  # less than pages only in an odd initial state
    if page % sizes.ROUND_LARGE != 0 and m[at.ODD_PAGE_ERROR] == 1:
        m[at.STOPPED] = at.STOP_ODD_PAGE
        return False
    if page % sizes.ROUND_LARGE != 0 or mapped > driver.device_free(m):
        driver.log(m, at.LOG_CREATE_REFUSED, 0, page, blocks.stream_value(m, which))
        return False
    start = m[block + at.PTR]
    blocks.erase_unmapped(m, block)
    if mapped < m[block + at.SIZE]:
        rest = blocks.new_fragment(m, block, start + mapped, m[block + at.SIZE] - mapped)
        blocks.link_after(m, rest, block)
        blocks.insert_unmapped(m, rest)
        m[block + at.SIZE] = mapped
    m[block + at.FLAGS] &= ~at.UNMAPPED
    left = m[block + at.PREV]
    right = m[block + at.NEXT]
    if blocks.can_merge(m, block, left):
        blocks.erase_free(m, left)
        blocks.absorb_left(m, block, left)
    if blocks.can_merge(m, block, right):
        blocks.erase_free(m, right)
        blocks.absorb_right(m, block, right)
    blocks.insert_free(m, block)
    m[at.DEVICE_USED] += mapped
    m[at.DEVICE_ALLOCS] += 1
    statistics.count_reserved(m, which, mapped)
    driver.log(m, at.LOG_MAP, start, mapped, blocks.stream_value(m, which))
    return True


@kernel
def unmap_block(m: Memory, block: int) -> None:
    """unmap_block: give back the whole pages inside a free block of an expandable segment."""
    which = m[block + at.SET]
    segment = m[block + at.EXPANDABLE]
    page = m[segment + at.X_PAGE]
    base = m[segment + at.X_BASE]
    begin = base + (m[block + at.PTR] - base + page - 1) // page * page
    end = base + (m[block + at.PTR] + m[block + at.SIZE] - base) // page * page
    if end <= begin:
        return
    blocks.erase_free(m, block)
    before = begin - m[block + at.PTR]
    after = m[block + at.PTR] + m[block + at.SIZE] - end
    if before > 0:
        fragment = blocks.new_fragment(m, block, m[block + at.PTR], before)
        blocks.link_before(m, fragment, block)
        blocks.insert_free(m, fragment)
    if after > 0:
        fragment = blocks.new_fragment(m, block, end, after)
        blocks.link_after(m, fragment, block)
        blocks.insert_free(m, fragment)
    m[block + at.PTR] = begin
    m[block + at.SIZE] = end - begin
    m[block + at.FLAGS] |= at.UNMAPPED
    left = m[block + at.PREV]
    right = m[block + at.NEXT]
    if blocks.can_merge(m, block, left):
        blocks.erase_unmapped(m, left)
        blocks.absorb_left(m, block, left)
    if blocks.can_merge(m, block, right):
        blocks.erase_unmapped(m, right)
        blocks.absorb_right(m, block, right)
    blocks.insert_unmapped(m, block)
    m[at.DEVICE_USED] -= (end - begin) // page * driver.round_granule(page)
    m[at.DEVICE_FREES] += 1
    m[m[which + at.SET_POOL] + at.P_MALLOC_COUNT] -= 1
    statistics.count_reserved(m, which, begin - end)
    driver.log(m, at.LOG_UNMAP, begin, end - begin, blocks.stream_value(m, which))
    if not blocks.is_split(m, block):
        blocks.erase_unmapped(m, block)
        drop_expandable(m, segment)
        blocks.drop_block(m, block)


@kernel
def allocate_expandable(m: Memory, which: int, size: int) -> int:
    """try_allocate_expandable_block: a free block of at least `size` bytes, left in its set; OUT if pages ran out."""
    block = find_expandable_block(m, which, size)
    if block == 0:
        return at.OUT
    if m[block + at.FLAGS] & at.UNMAPPED != 0 and not map_block(m, block, min(m[block + at.SIZE], size)):
        return at.OUT
    while m[block + at.SIZE] < size:
        following = m[block + at.NEXT]
        missing = size - m[block + at.SIZE]
        if following == 0 or m[following + at.FLAGS] & at.UNMAPPED == 0:  # mapped only in an odd initial state
            return at.OUT
        if not map_block(m, following, min(missing, m[following + at.SIZE])):
            return at.OUT
        block = following
    return block
