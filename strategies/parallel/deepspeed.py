"""DeepSpeed's ZeRO: `deepspeed-1`, `deepspeed-2` and `deepspeed-3`, by the engine of the DeepSpeed that is installed.

`deepspeed.initialize` runs on the fake device with the configuration that a case says, and the training loop calls its
engine as DeepSpeed's users do: `engine(...)`, `engine.backward(loss)`, `engine.step()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from strategies.parallel.native import Native, place_all
from strategies.strategy import Kind, Launch, Ranks, Strategy

if TYPE_CHECKING:
    import torch

#: Optimizers of torch that DeepSpeed takes without being told to (runtime/zero/utils.py, is_zero_supported_optimizer).
TESTED: Final = ("adamw", "adamw-foreach", "adamw-fused", "adamw-forloop")


class Zero(Native):
    """One rank under DeepSpeed's engine."""

    def __init__(self, case: Case, rank: int) -> None:
        from strategies.parallel.deepspeed_engine import ready

        super().__init__(case, rank)
        self.settings = configuration(case)
        self.library = ready(self.settings["zero_optimization"])
        self.real_steps = 3 if case.strategy == "deepspeed-3" else 2  # it fetches ahead by the iterations it has seen
        self.engine: Any = None
        self.runtime: Any = None

    @contextlib.contextmanager
    def running(self, runtime: Any, recorder: Any) -> Iterator[None]:
        """The process group, and DeepSpeed's job in it."""
        from strategies.parallel.deepspeed_engine import job

        with super().running(runtime, recorder), job(self.rank, self.case.world, self.case.release):
            self.runtime = runtime
            runtime.host_copies_keep = False  # norms come to the host, which looks whether they are numbers
            try:
                yield
            finally:
                self.engine = self.runtime = None

    def captured_case(self) -> Case:
        """Without clipping, which the engine does itself."""
        return replace(self.case, clip=0.0)

    def wrap(self, recorder: Any, built: Any) -> torch.nn.Module:
        """The engine, which moves the model to the device itself unless that has been done."""
        from graph.loop.placement import place

        module = built.module
        if self.case.init == "zero.Init":
            self._partition(recorder, module)
        elif built.loader is None:
            module.to = lambda device: place(recorder, module)
        else:
            module = place_all(recorder, built)
        module.train()
        try:
            with self._finite():
                self.engine, *_ = self.library.initialize(
                    model=module,
                    model_parameters=(one for one in module.parameters() if one.requires_grad),
                    optimizer=self._inner,
                    config=self.settings,
                )
        finally:
            vars(module).pop("to", None)
        engine: torch.nn.Module = self.engine
        return engine

    def _partition(self, recorder: Any, module: torch.nn.Module) -> None:
        """Place a model as under `deepspeed.zero.Init`, which cuts up a module's parameters as soon as it is made.

        A tied parameter is made for each of its modules; all but the first are dropped again.
        """
        import torch

        from graph.loop.inputs import DTYPES
        from graph.loop.placement import place

        first: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for part in _children_first(module):
            own = dict(part.named_parameters(recurse=False))
            for name, meta in own.items():
                tensor = torch.empty_like(meta, device=recorder.device)
                setattr(part, name, torch.nn.Parameter(tensor, requires_grad=meta.requires_grad))
                del tensor
            if own:
                self.library.zero.Init(module=part, config_dict_or_path=self.settings, dtype=DTYPES[self.case.dtype])
            for name, meta in own.items():
                setattr(part, name, first.setdefault(meta, getattr(part, name)))
        place(recorder, module, keep=lambda tensor: not tensor.is_meta)

    def _inner(self, parameters: list[torch.nn.Parameter]) -> Any:
        """The optimizer that DeepSpeed's goes around; on the host it takes no step."""
        made = super().optimizer(self.case, parameters)
        if self.case.offload == "optimizer":
            made.step = lambda *_, **__: None
        return made

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """The engine, as the training loop takes an optimizer."""
        return SimpleNamespace(
            step=self._step, zero_grad=self.engine.zero_grad, state=self.engine.basic_optimizer.state
        )

    @contextlib.contextmanager
    def micro_step(self, module: object, micro: int, last: bool) -> Iterator[None]:
        """The engine counts micro-batches by their steps, and updates in the last one's."""
        yield
        if not last:
            self._step()

    def share(self, loss: torch.Tensor, accum: int) -> torch.Tensor | None:
        """None: the engine divides the loss."""
        return None

    def backward(self, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        """By the engine, which scales the loss."""
        with self._finite():
            self.engine.backward(loss)

    def _step(self) -> None:
        with self._finite():
            self.engine.step()

    @contextlib.contextmanager
    def _finite(self) -> Iterator[None]:
        """Nothing is found to be infinite or no number: a run that is simulated never overflows."""
        before, self.runtime.truth = self.runtime.truth, False
        try:
            yield
        finally:
            self.runtime.truth = before


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def configuration(case: Case) -> dict[str, Any]:
    """The DeepSpeed configuration of a case (deepspeed/runtime/config.py)."""
    stage = int(case.strategy.rpartition("-")[2])
    zero: dict[str, Any] = {"stage": stage}
    if case.buckets is not None:
        zero |= {"reduce_bucket_size": case.buckets, "allgather_bucket_size": case.buckets}
    if case.overlap_comm != "default":
        zero["overlap_comm"] = case.overlap_comm
    if case.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    zero |= case.zero_extra
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accum,
        "gradient_clipping": case.clip,  # always: DeepSpeed clips to 1.0 where it is not told
        "zero_optimization": zero,
    }
    if case.optimizer not in TESTED:
        found["zero_allow_untested_optimizer"] = True
    if case.offload == "optimizer":
        found["zero_force_ds_cpu_optimizer"] = False  # PyTorch's optimizer steps on the host
    short = case.autocast or (case.dtype if case.dtype != "fp32" else "")
    if short:
        found[short] = {"enabled": True}
    if case.grad_accum_dtype:
        found["data_types"] = {"grad_accum_dtype": case.grad_accum_dtype}
    return found


