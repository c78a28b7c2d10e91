"""The training script of a case: plain PyTorch that runs the method as it was simulated, for `torchrun`.

`script` writes it for every method that PyTorch, transformers and DeepSpeed run by themselves; `why_not` says in one
line why a case has none. Only what the case asks for is in the text: the user puts data into its `batches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graph.dtypes import NAMES
from graph.optimizers import OPTIMIZERS
from strategies import registry
from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.case import Case

_STANDARD: Final = frozenset({"contextlib", "functools", "os"})


def _dtype(word: str) -> str:
    """A case's word for a dtype as the script has it."""
    return f"torch.{NAMES[word]}"


def axes_of(case: Case) -> dict[str, int]:
    """The case's ranks as a mesh: sizes of pp, dp (replicas), fsdp2 (shards) and tp, outermost first, those above 1.

    Empty for one GPU and for methods that are no mesh (fsdp1, DeepSpeed, Megatron, Gemini).
    """
    sizes = registry.find(case).axes(case)
    return {axis: size for axis, size in sizes.items() if size > 1}


def document_of(case: Case) -> dict[str, Any]:
    """The configuration of the case's model, as its config.json has it; empty where it has none."""
    from graph.keys import is_function
    from graph.models.lookup import configuration

    try:
        return {} if is_function(case.model) else configuration(case.model).document
    except ConfigError:
        return {}


def repository_of(case: Case) -> str:
    """What `from_pretrained` is given: a repository on the hub, or a folder."""
    from graph.models import catalogue

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
    if axes_of(case).get("pp", 1) > 1:
        return "pipeline stages are cut in your own script (torch.distributed.pipelining)"
    names = document_of(case).get("architectures") or [""]
    decoder = names[0].endswith(("ForCausalLM", "LMHeadModel"))
    if case.task != "train" or case.head not in ("", "causal-lm") or not (decoder or case.head):
        return "a script is written for the training of decoders (head causal-lm) alone"
    if not repository_of(case):
        return f"the model {case.model!r} is in no repository and no folder"
    if case.loss:
        return f"the loss {case.loss!r} is computed in your own script"
    if case.strategy == "fsdp1" and case.offload:
        return "FSDP's own offload is not what was simulated"
    return ""


@dataclass
class _Text:
    """A script as it grows: imports, constants, and the steps of `main`."""

    case: Case
    axes: dict[str, int]
    imports: dict[str, set[str]] = field(default_factory=lambda: {"os": set(), "torch": set()})
    constants: list[str] = field(default_factory=list)
    wrap: list[str] = field(default_factory=list)
    data: str = "0"  # in which data-parallel group this rank is

    def needs(self, module: str, *names: str) -> None:
        """`import module`, or names from it."""
        self.imports.setdefault(module, set()).update(names)

    def imported(self) -> list[str]:
        """The lines that import: the standard library's, then the others; modules, then names."""
        lines: list[str] = []
        for own in (True, False):
            found = {name: names for name, names in sorted(self.imports.items()) if (name in _STANDARD) is own}
            lines += [f"import {name}" for name, names in found.items() if not names]
            named = {name: sorted(names, key=lambda one: (one[0].islower(), one)) for name, names in found.items()}
            lines += [line for name, names in named.items() if names for line in _from(name, names)]
            lines += [""] if own else []
        return lines


def _from(module: str, names: list[str]) -> list[str]:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 100:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]


