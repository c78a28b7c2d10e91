"""Fully sharded data parallel by torch: `fsdp2` (`fully_shard`) with its variants, and `fsdp1`.

Each layer and the root are units: a unit's parameters are gathered before it computes and its gradients are
reduce-scattered after. To free what was gathered torch resizes its storage to 0, which `Recorder.resized` notes.
Autocast becomes a mixed-precision policy with that parameter dtype and fp32 reduction. `fsdp2-nr` keeps what forward
gathered (`reshard_after_forward=False`), `fsdp2-offload`, or any with `offload` of parameters, keeps shards on the
host (`CPUOffloadPolicy`), `hsdp` shards over half of the ranks and replicates over two (torch/distributed/fsdp).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.errors import CaptureError
from strategies.parallel.native import Native, by_shards, layers, place_all, tied, without_autocast
from strategies.strategy import FSDP, Groups, Kind, Launch, Ranks, Share, Strategy

if TYPE_CHECKING:
    import torch

    from graph.models.sources import Built
    from graph.recorder.recorder import Recorder

#: How many replicas `hsdp` makes.
REPLICAS: Final = 2


class FullyShard(Native):
    """One rank under `fully_shard`, as a variant of it says."""

    def __init__(self, case: Case, rank: int, variant: Sharded) -> None:
        super().__init__(case, rank)
        self.variant = variant
        self.on_host = variant.on_host(case)

    def captured_case(self) -> Case:
        """Without autocast: the policy casts."""
        return without_autocast(self.case)

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
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
            materialize(recorder, module, offload=self.on_host)
        return module

    def mesh(self, module: torch.nn.Module) -> Any:
        """The device mesh over which the model is sharded."""
        from torch.distributed.device_mesh import init_device_mesh

        del module
        return init_device_mesh("cuda", (self.case.world,))

    def options(self, module: torch.nn.Module) -> dict[str, Any]:
        """The arguments of `fully_shard`."""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        from graph.loop.inputs import DTYPES

        options: dict[str, Any] = {
            "mesh": self.mesh(module),
            "reshard_after_forward": self.variant.reshard_after_forward,
        }
        if self.on_host:
            options["offload_policy"] = CPUOffloadPolicy()
        if self.case.autocast:
            dtype = DTYPES[self.case.autocast]
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        return options

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Where parameters are on the host the step is the host's and touches nothing on the device: it is left out."""
        made = super().optimizer(case, parameters)
        return without_step(made) if self.on_host else made

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay whole on each rank before the last micro-batch, where the case says so."""
        if self.case.grad_sync == "last":
            module.set_requires_gradient_sync(last)
            if not self.case.reshard_backward:
                module.set_reshard_after_backward(last)
        return contextlib.nullcontext()


class HybridShard(FullyShard):
    """One rank under `fully_shard` over two dimensions."""

    def mesh(self, module: torch.nn.Module) -> Any:
        """Replicas, and the shards within each."""
        from torch.distributed.device_mesh import init_device_mesh

        del module
        return init_device_mesh("cuda", (REPLICAS, self.case.world // REPLICAS), mesh_dim_names=("replicate", "shard"))


class FullyShardedDataParallel(Native):
    """One rank under FSDP1, FULL_SHARD, wrapped by layer, with `use_orig_params`."""

    def captured_case(self) -> Case:
        """Without autocast: the policy casts."""
        return without_autocast(self.case)

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """Units are materialized one after another as they are flattened."""
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel as Flat
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        from graph.loop.inputs import DTYPES

        module: torch.nn.Module = built.module
        kinds = {type(layer) for layer in layers(module)}
        options: dict[str, Any] = {}
        if self.case.autocast:
            dtype = DTYPES[self.case.autocast]
            options["mixed_precision"] = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        return Flat(
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


def without_step(optimizer: Any) -> Any:
    """An optimizer whose step does nothing on the device, since it works on the host."""
    optimizer.step = lambda *_, **__: None
    return optimizer


def _empty(part: torch.nn.Module, device: torch.device) -> None:
    part.to_empty(device=device, recurse=False)


def materialize(recorder: Recorder, module: torch.nn.Module, *, offload: bool = False) -> None:
    """Give a sharded meta model its memory, as `to_empty` does; `offload`: parameters on the host, buffers not."""
    module.to_empty(device="cpu" if offload else recorder.device)
    if offload:
        for buffer in module.buffers():
            buffer.data = buffer.data.to(recorder.device)


@dataclass(frozen=True)
class Sharded(Strategy):
    """`fully_shard`: ranks whose shards have the same sizes do the same."""

    kind: Kind = Kind.SHARDED | Kind.HOST_PARAMETERS
    takes: tuple[str, ...] = ("grad_sync", "reshard_backward")
    launch: Launch = FSDP
    reshard_after_forward: bool = True
    offload: bool = False
    """Shards are always kept on the host."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return FullyShard(case, rank, self)

    def distinct(self, case: Case) -> Ranks:
        """Ranks whose shards have the same sizes."""
        return by_shards(case, case.world)

    def heaviest(self, case: Case) -> int:
        """The first pieces of torch.chunk are the largest."""
        return 0

    def axes(self, case: Case) -> dict[str, int]:
        """Shards."""
        return {"fsdp2": case.world}

    def on_host(self, case: Case) -> bool:
        """As the case or the variant says."""
        return self.offload or super().on_host(case)


@dataclass(frozen=True)
class Hybrid(Sharded):
    """Shards over half of the ranks, in two replicas."""

    def sensible(self, world: int) -> bool:
        """Of two ranks there is nothing to shard."""
        return world % REPLICAS == 0 and world > REPLICAS

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs. Raises CaptureError for an odd number of ranks."""
        if case.world % REPLICAS:
            raise CaptureError(f"key 'world': hsdp makes 2 replicas, so an even number of ranks, not {case.world}")
        return HybridShard(case, rank, self)

    def distinct(self, case: Case) -> Ranks:
        """Ranks whose shards have the same sizes."""
        return by_shards(case, case.world // REPLICAS)

    def groups(self, case: Case) -> Groups:
        """All, those that share shards, and those that have the same."""
        everyone = tuple(range(case.world))
        half = case.world // REPLICAS
        return {
            "default_pg": (everyone,),
            "mesh_shard": (everyone[:half], everyone[half:]),
            "mesh_replicate": tuple((rank, rank + half) for rank in range(half)),
        }

    def axes(self, case: Case) -> dict[str, int]:
        """Replicas and shards."""
        return {"dp": REPLICAS, "fsdp2": case.world // REPLICAS}


@dataclass(frozen=True)
class Flattened(Strategy):
    """FSDP1: flat parameters are padded, so that all shards are equal."""

    kind: Kind = Kind.FLAT
    takes: tuple[str, ...] = ("grad_sync",)
    launch: Launch = FSDP

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return FullyShardedDataParallel(case, rank)


_HOST = (("parameters and states on the host", {"strategy": "fsdp2-offload"}),)
STRATEGIES = (
    Flattened("fsdp1", "FSDP1, FULL_SHARD"),
    Sharded("fsdp2", "fully_shard by layer", remedies=_HOST, aliases=("fsdp",), mesh_axes=("fsdp2",)),
    Sharded("fsdp2-nr", "... without resharding after forward", share=Share.NO, reshard_after_forward=False),
    Sharded("fsdp2-offload", "... with parameters and states on the host", offload=True),
    Hybrid("hsdp", "... over half of the ranks, in two replicas", aliases=("hybrid_shard",), mesh_axes=("hsdp",)),
)