_LAUNCH = Launch(distributed_type="DEEPSPEED")


@dataclass(frozen=True)
class DeepSpeed(Strategy):
    """ZeRO of one stage."""

    kind: Kind = Kind.HOST_STATES
    takes: tuple[str, ...] = ("deepspeed", "lengths")
    launch: Launch = _LAUNCH
    half_weights: bool = True
    remedies: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("the optimizer's states on the host", {"offload": "optimizer"}),
    )

    def method(self, case: Case, rank: int) -> Zero:
        """How rank `rank` runs, or the rank that stands for it (`distinct`).

        Raises ConfigError for what contradicts DeepSpeed's own configuration, and where it is not installed.
        """
        return Zero(case, next(stands for stands, ranks in _stand_ins(case) if rank in ranks))

    def refused(self, case: Case) -> Iterator[tuple[str, str]]:
        """What contradicts the stage."""
        if case.init == "zero.Init" and case.strategy != "deepspeed-3":
            yield "init", "zero.Init is for deepspeed-3, which alone partitions parameters"
        if case.autocast:
            yield "autocast", "it has weights in bf16 or fp16 (key 'dtype') instead"

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
    whole_sums = case.dtype == "bf16" and case.grad_accum_dtype == "fp32" and not case.offload  # BF16_Optimizer
    if case.strategy == "deepspeed-3" or (case.strategy == "deepspeed-1" and whole_sums) or world == 1:
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
    if case.zero_extra.get("round_robin_gradients"):
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
    DeepSpeed("deepspeed-1", "DeepSpeed's ZeRO, stage 1", steps_alike=True, aliases=("zero-1",)),
    DeepSpeed("deepspeed-2", "... stage 2", steps_alike=True, aliases=("zero2", "zero-2")),
    DeepSpeed("deepspeed-3", "... stage 3", takes=("deepspeed", "zero.Init", "lengths"), aliases=("zero3", "zero-3")),
)
