"""What `record` says of a program: as JSON, and in a line for each kind of rank."""

from __future__ import annotations

from typing import Any, Final

from simulator.engine.result import PhasePeak, RankResult, Result
from simulator.recording.launch import Recorded
from simulator.reports.verdict import label_of
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


def told(rank: RankResult, outside: int) -> str:
    """The peaks of a rank, and what the card would hold with so many bytes more (`outside` the allocator; 0: none)."""
    total, held = rank.device.total_bytes, rank.peak_reserved + outside
    text = f"{label_of(rank.ranks)}: at most {format_bytes(rank.peak_allocated)} allocated, "
    text += f"{format_bytes(rank.peak_reserved)} reserved"
    if outside:
        text += f", {format_bytes(held)} of {format_bytes(total)} with the CUDA context and its like"
        text += "; that is more than there is: --context auto counts them" * (held > total)
    ooms = rank.memory_stats["num_ooms"]
    return text + (f"; out of memory {ooms} times" if ooms else "")


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
