"""Ordered sets of blocks, the place of PyTorch's `std::set<Block*>`.

A set keeps (key, block) pairs in ascending order, in small leaves; a directory lists the leaves in order and
is searched by halving; insertion and removal move at most one leaf. Free blocks have key = size, and `tie`
orders those of equal size. Unmapped blocks of expandable segments have key = address, gaps of the address space too
(their "block" is the size of the gap): these keys are unique, their order is given as `FIRST`.

A *cursor* is a position in a set: place of the leaf in the directory * LEAF + index in the leaf; -1 is none.
"""

from __future__ import annotations

from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel

FIRST = -1  # an order before that of every block
PADDING = (1 << 63) - 1  # key of the unused entries of a leaf


@kernel(inline=True)
def tie(m: Memory, block: int) -> int:
    """What decides among free blocks of equal size (BlockComparator of each release).

    Up to 2.11 the lower address; in 2.12 the older Block object; from 2.13 the older segment, then the address.
    `TIE` holds 0, the object's birth, or the segment's number in the high bits.
    """
    if m[at.TIE_BREAK] == at.TIE_BIRTH:
        return m[block + at.TIE]
    return m[block + at.TIE] + ((m[block + at.PTR] - m[block + at.BASE]) >> 9)


@kernel(inline=True)
def below(m: Memory, entry: int, key: int, order: int) -> bool:
    """Whether the entry stored at offset `entry` comes before (key, order)."""
    found = m[entry + at.LEAF_KEYS]
    return found < key or (found == key and order > FIRST and tie(m, m[entry + at.LEAF_BLOCKS]) < order)


@kernel(inline=True)
def take(m: Memory, head: int, columns: int) -> int:
    """A record of `columns` words: from the list of unused ones at `head`, else from the top of the memory."""
    record = m[head]
    if record != 0:
        m[head] = m[record]
    else:
        record = m[at.TOP]
        m[at.TOP] = record + columns
    return record


@kernel(inline=True)
def drop(m: Memory, head: int, record: int) -> None:
    """Put a record on the list of unused ones at `head`."""
    m[record] = m[head]
    m[head] = record


@kernel
def widen(m: Memory, which: int) -> None:
    """Double the directory of a set that is full."""
    capacity = 2 * m[which + at.SET_CAPACITY] + 4
    fresh = m[at.TOP]
    m[at.TOP] += capacity
    for i in range(m[which + at.SET_COUNT]):
        m[fresh + i] = m[m[which + at.SET_DIRECTORY] + i]
    m[which + at.SET_DIRECTORY] = fresh
    m[which + at.SET_CAPACITY] = capacity


@kernel
def insert_leaf(m: Memory, which: int, place: int) -> int:
    """A new empty leaf at `place` of the directory."""
    if m[which + at.SET_COUNT] == m[which + at.SET_CAPACITY]:
        widen(m, which)
    leaf = take(m, at.FREE_LEAF, at.LEAF_COLUMNS)
    m[at.LIVE_LEAVES] += 1
    m[leaf + at.LEAF_COUNT] = 0
    for i in range(at.LEAF):
        m[leaf + at.LEAF_KEYS + i] = PADDING
    row = m[which + at.SET_DIRECTORY]
    for i in range(m[which + at.SET_COUNT], place, -1):
        m[row + i] = m[row + i - 1]
    m[row + place] = leaf
    m[which + at.SET_COUNT] += 1
    return leaf


@kernel
def drop_leaf(m: Memory, which: int, place: int) -> None:
    """Take the leaf at `place` out of the directory."""
    row = m[which + at.SET_DIRECTORY]
    drop(m, at.FREE_LEAF, m[row + place])
    m[at.LIVE_LEAVES] -= 1
    m[which + at.SET_COUNT] -= 1
    for i in range(place, m[which + at.SET_COUNT]):
        m[row + i] = m[row + i + 1]


@kernel
def split_leaf(m: Memory, which: int, place: int) -> None:
    """Move the upper half of a full leaf into a new one after it."""
    high = insert_leaf(m, which, place + 1)
    low = m[m[which + at.SET_DIRECTORY] + place]
    half = at.LEAF // 2
    for i in range(half):
        m[high + at.LEAF_KEYS + i] = m[low + at.LEAF_KEYS + half + i]
        m[high + at.LEAF_BLOCKS + i] = m[low + at.LEAF_BLOCKS + half + i]
        m[low + at.LEAF_KEYS + half + i] = PADDING
    m[low + at.LEAF_COUNT] = half
    m[high + at.LEAF_COUNT] = half


