"""Time on one rank: a host clock, a clock for each stream, and work behind collectives that other ranks must join.

The host launches work and goes on. Work on a stream runs in order, not before it was launched. A collective starts
when every rank of its group has reached it; until that time is known, its stream *waits*: later work on it is noted
and priced by `resolve`.
"""

from __future__ import annotations

from simulator.allocator import blocks, free, free_lists
from simulator.allocator import layout as at
from simulator.allocator.layout import Memory
from traces.jit import kernel


@kernel(inline=True)
def launch_kernel(m: Memory, stream: int, duration: int) -> None:
    """The host launches `duration` ns of work on a stream."""
    m[at.HOST] += m[at.LAUNCH_NS]
    if m[stream + at.S_WAITING] == 1:
        free.queue_work(m, at.WORK_KERNEL, stream, duration, 0)
    else:
        m[stream + at.S_CLOCK] = max(m[stream + at.S_CLOCK], m[at.HOST]) + duration


@kernel
def launch_collective(m: Memory, stream: int, duration: int) -> None:
    """The host launches a collective; its stream waits until the start is known."""
    m[at.HOST] += m[at.LAUNCH_NS]
    call = m[at.COLLECTIVES] + m[at.NUM_COLLECTIVES] * at.C_COLUMNS
    m[at.NUM_COLLECTIVES] += 1
    m[call + at.C_EVENT] = m[at.EVENT]
    m[call + at.C_START] = -1
    m[call + at.C_ARRIVAL] = -1
    if m[stream + at.S_WAITING] == 0:
        m[call + at.C_ARRIVAL] = max(m[stream + at.S_CLOCK], m[at.HOST])
    free.queue_work(m, at.WORK_COLLECTIVE, stream, duration, call)
    m[stream + at.S_WAITING] = 1


@kernel
def wait_stream(m: Memory, stream: int, on: int) -> None:
    """Later work of `stream` waits for the work so far on `on`."""
    if stream == on:
        return
    if m[on + at.S_WAITING] == 1:
        free.queue_work(m, at.WORK_WAIT, stream, 0, on)
        m[stream + at.S_WAITING] = 1
    elif m[stream + at.S_WAITING] == 1:
        free.queue_work(m, at.WORK_WAIT, stream, m[on + at.S_CLOCK], 0)
    else:
        m[stream + at.S_CLOCK] = max(m[stream + at.S_CLOCK], m[on + at.S_CLOCK])


@kernel
def synchronize(m: Memory, number: int) -> bool:
    """The host waits for a stream (-1: all). False, with nothing changed, if that time is not known yet."""
    low = 0 if number < 0 else number
    high = m[at.NUM_STREAMS] if number < 0 else number + 1
    for i in range(low, high):
        if m[blocks.stream_at(m, i) + at.S_WAITING] == 1:
            return False
    for i in range(low, high):
        m[at.HOST] = max(m[at.HOST], m[blocks.stream_at(m, i) + at.S_CLOCK])
        free.complete_events(m, blocks.stream_at(m, i), False)
    return True


@kernel
def price(m: Memory, item: int) -> bool:
    """Work out one queued item whose stream has come to it; False if it must go on waiting."""
    stream = m[item + at.W_STREAM]
    ref = m[item + at.W_REF]
    kind = m[item + at.W_KIND]
    if kind == at.WORK_KERNEL:
        m[stream + at.S_CLOCK] = max(m[stream + at.S_CLOCK], m[item + at.W_ISSUED]) + m[item + at.W_DURATION]
    elif kind == at.WORK_EVENT:
        if m[ref + at.N_SERIAL] == m[item + at.W_SERIAL] and m[ref + at.N_TIME] == at.UNKNOWN:
            m[ref + at.N_TIME] = m[stream + at.S_CLOCK]
    elif kind == at.WORK_COLLECTIVE:
        if m[ref + at.C_ARRIVAL] < 0:
            m[ref + at.C_ARRIVAL] = max(m[stream + at.S_CLOCK], m[item + at.W_ISSUED])
        if m[ref + at.C_START] < 0:
            return False
        m[stream + at.S_CLOCK] = m[ref + at.C_START] + m[item + at.W_DURATION]
    else:
        if ref != 0:
            return False
        m[stream + at.S_CLOCK] = max(m[stream + at.S_CLOCK], m[item + at.W_DURATION])
    return True


@kernel
def learn_wait(m: Memory, item: int) -> None:
    """Note for a wait_stream how far the other stream had come, once all work queued there before it is priced."""
    on = m[item + at.W_REF]
    if m[item + at.W_KIND] == at.WORK_WAIT and on != 0 and m[on + at.S_WAITING] == 0:
        m[item + at.W_DURATION] = m[on + at.S_CLOCK]
        m[item + at.W_REF] = 0


@kernel
def resolve(m: Memory) -> None:
    """Price all queued work that the known starts of collectives allow, in order of launch.

    Streams with queued work are those that wait. Once all of them have come to work that must go on waiting, so must
    everything behind it.
    """
    left = 0
    for i in range(m[at.NUM_STREAMS]):
        left += m[blocks.stream_at(m, i) + at.S_WAITING]
        m[blocks.stream_at(m, i) + at.S_WAITING] = 0
    before = 0
    item = m[at.WORK]
    while item != 0 and left > 0:
        following = m[item + at.W_NEXT]
        stream = m[item + at.W_STREAM]
        learn_wait(m, item)
        if m[stream + at.S_WAITING] == 0 and price(m, item):
            if before == 0:
                m[at.WORK] = following
            else:
                m[before + at.W_NEXT] = following
            if following == 0:
                m[at.LAST_WORK] = before
            m[at.QUEUED] -= 1
            free_lists.drop(m, at.FREE_WORK, item)
        else:
            left -= 1 - m[stream + at.S_WAITING]
            m[stream + at.S_WAITING] = 1
            before = item
        item = following
