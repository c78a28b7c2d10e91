"""What a DeepSpeed configuration says of ZeRO, with the defaults of DeepSpeed 0.19.8 (runtime/zero/config.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from graph.case import Case
from traces.errors import ConfigError

#: Keys of zero_optimization that are modelled, with their defaults; sizes are in elements.
DEFAULTS: Final[dict[str, int | float | bool | str]] = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "reduce_scatter": True,
    "contiguous_gradients": True,
    "use_multi_rank_bucket_allreduce": True,
    "round_robin_gradients": False,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": 2**63 - 1,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "overlap_comm": False,
}
#: Keys that change nothing on the device while a job trains.
SILENT: Final = frozenset(
    {
        "stage",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "stage3_gather_16bit_weights_on_model_save",
        "log_trace_cache_warnings",
        "allgather_partitions",
        "legacy_stage1",
    }
)


@dataclass(frozen=True)
class Settings:
    """ZeRO as one rank runs it. Sizes are in elements."""

    stage: int
    world: int
    rank: int
    dtype: str
    accumulate: str
    accum: int
    clip: float
    overlap: bool
    offload: bool
    reduce_bucket: int
    reduce_scatter: bool
    all_ranks_at_once: bool
    round_robin: bool
    sub_group: int
    prefetch: int
    persistence: int
    model_persistence: int
    max_live: int
    max_reuse: int

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its BF16_Optimizer (runtime/engine.py, _do_optimizer_sanity_check)."""
        return self.stage == 1 and self.dtype == "bf16" and self.accumulate == "fp32" and not self.offload


def settings(case: Case, rank: int) -> Settings:
    """The settings of rank `rank` of a case; raises ConfigError for a key that is unknown or not modelled."""
    stage = int(case.strategy.removeprefix("deepspeed-"))
    if case.init == "zero.Init" and stage != 3:
        raise ConfigError("key 'init': zero.Init is for deepspeed-3, which alone partitions parameters")
    found = dict(DEFAULTS)
    found["overlap_comm"] = stage == 3
    if case.buckets is not None:
        found["reduce_bucket_size"] = found["allgather_bucket_size"] = case.buckets
    if isinstance(case.overlap_comm, bool):
        found["overlap_comm"] = case.overlap_comm
    for key, value in case.zero_extra.items():
        if key in SILENT:
            continue
        if key not in DEFAULTS:
            raise ConfigError(f"key 'zero_extra': {key!r} is not modelled; there are: {', '.join(DEFAULTS)}")
        found[key] = value
    if not found["contiguous_gradients"] and stage < 3:
        raise ConfigError("key 'zero_extra': contiguous_gradients=False is not modelled")
    if case.autocast:
        raise ConfigError(f"key 'autocast': {case.strategy} has weights in bf16 or fp16 (key 'dtype') instead")
    return Settings(
        stage=stage,
        world=case.world,
        rank=rank,
        dtype=case.dtype,
        accumulate=case.grad_accum_dtype or case.dtype,
        accum=case.accum,
        clip=case.clip,
        overlap=bool(found["overlap_comm"]),
        offload=case.offload == "optimizer",
        reduce_bucket=int(found["reduce_bucket_size"]),
        reduce_scatter=bool(found["reduce_scatter"]),
        all_ranks_at_once=bool(found["use_multi_rank_bucket_allreduce"]),
        round_robin=bool(found["round_robin_gradients"]),
        sub_group=int(found["sub_group_size"]),
        prefetch=int(found["stage3_prefetch_bucket_size"]),
        persistence=int(found["stage3_param_persistence_threshold"]),
        model_persistence=int(found["stage3_model_persistence_threshold"]),
        max_live=int(found["stage3_max_live_parameters"]),
        max_reuse=int(found["stage3_max_reuse_distance"]),
    )
