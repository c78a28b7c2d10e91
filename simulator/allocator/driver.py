"""The device under the allocator: physical bytes, address space, and the log of calls.

cudaMalloc fails exactly when fewer bytes are left than are asked for. Addresses and sizes are multiples of 2 MiB;
`first-fit` takes the lowest gap that is large enough, `bump` never reuses a place, `recorded` takes the addresses
that the trace gives, in order, and then goes on above all of them.
"""

from __future__ import annotations

from simulator.allocator import freelist
from simulator.allocator.layout import (
    CAPACITY,
    DEVICE_USED,
    EVENT,
    GAPS,
    L_ADDRESS,
    L_BYTES,
    L_COLUMNS,
    L_EVENT,
    L_KIND,
    L_STREAM,
    LOG,
    LOGGED,
    LOGGING,
    NUM_RECORDED,
    OTHER_BYTES,
    PLACE_FIRST_FIT,
    PLACE_RECORDED,
    PLACEMENT,
    RECORDED,
    STOP_ADDRESSES,
    STOPPED,
    VA_RECORDED,
    VA_TOP,
    Memory,
)
from traces.jit import kernel

GRANULE = 2 << 20
LAST_ADDRESS = (1 << 63) - (1 << 45)  # sums of an address above it and a block's size could overflow


@kernel(inline=True)
def log(m: Memory, kind: int, address: int, size: int, stream: int) -> None:
    """Append an entry to the log, if one is kept."""
    if m[LOGGING] == 1:
        entry = m[LOG] + m[LOGGED] * L_COLUMNS
        m[LOGGED] += 1
        m[entry + L_KIND] = kind
        m[entry + L_EVENT] = m[EVENT]
        m[entry + L_ADDRESS] = address
        m[entry + L_BYTES] = size
        m[entry + L_STREAM] = stream


@kernel(inline=True)
def round_granule(size: int) -> int:
    """`size` rounded up to the device's granularity."""
    return (size + GRANULE - 1) // GRANULE * GRANULE


@kernel(inline=True)
def device_free(m: Memory) -> int:
    """Bytes that cudaMemGetInfo would call free (may be negative when another process grew)."""
    return m[CAPACITY] - m[OTHER_BYTES] - m[DEVICE_USED]


@kernel
def take_gap(m: Memory, size: int) -> int:
    """The address of the lowest gap that is large enough, or -1."""
    cursor = freelist.first(m, m[GAPS])
    while cursor >= 0:
        length = freelist.block_at(m, m[GAPS], cursor)
        if length >= size:
            address = freelist.key_at(m, m[GAPS], cursor)
            if length == size:
                freelist.erase_at(m, m[GAPS], cursor)
            else:
                freelist.replace(m, m[GAPS], cursor, address + size, freelist.FIRST, length - size)
            return address
        cursor = freelist.successor(m, m[GAPS], cursor)
    return -1


@kernel
def take_address(m: Memory, size: int) -> int:
    """Place `size` bytes of address space by the device's rule; the base address."""
    size = round_granule(size)
    if m[PLACEMENT] == PLACE_FIRST_FIT:
        address = take_gap(m, size)
        if address >= 0:
            return address
    elif m[PLACEMENT] == PLACE_RECORDED and m[VA_RECORDED] < m[NUM_RECORDED]:
        m[VA_RECORDED] += 1
        return m[m[RECORDED] + m[VA_RECORDED] - 1]
    address = m[VA_TOP]
    if size > LAST_ADDRESS - address:
        m[STOPPED] = STOP_ADDRESSES
    else:
        m[VA_TOP] += size
    return address


@kernel
def give_address(m: Memory, address: int, size: int) -> None:
    """Give address space back; `first-fit` keeps the gaps below the top, joined with their neighbours."""
    if m[PLACEMENT] != PLACE_FIRST_FIT:
        return
    size = round_granule(size)
    after = freelist.seek(m, m[GAPS], address, freelist.FIRST)
    before = freelist.predecessor(m, m[GAPS], after) if after >= 0 else freelist.last(m, m[GAPS])
    follows = after >= 0 and freelist.key_at(m, m[GAPS], after) == address + size
    if follows:
        size += freelist.block_at(m, m[GAPS], after)
    if before >= 0:
        start = freelist.key_at(m, m[GAPS], before)
        length = freelist.block_at(m, m[GAPS], before)
        if start + length == address:
            address = start
            size += length
            if follows:
                freelist.erase_at(m, m[GAPS], after)
            freelist.erase_at(m, m[GAPS], freelist.seek(m, m[GAPS], start, freelist.FIRST))
            follows = False
    if follows:
        freelist.erase_at(m, m[GAPS], after)
    if address + size == m[VA_TOP]:
        m[VA_TOP] = address
    else:
        freelist.insert(m, m[GAPS], address, freelist.FIRST, size)