def script(case: Case) -> str:
    """The script's text. Raises ConfigError where `why_not` has a reason."""
    reason = why_not(case)
    if reason:
        raise ConfigError(f"no training script: {reason}")
    text = _Text(case, axes_of(case))
    text.needs("transformers", "AutoConfig", "AutoModelForCausalLM")
    body = [*_model(text), "", "", *_batches(text), "", "", *_main(text)]
    head = [
        f'"""Trains a model as it was simulated: {_named(case)}.',
        "",
        "Start it with launch.sh, and put your data into `batches`. RANDOM_WEIGHTS=1 takes fresh weights instead of",
        "loading them; STEPS=N ends after N steps.",
        '"""',
    ]
    constants = [
        f"MODEL = {_quoted(repository_of(case))}",
        f"BATCH, SEQUENCE, ACCUMULATION = {case.batch}, {case.seq}, {case.accum}",
        "LEARNING_RATE = 1e-5",
        'STEPS = int(os.environ.get("STEPS", "100"))',
        'DEVICE = "cuda" if torch.cuda.is_available() else "cpu"',
        *text.constants,
    ]
    lines = [
        *head,
        "",
        *text.imported(),
        "",
        *constants,
        "",
        "",
        *body,
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return "\n".join(lines) + "\n"


def _named(case: Case) -> str:
    method = ",".join(f"{axis}={size}" for axis, size in case.mesh.items()) if case.mesh else case.strategy
    return f"{method} on {case.world} GPU{'s' if case.world > 1 else ''}"


def _quoted(text: str) -> str:
    import json

    return json.dumps(text)


def _indented(lines: list[str], by: int = 4) -> list[str]:
    return [" " * by + line if line else line for line in lines]


# ------------------------------------------------------------------------------------------------- the model


def _model(text: _Text) -> list[str]:
    case = text.case
    options = [f'"dtype": {_dtype(case.dtype)}']
    if case.attn != "default":
        options.append(f'"attn_implementation": "{case.attn}"')
    if case.quant:
        options.append('"quantization_config": QUANTIZATION, "device_map": {"": torch.cuda.current_device()}')
        text.needs("transformers", "AutoConfig", "AutoModelForCausalLM", "BitsAndBytesConfig")
        text.constants.append(f"QUANTIZATION = {_quantization(text)}")
    lines = ["def model():", '    """The model, trained in all its weights."""']
    if case.lora:
        lines[-1] = '    """The model under adapters."""'
    lines += [
        f"    options = {{{', '.join(options)}}}",
        '    if os.environ.get("RANDOM_WEIGHTS"):',
        "        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), **options)",
        "    else:",
        "        made = AutoModelForCausalLM.from_pretrained(MODEL, **options)",
        f"    made.config.use_cache = {case.use_cache}",
    ]
    lines += _indented([*_adapters(text), *_checkpointing(text)])
    return [*lines, "    return made.train()"]


def _quantization(text: _Text) -> str:
    case = text.case
    if case.quant == "int8":
        return "BitsAndBytesConfig(load_in_8bit=True)"
    compute = _dtype(case.compute or "bf16")
    return (
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
        f"bnb_4bit_compute_dtype={compute}, bnb_4bit_use_double_quant={case.double_quant})"
    )


def _adapters(text: _Text) -> list[str]:
    case = text.case
    if not case.lora:
        return []
    text.needs("peft", "LoraConfig", "get_peft_model")
    lines = []
    if case.quant:
        text.needs("peft", "LoraConfig", "get_peft_model", "prepare_model_for_kbit_training")
        lines.append(f"made = prepare_model_for_kbit_training(made, {bool(case.checkpointing)})")
    targets = ""
    if case.lora_targets:
        names = case.lora_targets[0] if case.lora_targets == ("all-linear",) else list(case.lora_targets)
        targets = f", target_modules={names!r}".replace("'", '"')
    lines.append(
        f'made = get_peft_model(made, LoraConfig(r={case.lora}, lora_alpha=16, task_type="CAUSAL_LM"{targets}))'
    )
    if case.checkpointing and not case.quant:
        lines.append("made.enable_input_require_grads()")
    return lines


def _checkpointing(text: _Text) -> list[str]:
    """As `graph.models.sources` asks transformers for it."""
    case = text.case
    if not case.checkpointing:
        return []
    options = f'"use_reentrant": {case.checkpointing == "reentrant"}'
    if case.save:
        from graph.models.sources import saved_operators

        text.needs("functools")
        text.needs("torch.utils.checkpoint", "create_selective_checkpoint_contexts")
        saved = ", ".join(f"torch.ops.{operator}" for operator in saved_operators(case.save))
        text.constants.append(f"SAVED = [{saved}]")
        options += ', "context_fn": functools.partial(create_selective_checkpoint_contexts, SAVED)'
    extra = f", every_n_layers={case.every}" if case.every > 1 else ""
    extra += ", offload=True" if case.offload == "checkpoints" else ""
    name = "activation_checkpointing_enable" if extra else "gradient_checkpointing_enable"
    return [f"made.{name}({{{options}}}{extra})"]


def _batches(text: _Text) -> list[str]:
    keys = '"input_ids": ids, "labels": ids'
    if text.case.attention_mask:
        keys += ', "attention_mask": torch.ones_like(ids)'
    if text.case.strategy == "tp-sp":
        keys += ', "position_ids": torch.arange(SEQUENCE, device=DEVICE)[None]'  # the model sees a part of the sequence
    return [
        "def batches(vocabulary, group):",
        '    """Micro-batches without end, other ones for each data-parallel group. Your data go here."""',
        "    torch.manual_seed(group)",
        "    while True:",
        "        ids = torch.randint(vocabulary, (BATCH, SEQUENCE), device=DEVICE)",
        f"        yield {{{keys}}}",
    ]


# ------------------------------------------------------------------------------------------------ the method


def _main(text: _Text) -> list[str]:
    case = text.case
    lines = ["def main():", '    """The training loop."""']
    setup: list[str] = []
    spread = case.world > 1 or case.strategy.startswith("deepspeed")
    if spread:
        text.needs("torch.distributed as dist")
        setup += [
            'rank = int(os.environ["LOCAL_RANK"])',
            'if DEVICE == "cuda":',
            "    torch.cuda.set_device(rank)",
            'dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")',
        ]
    deepspeed = case.strategy.startswith("deepspeed")
    if deepspeed and case.init == "zero.Init":
        text.needs("deepspeed")
        setup += [
            'with deepspeed.zero.Init(config_dict_or_path="deepspeed.json"):',
            "    module = model()",
        ]
    else:
        setup.append("module = model()")
    setup.append("vocabulary = module.get_input_embeddings().num_embeddings")
    if case.strategy == "fsdp1" or {"fsdp2", "tp"} & set(text.axes):
        setup.append(_LAYERS)
    if deepspeed:
        setup += _deepspeed(text)
    elif case.strategy == "fsdp1":
        setup += _fsdp1(text)
    else:
        setup += _mesh(text)
    setup.append(f"data = batches(vocabulary, {text.data})")
    if case.step_in_backward:
        setup += _steps_in_backward(text)
    elif not deepspeed:
        setup += _optimizer(text)
    lines += _indented([*setup, *_loop(text)])
    if spread:
        lines.append("    dist.destroy_process_group()")
    return lines


_LAYERS: Final = (
    "layers = next(part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) > 1)"
)


def _deepspeed(text: _Text) -> list[str]:
    text.needs("deepspeed")
    text.data = "dist.get_rank()"
    optimizer = _made(text, "[one for one in module.parameters() if one.requires_grad]")
    return [
        f"optimizer = {optimizer}",
        'engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config="deepspeed.json")',
    ]


def _fsdp1(text: _Text) -> list[str]:
    case = text.case
    text.needs("functools")
    text.needs("torch.distributed.fsdp", "FullyShardedDataParallel")
    text.needs("torch.distributed.fsdp.wrap", "transformer_auto_wrap_policy")
    text.data = "dist.get_rank()"
    mixed = []
    if case.autocast:
        text.needs("torch.distributed.fsdp", "MixedPrecision")
        mixed.append(f"    mixed_precision=MixedPrecision({_dtype(case.autocast)}, torch.float32),")
    return [
        "kinds = {type(layer) for layer in layers}",
        "policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)",
        "module = FullyShardedDataParallel(",
        "    module,",
        "    auto_wrap_policy=policy,",
        '    device_id=torch.device(DEVICE, rank) if DEVICE == "cuda" else None,',
        "    use_orig_params=True,",
        *mixed,
        ")",
    ]


def _mesh(text: _Text) -> list[str]:
    """Tensor parallelism, shards, replicas, in this order; what these do not move to the GPU follows."""
    axes = text.axes
    lines: list[str] = []
    if set(axes) - {"dp"}:
        text.needs("torch.distributed.device_mesh", "init_device_mesh")
        sizes, names = (", ".join(map(str, one)) for one in (axes.values(), map(_quoted, axes)))
        comma = "," if len(axes) == 1 else ""
        lines.append(f"mesh = init_device_mesh(DEVICE, ({sizes}{comma}), mesh_dim_names=({names}{comma}))")
    spread = [axis for axis in ("dp", "fsdp2") if axis in axes]
    if spread:
        text.data = f"dist.get_rank() // {axes['tp']}" if "tp" in axes else "dist.get_rank()"
    if "tp" in axes:
        lines += _split(text)
    if "fsdp2" in axes:
        return [*lines, *_sharded(text, spread)]
    lines += [] if text.case.quant else ["module.to(DEVICE)"]
    return [*lines, *_replicated(text)] if "dp" in axes else lines


def _sharded(text: _Text, spread: Sequence[str]) -> list[str]:
    case = text.case
    names = {"fully_shard"}
    over = "mesh" if len(spread) == len(text.axes) else f"mesh[{', '.join(map(_quoted, spread))}]"
    options = [f'"mesh": {over}', f'"reshard_after_forward": {case.strategy != "fsdp2-nr"}']
    if case.autocast:
        names.add("MixedPrecisionPolicy")
        dtype = _dtype(case.autocast)
        options.append(f'"mp_policy": MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)')
    if case.strategy == "fsdp2-offload":
        names.add("CPUOffloadPolicy")
        options.append('"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda")')
    text.needs("torch.distributed.fsdp", *names)
    return [
        "options = {",
        *_indented([f"{one}," for one in options]),
        "}",
        "for layer in layers:",
        "    fully_shard(layer, **options)",
        "fully_shard(module, **options)",
    ]


def _replicated(text: _Text) -> list[str]:
    text.needs("torch.nn.parallel", "DistributedDataParallel")
    lines = []
    if "tp" in text.axes:
        text.needs("torch.distributed.tensor.parallel.ddp", "_pre_dp_module_transform")
        lines.append("_pre_dp_module_transform(module)  # as PyTorch's own tests of both together do")
    more = ["    gradient_as_bucket_view=True,"] if text.case.strategy == "ddp-view" else []
    more += ['    process_group=mesh["dp"].get_group(),'] if len(text.axes) > 1 else []
    devices = '    device_ids=[rank] if DEVICE == "cuda" else None,'
    return [*lines, "module = DistributedDataParallel(", "    module,", devices, *more, ")"]


def _split(text: _Text) -> list[str]:
    """`parallelize_module` with the plan that was simulated, and the heads that are left to a rank."""
    from strategies.parallel.tp import COUNTS

    case, size = text.case, text.axes["tp"]
    sequence = case.strategy == "tp-sp"
    block, top = _plan(case, sequence)
    styles = {word.partition("(")[0] for word in [*block.values(), *top.values()]}
    styles |= {"loss_parallel"} if case.tp_loss else set()
    layouts = {
        name for name in ("Replicate", "Shard") if any(f"{name}(" in w for w in [*block.values(), *top.values()])
    }
    if layouts:
        text.needs("torch.distributed.tensor", *layouts)
    text.needs("torch.distributed.tensor.parallel", "parallelize_module", *styles)
    text.constants += [
        "LAYER_PLAN = {",
        *(f"    {_quoted(path)}: {style}," for path, style in block.items()),
        "}",
        "MODEL_PLAN = {",
        *(f"    {_quoted(path)}: {style}," for path, style in top.items()),
        "}",
        f"HEADS = {COUNTS!r}".replace("'", '"'),
    ]
    over = "mesh" if len(text.axes) == 1 else 'mesh["tp"]'
    return [
        "for layer in layers:",
        f"    parallelize_module(layer, {over}, LAYER_PLAN)",
        "    for part in layer.modules():  # attention counts the heads of one rank",
        "        for name in HEADS:",
        "            if isinstance(getattr(part, name, None), int):",
        f"                setattr(part, name, getattr(part, name) // {size})",
        f"parallelize_module(module, {over}, MODEL_PLAN)",
    ]


def _plan(case: Case, sequence: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The plan of a layer and that of embedding and head, as text: path -> call. `strategies.parallel.tp` has the
    rules."""
    from graph.models.sources import build
    from strategies.parallel.native import layers
    from strategies.parallel.tp import NORMS, role_of

    module: Any = build(case).module
    layer = layers(module)[0]
    rows = "RowwiseParallel(output_layouts=Shard(1))" if sequence else "RowwiseParallel()"
    calls = {"column": "ColwiseParallel()", "row": rows}
    block: dict[str, str] = {}
    for path, _ in layer.named_modules():
        role = role_of(layer, path)
        if role:
            block[path] = calls[role]
        elif sequence and path.rpartition(".")[2] in NORMS:
            block[path] = "SequenceParallel()"
        elif sequence and path == "self_attn":
            block[path] = (
                "PrepareModuleInput(\n"
                '        input_kwarg_layouts={"hidden_states": Shard(1)},\n'
                '        desired_input_kwarg_layouts={"hidden_states": Replicate()},\n'
                "    )"
            )
        elif sequence and path == "mlp":
            block[path] = "PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))"
    return block, _top_plan(case, module, sequence)


def _top_plan(case: Case, module: Any, sequence: bool) -> dict[str, str]:
    paths = {id(part): path for path, part in module.named_modules()}
    embedding, head = paths[id(module.get_input_embeddings())], module.get_output_embeddings()
    out = ", output_layouts=Shard(1)" if sequence else ""
    top = {embedding: f"RowwiseParallel(input_layouts=Replicate(){out})"}
    if head is not None:
        layouts = "output_layouts=Shard(-1), use_local_output=False" if case.tp_loss else "output_layouts=Replicate()"
        before = "input_layouts=Shard(1), " if sequence else ""
        top[paths[id(head)]] = f"ColwiseParallel({before}{layouts})"
    if sequence:
        top[f"{embedding.rpartition('.')[0]}.norm".lstrip(".")] = "SequenceParallel()"
    return top


# -------------------------------------------------------------------------------------------------- the loop


def _class_and_arguments(text: _Text) -> tuple[str, str]:
    """The case's optimizer: its class, and its arguments after the parameters."""
    found = OPTIMIZERS[text.case.optimizer]
    if (library := found.path.partition(".")[0]) != "torch":
        text.needs(library)
    options = {"lr": "LEARNING_RATE", **found.arguments(text.case)}
    return found.path, ", ".join(f"{name}={value}" for name, value in options.items())


def _made(text: _Text, parameters: str) -> str:
    kind, arguments = _class_and_arguments(text)
    return f"{kind}({parameters}, {arguments})"


def _optimizer(text: _Text) -> list[str]:
    case = text.case
    if case.strategy == "zero1":
        text.needs("torch.distributed.optim", "ZeroRedundancyOptimizer")
        kind, arguments = _class_and_arguments(text)
        made = f"ZeroRedundancyOptimizer(trained, optimizer_class={kind}, {arguments})"
    elif "tp" in text.axes:
        made = _made(text, '[{"params": group} for group in groups.values()]')
    else:
        made = _made(text, "trained")
    lines = ["trained = [one for one in module.parameters() if one.requires_grad]"]
    if "tp" in text.axes:
        lines += [
            "groups = {}",
            "for one in trained:  # one call of the optimizer's cannot mix parameters of several meshes",
            '    groups.setdefault(getattr(one, "device_mesh", None), []).append(one)',
        ]
    return [*lines, f"optimizer = {made}", *_scaler(text)]


def _scaled(case: Case) -> bool:
    return case.autocast == "fp16" and not case.strategy.startswith("deepspeed")


def _scaler(text: _Text) -> list[str]:
    if not _scaled(text.case):
        return []
    if text.case.strategy == "fsdp1":
        text.needs("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")
        return ["scaler = ShardedGradScaler(DEVICE)"]
    return ["scaler = torch.amp.GradScaler(DEVICE)"]


def _steps_in_backward(text: _Text) -> list[str]:
    return [
        "trained = [one for one in module.parameters() if one.requires_grad]",
        f"optimizers = {{one: {_made(text, '[one]')} for one in trained}}",
        "",
        "def step(parameter):",
        "    optimizers[parameter].step()",
        "    optimizers[parameter].zero_grad()",
        "",
        "for one in trained:",
        "    one.register_post_accumulate_grad_hook(step)",
    ]


def _loop(text: _Text) -> list[str]:
    case = text.case
    deepspeed = case.strategy.startswith("deepspeed")
    number = "number" if case.step_in_backward else "step"  # `step` is a function there
    body = ["for micro in range(ACCUMULATION):", *_indented(_forward(text, deepspeed))]
    if not deepspeed and not case.step_in_backward:
        body += _update(text)
    shown = [
        'peak = torch.cuda.max_memory_allocated() >> 20 if DEVICE == "cuda" else 0',
        f'print(f"step {{{number}}}: loss {{loss.item():.4f}}, peak {{peak}} MiB", flush=True)',
    ]
    if case.world > 1 or deepspeed:
        shown = ['if int(os.environ["RANK"]) == 0:', *_indented(shown)]
    return [f"for {number} in range(STEPS):", *_indented([*body, *shown])]


def _forward(text: _Text, deepspeed: bool) -> list[str]:
    """Forward and backward of one micro-batch."""
    case = text.case
    loss = ["loss = engine(**next(data)).loss" if deepspeed else "loss = module(**next(data)).loss"]
    if case.offload.startswith("activations"):
        pinned = case.offload == "activations-pin"
        loss = [f"with torch.autograd.graph.save_on_cpu(pin_memory={pinned}):", *_indented(loss)]
    casts = case.autocast and not deepspeed and case.strategy != "fsdp1" and "fsdp2" not in text.axes
    if casts:
        loss = [f"with torch.autocast(DEVICE, dtype={_dtype(case.autocast)}):", *_indented(loss)]
    if deepspeed:
        return [*loss, "engine.backward(loss)", "engine.step()"]
    part = "loss / ACCUMULATION" if case.accum > 1 else "loss"
    scaled = f"scaler.scale({part})" if _scaled(case) else f"({part})" if case.accum > 1 else part
    body = [*loss, f"{scaled}.backward()"]
    if case.tp_loss:
        body = ["with loss_parallel():", *_indented(body)]
    return _synchronized(text, body)


def _synchronized(text: _Text, body: list[str]) -> list[str]:
    """Gradients meet after the last micro-batch alone, where the case says so."""
    case = text.case
    if case.grad_sync != "last" or case.accum == 1:
        return body
    last = "micro + 1 == ACCUMULATION"
    if "fsdp2" in text.axes:
        more = [] if case.reshard_backward else [f"module.set_reshard_after_backward({last})"]
        return [f"module.set_requires_gradient_sync({last})", *more, *body]
    if "dp" in text.axes or case.strategy == "fsdp1":
        text.needs("contextlib")
        return [f"with contextlib.nullcontext() if {last} else module.no_sync():", *_indented(body)]
    return body


def _update(text: _Text) -> list[str]:
    case = text.case
    lines = []
    if case.clip:
        if _scaled(case):
            lines.append("scaler.unscale_(optimizer)")
        fsdp1 = case.strategy == "fsdp1"
        clip = f"module.clip_grad_norm_({case.clip})"
        lines.append(clip if fsdp1 else f"torch.nn.utils.clip_grad_norm_(module.parameters(), {case.clip})")
    step = ["scaler.step(optimizer)", "scaler.update()"] if _scaled(case) else ["optimizer.step()"]
    return [*lines, *step, "optimizer.zero_grad()"]
