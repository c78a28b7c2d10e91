"""Time on one rank: a host clock, a clock for each stream, and work behind collectives that other ranks must join.

The host launches work and goes on. Work on a stream runs in order, not before it was launched. A collective starts
when every rank of its group has reached it; until that time is known, its stream *waits*: later work on it is noted
and priced by `resolve`.
"""

from __future__ import annotations

from simulator.allocator import freelist
from simulator.allocator.allocator import complete_events, queue_work, stream_at
from simulator.allocator.layout import (
    C_ARRIVAL,
    C_COLUMNS,
    C_EVENT,
    C_START,
    COLLECTIVES,
    EVENT,
    FREE_WORK,
    HOST,
    LAST_WORK,
    LAUNCH_NS,
    N_SERIAL,
    N_TIME,
    NUM_COLLECTIVES,
    NUM_STREAMS,
    QUEUED,
    S_CLOCK,
    S_WAITING,
    UNKNOWN,
    W_DURATION,
    W_ISSUED,
    W_KIND,
    W_NEXT,
    W_REF,
    W_SERIAL,
    W_STREAM,
    WORK,
    WORK_COLLECTIVE,
    WORK_EVENT,
    WORK_KERNEL,
    WORK_WAIT,
    Memory,
)
from traces.jit import kernel


@kernel(inline=True)
def launch_kernel(m: Memory, stream: int, duration: int) -> None:
    """The host launches `duration` ns of work on a stream."""
    m[HOST] += m[LAUNCH_NS]
    if m[stream + S_WAITING] == 1:
        queue_work(m, WORK_KERNEL, stream, duration, 0)
    else:
        m[stream + S_CLOCK] = max(m[stream + S_CLOCK], m[HOST]) + duration


@kernel
def launch_collective(m: Memory, stream: int, duration: int) -> None:
    """The host launches a collective; its stream waits until the start is known."""
    m[HOST] += m[LAUNCH_NS]
    call = m[COLLECTIVES] + m[NUM_COLLECTIVES] * C_COLUMNS
    m[NUM_COLLECTIVES] += 1
    m[call + C_EVENT] = m[EVENT]
    m[call + C_START] = -1
    m[call + C_ARRIVAL] = -1
    if m[stream + S_WAITING] == 0:
        m[call + C_ARRIVAL] = max(m[stream + S_CLOCK], m[HOST])
    queue_work(m, WORK_COLLECTIVE, stream, duration, call)
    m[stream + S_WAITING] = 1


@kernel
def wait_stream(m: Memory, stream: int, on: int) -> None:
    """Later work of `stream` waits for the work so far on `on`."""
    if stream == on:
        return
    if m[on + S_WAITING] == 1:
        queue_work(m, WORK_WAIT, stream, 0, on)
        m[stream + S_WAITING] = 1
    elif m[stream + S_WAITING] == 1:
        queue_work(m, WORK_WAIT, stream, m[on + S_CLOCK], 0)
    else:
        m[stream + S_CLOCK] = max(m[stream + S_CLOCK], m[on + S_CLOCK])


@kernel
def synchronize(m: Memory, number: int) -> bool:
    """The host waits for a stream (-1: all). False, with nothing changed, if that time is not known yet."""
    low = 0 if number < 0 else number
    high = m[NUM_STREAMS] if number < 0 else number + 1
    for i in range(low, high):
        if m[stream_at(m, i) + S_WAITING] == 1:
            return False
    for i in range(low, high):
        m[HOST] = max(m[HOST], m[stream_at(m, i) + S_CLOCK])
        complete_events(m, stream_at(m, i), False)
    return True


@kernel
def price(m: Memory, item: int) -> bool:
    """Work out one queued item whose stream has come to it; False if it must go on waiting."""
    stream = m[item + W_STREAM]
    ref = m[item + W_REF]
    kind = m[item + W_KIND]
    if kind == WORK_KERNEL:
        m[stream + S_CLOCK] = max(m[stream + S_CLOCK], m[item + W_ISSUED]) + m[item + W_DURATION]
    elif kind == WORK_EVENT:
        if m[ref + N_SERIAL] == m[item + W_SERIAL] and m[ref + N_TIME] == UNKNOWN:
            m[ref + N_TIME] = m[stream + S_CLOCK]
    elif kind == WORK_COLLECTIVE:
        if m[ref + C_ARRIVAL] < 0:
            m[ref + C_ARRIVAL] = max(m[stream + S_CLOCK], m[item + W_ISSUED])
        if m[ref + C_START] < 0:
            return False
        m[stream + S_CLOCK] = m[ref + C_START] + m[item + W_DURATION]
    else:
        if ref != 0:
            return False
        m[stream + S_CLOCK] = max(m[stream + S_CLOCK], m[item + W_DURATION])
    return True


@kernel
def learn_wait(m: Memory, item: int) -> None:
    """Note for a wait_stream how far the other stream had come, once all work queued there before it is priced."""
    on = m[item + W_REF]
    if m[item + W_KIND] == WORK_WAIT and on != 0 and m[on + S_WAITING] == 0:
        m[item + W_DURATION] = m[on + S_CLOCK]
        m[item + W_REF] = 0


@kernel
def resolve(m: Memory) -> None:
    """Price all queued work that the known starts of collectives allow, in order of launch.

    Streams with queued work are those that wait. Once all of them have come to work that must go on waiting, so must
    everything behind it.
    """
    left = 0
    for i in range(m[NUM_STREAMS]):
        left += m[stream_at(m, i) + S_WAITING]
        m[stream_at(m, i) + S_WAITING] = 0
    before = 0
    item = m[WORK]
    while item != 0 and left > 0:
        following = m[item + W_NEXT]
        stream = m[item + W_STREAM]
        learn_wait(m, item)
        if m[stream + S_WAITING] == 0 and price(m, item):
            if before == 0:
                m[WORK] = following
            else:
                m[before + W_NEXT] = following
            if following == 0:
                m[LAST_WORK] = before
            m[QUEUED] -= 1
            freelist.drop(m, FREE_WORK, item)
        else:
            left -= 1 - m[stream + S_WAITING]
            m[stream + S_WAITING] = 1
            before = item
        item = following
