"""Step graphs of training runs written by hand, for tests of what is made of a graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from graph.case import Case
from graph.model import StepGraph
from simulator.estimator.estimate import forget_graphs
from tests.support.made_graphs import Maker

PHASES = ("load", "forward", "backward", "optimizer", "end")


class Writer(Maker):
    """A maker with the phases of training."""

    def __init__(self, case: Mapping[str, Any] | None = None) -> None:
        super().__init__(case=dict(case or {"model": "written"}), phases=list(PHASES))

    def graph(self, **fields: Any) -> StepGraph:
        return super().graph(assumptions=("routers spread tokens evenly",), **fields)


def training(
    case: Mapping[str, Any] | None = None, *, steps: int = 2, micro: int = 1, unit: int = 3 << 20
) -> StepGraph:
    """A run of one parameter of `unit` bytes: activations, its gradient, and a state of the optimizer.

    Peaks in units: load 1; the n-th micro-batch's forward holds n activations at once, and backward one gradient more.
    """
    writer = Writer(case)
    writer.phase("load")
    writer.alloc(unit, "parameter", "layer.weight", "layer")
    gradient, state = -1, -1
    for step in range(steps):
        for batch in range(micro):
            writer.phase("forward", step)
            if batch == 0 and gradient >= 0:
                writer.free(gradient)
                gradient = -1
            writer.operator("aten.mm.default", module="layer", flops=10**9, moved=3 * unit)
            acts = [writer.alloc(unit, "activation", "aten.mm.default", "layer") for _ in range(batch + 1)]
            writer.phase("backward", step)
            if gradient < 0:
                gradient = writer.alloc(unit, "gradient", "layer.weight", "layer")
            writer.free(*acts)
        writer.phase("optimizer", step)
        if state < 0:
            state = writer.alloc(unit, "optimizer_state", "layer.weight", "layer")
    writer.phase("end")
    return writer.graph()


def stub(case: Case) -> StepGraph:
    """In the place of a capture: the written run, or the misfortune that the model's name says."""
    what, _, seconds = case.model.partition(":")
    if what == "sleeps":
        time.sleep(float(seconds))
    elif what == "dies":
        os._exit(9)
    elif what == "fails":
        raise RuntimeError("first line\nsecond line")
    elif what == "exits":
        raise SystemExit(3)
    return training(case.document(), steps=case.steps, micro=case.accum)


def in_place_of_captures(patch: pytest.MonkeyPatch, made: Callable[..., StepGraph]) -> Iterator[None]:
    """Until it is resumed, `made` stands for captures, and models may have names that are in no catalogue."""
    forget_graphs()
    patch.setattr("simulator.estimator.estimate.capture_of", made)
    patch.setattr("simulator.options.case.configuration", lambda model: None)
    yield
    forget_graphs()
