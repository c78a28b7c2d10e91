"""Fully sharded data parallel by torch's first FSDP: `fsdp1`, FULL_SHARD by layer (torch/distributed/fsdp)."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.loop.method import layers
from strategies.parallel.native import Native, synchronized, without_autocast
from strategies.strategy import FSDP, Kind, Launch, Strategy

if TYPE_CHECKING:
    import torch

    from graph.models.sources import Built
    from graph.recorder.recorder import Recorder


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

    def micro_step(self, module: object, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay whole on each rank before the last micro-batch, where the case says so."""
        return synchronized(self.case, module, last)


def _empty(part: torch.nn.Module, device: torch.device) -> None:
    part.to_empty(device=device, recurse=False)


@dataclass(frozen=True)
class Flattened(Strategy):
    """FSDP1: flat parameters are padded, so that all shards are equal."""

    kind: Kind = Kind.FLAT
    takes: tuple[str, ...] = ("grad_sync", "lengths")
    launch: Launch = FSDP

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return FullyShardedDataParallel(case, rank)


FSDP1: Final = Flattened("fsdp1", "FSDP1, FULL_SHARD")
