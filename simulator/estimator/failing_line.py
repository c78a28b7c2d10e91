"""At which line of the model's code an estimate runs out of memory: found by a second capture, up to the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graph.case import Case
from graph.model import Int32Array, Kind, Role, StepGraph
from simulator.engine.result import OutOfMemory, Result
from traces.errors import LLMemError

if TYPE_CHECKING:
    from graph.loop.method import Method

Captured = tuple[Case, "Method | None", StepGraph]


def with_line(
    found: Result, captures: Sequence[Captured], line_of: Callable[[Case, int, Method | None], str]
) -> Result:
    """The result, with the line in the failure on which the verdict rests, where one of the captures has it.

    `line_of(case, operator, method)` is that of `graph.recorder.capture`. What load and the optimizer ask for has none.
    """
    rank = found.decisive
    assert rank.oom is not None
    for case, method, graph in captures:
        operator = _forward_operator(graph, rank.oom)
        if operator is None:
            continue
        try:
            line = line_of(case, operator, method)
        except LLMemError:  # the answer stands without it
            continue
        told = replace(rank, oom=replace(rank.oom, line=line))
        return replace(found, ranks=tuple(told if one is rank else one for one in found.ranks))
    return found


def _forward_operator(graph: StepGraph, oom: OutOfMemory) -> int | None:
    """The operator of a forward pass, in the first two steps, that asks for what failed, or whose derivative does."""
    storages, operators = graph.storages, graph.operators
    if not 0 <= oom.id < len(storages.bytes) or storages.bytes[oom.id] != oom.requested:
        return None  # of another rank's graph
    if not (oom.name or "").endswith(graph.names[storages.name[oom.id]]):
        return None
    born = int(np.flatnonzero((graph.kind == Kind.ALLOC) & (graph.index == oom.id))[0])
    ran = np.flatnonzero(graph.kind[:born] == Kind.OPERATOR)
    if not len(ran):
        return None
    operator = int(graph.index[ran[-1]])
    if operators.role[operator] == Role.BACKWARD:
        operator = int(operators.origin[operator])
    if operator < 0 or operators.role[operator] not in (Role.FORWARD, Role.RECOMPUTE):
        return None
    return _of_the_first_steps(operators.step, operator)


def _of_the_first_steps(step: Int32Array, operator: int) -> int:
    """The same operator in the second step: later ones are copies of it, which no capture runs."""
    if step[operator] <= 1:
        return operator
    return operator - int(np.flatnonzero(step == step[operator])[0]) + int(np.flatnonzero(step == 1)[0])
