"""What a method of several GPUs cannot be combined with: one line that says why, before the long work.

Most modifiers (checkpointing, accumulation, offloaded activations, adapters, optimizers) go with most methods. The
exceptions here are those of the libraries: where PyTorch's own code would fail after minutes, or do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph.case import Case
from traces.errors import ConfigError

#: Axes and strategies whose parameters are distributed tensors, by sharding and by splitting.
_SHARDED = frozenset({"fsdp2", "fsdp2-nr", "fsdp2-offload", "fsdp2-tp", "hsdp"})
_SPLIT = frozenset({"tp", "tp-sp", "fsdp2-tp"})
_MEGATRON = frozenset({"tp-megatron", "tp-megatron-sp"})
_ZERO = frozenset({"deepspeed-1", "deepspeed-2", "deepspeed-3"})


def check(case: Case) -> None:
    """Raises ConfigError for the first key of a case that its method cannot have."""
    for key, reason in _refused(case):
        name = ",".join(case.mesh) if case.mesh and case.strategy != "gemini" else case.strategy
        raise ConfigError(f"key '{key}': not {getattr(case, key)!r} with strategy {name!r}: {reason}")


def _refused(case: Case) -> Iterator[tuple[str, str]]:
    names = {case.strategy} if case.strategy == "gemini" else {case.strategy, *case.mesh}
    sharded, split = bool(names & _SHARDED), bool(names & _SPLIT)
    yield from _offload(case, names)
    if (sharded or split) and case.optimizer == "adamw-8bit":
        yield "optimizer", "bitsandbytes updates no distributed tensors; ddp, fsdp1 and deepspeed have plain ones"
    if (sharded or split) and case.optimizer == "adafactor":
        yield "optimizer", "torch's Adafactor fails on distributed tensors, whose norms are partial; ddp has plain ones"
    if case.quant == "int8" and sharded:
        yield "quant", "bitsandbytes keeps scales on each int8 parameter, which sharding loses; nf4 can be sharded"
    if "fsdp1" in names and case.quant:
        yield "quant", "FSDP1 flattens parameters of one type, and quantized weights are bytes; fsdp2 shards them"
    if "fsdp1" in names and case.lora and case.dtype != "fp32":
        yield "lora", "FSDP1 flattens parameters of one type, and adapters are fp32 here; use fsdp2 or fp32 weights"
    if split:
        yield from _split(case, names, sharded=sharded)


def _offload(case: Case, names: set[str]) -> Iterator[tuple[str, str]]:
    if case.offload == "optimizer" and not names & _ZERO:
        yield "offload", "deepspeed-1 to -3 keep the optimizer's states alone on the host; fsdp2 and hsdp 'parameters'"
    if case.offload == "parameters" and not names & (_SHARDED - {"fsdp2-tp"}):
        yield "offload", "fsdp2, fsdp2-nr, hsdp and meshes with fsdp2 keep shards of parameters on the host"
    if case.offload.startswith("activations") and names & _MEGATRON:
        yield "offload", "its loss and recomputation are Megatron's; use checkpointing, or 'tp'"


def _split(case: Case, names: set[str], *, sharded: bool) -> Iterator[tuple[str, str]]:
    for key in ("quant", "lora"):
        if getattr(case, key):
            yield key, "tensor parallelism splits plain linear layers, not adapted or quantized ones"
    if case.offload == "activations-pin":
        yield "offload", "torch copies no distributed tensor to pinned memory; 'activations' goes"
    if case.clip and "tp-sp" not in names:
        meshes = "parameters of two meshes" if sharded else "distributed and plain tensors"
        yield "clip", f"torch's clip_grad_norm_ takes no norm over {meshes} at once"
    if case.autocast == "fp16" and not sharded and "tp-sp" not in names:
        yield "autocast", "torch's GradScaler does not mix distributed and plain tensors; use 'bf16'"
