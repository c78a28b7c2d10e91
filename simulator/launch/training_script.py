"""The training script of a case: plain PyTorch that runs the method as it was simulated, for `torchrun`.

`script` fills `templates/train.py.j2` for every method that PyTorch, transformers and DeepSpeed run by themselves;
`why_not` says in one line why a case has none. Only what the case asks for is in the text: the user puts data into its
`batches`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from graph.dtypes import NAMES
from graph.keys import is_function
from graph.loop.method import layers
from graph.models import catalogue
from graph.models.lookup import configuration
from graph.optimizers import OPTIMIZERS
from strategies import registry
from strategies.parallel.fsdp import Flattened
from strategies.parallel.meshes import ReplicasWithShards
from strategies.parallel.native import tied
from strategies.parallel.tp import COUNTS, layer_plan, model_plan
from strategies.strategy import Axis
from traces.errors import ConfigError

if TYPE_CHECKING:
    import jinja2

    from graph.case import Case

#: What a script may import: modules by the name that they have in it, those of the standard library first, and names
#: by their modules.
_STANDARD: Final = ("argparse", "contextlib", "functools", "os")
_LIBRARIES: Final = {"bitsandbytes": "", "deepspeed": "", "torch": "", "dist": "torch.distributed as dist"}
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "peft": ("LoraConfig", "get_peft_model", "prepare_model_for_kbit_training"),
    "torch.distributed.checkpoint.state_dict": ("StateDictOptions", "set_model_state_dict"),
    "torch.distributed.device_mesh": ("init_device_mesh",),
    "torch.distributed.fsdp": (
        *("CPUOffloadPolicy", "FullyShardedDataParallel", "MixedPrecision", "MixedPrecisionPolicy", "fully_shard"),
    ),
    "torch.distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler",),
    "torch.distributed.fsdp.wrap": ("transformer_auto_wrap_policy",),
    "torch.distributed.optim": ("ZeroRedundancyOptimizer",),
    "torch.distributed.tensor": ("Replicate", "Shard"),
    "torch.distributed.tensor.parallel": (
        *("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"),
        *("loss_parallel", "parallelize_module"),
    ),
    "torch.distributed.tensor.parallel.ddp": ("_pre_dp_module_transform",),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torch.utils.checkpoint": ("checkpoint", "create_selective_checkpoint_contexts"),
    "transformers": ("AutoConfig", "AutoModelForCausalLM", "BitsAndBytesConfig"),
}


def axes_of(case: Case) -> dict[str, int]:
    """The case's ranks as a mesh: sizes of pp, dp (replicas), fsdp2 (shards) and tp, outermost first, those above 1.

    Empty for one GPU and for methods that are no mesh (fsdp1, DeepSpeed, Megatron, Gemini).
    """
    sizes = registry.find(case).axes(case)
    return {axis: size for axis, size in sizes.items() if size > 1}


def document_of(case: Case) -> dict[str, Any]:
    """The configuration of the case's model, as its config.json has it; empty where it has none."""
    try:
        return {} if is_function(case.model) else configuration(case.model).document
    except ConfigError:
        return {}


def repository_of(case: Case) -> str:
    """What `from_pretrained` is given: a repository on the hub, or a folder."""
    path = Path(case.model).expanduser()
    if path.is_file():
        return str(path.parent.resolve())
    if path.is_dir():
        return str(path.resolve())
    known = catalogue.find(case.model)
    if known is None:
        return ""
    return case.model if "/" in case.model else str(catalogue.entries()[known]["repository"])


def why_not(case: Case) -> str:
    """Why there is no script for a case, in one line; empty where there is one."""
    if reason := registry.find(case).launch.no_script:
        return reason
    if axes_of(case).get(Axis.STAGES, 1) > 1:
        return "pipeline stages are cut in your own script (torch.distributed.pipelining)"
    names = document_of(case).get("architectures") or [""]
    decoder = names[0].endswith(("ForCausalLM", "LMHeadModel"))
    if case.task != "train" or case.head not in ("", "causal-lm") or not (decoder or case.head):
        return "a script is written for the training of decoders (head causal-lm) alone"
    if not repository_of(case):
        return f"the model {case.model!r} is in no repository and no folder"
    if case.lengths:
        return "batches of several lengths come from your own data"
    if case.loss == "transformers-4.29":
        return f"the loss {case.loss!r} is computed in your own script"
    if _flat(case) and case.offload:
        return "FSDP's own offload is not what was simulated"
    return ""


@functools.cache
def templates() -> jinja2.Environment:
    """The templates of files that start a run."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("simulator.launch"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # what is written are programs
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"quoted": json.dumps, "shell": shlex.quote}
    return found


class Predicted(NamedTuple):
    """Peaks of the rank that needs most, in bytes, as they were simulated."""

    rank: int
    allocated: int
    reserved: int


def script(case: Case, predicted: Predicted | None = None) -> str:
    """The script's text; it prints the peaks that it measures beside those `predicted`.

    Raises ConfigError where `why_not` has a reason, and CaptureError for a model that tensor parallelism cannot split.
    """
    reason = why_not(case)
    if reason:
        raise ConfigError(f"no training script: {reason}")
    known = {"predicted": predicted, "worst": predicted.rank if predicted else 0}
    template, context = templates().get_template("train.py.j2"), {**_context(case), **known}
    program = template.render(context, imports=())
    return template.render(context, imports=_imports(program))


def _imports(body: str) -> Iterator[str]:
    """The lines that import what a script uses."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    yield from (f"import {name}" for name in _STANDARD if name in used)
    yield ""
    yield from (f"import {words or name}" for name, words in _LIBRARIES.items() if name in used)
    for module, names in _NAMES.items():
        if found := [name for name in names if name in used]:
            line = f"from {module} import {', '.join(found)}"
            yield from (
                [line] if len(line) <= 100 else (f"from {module} import (", *(f"    {name}," for name in found), ")")
            )


