"""What `record` says of a program: as JSON, and in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from simulator.engine.replay import replay
from simulator.engine.result import OutsideTerm, PhasePeak, RankResult, Result
from simulator.estimator.judging import judged
from simulator.recording.launch import Recorded
from simulator.reports.verdict import headline, label_of
from traces.model import Trace
from traces.units import format_bytes

#: Version of the layout of the document.
SCHEMA_VERSION: Final = 1


def document(recorded: Recorded, result: Result) -> dict[str, Any]:
    """Exit code, steps, figures by rank and assumptions; bytes are integers."""
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": recorded.exit_code,
        "steps": recorded.steps,
        "ranks": [_rank(rank) for rank in result.ranks],
        "assumptions": list(recorded.assumptions),
        "notices": list(recorded.notices),
    }


def shown(trace: Trace, result: Result, outside: tuple[OutsideTerm, ...], **kept: Any) -> Result:
    """The result for people, with what lies outside the allocator in its limit; of a program that ran out of memory,
    as it went on. `kept` are arguments of `simulator.replay`."""
    if any(rank.oom for rank in result.ranks):
        return replay(trace, analyse=False, after_oom="continue", **kept)
    return judged(trace, outside, analyse=False, **kept)


def told(result: Result) -> Iterator[str]:
    """The verdict, and the peaks of every kind of rank, a line each."""
    yield headline(result)
    for rank in result.ranks:
        peaks = f"{format_bytes(rank.peak_allocated)} allocated, {format_bytes(rank.peak_reserved)} reserved"
        ooms = rank.memory_stats["num_ooms"]
        yield f"{label_of(rank.ranks)}: at most {peaks}" + (f"; out of memory {ooms} times" if ooms else "")


def _rank(rank: RankResult) -> dict[str, Any]:
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
        "phases": [_phase(phase) for phase in rank.phases],
    }


def _phase(phase: PhasePeak) -> dict[str, Any]:
    return {
        "name": phase.name,
        "step": phase.step,
        "peak_allocated": phase.peak,
        "peak_reserved": phase.peak_reserved,
        "left": phase.left,
    }
