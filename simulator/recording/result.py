"""What `record` says of a program: as JSON, in a few lines, and as a document (Markdown and the page)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from simulator.engine.replay import replay
from simulator.engine.result import OnGpu, OutsideTerm, PhasePeak, RankResult, Result
from simulator.estimator.judging import judged
from simulator.estimator.step_time import NOTE
from simulator.recording.durations import Durations, of_step
from simulator.recording.launch import Recorded
from simulator.reports.document import Document, Lines, Section
from simulator.reports.run import few, format_time
from simulator.reports.verdict import headline, label_of
from traces.model import Trace
from traces.units import format_bytes

#: Version of the layout of the document.
SCHEMA_VERSION: Final = 1
#: Steps from which on their peaks are told apart.
_FEWEST: Final = 3


def document(recorded: Recorded, result: Result, told: Result) -> dict[str, Any]:
    """Exit code, steps, what it ran on, figures by rank and assumptions; bytes are integers. `told` is what people are
    shown (`shown`)."""
    card = recorded.trace.devices[0]
    found = {
        "schema_version": SCHEMA_VERSION,
        "exit_code": recorded.exit_code,
        "steps": recorded.steps,
        "release": result.release,
        "gpu": card.name,
        "gpu_bytes": card.total_bytes,
        "conf": result.conf,
        "ranks": [
            _rank(rank, told.for_rank(rank.ranks[0]).on_gpu, recorded.steps, recorded.durations.get(rank.ranks[0], ()))
            for rank in result.ranks
        ],
        "assumptions": list(recorded.assumptions),
        "notices": list(recorded.notices),
    }
    if step := step_of(recorded):
        found["step_time_ns"] = sum(step.values())
        found["step_time_note"] = NOTE
    return found


def step_of(recorded: Recorded) -> dict[str, int]:
    """The phases of a step of the slowest rank."""
    return max(map(of_step, recorded.durations.values()), key=lambda step: sum(step.values()), default={})


def shown(trace: Trace, result: Result, outside: tuple[OutsideTerm, ...], **kept: Any) -> Result:
    """The result for people, with what lies outside the allocator in its limit; of a program that ran out of memory,
    as it went on. `kept` are arguments of `simulator.replay`."""
    if any(rank.oom for rank in result.ranks):
        return replay(trace, analyse=False, after_oom="continue", **kept)
    return judged(trace, outside, analyse=False, **kept)


def told(result: Result, recorded: Recorded) -> Iterator[str]:
    """The verdict, the peaks of every kind of rank, a line each, and the time of a step."""
    yield _ending(result, recorded) or headline(result)
    for rank in result.ranks:
        peaks = f"{format_bytes(rank.peak_allocated)} allocated, {format_bytes(rank.peak_reserved)} reserved"
        ooms = rank.memory_stats["num_ooms"]
        yield f"{label_of(rank.ranks)}: at most {peaks}" + (
            f"; out of memory {ooms} time{'s' * (ooms > 1)}" if ooms else ""
        )
        if (there := rank.on_gpu) is not None and there != OnGpu(rank.peak_allocated, rank.peak_reserved, rank.retries):
            sizes = f"{format_bytes(there.peak_allocated)} allocated, {format_bytes(there.peak_reserved)} reserved"
            yield f"  on a GPU, where libraries allocate too: {sizes}"
        if spread := _spread_line(rank, recorded):
            yield f"  of steps: {spread}"
    if line := _time_line(recorded):
        yield line


def document_of(found: Document, result: Result, recorded: Recorded) -> Document:
    """The document of a replay, for a report or for a page, with what is known of the program: how it was started, that
    it failed, its steps, and what was assumed."""
    if ended := _ending(result, recorded):
        found = replace(found, says="", badge="", lead=ended)
    spreads = ((label_of(rank.ranks), _spread_line(rank, recorded)) for rank in result.ranks)
    steps = (*(f"{label}, of steps: {line}" for label, line in spreads if line), *filter(None, [_time_line(recorded)]))
    assumed = (Lines(few(recorded.assumptions), "Assumed"), Lines(few(recorded.notices), "To know"))
    return replace(
        found,
        subject=shlex.join(map(str, recorded.trace.metadata["program"])),
        facts=(*found.facts, f"{recorded.steps} steps"),
        head=(*found.head, Lines(steps)),
        sections=(*found.sections, Section("", tuple(block for block in assumed if block.lines))),
    )


def _ending(result: Result, recorded: Recorded) -> str:
    """That the program failed, but for want of memory, went on without, or did not use the GPU; else empty."""
    ooms = any(rank.oom for rank in result.ranks)
    if recorded.exit_code and not ooms:
        return f"the program ended with exit code {recorded.exit_code}, and until then: {headline(result)}"
    if not any(rank.peak_allocated for rank in result.ranks) and not ooms:
        return "nothing was allocated on the GPU"
    return f"the program went on after {headline(result)}" if ooms and not recorded.exit_code else ""


def _spread_line(rank: RankResult, recorded: Recorded) -> str:
    """The peaks of a rank's steps in words; empty where they are alike."""
    if (spread := step_spread(rank, recorded.steps)) is None:
        return ""
    median, p99, most = (format_bytes(spread[name]) for name in ("median", "p99", "max"))
    return f"{median} in the median, {p99} at the 99th percentile, {most} in step {spread['step']}"


def _time_line(recorded: Recorded) -> str:
    """The time of a step in words; empty where nobody asked for it."""
    if not (step := step_of(recorded)):
        return ""
    parts = ", ".join(f"{name} {format_time(duration)}" for name, duration in step.items())
    return f"a step takes {format_time(sum(step.values()))}: {parts}; this is {NOTE}"


def step_spread(rank: RankResult, steps: int) -> dict[str, int] | None:
    """The peaks of a rank's whole steps in allocated bytes: the largest and its step, the 99th percentile, the median;
    None for fewer than three, and where all but the first are alike."""
    peaks = {step: peak for step, peak in rank.step_peaks.items() if step < steps}
    if len(peaks) < _FEWEST or len(set(list(peaks.values())[1:])) == 1:
        return None
    some = np.fromiter(peaks.values(), np.int64)
    p99, median = (int(np.quantile(some, share, method="higher")) for share in (0.99, 0.5))
    step = max(peaks, key=lambda one: peaks[one])
    return {"max": peaks[step], "step": step, "p99": p99, "median": median}


def _rank(rank: RankResult, on_gpu: OnGpu | None, steps: int, durations: Durations) -> dict[str, Any]:
    times = {(name, step): duration for name, step, duration in durations}
    stats = rank.memory_stats
    return {
        "ranks": list(rank.ranks),
        "peak_allocated": rank.peak_allocated,
        "peak_reserved": rank.peak_reserved,
        "end_allocated": stats["allocated_bytes.all.current"],
        "end_reserved": stats["reserved_bytes.all.current"],
        "allocations": stats["allocation.all.allocated"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
        "on_gpu": on_gpu and on_gpu.document(),
        "step_peaks": step_spread(rank, steps),
        "phases": [_phase(phase, times) for phase in rank.phases],
    }


def _phase(phase: PhasePeak, times: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    duration = times.get((phase.name, -1 if phase.step is None else phase.step))
    return {
        "name": phase.name,
        "step": phase.step,
        "peak_allocated": phase.peak,
        "peak_reserved": phase.peak_reserved,
        "left": phase.left,
    } | ({} if duration is None else {"duration_ns": duration})