def _titled(case: Case) -> str:
    return ",".join(f"{axis}={size}" for axis, size in case.mesh.items()) if case.mesh else case.strategy


def _flat(case: Case) -> bool:
    return isinstance(registry.find(case), Flattened)


def deepspeed_runs(case: Case) -> bool:
    """Whether DeepSpeed runs the case."""
    return registry.find(case).launch.distributed_type == "DEEPSPEED"


def by_block(case: Case) -> bool:
    """Whether blocks are compiled, each for itself."""
    return case.compile_blocks or Axis.SHARDS in axes_of(case)


def _context(case: Case) -> dict[str, Any]:
    """What the template asks of a case and its method."""
    strategy, axes, deepspeed, flat = registry.find(case), axes_of(case), deepspeed_runs(case), _flat(case)
    optimizer = OPTIMIZERS[case.optimizer]
    spread = deepspeed or flat or bool({Axis.REPLICAS, Axis.SHARDS} & axes.keys())
    by = f" // {axes[Axis.TENSOR]}" if Axis.TENSOR in axes else ""
    return {
        "case": case,
        "method": _titled(case),
        "axes": axes,
        "by_block": by_block(case),
        "dtypes": {word: f"torch.{name}" for word, name in NAMES.items()},
        "repository": repository_of(case),
        "saved": _saved(case),
        "deepspeed": deepspeed,
        "flat": flat,
        "launched": case.world > 1 or deepspeed,
        "group": f"dist.get_rank(){by}" if spread else "0",
        "reshard": getattr(strategy, "reshard_after_forward", True),
        "on_host": strategy.on_host(case),
        "on_meta": _on_meta(case, axes),
        "bucket_view": getattr(strategy, "bucket_view", False),
        "sharded_optimizer": isinstance(strategy, ReplicasWithShards),
        "optimizer_class": optimizer.path,
        "optimizer_options": "".join(f", {name}={value}" for name, value in optimizer.arguments(case).items()),
        "scaled": case.autocast == "fp16" and not deepspeed,
        "last_alone": case.grad_sync == "last" and case.accum > 1 and not deepspeed,
        **_around(case, axes, deepspeed or flat),
        **(_plans(case, axes[Axis.TENSOR]) if Axis.TENSOR in axes else {"sequence": False}),
    }


def _on_meta(case: Case, axes: Mapping[str, int]) -> bool:
    """Whether rank 0 alone loads the weights: FSDP2's shards can be filled from it, of a model that is whole before.

    A model with tied parameters is loaded by every rank, since they would come apart, and so are adapters' models.
    """
    from graph.models.sources import build

    shards = Axis.SHARDS in axes and Axis.TENSOR not in axes
    if not shards or case.lora or case.quant or registry.find(case).on_host(case):
        return False
    module: Any = build(case).module
    return not tied(module)


def _saved(case: Case) -> list[str]:
    """The operators whose outputs selective checkpointing keeps."""
    from graph.models.sources import saved_operators

    return [f"torch.ops.{operator}" for operator in saved_operators(case.save)] if case.save else []


def _around(case: Case, axes: Mapping[str, int], own: bool) -> dict[str, list[str]]:
    """What surrounds forward and backward of a micro-batch, and its forward alone; `own`: the method casts itself."""
    step, forward = [], []
    replicas = _flat(case) or (Axis.REPLICAS in axes and Axis.SHARDS not in axes)
    if replicas and case.grad_sync == "last" and case.accum > 1:
        step.append("contextlib.nullcontext() if micro + 1 == ACCUMULATION else module.no_sync()")
    if case.tp_loss:
        step.append("loss_parallel()")
    if case.autocast and not own and Axis.SHARDS not in axes:
        forward.append(f"torch.autocast(DEVICE, dtype=torch.{NAMES[case.autocast]})")
    if case.offload.startswith("activations"):
        pinned = case.offload == "activations-pin"
        forward.append(f"torch.autograd.graph.save_on_cpu(pin_memory={pinned})")
    return {"around_step": step, "around_forward": forward}


def _plans(case: Case, size: int) -> dict[str, Any]:
    """The plans of tensor parallelism as they were simulated, and the attributes that count heads."""
    from graph.models.sources import build

    strategy = registry.find(case)
    sequence = getattr(strategy, "sequence", False)
    module: Any = build(case).module
    return {
        "sequence": sequence,
        "heads": COUNTS,
        "layer_plan": {path: _style(one) for path, one in layer_plan(layers(module)[0], sequence, size).items()},
        "model_plan": {path: _style(one) for path, one in model_plan(module, sequence, not case.tp_loss).items()},
    }


def _style(style: object) -> str:
    """A way to split a module as the call that makes it: arguments that differ from their defaults."""
    name, usual = type(style).__name__, type(style)()
    several = hasattr(style, "with_kwargs")  # a module has inputs; a linear layer one, in a tuple of its own
    words = [
        f"{argument}={_layout(value if several or not isinstance(value, tuple) else value[0])}"
        for argument in inspect.signature(type(style)).parameters
        if (value := getattr(style, argument, None)) != getattr(usual, argument, None)
    ]
    line = ", ".join(words)
    return (
        f"{name}({line})" if len(line) < 90 else "\n".join([f"{name}(", *(f"        {one}," for one in words), "    )"])
    )


def _layout(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_layout, value))}{',' * (len(value) == 1)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_layout(one)}" for key, one in value.items()) + "}"
    return repr(value).replace("dim=", "")
