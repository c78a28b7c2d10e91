"""From a case to the trace of all its ranks: which ranks differ, and the events of each kind of rank once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from graph.case import Case
from graph.loop.method import Method
from graph.model import StepGraph
from strategies.lowering import MODULES, Lowered, finish, lower
from strategies.modifiers import check
from strategies.single import Speed, events_of
from strategies.timing.clock import Clock, timed
from traces.errors import ConfigError
from traces.model import RankEvents, Trace

#: The module for cases with a mesh.
MESHES: Final = "strategies.parallel.meshes"
#: Captures a case under a method (None: one GPU).
Capture = Callable[[Case, Method | None], StepGraph]


def trace(case: Case, capture: Capture, *, speed: Speed | None = None, clock: Clock | None = None) -> Trace:
    """The trace of every rank of a case; `capture` makes the step graphs that it needs.

    A strategy's module has either `ranks(graph, case, mesh, speed)`, which rewrites the graph of one GPU, or
    `method(case, rank)` and `distinct(case)`, which say how a rank runs and which ranks do the same. Raises ConfigError
    for a strategy that is not there or that the case contradicts. With a `clock` kernels and collectives have
    durations, and the host its launches; with `speed` alone only kernels have.
    """
    if clock is not None:
        return timed(trace(case, capture, speed=speed or clock.speed()), clock)
    check(case)
    if case.mesh and case.strategy != "gemini":
        return _native(case, importlib.import_module(MESHES), capture, speed)
    if case.strategy not in MODULES:
        raise ConfigError(f"strategy {case.strategy!r} is not available; there are: {', '.join(MODULES)}")
    module: Any = importlib.import_module(MODULES[case.strategy])
    if not hasattr(module, "method"):
        graph = capture(case, None)
        return lower(replace(graph, case=case.document()), speed=speed)
    return _native(case, module, capture, speed)


def _native(case: Case, module: Any, capture: Capture, speed: Speed | None) -> Trace:
    """The trace of a strategy whose ranks are captured one by one, those that differ."""
    entries = []
    last: StepGraph | None = None
    for members in module.distinct(case):
        method = module.method(case, members[0])
        last = capture(method.captured_case(), method)
        entries.append(RankEvents(tuple(members), events_of(last, speed, late=case.deferred == "late")))
    if last is None:
        raise ConfigError(f"key 'world': strategy {case.strategy!r} has no rank")
    groups = module.groups(case) if hasattr(module, "groups") else {"default_pg": (tuple(range(case.world)),)}
    return finish(Lowered(tuple(entries), groups), last, case)
