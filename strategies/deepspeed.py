"""DeepSpeed's ZeRO: `deepspeed-1`, `deepspeed-2` and `deepspeed-3`, as DeepSpeed 0.19.8 runs them.

DeepSpeed itself is not needed: `strategies.zero_flat` (stages 1 and 2), `strategies.zero_bf16` (stage 1 with gradients
in fp32) and `strategies.zero_sharded` (stage 3) do what its optimizers do with tensors, within a captured run, so that
autograd, the order of hooks and the ends of tensors are PyTorch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graph.case import Case
from strategies.parallel.native import Native, place_all, storages
from strategies.strategy import Kind, Launch, Ranks, Strategy
from strategies.zero_settings import settings

if TYPE_CHECKING:
    import torch


class Zero(Native):
    """One rank under DeepSpeed's engine."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.settings = settings(case, rank)
        self.real_steps = 3 if self.settings.stage == 3 else 2  # stage 3 fetches ahead by the iterations it has seen
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

        module = self._cast(recorder, built)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return (Bf16 if self.settings.bf16_optimizer else Flat)(self.settings, trainable, self._make)

    def _stage_3(self, recorder: Any, built: Any) -> Any:
        from strategies.zero_sharded import Sharded, partitioned, partitioned_while_built

        module = built.module
        if self.case.init == "zero.Init":
            shards = partitioned_while_built(self.settings, recorder, module)
        else:
            module = self._cast(recorder, built)
            shards = partitioned(self.settings, module)
        return Sharded(self.settings, module, shards, self._make)

    def _cast(self, recorder: Any, built: Any) -> torch.nn.Module:
        """The model on the device, all of it in one type (runtime/engine.py, _configure_distributed_model).

        On the way there, or afterwards where quantization has put it there.
        """
        from graph.loop.inputs import DTYPES

        if built.loader is None:
            built.module.to(DTYPES[self.case.dtype])
        module = place_all(recorder, built)
        return module if built.loader is None else module.to(DTYPES[self.case.dtype])

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
        scaled.backward()
        self.engine.backward_ends()
        del scaled

    def _begin(self, gradient: torch.Tensor) -> None:
        self.engine.backward_begins()


_LAUNCH = Launch(distributed_type="DEEPSPEED")


@dataclass(frozen=True)
class DeepSpeed(Strategy):
    """ZeRO of one stage."""

    kind: Kind = Kind.HOST_STATES
    launch: Launch = _LAUNCH
    half_weights: bool = True
    remedies: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("the optimizer's states on the host", {"offload": "optimizer"}),
    )

    def method(self, case: Case, rank: int) -> Zero:
        """How rank `rank` runs, or the rank that stands for it (`distinct`)."""
        stand_in = next(members for members in _stand_ins(case) if rank in members[1])[0]
        return Zero(case, stand_in)

    def distinct(self, case: Case) -> Ranks:
        """Ranks that do the same.

        All of them under stage 3, whose parts are equal, and with gradients in fp32. Otherwise ranks differ in what
        they hold parts of: the first and the last rank stand for themselves, and of the others the one with most for
        all.
        """
        return tuple(ranks for _, ranks in _stand_ins(case))


def _stand_ins(case: Case) -> list[tuple[int, tuple[int, ...]]]:
    """(the rank that is run, the ranks it stands for)."""
    world = case.world
    chosen = settings(case, 0)
    if chosen.stage == 3 or chosen.bf16_optimizer or world == 1:
        return [(0, tuple(range(world)))]
    found: list[tuple[int, tuple[int, ...]]] = [(0, (0,))]
    if world > 2:
        held = _held(case)
        others = tuple(range(1, world - 1))
        found.append((max(others, key=lambda rank: held[rank]), others))
    return [*found, (world - 1, (world - 1,))]


def _held(case: Case) -> list[int]:
    """For each rank the elements of all parameters of which it holds a part (in whole, as gradients are kept)."""
    from graph.models.sources import build

    sizes = [parameter.numel() for parameter in build(case).module.parameters() if parameter.requires_grad]
    if settings(case, 0).round_robin:
        sizes = [size for first in range(case.world) for size in sizes[first :: case.world]]
    share = -(-sum(sizes) // (2 * case.world)) * 2
    held = [0] * case.world
    begin = 0
    for size in sizes:
        for rank in range(begin // share, -(-(begin + size) // share)):
            held[rank] += size
        begin += size
    return held


STRATEGIES = (
    DeepSpeed("deepspeed-1", "DeepSpeed's ZeRO, stage 1", steps_alike=True),
    DeepSpeed("deepspeed-2", "... stage 2", steps_alike=True),
    DeepSpeed("deepspeed-3", "... stage 3"),
)
