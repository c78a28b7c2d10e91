"""Configuration files for a case: how to start exactly the run that was simulated.

Written are a start script with `torchrun` and the allocator's settings, the training script that it starts
(`simulator.launch.training_script`), an `accelerate` configuration, a DeepSpeed configuration where DeepSpeed runs, and
arguments of transformers' Trainer and of TRL's SFTTrainer. Of a file that is not written `absent` has the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.dtypes import NAMES
from graph.optimizers import OPTIMIZERS
from simulator.allocator.releases import parse_release
from simulator.launch.training_script import Predicted, axes_of, by_block, deepspeed_runs, script, templates, why_not
from strategies import registry
from strategies.parallel.deepspeed import configuration
from strategies.parallel.fsdp import Flattened
from strategies.strategy import MACHINE, Axis

if TYPE_CHECKING:
    from graph.case import Case

#: Every file that may be written.
FILES: Final = ("launch.sh", "train.py", "accelerate.yaml", "deepspeed.json", "training_args.json", "sft_args.json")


def files(case: Mapping[str, Any] | Case, predicted: Predicted | None = None) -> dict[str, str]:
    """File name -> text, for a case: those of `FILES` for which `absent` has no reason.

    `predicted` are the peaks beside which the training script prints those that it measures. Raises ConfigError for a
    case that cannot be.
    """
    asked = _case(case)
    made = {
        "launch.sh": lambda: launch(asked),
        "train.py": lambda: script(asked, predicted),
        "accelerate.yaml": lambda: _yaml(accelerate(asked)),
        "deepspeed.json": lambda: _json(deepspeed(asked)),
        "training_args.json": lambda: _json(training_arguments(asked)),
        "sft_args.json": lambda: _json(sft_arguments(asked)),
    }
    missing = absent(asked)
    return {name: made[name]() for name in FILES if name not in missing}


def _case(case: Mapping[str, Any] | Case) -> Case:
    return case if isinstance(case, Case) else Case.of(case)


def absent(case: Mapping[str, Any] | Case) -> dict[str, str]:
    """File name -> why a case has no such file, in one line."""
    asked = _case(case)
    trainer = _no_trainer(asked)
    found = {
        "train.py": why_not(asked),
        "accelerate.yaml": _no_launcher(asked),
        "deepspeed.json": "" if deepspeed_runs(asked) else "the method is not one of DeepSpeed's",
        "training_args.json": trainer,
        "sft_args.json": trainer or _no_sft(asked),
    }
    return {name: reason for name, reason in found.items() if reason}


def _megatron(case: Case) -> bool:
    return registry.find(case).launch.distributed_type == "MEGATRON_LM"


def _no_launcher(case: Case) -> str:
    """Why accelerate cannot start a case as it was simulated."""
    axes = axes_of(case)
    if Axis.STAGES in axes:
        return "accelerate cuts no pipeline of stages"
    if {Axis.REPLICAS, Axis.TENSOR} == set(axes):
        return "accelerate has no replicas of tensor-parallel ranks without FSDP2's shards"
    return registry.find(case).launch.no_accelerate


def _no_trainer(case: Case) -> str:
    """Why transformers' Trainer cannot run a case as it was simulated."""
    if _megatron(case):
        return "Megatron-LM trains, not transformers' Trainer"
    reasons = {
        "keeps chosen outputs (selective checkpointing)": case.checkpointing == "selective",
        "checkpoints every n-th layer": case.every > 1,
        "steps in backward": case.step_in_backward,
        "offloads activations": case.offload in ("activations", "activations-pin", "checkpoints"),
        f"has the loss {case.loss!r}": bool(case.loss),
        "splits its loss by vocabulary": bool(case.tp_loss),
        "is in inference": case.task != "train",
    }
    reason = next((text for text, so in reasons.items() if so), "")
    return _no_launcher(case) or (f"transformers' Trainer has no setting for a run that {reason}" if reason else "")


def _no_sft(case: Case) -> str:
    if case.head not in ("", "causal-lm"):
        return f"TRL's SFTTrainer is for decoders, and the head is {case.head}"
    return ""


def launch(case: Case) -> str:
    """A script that starts the run: the environment, then `torchrun` (its arguments go to `train.py`)."""
    nodes, each = machines(case)
    context = {
        "case": case,
        "nodes": nodes,
        "each": each,
        "torchrun": case.world > 1 or deepspeed_runs(case),
        "variable": parse_release(case.release).alloc_conf_variable,
        "missing": absent(case),
        "reduces_short": case.autocast and _distributed_type(case) == "FSDP" and Axis.SHARDS in axes_of(case),
    }
    return templates().get_template("launch.sh.j2").render(context)


def machines(case: Case) -> tuple[int, int]:
    """How many machines there are, and GPUs on each: as many as divide the world, 8 at most."""
    each = max(count for count in range(1, MACHINE + 1) if case.world % count == 0)
    return case.world // each, each


