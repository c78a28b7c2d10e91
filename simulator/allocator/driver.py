"""The device under the allocator: physical bytes, address space, and the log of calls.

cudaMalloc fails exactly when fewer bytes are left than are asked for. Addresses and sizes are multiples of 2 MiB;
`first-fit` takes the lowest gap that is large enough, `bump` never reuses a place, `recorded` takes the addresses
that the trace gives, in order, and then goes on above all of them.

`driver` is what CUDA's driver did on an H100 (580.159, tests/data/gpu): address space is taken downwards, in whole 32
MiB, and what is left of that is used first, the newest part first, each from its start. That is the lowest gap again,
but for what is taken where there is none. Rooms that the context leaves are not imitated: the first segments lie there.
"""

from __future__ import annotations

from simulator.allocator import free_lists
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel

GRANULE = 2 << 20
RESERVATION = 32 << 20
LAST_ADDRESS = (1 << 63) - (1 << 45)  # sums of an address above it and a block's size could overflow


@kernel(inline=True)
def log(m: Memory, kind: int, address: int, size: int, stream: int) -> None:
    """Append an entry to the log, if one is kept."""
    if m[at.LOGGING] == 1:
        entry = m[at.LOG] + m[at.LOGGED] * at.L_COLUMNS
        m[at.LOGGED] += 1
        m[entry + at.L_KIND] = kind
        m[entry + at.L_EVENT] = m[at.EVENT]
        m[entry + at.L_ADDRESS] = address
        m[entry + at.L_BYTES] = size
        m[entry + at.L_STREAM] = stream


@kernel(inline=True)
def round_granule(size: int) -> int:
    """`size` rounded up to the device's granularity."""
    return (size + GRANULE - 1) // GRANULE * GRANULE


@kernel(inline=True)
def device_free(m: Memory) -> int:
    """Bytes that cudaMemGetInfo would call free (may be negative when another process grew)."""
    return m[at.CAPACITY] - m[at.OTHER_BYTES] - m[at.DEVICE_USED]


@kernel
def take_gap(m: Memory, size: int) -> int:
    """The address of the lowest gap that is large enough, or -1."""
    cursor = free_lists.first(m, m[at.GAPS])
    while cursor >= 0:
        length = free_lists.block_at(m, m[at.GAPS], cursor)
        if length >= size:
            address = free_lists.key_at(m, m[at.GAPS], cursor)
            if length == size:
                free_lists.erase_at(m, m[at.GAPS], cursor)
            else:
                free_lists.replace(m, m[at.GAPS], cursor, address + size, free_lists.FIRST, length - size)
            return address
        cursor = free_lists.successor(m, m[at.GAPS], cursor)
    return -1


@kernel(inline=True)
def keeps_gaps(m: Memory) -> bool:
    """Whether address space that was given back is taken again."""
    return m[at.PLACEMENT] == at.PLACE_FIRST_FIT or m[at.PLACEMENT] == at.PLACE_DRIVER


@kernel
def give_address(m: Memory, address: int, size: int) -> None:
    """Give address space back; `first-fit` and `driver` keep the gaps, joined with their neighbours."""
    if not keeps_gaps(m):
        return
    size = round_granule(size)
    after = free_lists.seek(m, m[at.GAPS], address, free_lists.FIRST)
    before = free_lists.predecessor(m, m[at.GAPS], after) if after >= 0 else free_lists.last(m, m[at.GAPS])
    follows = after >= 0 and free_lists.key_at(m, m[at.GAPS], after) == address + size
    if follows:
        size += free_lists.block_at(m, m[at.GAPS], after)
    if before >= 0:
        start = free_lists.key_at(m, m[at.GAPS], before)
        length = free_lists.block_at(m, m[at.GAPS], before)
        if start + length == address:
            address = start
            size += length
            if follows:
                free_lists.erase_at(m, m[at.GAPS], after)
            free_lists.erase_at(m, m[at.GAPS], free_lists.seek(m, m[at.GAPS], start, free_lists.FIRST))
            follows = False
    if follows:
        free_lists.erase_at(m, m[at.GAPS], after)
    if m[at.PLACEMENT] == at.PLACE_FIRST_FIT and address + size == m[at.VA_TOP]:
        m[at.VA_TOP] = address
    else:
        free_lists.insert(m, m[at.GAPS], address, free_lists.FIRST, size)


@kernel
def take_below(m: Memory, size: int) -> int:
    """Take address space below all that was taken, in whole reservations; what is left of them is a gap."""
    whole = (size + RESERVATION - 1) // RESERVATION * RESERVATION
    m[at.VA_TOP] -= whole
    if whole > size:
        give_address(m, m[at.VA_TOP] + size, whole - size)
    return m[at.VA_TOP]


@kernel
def take_address(m: Memory, size: int) -> int:
    """Place `size` bytes of address space by the device's rule; the base address."""
    size = round_granule(size)
    if keeps_gaps(m):
        address = take_gap(m, size)
        if address >= 0:
            return address
    if m[at.PLACEMENT] == at.PLACE_DRIVER:
        return take_below(m, size)
    if m[at.PLACEMENT] == at.PLACE_RECORDED and m[at.VA_RECORDED] < m[at.NUM_RECORDED]:
        m[at.VA_RECORDED] += 1
        return m[m[at.RECORDED] + m[at.VA_RECORDED] - 1]
    address = m[at.VA_TOP]
    if size > LAST_ADDRESS - address:
        m[at.STOPPED] = at.STOP_ADDRESSES
    else:
        m[at.VA_TOP] += size
    return address
