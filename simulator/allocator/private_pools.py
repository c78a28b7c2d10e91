"""Private pools (`torch.cuda.MemPool`, CUDA graphs): which pool serves now, and their creation and end."""

from __future__ import annotations

from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel(inline=True)
def pool_at(m: Memory, number: int) -> int:
    """The record of a pool; number 0 is the default pool."""
    return m[at.POOLS] + number * at.P_COLUMNS


@kernel(inline=True)
def current_pool(m: Memory) -> int:
    """The pool that requests go to now."""
    return m[at.SERVING]


@kernel(inline=True)
def capturing(m: Memory) -> bool:
    """Whether the allocator believes that a CUDA graph is being captured: up to 2.12 in any open scope, later where the
    current stream is captured."""
    return m[m[at.SERVING] + at.P_CAPTURED] == 1 or (m[at.SCOPES] > 0 and m[at.SCOPE_CAPTURES] == 1)


@kernel
def nth_private_pool(m: Memory, order: int) -> int:
    """The living private pool that was created as number `order`, or 0."""
    for number in range(1, m[at.NUM_POOLS]):
        pool = pool_at(m, number)
        if m[pool + at.P_ALIVE] == 1 and m[pool + at.P_CREATED] == order:
            return pool
    return 0


@kernel
def create_pool(m: Memory, pool: int) -> None:
    """createOrIncref of a private pool."""
    if m[pool + at.P_ALIVE] == 1:
        m[pool + at.P_USE_COUNT] += 1
        return
    m[pool + at.P_ALIVE] = 1
    m[pool + at.P_USE_COUNT] = 1
    m[pool + at.P_MALLOC_COUNT] = 0
    m[pool + at.P_CREATED] = m[at.CREATED]
    m[at.CREATED] += 1


@kernel
def serve_scope(m: Memory) -> None:
    """Requests go to the oldest open scope up to 2.10, to the newest later, to the default pool if none is open."""
    m[at.SERVING] = m[at.POOLS]
    if m[at.SCOPES] > 0:
        m[at.SERVING] = m[pool_at(m, m[at.SCOPES] - 1 if m[at.NEWEST_SCOPE] == 1 else 0) + at.P_SCOPE]


@kernel
def begin_scope(m: Memory, pool: int, capture: int) -> None:
    """beginAllocateToPool, and markCaptureBegin for a capture; a scope inside of one leaves the stream captured."""
    create_pool(m, pool)
    m[pool_at(m, m[at.SCOPES]) + at.P_SCOPE] = pool
    m[at.SCOPES] += 1
    m[pool + at.P_CAPTURED] = capture | m[m[at.SERVING] + at.P_CAPTURED]
    serve_scope(m)


@kernel
def end_scope(m: Memory, pool: int) -> None:
    """endAllocateToPool (and markCaptureEnd): take the pool off the list of scopes."""
    m[pool + at.P_CAPTURED] = 0
    kept = 0
    for i in range(m[at.SCOPES]):
        if m[pool_at(m, i) + at.P_SCOPE] != pool:
            m[pool_at(m, kept) + at.P_SCOPE] = m[pool_at(m, i) + at.P_SCOPE]
            kept += 1
    m[at.SCOPES] = kept
    serve_scope(m)
