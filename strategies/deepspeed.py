"""DeepSpeed's ZeRO: `deepspeed-1`, `deepspeed-2` and `deepspeed-3`, as DeepSpeed 0.19.8 runs them.

DeepSpeed itself is not needed: `strategies.zero_flat` (stages 1 and 2), `strategies.zero_bf16` (stage 1 with gradients
in fp32) and `strategies.zero_sharded` (stage 3) do what its optimizers do with tensors, within a captured run, so that
autograd, the order of hooks and the ends of tensors are PyTorch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graph.case import Case
from graph.method import Method
from strategies.native import Native, place_all, storages
from strategies.zero_settings import settings

if TYPE_CHECKING:
    import torch


class Zero(Native):
    """One rank under DeepSpeed's engine."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.settings = settings(case, rank)
        self.engine: Any = None

    @contextlib.contextmanager
    def running(self, runtime: Any, recorder: Any) -> Iterator[None]:
        """The process group of the job; stage 3 has a linear function of its own."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().running(runtime, recorder))
            if self.settings.stage == 3:
                from unittest import mock

                import torch

                from strategies.zero_linear import linear

                stack.enter_context(mock.patch.object(torch.nn.functional, "linear", linear))
            try:
                yield
            finally:
                self.engine = None

    def captured_case(self) -> Case:
        """Without clipping, which the engine does itself."""
        return replace(self.case, clip=0.0)

    def load(self, recorder: Any, built: Any) -> Mapping[str, int]:
        """Place the model and initialize the engine."""
        self.engine = self._stage_3(recorder, built) if self.settings.stage == 3 else self._flat(recorder, built)
        built.module.train()
        return storages(recorder, built.module)

    def _flat(self, recorder: Any, built: Any) -> Any:
        from strategies.zero_bf16 import Bf16
        from strategies.zero_flat import Flat

        module = place_all(recorder, built)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return (Bf16 if self.settings.bf16_optimizer else Flat)(self.settings, trainable, self._make)

    def _stage_3(self, recorder: Any, built: Any) -> Any:
        from strategies.zero_sharded import Sharded, partitioned, partitioned_while_built

        unused: list[torch.Tensor] = []
        module = built.module
        if self.case.init == "zero.Init":
            shards, unused = partitioned_while_built(self.settings, recorder, module)
        else:
            module = place_all(recorder, built)
            shards = partitioned(self.settings, module)
        late = self.case.deferred == "late"
        return Sharded(self.settings, module, shards, self._make, late=late, unused=unused)

    def _make(self, parameters: list[torch.nn.Parameter]) -> Any:
        return super().optimizer(self.case, parameters)

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """The engine."""
        return self.engine

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """A forward begins; gradients are summed over micro-batches up to the last one."""
        self.engine.boundary = last
        self.engine.micro = micro
        self.engine.forward_begins()
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of the loss, scaled (runtime/engine.py, backward)."""
        part = loss / self.settings.accum
        scaled = part if self.settings.bf16_optimizer else part * self.engine.scale
        scaled.register_hook(self._begin)
        scaled.backward()  # type: ignore[no-untyped-call]
        self.engine.backward_ends()
        del scaled

    def _begin(self, gradient: torch.Tensor) -> None:
        self.engine.backward_begins()


def method(case: Case, rank: int) -> Method:
    """How rank `rank` runs."""
    return Zero(case, rank)


def distinct(case: Case) -> tuple[tuple[int, ...], ...]:
    """Ranks that do the same: all of them hold other parameters, so only stage 3 has equal ones."""
    if case.strategy == "deepspeed-3":
        return (tuple(range(case.world)),)
    return tuple((rank,) for rank in range(case.world))