def precision(case: Case) -> str:
    """Mixed precision as accelerate names it; weights that are in 16 bits throughout have none."""
    return case.autocast or "no"


def accelerate(case: Case) -> dict[str, Any]:
    """The configuration of `accelerate launch` (accelerate/commands/config/config_args.py, ClusterConfig)."""
    kind = _distributed_type(case)
    nodes, _ = machines(case)
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision(case),
        "num_machines": nodes,
        "num_processes": case.world,
        "rdzv_backend": "static" if nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": False,
    }
    if case.compile:
        found["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": case.compile,
            "dynamo_use_regional_compilation": by_block(case),
        }
    if kind == "FSDP":
        found["fsdp_config"] = _fsdp(case)
    if kind == "DEEPSPEED":
        del found["mixed_precision"]  # the file says it, and accelerate refuses to be told twice
        found["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": case.init == "zero.Init",
        }
    if kind == "MEGATRON_LM":
        found["megatron_lm_config"] = _megatron_lm(case)
    split = _split(case)
    if split:
        found["parallelism_config"] = split
    return found


def _distributed_type(case: Case) -> str:
    kind = registry.find(case).launch.distributed_type
    if kind == "DEEPSPEED":
        return kind
    if case.world == 1:
        return "NO"
    return "FSDP" if Axis.SHARDS in axes_of(case) else kind


def _fsdp(case: Case) -> dict[str, Any]:
    strategy = registry.find(case)
    common = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": strategy.on_host(case),
        "fsdp_activation_checkpointing": False,  # the trainer's arguments turn it on, as the simulated model does
    }
    if isinstance(strategy, Flattened):
        one = {"fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD", "fsdp_use_orig_params": True}
        return {**one, **common, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    reshard = getattr(strategy, "reshard_after_forward", True)
    two = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}
    return {**two, **common, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}


def _megatron_lm(case: Case) -> dict[str, Any]:
    return {
        "megatron_lm_tp_degree": case.world,
        "megatron_lm_pp_degree": 1,
        "megatron_lm_num_micro_batches": case.accum,
        "megatron_lm_sequence_parallelism": getattr(registry.find(case), "sequence", False),
        "megatron_lm_recompute_activations": bool(case.checkpointing),
        "megatron_lm_use_distributed_optimizer": False,
        "megatron_lm_gradient_clipping": case.clip,
    }


def _split(case: Case) -> dict[str, int]:
    """accelerate's ParallelismConfig: the sizes of the mesh, where FSDP2's shards are not its only dimension."""
    axes = axes_of(case)
    if Axis.SHARDS not in axes or len(axes) == 1:
        return {}
    names = {Axis.REPLICAS: "dp_replicate_size", Axis.SHARDS: "dp_shard_size", Axis.TENSOR: "tp_size"}
    return {f"parallelism_config_{name}": axes.get(axis, 1) for axis, name in names.items()}


def deepspeed(case: Case) -> dict[str, Any]:
    """The DeepSpeed configuration: the one that was simulated."""
    return configuration(case)


def training_arguments(case: Case) -> dict[str, Any]:
    """Arguments of transformers' Trainer (`TrainingArguments`); TRL's have these too."""
    found: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": case.accum,
        "optim": OPTIMIZERS[case.optimizer].hugging_face,
        "max_grad_norm": case.clip,
        "activation_checkpointing": case.checkpointing in ("nonreentrant", "reentrant"),
        "bf16": case.autocast == "bf16",
        "fp16": case.autocast == "fp16",
    }
    if case.compile:
        found |= {"torch_compile": True, "torch_compile_mode": case.compile}
    if found["activation_checkpointing"]:
        found["activation_checkpointing_kwargs"] = {"use_reentrant": case.checkpointing == "reentrant"}
    if case.accum > 1 and case.grad_sync == "each" and case.world > 1 and not deepspeed_runs(case):
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if deepspeed_runs(case):
        found["deepspeed"] = "deepspeed.json"
        found["bf16"] = found["bf16"] or case.dtype == "bf16"
        found["fp16"] = found["fp16"] or case.dtype == "fp16"
    return found


def sft_arguments(case: Case) -> dict[str, Any]:
    """Arguments of TRL's SFTTrainer (`SFTConfig`): rows that are full, as simulated, and how the model is loaded.

    Packing is "wrapped": the other strategies flatten the batch (padding-free), which is another program.
    """
    model: dict[str, Any] = {"dtype": NAMES[case.dtype]}
    if case.attn != "default":
        model["attn_implementation"] = case.attn
    if Axis.TENSOR in axes_of(case):
        model["tp_plan"] = "auto"
    packed = {"max_length": case.seq, "packing": True, "packing_strategy": "wrapped"}
    return {**training_arguments(case), **packed, "model_init_kwargs": model}


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
