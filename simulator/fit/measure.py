"""What the search asks of a case: whether it fits, its peaks by phase, and how long a token takes.

Memory is that of the case's own trace, as `estimate` has it. Time is that of the same trace with a clock, on a GPU
without end (`simulator.estimator.step_time`), with what the allocator's retries add on this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from simulator.engine.replay import ENDLESS, replay
from simulator.estimator.judging import judged, with_context
from simulator.estimator.outside import bytes_of, communicators, least_of, outside_of
from simulator.estimator.step_time import StepTime, of_case, stall_of
from simulator.estimator.traced import trace_of
from simulator.fit.plans import Judged
from strategies import registry
from strategies.timing.clock import Clock
from traces.errors import LLMemError

if TYPE_CHECKING:
    from graph.case import Case
    from simulator.engine.result import OutsideTerm, Result
    from simulator.estimator.outside import Context
    from strategies.strategy import Capture
    from traces.model import Trace

    Terms = tuple[OutsideTerm, ...]

#: Parts of a phase, by its events: what two changes save together is foreseen from what each saves when.
PARTS: Final = 8
#: Bytes an element of paged states, by the optimizer's name: two of Adam, one of Lion.
_PAGED: Final = {"paged-adamw-8bit": 2, "paged-adamw-32bit": 8, "paged-lion-8bit": 1, "paged-lion-32bit": 4}


def measured(case: Case, context: Context, capture: Capture, budget: int | None = None) -> Judged | None:
    """What a case needs and takes, beside `context` bytes that are not PyTorch's; None where it cannot run.

    `capture` makes its graphs. With a `budget` it may have no more than that many bytes of its GPU.
    """
    try:
        rank = _heaviest(case)
        trace, terms, found = _judged(case, context, capture, rank)
        if found.verdict != "oom" and case.deferred == "prompt" and registry.find(case).keeps_works(case):
            late = _judged(replace(case, deferred="late"), context, capture, rank)  # as much as a clock may make of it
            trace, terms, found = max((trace, terms, found), late, key=lambda one: one[-1].needed or 0)
        clocked = trace_of(case, capture=capture, rank=rank, clock=Clock.connected(case.gpu, ""))
    except LLMemError:
        return None
    needs, total = found.needed, found.decisive.device.total_bytes
    room = min(total, ENDLESS if budget is None else budget)
    phases, ns = _taken(clocked, case)
    waits = _waits(trace, case, bytes_of(terms)) if ns is not None and found.verdict == "tight" else 0.0
    verdict = found.verdict if needs is None or budget is None or needs <= budget else "oom"
    taken = None if ns is None else ns + waits
    return Judged(needs, room, verdict, taken, room - bytes_of(least_of(terms)), phases, waits)


def _heaviest(case: Case) -> int | None:
    """The rank of replicas that stands for all: they differ in their shares of the optimizer's states alone."""
    method = registry.find(case)
    return method.heaviest(case) if method.keeps_works(case) and not isinstance(case.memory, tuple) else None


def _judged(case: Case, context: Context, capture: Capture, rank: int | None) -> tuple[Trace, Terms, Result]:
    """The trace of a case, or of one rank for all, what lies outside the allocator, and what comes out."""
    trace = trace_of(case, capture=capture, rank=rank)
    terms = outside_of(case, context, communicators(trace))
    return trace, terms, judged(trace, terms, analyse=False, needs=True)


def _taken(trace: Trace, case: Case) -> tuple[dict[str, int], float | None]:
    """Peaks by phase of the largest rank, and nanoseconds a token, on GPUs without end."""
    ample = endless(trace)
    result = replay(ample, analyse=False)
    found = of_case(ample, case, result)
    if found is None:
        return peaks_of(result), None
    if isinstance(found, StepTime):
        ns = (found.step_ns + _paging(trace, case)) / found.tokens
    else:
        ns = (found.first_token_ns + found.decode_ns) / (case.batch * case.new)
    return peaks_of(result), ns


def endless(trace: Trace) -> Trace:
    """The trace on GPUs without end."""
    return replace(trace, devices=tuple(replace(one, total_bytes=ENDLESS, context_bytes=0) for one in trace.devices))


def peaks_of(result: Result) -> dict[str, int]:
    """The peak of allocated bytes in every part of a phase (`load` has one), over all steps, of the largest rank."""
    rank = max(result.ranks, key=lambda one: one.peak_allocated)
    peaks: dict[str, int] = {}
    for span in rank.timeline.phases:
        parts = np.array_split(rank.timeline.allocated[span.start : span.stop], 1 if span.name == "load" else PARTS)
        for number, part in enumerate(one for one in parts if len(one)):
            name = f"{span.name} {number}" if number else span.name
            peaks[name] = max(peaks.get(name, 0), int(part.max()))
    return peaks


def _paging(trace: Trace, case: Case) -> float:
    """Nanoseconds in which paged states come to the device and go, as they do where it has no room for them."""
    trained = trace.metadata.get("environment", {}).get("model", {}).get("trained", 0)
    rate = Clock.connected(case.gpu, "").speed().host_bytes_per_second
    return 2e9 * _PAGED.get(case.optimizer, 0) * trained / case.world / rate if rate else 0.0


def _waits(trace: Trace, case: Case, aside: int) -> float:
    """Nanoseconds a token that the allocator's retries take."""
    stall = stall_of(with_context(trace, aside))
    return stall.seconds * 1e9 / (case.batch * case.accum * case.seq * max(1, trace.world)) if stall.retries else 0.0
