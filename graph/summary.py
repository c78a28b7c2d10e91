"""What `capture` tells of a step graph: the figures of `graph.analysis` in one plain record, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from graph.analysis import (
    Peak,
    PhasePeak,
    Saved,
    Total,
    by_module,
    by_phase,
    critical_path,
    peak,
    phase_peaks,
    saved_for_backward,
)
from graph.model import StepGraph

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements and bytes on the GPU, of all parameters and of those that are trained; bytes of the buffers."""

    elements: int
    bytes: int
    trained_elements: int
    trained_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Summary:
    """A step graph in figures; bytes are requested ones, what a perfect allocator needs.

    `flops` and `moved` are of the whole run, `step_flops` and `step_moved` of its last step, `path_flops` of the
    longest chain of operators that depend on each other. `totals` is the work by phase and step, `modules` by module,
    layers together.
    """

    case: Mapping[str, Any]
    environment: Mapping[str, Any]
    parameters: Parameters
    operators: int
    storages: int
    events: int
    flops: int
    moved: int
    last_step: int
    step_flops: int
    step_moved: int
    path_flops: int
    path_operators: int
    peak: Peak
    phases: tuple[PhasePeak, ...]
    totals: tuple[Total, ...]
    modules: tuple[Total, ...]
    saved: tuple[Saved, ...]
    assumptions: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward leaves for backward."""
        return sum(row.bytes for row in self.saved)

    def saved_by_class(self) -> tuple[tuple[str, int, int, int], ...]:
        """(class of the module, storages, bytes, bytes that backward reads), largest first."""
        groups: dict[str, list[int]] = {}
        for row in self.saved:
            group = groups.setdefault(row.kind or row.module or "the model", [0, 0, 0])
            for place, value in enumerate((row.storages, row.bytes, row.read)):
                group[place] += value
        rows = ((name, count, size, read) for name, (count, size, read) in groups.items())
        return tuple(sorted(rows, key=lambda row: (-row[2], row[0])))


def summarize(graph: StepGraph) -> Summary:
    """All figures of a step graph."""
    totals = by_phase(graph)
    path = critical_path(graph)
    last = max((total.step for total in totals), default=-1)
    step = [total for total in totals if total.step == last]
    return Summary(
        case=graph.case,
        environment=graph.environment,
        parameters=_parameters(graph),
        operators=len(graph.operators),
        storages=len(graph.storages),
        events=len(graph.kind),
        flops=sum(total.flops for total in totals),
        moved=sum(total.moved for total in totals),
        last_step=last,
        step_flops=sum(total.flops for total in step),
        step_moved=sum(total.moved for total in step),
        path_flops=path.flops,
        path_operators=len(path.operators),
        peak=peak(graph),
        phases=phase_peaks(graph),
        totals=totals,
        modules=by_module(graph),
        saved=saved_for_backward(graph),
        assumptions=graph.assumptions,
    )


def _parameters(graph: StepGraph) -> Parameters:
    """Tied parameters, and those that share a storage, count once."""
    elements, sizes, buffers = [0, 0], [0, 0], 0
    seen: set[int] = set()
    for tensor in graph.tensors:
        new = tensor.storage not in seen
        seen.add(tensor.storage)
        size = int(graph.storages.bytes[tensor.storage]) if tensor.storage >= 0 and new else 0
        if tensor.kind == "buffer":
            buffers += size
            continue
        for place in (0, 1) if tensor.requires_grad else (0,):
            elements[place] += prod(tensor.shape)
            sizes[place] += size
    return Parameters(elements[0], sizes[0], elements[1], sizes[1], buffers)


def document(summary: Summary, *, most: int = 20) -> dict[str, Any]:
    """The summary as JSON: bytes and counts throughout, at most `most` tensors and rows of a list that may be long."""
    work = {(total.name, total.step): total for total in summary.totals}
    found = summary.peak
    return {
        "schema_version": SCHEMA_VERSION,
        "case": dict(summary.case),
        "environment": dict(summary.environment),
        "parameters": dataclasses.asdict(summary.parameters),
        "operators": summary.operators,
        "storages": summary.storages,
        "events": summary.events,
        "flops": summary.flops,
        "moved": summary.moved,
        "last_step": {"step": summary.last_step, "flops": summary.step_flops, "moved": summary.step_moved},
        "critical_path": {"flops": summary.path_flops, "operators": summary.path_operators},
        "peak": {
            "bytes": found.bytes,
            "event": found.event,
            "phase": found.phase,
            "step": found.step,
            "by_category": found.by_category,
            "largest": [dataclasses.asdict(tensor) for tensor in found.tensors[:most]],
        },
        "phases": [_phase(phase, work.get((phase.name, phase.step))) for phase in summary.phases],
        "modules": [dataclasses.asdict(total) for total in summary.modules[:most]],
        "saved_for_backward": {
            "bytes": summary.saved_bytes,
            "rows": [dataclasses.asdict(row) for row in summary.saved],
        },
        "assumptions": list(summary.assumptions),
    }


def _phase(phase: PhasePeak, work: Total | None) -> dict[str, Any]:
    counts = ("operators", "flops", "moved", "allocated")
    return {
        "name": phase.name,
        "step": phase.step,
        "peak": phase.peak,
        "left": phase.left,
        "event": phase.event,
        **{name: 0 if work is None else getattr(work, name) for name in counts},
    }
