"""What a method of several GPUs cannot be combined with: one line that says why, before the long work.

Most modifiers (checkpointing, accumulation, offloaded activations, adapters, optimizers) go with most methods. The
exceptions here are those of the libraries, by what a method does with parameters: where PyTorch's own code would fail
after minutes, or do nothing. What one method alone cannot have, its record says (`Strategy.refused`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from graph.case import Case
from graph.optimizers import OPTIMIZERS
from strategies import registry
from strategies.strategy import Kind, Strategy
from traces.errors import ConfigError

#: Methods whose ranks call a model that can be compiled, by accelerate's DistributedType.
_COMPILED: Final = ("NO", "MULTI_GPU", "FSDP")


def check(case: Case) -> None:
    """Raises ConfigError for the first key of a case that its method cannot have."""
    strategy = registry.find(case)
    for refusals in (strategy.refused(case), _refused(case, strategy, strategy.kinds(case))):
        for key, reason in refusals:
            given, name = getattr(case, key), strategy.title(case)
            raise ConfigError(f"key '{key}': not {given!r} with strategy {name!r}: {reason}")


def _refused(case: Case, strategy: Strategy, kind: Kind) -> Iterator[tuple[str, str]]:
    yield from _offload(case, kind)
    if case.compile and (strategy.launch.distributed_type not in _COMPILED or "pp" in strategy.axes(case)):
        yield "compile", "its engine compiles in a way of its own; one GPU, ddp, fsdp1, fsdp2, hsdp and tp are compiled"
    if kind & (Kind.SHARDED | Kind.SPLIT):
        if OPTIMIZERS[case.optimizer].of_bitsandbytes:
            yield "optimizer", "bitsandbytes updates no distributed tensors; ddp, fsdp1 and deepspeed have plain ones"
        if case.optimizer == "adafactor":
            yield (
                "optimizer",
                "torch's Adafactor fails on distributed tensors, whose norms are partial; ddp has plain ones",
            )
    if case.quant == "int8" and Kind.SHARDED in kind:
        yield "quant", "bitsandbytes keeps scales on each int8 parameter, which sharding loses; nf4 can be sharded"
    if Kind.FLAT in kind and case.quant:
        yield "quant", "FSDP1 flattens parameters of one type, and quantized weights are bytes; fsdp2 shards them"
    if Kind.FLAT in kind and case.lora and case.dtype != "fp32":
        yield "lora", "FSDP1 flattens parameters of one type, and adapters are fp32 here; use fsdp2 or fp32 weights"
    if Kind.SPLIT in kind:
        yield from _split(case, kind)


def _offload(case: Case, kind: Kind) -> Iterator[tuple[str, str]]:
    if case.offload == "optimizer" and Kind.HOST_STATES not in kind:
        yield "offload", "deepspeed-1 to -3 keep the optimizer's states alone on the host; fsdp2 and hsdp 'parameters'"
    if case.offload == "parameters" and Kind.HOST_PARAMETERS not in kind:
        yield "offload", "fsdp2, fsdp2-nr, hsdp and meshes with fsdp2 keep shards of parameters on the host"
    if case.offload.startswith("activations") and Kind.OWN_LOSS in kind:
        yield "offload", "its loss and recomputation are Megatron's; use checkpointing, or 'tp'"


def _split(case: Case, kind: Kind) -> Iterator[tuple[str, str]]:
    for key in ("quant", "lora"):
        if getattr(case, key):
            yield key, "tensor parallelism splits plain linear layers, not adapted or quantized ones"
    if case.offload == "activations-pin":
        yield "offload", "torch copies no distributed tensor to pinned memory; 'activations' goes"
    if Kind.ALL_SPLIT in kind:
        return
    sharded = Kind.SHARDED in kind
    if case.clip:
        meshes = "parameters of two meshes" if sharded else "distributed and plain tensors"
        yield "clip", f"torch's clip_grad_norm_ takes no norm over {meshes} at once"
    if case.autocast == "fp16" and not sharded:
        yield "autocast", "torch's GradScaler does not mix distributed and plain tensors; use 'bf16'"