@kernel
def join_leaves(m: Memory, which: int, place: int) -> None:
    """Append the leaf after `place` to the one at `place`."""
    low = m[m[which + at.SET_DIRECTORY] + place]
    high = m[m[which + at.SET_DIRECTORY] + place + 1]
    count = m[low + at.LEAF_COUNT]
    for i in range(m[high + at.LEAF_COUNT]):
        m[low + at.LEAF_KEYS + count + i] = m[high + at.LEAF_KEYS + i]
        m[low + at.LEAF_BLOCKS + count + i] = m[high + at.LEAF_BLOCKS + i]
    m[low + at.LEAF_COUNT] = count + m[high + at.LEAF_COUNT]
    drop_leaf(m, which, place + 1)


@kernel(inline=True)
def find_place(m: Memory, which: int, key: int, order: int) -> int:
    """The last leaf of the directory whose first entry is below (key, order); the first leaf if there is none."""
    row = m[which + at.SET_DIRECTORY]
    low = 0
    high = m[which + at.SET_COUNT] - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if below(m, m[row + middle], key, order):
            low = middle
        else:
            high = middle - 1
    return low


@kernel(inline=True)
def find_in_leaf(m: Memory, leaf: int, key: int, order: int) -> int:
    """The first entry of a leaf that is not below (key, order).

    Counts the smaller keys, eight at a time, padding included: a few vector instructions are faster than a binary
    search, whose every branch is a guess.
    """
    index = 0
    for chunk in range(leaf + at.LEAF_KEYS, leaf + at.LEAF_KEYS + m[leaf + at.LEAF_COUNT], 8):
        for i in range(8):
            index += m[chunk + i] < key
    if order > FIRST:
        index = find_among_equal(m, leaf, index, key, order)
    return index


@kernel(inline=True)
def find_among_equal(m: Memory, leaf: int, index: int, key: int, order: int) -> int:
    """Go on from the first entry with key >= `key` to the first that is not below (key, order)."""
    length = m[leaf + at.LEAF_COUNT] - index
    if length > 0 and not below(m, leaf + index, key, order):
        return index
    while length > 0:
        half = length >> 1
        if below(m, leaf + index + half, key, order):
            index += half + 1
            length -= half + 1
        else:
            length = half
    return index


@kernel(inline=True)
def put(m: Memory, entry: int, key: int, block: int) -> None:
    """Store an entry."""
    m[entry + at.LEAF_KEYS] = key
    m[entry + at.LEAF_BLOCKS] = block


@kernel(inline=True)
def move(m: Memory, to: int, entry: int) -> None:
    """Copy an entry."""
    m[to + at.LEAF_KEYS] = m[entry + at.LEAF_KEYS]
    m[to + at.LEAF_BLOCKS] = m[entry + at.LEAF_BLOCKS]


@kernel(inline=True)
def leaf_at(m: Memory, which: int, place: int) -> int:
    """The leaf at a place of the directory."""
    return m[m[which + at.SET_DIRECTORY] + place]


@kernel(inline=True)
def seek(m: Memory, which: int, key: int, order: int) -> int:
    """Cursor of the first entry that is not below (key, order), or -1."""
    if m[which + at.SET_COUNT] == 0:
        return -1
    place = find_place(m, which, key, order)
    leaf = leaf_at(m, which, place)
    index = find_in_leaf(m, leaf, key, order)
    if index < m[leaf + at.LEAF_COUNT]:
        return place * at.LEAF + index
    return (place + 1) * at.LEAF if place + 1 < m[which + at.SET_COUNT] else -1


