"""What somebody else registers: a method, an optimizer, a GPU, a PyTorch release, a case key, by CONTRIBUTING."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from msgspec import Meta

from graph import case as cases
from graph import optimizers
from graph.case import Case
from graph.hardware import gpus
from graph.keys import Taken
from simulator.allocator import releases
from strategies import registry
from strategies.parallel.native import Native, place_all
from strategies.strategy import Kind, Strategy
from traces.release import Version

TOTAL = 5 * 2**30
NEXT = Version(2, 16)


class Copies(Native):
    """Every rank keeps further copies of the weights."""

    def wrap(self, recorder: Any, built: Any) -> torch.nn.Module:
        """The model as it is, beside the copies."""
        module = place_all(recorder, built)
        number = self.case.toy_copies  # type: ignore[attr-defined]
        self.spare = [parameter.detach().clone() for _ in range(number) for parameter in module.parameters()]
        return module


class Toy(Strategy):
    """The record of the method."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return Copies(case, rank)


class ThreeStates(torch.optim.Optimizer):
    """An optimizer with three states of a parameter's size."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states at the first step, and nothing else."""
        for group in self.param_groups:
            for parameter in group["params"]:
                for name in ("first", "second", "third"):
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))


def register() -> None:
    """All of them, from here."""
    registry.register(Toy("toy", "copies of the weights", Kind.WHOLE, takes=("toy",), aliases=("toyish",)))
    optimizers.register("three", optimizers.Optimizer(f"{__name__}.ThreeStates", "sgd"))
    gpus.register(replace(gpus.gpu("L4"), name="TOY-5GB", product="Toy 5", aliases=(), total_bytes=TOTAL))
    releases.register(replace(releases.parse_release("2.15"), version=NEXT, large_segment_size_option=False))
    cases.register(
        "toy_copies",
        Annotated[int, Meta(ge=0)],
        1,
        cases.SEVERAL,
        "Further copies of the weights.",
        only=(Taken(scope="toy"),),
        metavar="N",
        aliases=("toy_n",),
    )
