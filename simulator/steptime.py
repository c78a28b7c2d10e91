"""How long a step of a timed trace takes: what the replay's clocks show of its last iteration.

The time of a model, not of a machine: kernels follow a roofline, collectives alpha-beta (`strategies.timing`), and
nothing waits for data, logging or the allocator's calls of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.model import Events, Op, Strings, Trace

if TYPE_CHECKING:
    from graph.case import Case
    from simulator.result import Result


@dataclass(frozen=True)
class StepTime:
    """A steady iteration: its nanoseconds on the slowest rank, and how many tokens (or samples) all ranks do in it."""

    step_ns: int
    tokens: int
    ranks: int

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.step_ns * 1e9 if self.step_ns else 0.0

    def document(self) -> dict[str, Any]:
        """The entries of an answer."""
        return {
            "step_time_ns": self.step_ns,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_second_per_gpu": round(self.tokens_per_second / self.ranks, 1),
            "step_time_note": "a model (roofline, alpha-beta collectives), not a measurement",
        }


def step_time(trace: Trace, result: Result | None = None) -> int | None:
    """Nanoseconds of the last iteration of a timed trace: from when all before it is done to when all is done.

    `result` is the trace's replay, where there is one already. None for a trace without steps or time, or one that
    runs out of memory.
    """
    from simulator.replay import replay

    before = _before_last_step(trace)
    if before is None:
        return None
    whole = result if result is not None else replay(trace, analyse=False)
    ends, starts = _end(whole), _end(replay(before, analyse=False))
    return None if ends is None or starts is None else ends - starts


def of_case(trace: Trace, case: Case, result: Result) -> StepTime | None:
    """The time of a steady iteration of a case, whose timed trace was replayed with this result."""
    found = step_time(trace, result)
    if found is None:
        return None
    return StepTime(found, _samples(case) * case.seq, trace.world)


def _samples(case: Case) -> int:
    """Samples of an iteration over all ranks: data-parallel axes have samples of their own, others share them."""
    axes: dict[str, int] = dict(case.mesh)
    if axes:
        shared = 1
        for name, size in axes.items():
            shared *= size if name in ("tp", "pp", "sp", "tp-sp") else 1
        replicas = max(1, case.world // shared)
    else:
        replicas = 1 if case.strategy.startswith("tp") or case.strategy == "pp" else case.world
        replicas = max(1, case.world // 2) if case.strategy == "fsdp2-tp" else replicas
    pieces = case.microbatches if case.strategy == "pp" or "pp" in axes else 1
    return case.batch * case.accum * replicas * pieces


def _end(result: Result) -> int | None:
    """When the last rank is done; None where one ran out of memory or has no time."""
    times = [rank.duration_ns for rank in result.ranks]
    if result.verdict == "oom" or any(time is None for time in times):
        return None
    return max(time for time in times if time is not None)


def _before_last_step(trace: Trace) -> Trace | None:
    """The events of all ranks before their last iteration; None where a rank has no iterations."""
    entries = []
    for entry in trace.ranks:
        step = entry.events.ints("step")
        phases = np.flatnonzero((entry.events.op == Op.PHASE) & (step >= 0))
        if not len(phases):
            return None
        first = phases[step[phases] == step[phases].max()][0]
        entries.append(replace(entry, events=_cut(entry.events, int(first))))
    return replace(trace, ranks=tuple(entries))


def _cut(events: Events, stop: int) -> Events:
    """The first `stop` events."""
    columns = {
        name: Strings(column.codes[:stop], column.table) if isinstance(column, Strings) else column[:stop]
        for name, column in events.columns.items()
    }
    return Events(events.op[:stop], columns)
