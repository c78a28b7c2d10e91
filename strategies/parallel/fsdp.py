"""Fully sharded data parallel by torch: `fsdp2` (`fully_shard`) with its variants, and `fsdp1`.

Each layer and the root are units: a unit's parameters are gathered before it computes and its gradients are
reduce-scattered after. Autocast becomes a mixed-precision policy with that parameter dtype and fp32 reduction.
`fsdp2-nr` keeps what forward gathered (`reshard_after_forward=False`), `fsdp2-offload`, or any with `offload` of
parameters, keeps shards on the host (`CPUOffloadPolicy`), `hsdp` shards over half of the ranks and replicates over two
(torch/distributed/fsdp).
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from graph.case import Case
from graph.errors import CaptureError
from graph.loop.method import Method
from strategies.parallel.native import Native, by_shards, layers, place_all, tied, without_autocast

if TYPE_CHECKING:
    import torch


class FullyShard(Native):
    """One rank under `fully_shard`."""

    def captured_case(self) -> Case:
        """Without autocast: the policy casts."""
        return without_autocast(self.case)

    def wrap(self, recorder: Any, built: Any) -> torch.nn.Module:
        """Layers, then the root, are sharded on meta and materialized; a model with tied parameters is placed first."""
        from torch.distributed.fsdp import fully_shard

        module: torch.nn.Module = built.module
        whole = tied(module) or built.loader is not None  # before the mesh: splitting makes two of a tied pair
        options = self.options(module)
        if whole:
            module = place_all(recorder, built)
        for layer in layers(module):
            fully_shard(layer, **options)
        fully_shard(module, **options)
        if not whole:
            materialize(recorder, module, offload=on_host(self.case))
        return module

    def mesh(self, module: torch.nn.Module) -> Any:
        """The device mesh over which the model is sharded."""
        from torch.distributed.device_mesh import init_device_mesh

        del module
        world = self.case.world
        if self.case.strategy == "hsdp":
            return init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh("cuda", (world,))

    def options(self, module: torch.nn.Module) -> dict[str, Any]:
        """The arguments of `fully_shard`."""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        options: dict[str, Any] = {
            "mesh": self.mesh(module),
            "reshard_after_forward": self.case.strategy != "fsdp2-nr",
        }
        if on_host(self.case):
            options["offload_policy"] = CPUOffloadPolicy()
        if self.case.autocast:
            dtype = torch.bfloat16 if self.case.autocast == "bf16" else torch.float16
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        return options

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Where parameters are on the host the step is the host's and touches nothing on the device: it is left out."""
        return without_step(super().optimizer(case, parameters), self.case)

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay whole on each rank before the last micro-batch, where the case says so."""
        if self.case.grad_sync == "last":
            module.set_requires_gradient_sync(last)
            if not self.case.reshard_backward:
                module.set_reshard_after_backward(last)
        return contextlib.nullcontext()


class FullyShardedDataParallel(Native):
    """One rank under FSDP1, FULL_SHARD, wrapped by layer, with `use_orig_params`."""

    def captured_case(self) -> Case:
        """Without autocast: the policy casts."""
        return without_autocast(self.case)

    def wrap(self, recorder: Any, built: Any) -> torch.nn.Module:
        """Units are materialized one after another as they are flattened."""
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        module: torch.nn.Module = built.module
        kinds = {type(layer) for layer in layers(module)}
        options: dict[str, Any] = {}
        if self.case.autocast:
            dtype = torch.bfloat16 if self.case.autocast == "bf16" else torch.float16
            options["mixed_precision"] = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        return FSDP(
            module,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds),
            device_id=recorder.device,
            use_orig_params=True,
            param_init_fn=lambda part: _empty(part, recorder.device),
            **options,
        )

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay whole on each rank before the last micro-batch, where the case says so."""
        if self.case.grad_sync == "last" and not last:
            quiet: contextlib.AbstractContextManager[Any] = module.no_sync()
            return quiet
        return contextlib.nullcontext()


def on_host(case: Case) -> bool:
    """Whether shards of parameters, with their gradients and states, are kept on the host."""
    return case.strategy == "fsdp2-offload" or case.offload == "parameters"


def without_step(optimizer: Any, case: Case) -> Any:
    """An optimizer that does nothing, where it would work on the host."""
    if on_host(case):
        optimizer.step = lambda *_, **__: None
    return optimizer


def _empty(part: torch.nn.Module, device: Any) -> None:
    part.to_empty(device=device, recurse=False)


def materialize(recorder: Any, module: torch.nn.Module, *, offload: bool = False) -> None:
    """Give a sharded meta model its memory, as `to_empty` does; `offload`: parameters on the host, buffers not."""
    module.to_empty(device="cpu" if offload else recorder.device)
    if offload:
        for buffer in module.buffers():
            buffer.data = buffer.data.to(recorder.device)


def method(case: Case, rank: int) -> Method:
    """How rank `rank` runs."""
    if case.strategy == "hsdp" and case.world % 2:
        raise CaptureError(f"key 'world': hsdp makes 2 replicas, so an even number of ranks, not {case.world}")
    return FullyShardedDataParallel(case, rank) if case.strategy == "fsdp1" else FullyShard(case, rank)


def distinct(case: Case) -> tuple[tuple[int, ...], ...]:
    """Ranks that do the same: those whose shards have the same sizes."""
    if case.strategy == "fsdp1":
        return (tuple(range(case.world)),)  # flat parameters are padded: all shards are equal
    return by_shards(case, case.world // 2 if case.strategy == "hsdp" else case.world)


def groups(case: Case) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of ranks that meet in collectives, by the names that torch gives them."""
    everyone = tuple(range(case.world))
    if case.strategy != "hsdp":
        return {"default_pg": (everyone,)}
    half = case.world // 2
    return {
        "default_pg": (everyone,),
        "mesh_shard": (everyone[:half], everyone[half:]),
        "mesh_replicate": tuple((rank, rank + half) for rank in range(half)),
    }
