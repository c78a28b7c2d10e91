"""How a run is set up: the points of a training run that a distributed method changes. The defaults are one GPU.

`graph.capture` runs a model through a `Method`; `strategies` has one for every way of spreading a model over GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from graph.errors import CaptureError

if TYPE_CHECKING:
    import torch

    from graph.case import Case
    from graph.fake_cuda.device import Runtime
    from graph.loop.training import Clock
    from graph.models.sources import Built
    from graph.recorder.attribution import Roles
    from graph.recorder.recorder import Recorder


class Method:
    """One rank of a job. Subclasses change what their method changes; this class is training on one GPU."""

    #: Iterations that must run for real before the last of them may stand for the rest.
    real_steps: int = 2
    #: Whether what the first iteration left to be dropped is gone: until then no iteration stands for the rest.
    settled: bool = True
    #: Names of the phases of training, in the order of the numbers that `train` gives its clock.
    phases: tuple[str, ...] = ("load", "forward", "backward", "optimizer", "end")

    def running(self, runtime: Runtime, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        """Around the whole run, inside the fake device: process groups begin and end here."""
        return contextlib.nullcontext()

    def load(self, recorder: Recorder, built: Built) -> Mapping[str, int]:
        """Bring `built.module` to the device, wrapped as the method wraps it (`built.module` is replaced by that).

        The answer maps the names of parameters and buffers to their storages.
        """
        from graph.loop.placement import place

        found: Mapping[str, int] = built.load(lambda module, keep: place(recorder, module, keep=keep))
        return found

    def compiles_blocks(self, case: Case) -> bool:
        """Whether blocks are compiled one by one, not the model as a whole."""
        return case.compile_blocks

    def compile(self, case: Case, module: torch.nn.Module) -> None:
        """Mark the wrapped module, or each of its blocks, to be compiled: `compile` changes no name in it."""
        for part in layers(module) if self.compiles_blocks(case) else [module]:
            part.compile(mode=case.compile)

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """The optimizer over the trainable parameters of the wrapped module."""
        from graph.loop.training import make_optimizer

        return make_optimizer(case, parameters)

    def train(self, clock: Clock, built: Built, case: Case, roles: Roles, steps: int) -> None:
        """The training loop: `steps` iterations, with its marks on `clock` (a `graph.loop.training.Clock`)."""
        from graph.loop.training import train

        train(clock, built, case, roles, steps, self)

    def micro_step(self, module: torch.nn.Module, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch (`last`: the one after which the optimizer steps)."""
        return contextlib.nullcontext()

    def share(self, loss: torch.Tensor, accum: int) -> torch.Tensor | None:
        """The gradient that backward begins with: it makes the mean over `accum` micro-batches, without a division of
        the loss. None: one."""
        import torch

        return torch.full_like(loss, 1 / accum) if accum > 1 else None

    def backward(self, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        """The backward pass of one micro-batch, from its loss and its `share`. They end in this order, as those of
        `loss.backward(share)` do."""
        loss.backward(share)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """A phase ends: work that was finished is dropped."""


def layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a model: items of its lists of modules that lie in no other such list.

    Raises CaptureError for a model without any.
    """
    import torch

    def walk(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
        for child in part.children():
            if isinstance(child, torch.nn.ModuleList) and len(child) > 1:
                yield from child
            else:
                yield from walk(child)

    found = list(walk(module))
    if not found:
        raise CaptureError("the model has no list of layers (torch.nn.ModuleList) that could be wrapped one by one")
    return found
