"""Configuration files for a case: how to start exactly the run that was simulated.

Written are a start script with `torchrun` and the allocator's settings, an `accelerate` configuration, a DeepSpeed
configuration where DeepSpeed runs, arguments of transformers' Trainer and of TRL's SFTTrainer, and FSDP2's settings
for those who call `fully_shard` themselves. All are text; none of those libraries is needed to write them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.case import Case

#: Every file that may be written.
FILES: Final = ("launch.sh", "accelerate.yaml", "deepspeed.json", "training_args.json", "sft_args.json", "fsdp2.json")
FSDP: Final = ("fsdp1", "fsdp2", "fsdp2-nr", "fsdp2-offload", "hsdp", "fsdp2-tp")
#: Methods of which no launcher has files: Colossal-AI's booster and a pipeline are set up in code.
IN_CODE: Final[Mapping[str, str]] = {
    "gemini": "Colossal-AI's GeminiPlugin is set up in the training script",
    "pp": "torch.distributed.pipelining is set up in the training script",
}
#: Optimizers by their names in transformers' `OptimizerNames`.
OPTIMIZERS: Final[Mapping[str, str]] = {
    "adamw": "adamw_torch",
    "adamw-foreach": "adamw_torch",
    "adamw-forloop": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "adamw-8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


def files(case: Mapping[str, Any] | Case) -> dict[str, str]:
    """File name -> text, for a case; only those that its method takes.

    Raises ConfigError for a case that cannot be, or whose method is set up in code.
    """
    from graph.case import Case

    asked = case if isinstance(case, Case) else Case.of(case)
    if asked.strategy in IN_CODE:
        raise ConfigError(f"no configuration files for strategy {asked.strategy!r}: {IN_CODE[asked.strategy]}")
    found = {"launch.sh": launch(asked), "accelerate.yaml": _yaml(accelerate(asked))}
    if asked.strategy.startswith("deepspeed"):
        found["deepspeed.json"] = _json(deepspeed(asked))
    found["training_args.json"] = _json(training_arguments(asked))
    found["sft_args.json"] = _json({**training_arguments(asked), "max_length": asked.seq, "packing": True})
    if asked.strategy in FSDP and asked.strategy != "fsdp1":
        found["fsdp2.json"] = _json(fsdp2(asked))
    return found


def launch(case: Case) -> str:
    """A script that starts the run: the environment, then `torchrun` (its arguments go to `train.py`)."""
    lines = ["#!/usr/bin/env bash", "# Starts the training script on all GPUs of this machine.", "set -euo pipefail"]
    if case.alloc_conf:
        old = release_of(case) < (2, 9)  # the new name is known from 2.9 on
        name = "PYTORCH_CUDA_ALLOC_CONF" if old else "PYTORCH_ALLOC_CONF"
        lines.append(f"export {name}={shlex.quote(case.alloc_conf)}")
    if case.strategy == "fsdp2" or case.strategy.startswith("fsdp2-"):
        lines.append("# fully_shard takes the settings of fsdp2.json; with accelerate instead:")
    else:
        lines.append("# With accelerate instead:")
    lines.append('#   accelerate launch --config_file accelerate.yaml train.py "$@"')
    lines.append(f'torchrun --standalone --nproc-per-node={case.world} train.py "$@"')
    return "\n".join(lines) + "\n"


def release_of(case: Case) -> tuple[int, int]:
    """The release of PyTorch as numbers."""
    major, minor = case.release.split(".")[:2]
    return int(major), int("".join(letter for letter in minor if letter.isdigit()) or 0)


def precision(case: Case) -> str:
    """Mixed precision as accelerate names it; weights that are in 16 bits throughout have none."""
    return case.autocast or "no"


def accelerate(case: Case) -> dict[str, Any]:
    """The configuration of `accelerate launch` (accelerate/commands/config/config_args.py, ClusterConfig)."""
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(case),
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision(case),
        "num_machines": 1,
        "num_processes": case.world,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if case.strategy in FSDP:
        found["fsdp_config"] = _fsdp(case)
    if case.strategy.startswith("deepspeed"):
        del found["mixed_precision"]  # the file says it, and accelerate refuses to be told twice
        found["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": case.init == "zero.Init",
        }
    split = _split(case)
    if split:
        found["parallelism_config"] = split
    return found


def _distributed_type(case: Case) -> str:
    if case.world == 1:
        return "NO"
    if case.strategy in FSDP:
        return "FSDP"
    return "DEEPSPEED" if case.strategy.startswith("deepspeed") else "MULTI_GPU"


def _fsdp(case: Case) -> dict[str, Any]:
    common = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": case.strategy == "fsdp2-offload",
        "fsdp_activation_checkpointing": False,  # the trainer's arguments turn it on, as the simulated model does
    }
    if case.strategy == "fsdp1":
        one = {"fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD", "fsdp_use_orig_params": True}
        return {**one, **common, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    stays = case.strategy == "fsdp2-nr"
    two = {"fsdp_version": 2, "fsdp_reshard_after_forward": not stays}
    return {**two, **common, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}


def _split(case: Case) -> dict[str, int]:
    """accelerate's ParallelismConfig: the sizes of the mesh, for methods that have more than one dimension, or tp."""
    half = case.world // 2
    sizes = {
        "hsdp": (2, half, 1),
        "fsdp2-tp": (1, half, 2),
        "tp": (1, 1, case.world),
        "tp-sp": (1, 1, case.world),
    }.get(case.strategy)
    if sizes is None:
        return {}
    names = ("dp_replicate_size", "dp_shard_size", "tp_size")
    return {f"parallelism_config_{name}": size for name, size in zip(names, sizes, strict=True)}