@kernel(inline=True)
def block_at(m: Memory, which: int, cursor: int) -> int:
    """The block under a cursor."""
    return m[leaf_at(m, which, cursor // at.LEAF) + at.LEAF_BLOCKS + cursor % at.LEAF]


@kernel(inline=True)
def key_at(m: Memory, which: int, cursor: int) -> int:
    """The key under a cursor."""
    return m[leaf_at(m, which, cursor // at.LEAF) + at.LEAF_KEYS + cursor % at.LEAF]


@kernel
def first(m: Memory, which: int) -> int:
    """Cursor of the smallest entry, or -1."""
    return 0 if m[which + at.SET_COUNT] > 0 and m[leaf_at(m, which, 0) + at.LEAF_COUNT] > 0 else -1


@kernel
def last(m: Memory, which: int) -> int:
    """Cursor of the largest entry, or -1."""
    place = m[which + at.SET_COUNT] - 1
    if place < 0 or m[leaf_at(m, which, place) + at.LEAF_COUNT] == 0:
        return -1
    return place * at.LEAF + m[leaf_at(m, which, place) + at.LEAF_COUNT] - 1


@kernel
def successor(m: Memory, which: int, cursor: int) -> int:
    """Cursor of the next larger entry, or -1."""
    place = cursor // at.LEAF
    if cursor % at.LEAF + 1 < m[leaf_at(m, which, place) + at.LEAF_COUNT]:
        return cursor + 1
    return (place + 1) * at.LEAF if place + 1 < m[which + at.SET_COUNT] else -1


@kernel
def predecessor(m: Memory, which: int, cursor: int) -> int:
    """Cursor of the next smaller entry, or -1."""
    if cursor % at.LEAF > 0:
        return cursor - 1
    place = cursor // at.LEAF - 1
    return place * at.LEAF + m[leaf_at(m, which, place) + at.LEAF_COUNT] - 1 if place >= 0 else -1


@kernel
def insert(m: Memory, which: int, key: int, order: int, block: int) -> None:
    """Add an entry."""
    if m[which + at.SET_COUNT] == 0:
        insert_leaf(m, which, 0)
    place = find_place(m, which, key, order)
    if m[leaf_at(m, which, place) + at.LEAF_COUNT] == at.LEAF:
        split_leaf(m, which, place)
        place = find_place(m, which, key, order)
    leaf = leaf_at(m, which, place)
    index = find_in_leaf(m, leaf, key, order)
    count = m[leaf + at.LEAF_COUNT]
    for i in range(leaf + count, leaf + index, -1):
        move(m, i, i - 1)
    put(m, leaf + index, key, block)
    m[leaf + at.LEAF_COUNT] = count + 1


@kernel
def tidy(m: Memory, which: int, place: int) -> None:
    """Drop or join a leaf that has become nearly empty."""
    count = m[leaf_at(m, which, place) + at.LEAF_COUNT]
    leaves = m[which + at.SET_COUNT]
    if count == 0:
        if leaves > 1:
            drop_leaf(m, which, place)
    elif place + 1 < leaves and count + m[leaf_at(m, which, place + 1) + at.LEAF_COUNT] <= at.LEAF // 2:
        join_leaves(m, which, place)
    elif place > 0 and count + m[leaf_at(m, which, place - 1) + at.LEAF_COUNT] <= at.LEAF // 2:
        join_leaves(m, which, place - 1)


@kernel
def erase_at(m: Memory, which: int, cursor: int) -> None:
    """Remove the entry under a cursor."""
    leaf = leaf_at(m, which, cursor // at.LEAF)
    count = m[leaf + at.LEAF_COUNT] - 1
    for i in range(leaf + cursor % at.LEAF, leaf + count):
        move(m, i, i + 1)
    m[leaf + at.LEAF_KEYS + count] = PADDING
    m[leaf + at.LEAF_COUNT] = count
    if count < at.LEAF // 8:
        tidy(m, which, cursor // at.LEAF)


@kernel(inline=True)
def find(m: Memory, which: int, key: int, order: int, block: int) -> int:
    """Cursor of a block that the set holds. Blocks at one address, as a trace may give it, can be equal in all else."""
    cursor = seek(m, which, key, order)
    while block_at(m, which, cursor) != block:
        cursor = successor(m, which, cursor)
    return cursor


@kernel
def erase(m: Memory, which: int, key: int, order: int, block: int) -> None:
    """Remove a block that the set holds."""
    erase_at(m, which, find(m, which, key, order, block))


@kernel
def replace(m: Memory, which: int, cursor: int, key: int, order: int, block: int) -> None:
    """Replace the entry under a cursor by another one, moving only what lies between the two places."""
    place = cursor // at.LEAF
    leaf = leaf_at(m, which, place)
    i = leaf + cursor % at.LEAF
    low = leaf
    high = leaf + m[leaf + at.LEAF_COUNT] - 1
    fits_left = place == 0 or (i > low and below(m, low, key, order))
    fits_right = place + 1 == m[which + at.SET_COUNT] or (i < high and not below(m, high, key, order))
    if not (fits_left and fits_right):  # it may belong into another leaf
        erase_at(m, which, cursor)
        insert(m, which, key, order, block)
        return
    while i > low and not below(m, i - 1, key, order):
        move(m, i, i - 1)
        i -= 1
    while i < high and below(m, i + 1, key, order):
        move(m, i, i + 1)
        i += 1
    put(m, i, key, block)
