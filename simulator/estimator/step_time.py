"""How long a step of a timed trace takes: what the replay's clocks (`simulator.engine.streams`) show of its last
iteration.

The time of a model, not of a machine: kernels follow a roofline, collectives alpha-beta (`strategies.timing`), and
nothing waits for data or logging. What the allocator's calls of the driver take is reckoned apart (`stall_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strategies import registry
from strategies.timing.clock import timed
from traces.errors import ConfigError
from traces.model import Events, Op, Trace

if TYPE_CHECKING:
    from graph.case import Case
    from simulator.engine.result import RankResult, Result
    from strategies.timing.clock import Clock

#: Memory of the devices while time alone is told: enough for all that fits anywhere.
_AMPLE: Final = 1 << 42
#: Nanoseconds of a cudaMalloc or cudaFree of a segment, and of the wait for the device before cached blocks are freed,
#: after which the GPU idles until the host is ahead again. Assumed, for want of measurements by size: a cudaMalloc is
#: said to take 30 to 200 us, and segments are large; a cudaFree waits for the device and unmaps as much. That a run
#: with retries is slower is not assumed: pytorch/pytorch#104509 tells of 46 retries and 7.3 s a step for 5.3 s.
CALL_NS: Final = 200_000
SYNCHRONIZE_NS: Final = 50_000
NOTE: Final = "a model (roofline, alpha-beta collectives), not a measurement"


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
            "step_time_note": NOTE,
        }


@dataclass(frozen=True)
class GenerationTime:
    """An inference run: nanoseconds to the first token of every sequence, and of the `tokens` that follow, all told."""

    first_token_ns: int
    decode_ns: int
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, after the first token."""
        return self.tokens / self.decode_ns * 1e9 if self.decode_ns else 0.0

    def document(self) -> dict[str, Any]:
        """The entries of an answer."""
        return {
            "first_token_ns": self.first_token_ns,
            "decode_tokens_per_second": round(self.tokens_per_second, 1),
            "step_time_note": NOTE,
        }


def step_time(trace: Trace, result: Result | None = None) -> int | None:
    """Nanoseconds of the last iteration of a timed trace: from when all before it is done to when all is done.

    `result` is the trace's replay, where there is one already. None for a trace without steps or time, or one that
    runs out of memory.
    """
    return _since(trace, _last_step, result)


def _since(trace: Trace, place: Callable[[Events], int | None], result: Result | None = None) -> int | None:
    """Nanoseconds from when all before a place in every rank's events is done to when all is done."""
    from simulator.engine.replay import replay

    before = _before(trace, place)
    if before is None:
        return None
    whole = result if result is not None else replay(trace, analyse=False)
    ends, starts = _end(whole), _end(replay(before, analyse=False), 0)
    return None if ends is None or starts is None else ends - starts


def step_seconds(trace: Trace, clock: Clock) -> float:
    """Seconds of the last iteration of a trace whose kernels have durations, with `clock`'s collectives and launches.

    Its devices are taken to be ample. Raises ConfigError for a trace without iterations.
    """
    ample = tuple(replace(device, total_bytes=_AMPLE, context_bytes=0) for device in trace.devices)
    found = step_time(timed(replace(trace, devices=ample), clock))
    if found is None:
        raise ConfigError("the trace has no training steps to be timed")
    return found / 1e9


@dataclass(frozen=True)
class Stall:
    """What the allocator adds to a steady iteration of a rank: retries, and seconds of its calls of the driver."""

    retries: int = 0
    seconds: float = 0.0


def stall_of(trace: Trace, context: int | None = None) -> Stall:
    """What the allocator's calls of the driver add to the last iteration, on the rank that waits longest.

    A retry waits for the device and frees cached segments, one call each; what is then missing is allocated anew.
    `context` are the bytes of each device that are not PyTorch's (None: as the devices say). Nothing for a trace
    without iterations.
    """
    before = _before(trace, _last_step)
    if before is None:
        return Stall()
    ends = {rank.ranks: _calls(rank) for rank in _replayed(trace, context).ranks}
    starts = {rank.ranks: _calls(rank) for rank in _replayed(before, context).ranks}
    differences = ((end[0] - starts[ranks][0], end[1] - starts[ranks][1]) for ranks, end in ends.items())
    stalls = (Stall(tries, (tries * SYNCHRONIZE_NS + calls * CALL_NS) / 1e9) for tries, calls in differences)
    return max(stalls, key=lambda one: (one.seconds, one.retries))


def _calls(rank: RankResult) -> tuple[int, int]:
    """Retries of a rank, and its calls of the driver that took or gave back memory."""
    stats = rank.memory_stats
    made = stats.get("num_device_alloc", stats.get("segment.all.allocated", 0))
    return rank.retries, made + stats.get("num_device_free", stats.get("segment.all.freed", 0))


def _replayed(trace: Trace, context: int | None) -> Result:
    from simulator.engine.replay import replay

    return replay(trace, context=context, analyse=False)


def of_last_step(events: Events) -> Events:
    """The events of the last iteration, all where there are none."""
    return events.take(slice(_last_step(events), None))


def of_case(trace: Trace, case: Case, result: Result) -> StepTime | GenerationTime | None:
    """The time of a steady iteration of a case, or of an inference run, by its timed trace's replay."""
    if case.task == "inference":
        return _generation(trace, case, result)
    found = step_time(trace, result)
    if found is None:
        return None
    if any(rank.retries for rank in result.ranks):
        found += round(stall_of(trace).seconds * 1e9)
    return StepTime(found, _samples(case) * case.seq, trace.world)


def _generation(trace: Trace, case: Case, result: Result) -> GenerationTime | None:
    whole = _since(trace, lambda events: _phase(events, "prefill"), result)
    if whole is None:
        return None
    decode = (_since(trace, lambda events: _phase(events, "decode"), result) or 0) if case.new > 1 else 0
    return GenerationTime(whole - decode, decode, case.batch * (case.new - 1))


def _samples(case: Case) -> int:
    """Samples of an iteration over all ranks: data-parallel axes have samples of their own, others share them."""
    return case.batch * case.accum * registry.find(case).micro_batches(case)


def _end(result: Result, idle: int | None = None) -> int | None:
    """When the last rank is done; None where one ran out of memory, `idle` where nothing takes time."""
    times = [idle if rank.duration_ns is None else rank.duration_ns for rank in result.ranks]
    if result.verdict == "oom" or any(time is None for time in times):
        return None
    return max(time for time in times if time is not None)


def _last_step(events: Events) -> int | None:
    """Where the last iteration starts; None where there are none."""
    step = events.ints("step")
    phases = np.flatnonzero((events.op == Op.PHASE) & (step >= 0))
    return int(phases[step[phases] == step[phases].max()][0]) if len(phases) else None


def _phase(events: Events, name: str) -> int | None:
    """Where the first phase of a name starts."""
    names = events.strings("name")
    return next((int(at) for at in np.flatnonzero(events.op == Op.PHASE) if names.get(int(at)) == name), None)


def _before(trace: Trace, place: Callable[[Events], int | None]) -> Trace | None:
    """The events of all ranks before a place in them; None where a rank has no such place."""
    entries = []
    for entry in trace.ranks:
        stop = place(entry.events)
        if stop is None:
            return None
        entries.append(replace(entry, events=entry.events.take(slice(stop))))
    return replace(trace, ranks=tuple(entries))
