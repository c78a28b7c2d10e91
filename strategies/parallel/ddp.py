"""Data parallel by torch's DistributedDataParallel: `ddp`, `ddp-view` and, with a sharded optimizer, `zero1`.

Every rank holds the whole model; gradients meet in buckets, which DDP lays out anew after the first backward
(torch/csrc/distributed/c10d/reducer.cpp). `ddp-view` is `gradient_as_bucket_view=True`; `zero1` puts torch's
ZeroRedundancyOptimizer around the optimizer, so that each rank holds the states of its share of the parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graph.case import Case
from strategies.parallel.native import Native, place_all
from strategies.strategy import Kind, Launch, Ranks, Share, Strategy

if TYPE_CHECKING:
    import torch

    from graph.models.sources import Built
    from graph.recorder.recorder import Recorder


class DataParallel(Native):
    """One rank under DistributedDataParallel."""

    kept = frozenset({"all_reduce"})
    real_steps = 3  # DDP rebuilds its buckets in the second iteration, so that the third is the first usual one

    def __init__(self, case: Case, rank: int, *, bucket_view: bool = False) -> None:
        super().__init__(case, rank)
        self.bucket_view = bucket_view

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """The whole model, wrapped."""
        from graph.fake_cuda.collectives import replicated

        return replicated(place_all(recorder, built), gradient_as_bucket_view=self.bucket_view)

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are not synchronized before the last micro-batch, where the case says so."""
        if self.case.grad_sync == "last" and not last:
            quiet: contextlib.AbstractContextManager[Any] = module.no_sync()
            return quiet
        return contextlib.nullcontext()


class ShardedOptimizer(DataParallel):
    """DistributedDataParallel with ZeroRedundancyOptimizer (torch/distributed/optim/zero_redundancy_optimizer.py)."""

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """The case's optimizer over this rank's share of the parameters."""
        from graph.loop.training import optimizer_class

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its package scripts functions as it is imported
            from torch.distributed.optim import ZeroRedundancyOptimizer

        kind, options = optimizer_class(case)
        return ZeroRedundancyOptimizer(parameters, optimizer_class=kind, **options)


@dataclass(frozen=True)
class Replicas(Strategy):
    """DistributedDataParallel and its variants."""

    kind: Kind = Kind.WHOLE
    takes: tuple[str, ...] = ("grad_sync",)
    bucket_view: bool = False
    """Gradients are views of their buckets."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return DataParallel(case, rank, bucket_view=self.bucket_view)

    def axes(self, case: Case) -> dict[str, int]:
        """Replicas."""
        return {"dp": case.world}


@dataclass(frozen=True)
class ReplicasWithShards(Replicas):
    """... with a sharded optimizer: each rank's share of the states is another."""

    kind: Kind = Kind.NONE

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return ShardedOptimizer(case, rank)

    def distinct(self, case: Case) -> Ranks:
        """Each rank for itself."""
        return tuple((rank,) for rank in range(case.world))

    def heaviest(self, case: Case) -> int:
        """The rank whose share of the optimizer's states is the largest.

        ZeroRedundancyOptimizer hands out the parameters, largest first, to the rank that has least
        (torch/distributed/optim/zero_redundancy_optimizer.py, _partition_parameters).
        """
        from graph.models.sources import build

        held = [0] * case.world
        parameters = (one for one in build(case).module.parameters() if one.requires_grad)
        for size in sorted((one.numel() for one in parameters), reverse=True):
            held[held.index(min(held))] += size
        return held.index(max(held))


_VIEW = Launch(no_accelerate="accelerate takes gradient_as_bucket_view only in code")
_ZERO = Launch(no_accelerate="accelerate has no ZeroRedundancyOptimizer")
STRATEGIES = (
    Replicas("ddp", "DistributedDataParallel", mesh_axes=("dp", "ddp")),
    Replicas("ddp-view", "... with gradient_as_bucket_view", share=Share.NO, launch=_VIEW, bucket_view=True),
    ReplicasWithShards("zero1", "... with ZeroRedundancyOptimizer", launch=_ZERO),
)