def deepspeed(case: Case) -> dict[str, Any]:
    """The DeepSpeed configuration (deepspeed/runtime/config.py)."""
    stage = int(case.strategy.rpartition("-")[2])
    zero: dict[str, Any] = {"stage": stage, **dict(case.zero_extra)}
    if case.buckets is not None:
        zero |= {"reduce_bucket_size": case.buckets, "allgather_bucket_size": case.buckets}
    if case.overlap_comm != "default":
        zero["overlap_comm"] = case.overlap_comm
    if case.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if case.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accum,
        "zero_optimization": zero,
    }
    short = case.autocast or (case.dtype if case.dtype != "fp32" else "")
    if short:
        found[short] = {"enabled": True}
    if case.grad_accum_dtype:
        found["data_types"] = {"grad_accum_dtype": case.grad_accum_dtype}
    if case.clip:
        found["gradient_clipping"] = case.clip
    return found


def training_arguments(case: Case) -> dict[str, Any]:
    """Arguments of transformers' Trainer (`TrainingArguments`); TRL's have these too."""
    found: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": case.accum,
        "optim": OPTIMIZERS[case.optimizer],
        "max_grad_norm": case.clip,
        "gradient_checkpointing": case.checkpointing in ("nonreentrant", "reentrant"),
        "bf16": case.autocast == "bf16",
        "fp16": case.autocast == "fp16",
    }
    if found["gradient_checkpointing"]:
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": case.checkpointing == "reentrant"}
    if case.strategy.startswith("deepspeed"):
        found["deepspeed"] = "deepspeed.json"
        found["bf16"] = found["bf16"] or case.dtype == "bf16"
        found["fp16"] = found["fp16"] or case.dtype == "fp16"
    return found


def fsdp2(case: Case) -> dict[str, Any]:
    """Settings of `torch.distributed.fsdp.fully_shard`: what to wrap, the mesh and the policies."""
    half = case.world // 2
    meshes = {"hsdp": [2, half], "fsdp2-tp": [half, 2]}
    types = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    return {
        "wrap": "every item of the model's lists of layers (torch.nn.ModuleList), then the model",
        "mesh": meshes.get(case.strategy, [case.world]),
        "reshard_after_forward": case.strategy != "fsdp2-nr",
        "set_reshard_after_backward": case.reshard_backward,
        "mp_policy": {
            "param_dtype": types.get(case.autocast),
            "reduce_dtype": "torch.float32" if case.autocast else None,
        },
        "offload_policy": "CPUOffloadPolicy" if case.strategy == "fsdp2-offload" else None,
    }


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def _yaml(document: Mapping[str, Any], indent: str = "") -> str:
    """Scalars and mappings as YAML; texts in quotes, so that `no` stays a word."""
    text = ""
    for key, value in document.items():
        if isinstance(value, Mapping):
            text += f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
        else:
            text += f"{indent}{key}: {json.dumps(value)}\n"
    return text
