"""The allocator's statistics (`Stat` of c10/core/CachingDeviceAllocator.h): rows of the state's array."""

from __future__ import annotations

from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel(inline=True)
def raise_row(m: Memory, row: int, large: int, amount: int) -> None:
    """Stat::increase in a row of statistics, for the pool and for both together."""
    cell = row + large * at.ST_POOL
    current = m[cell] + amount
    m[cell] = current
    m[cell + at.ST_ALLOCATED] += amount
    if current > m[cell + at.ST_PEAK]:
        m[cell + at.ST_PEAK] = current
    both = m[row] + m[row + at.ST_POOL]
    if both > m[row + at.ST_PEAK_ALL]:
        m[row + at.ST_PEAK_ALL] = both


@kernel(inline=True)
def increase(m: Memory, stat: int, large: int, amount: int) -> None:
    """Stat::increase."""
    raise_row(m, at.STATS + stat * at.STAT_ROW, large, amount)


@kernel(inline=True)
def decrease(m: Memory, stat: int, large: int, amount: int) -> None:
    """Stat::decrease; what was freed follows from the other numbers."""
    m[at.STATS + stat * at.STAT_ROW + large * at.ST_POOL + at.ST_CURRENT] -= amount


@kernel(inline=True)
def change(m: Memory, stat: int, large: int, amount: int) -> None:
    """One net increase or decrease."""
    if amount > 0:
        increase(m, stat, large, amount)
    elif amount < 0:
        decrease(m, stat, large, -amount)


@kernel
def count_reserved(m: Memory, which: int, amount: int) -> None:
    """Bytes obtained from the driver (or given back, below 0), in total and for a private pool."""
    m[at.TOTAL_ALLOCATED] += amount
    change(m, at.RESERVED_BYTES, m[which + at.SET_LARGE], amount)
    pool = m[which + at.SET_POOL]
    if m[pool + at.P_PRIVATE] == 1:
        if amount > 0:
            raise_row(m, pool + at.P_RESERVED, m[which + at.SET_LARGE], amount)
            m[pool + at.P_EVER] = 1
        else:
            m[pool + at.P_RESERVED + m[which + at.SET_LARGE] * at.ST_POOL + at.ST_CURRENT] += amount
