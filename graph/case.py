"""A case: which model runs how on which GPU, as checked values; no torch here.

A case is what the options of `estimate` say, or one line of a `CASES.jsonl`. `Case.of` reads it from a mapping and
refuses what it does not know; a `Case` always holds values of the right kinds, though not yet a model that exists.
Every key is declared here and nowhere else: checks, options, their help and the reference derive from the declaration.
A program that needs another one adds it with `register`.
"""

# ruff: noqa: RUF009  (a declared key is the field of a dataclass)

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from msgspec import Meta

from graph import methods, optimizers
from graph.dtypes import NAMES
from graph.keys import (
    LARGEST,
    About,
    Configuration,
    Group,
    Key,
    Only,
    Taken,
    declared,
    edges,
    is_function,
    keys_of,
    nearest,
    numbers,
    pairs,
    shown,
    words,
)
from graph.models.lookup import configuration
from traces.errors import ConfigError
from traces.release import installed_release

Head = Literal["", "causal-lm", "seq2seq-lm", "masked-lm", "sequence-classification", "image-classification"]

# --- where keys mean something ---------------------------------------------------------------------------------------

_TRAIN: Final = Only("task", ("train",))
_CONFIGURATION: Final = Configuration("model")

COMMON: Final = Group("Common options")
PRECISION: Final = Group("Precision and attention")
INPUTS: Final = Group("Model and inputs")
LOOP: Final = Group("Training loop", (_TRAIN,))
ADAPTERS: Final = Group("Adapters and quantisation", (_CONFIGURATION,))
SEVERAL: Final = Group("Several GPUs")
DEEPSPEED: Final = Group("DeepSpeed", (Taken(scope="deepspeed"),))
PIPELINE: Final = Group("Pipeline", (Taken(scope="pipeline"),))
INFERENCE: Final = Group("Inference", (Only("task", ("inference",)),))
DEVICE: Final = Group("Allocator and GPU")
#: Modes of torch.compile that make CUDA graphs.
GRAPHED: Final = frozenset({"reduce-overhead", "max-autotune"})
#: Every group, in the order of help and reference.
GROUPS: Final = (COMMON, PRECISION, INPUTS, LOOP, ADAPTERS, SEVERAL, DEEPSPEED, PIPELINE, INFERENCE, DEVICE)

# --- kinds of values -------------------------------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=1, lt=LARGEST)]
Size = Annotated[int, Meta(ge=1 << 20, lt=LARGEST)]
Number = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Line = Annotated[str, Meta(pattern=r"\A[^\n]+\Z")]
Kept = Literal["matmul", "attn"]
Flavour = Literal["", "fp32", "bf16", "fp16"]

# --- other names of values: those of torch, transformers, accelerate and DeepSpeed -----------------------------------

_DTYPES: Final[Mapping[str, str]] = {
    f"{torch}{other}": name
    for torch in ("", "torch.")
    for name, other in (*NAMES.items(), ("fp32", "float"), ("fp16", "half"))
}


#: Tokens of a text by the class of a denoiser, as diffusers' training scripts make them: those of CLIP, of CLIP and T5
#: (77 each), of T5.
_TOKENS: Final = {"UNet2DConditionModel": 77, "SD3Transformer2DModel": 154, "FluxTransformer2DModel": 512}


@dataclass(frozen=True, slots=True)
class Case:
    """One case; the fields are the keys of its JSON form, and every field but `model` has a default.

    Make one with `Case.of`, which checks all; the plain constructor checks values, not whether a key means something.
    Bytes are bytes, lengths are tokens. What each key means is in its declaration.
    """

    model: Line = declared(
        MISSING,
        INPUTS,
        "A catalogue name, a config.json or its folder, or module:function.",
        means="a catalogue name, a path of a config.json, or module:function",
    )
    head: Head = declared(
        "", INPUTS, "What stands on the model.", only=(_CONFIGURATION,), unset="what its configuration names"
    )
    task: Literal["train", "inference"] = declared("train", INPUTS, "What runs.")

    # what is computed, and in what
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = declared(
        "auto",
        COMMON,
        "Precision of the weights; auto: the dtype of the configuration, else fp32.",
        aliases=("torch_dtype",),
        values=_DTYPES,
    )
    autocast: Literal["", "bf16", "fp16"] = declared(
        "",
        PRECISION,
        "Automatic mixed precision (with a GradScaler for fp16).",
        only=(_TRAIN,),
        aliases=("mixed_precision",),
        values={**_DTYPES, "no": ""},
        switches={"bf16": "bf16", "fp16": "fp16"},
    )
    quant: Literal["", "nf4", "int8"] = declared(
        "",
        COMMON,
        "Linear layers but the head, as bitsandbytes stores them.",
        only=(_CONFIGURATION,),
        hints=("load",),
        switches={"load_in_4bit": "nf4", "load_in_8bit": "int8"},
    )
    compute: Flavour = declared(
        "",
        ADAPTERS,
        "What nf4 layers compute in.",
        only=(Only("quant", ("nf4",)),),
        unset="bf16, for inference dtype where it has 16 bits",
        aliases=("bnb_4bit_compute_dtype",),
        values=_DTYPES,
    )
    double_quant: bool = declared(
        True,
        ADAPTERS,
        "The absolute maxima of nf4 are quantised as well.",
        only=(Only("quant", ("nf4",)),),
        aliases=("bnb_4bit_use_double_quant",),
    )
    attn: Literal["sdpa", "eager", "default"] = declared(
        "default",
        PRECISION,
        "Attention that transformers is asked for; default: none, and so sdpa where the model has it, else eager.",
        only=(_CONFIGURATION,),
        hints=("attention",),
        aliases=("attn_implementation",),
    )
    repeat_kv: bool = declared(
        False,
        PRECISION,
        "Keys and values of grouped heads are repeated before sdpa, as transformers before 4.48 did.",
        only=(_CONFIGURATION, Only("attn", ("sdpa", "default"))),
    )
    batch: Count = declared(
        1,
        COMMON,
        "Sequences of a micro-batch, on each GPU.",
        hints=("mb_size", "micro_batch"),
        aliases=("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    )
    seq: Count = declared(
        512,
        COMMON,
        "Tokens of a sequence (77 of the text for a U-Net of Stable Diffusion, 154 for its transformer).",
        only=(_TRAIN,),
        aliases=("max_length", "max_seq_length"),
    )
    dec_seq: Count | None = declared(
        None,
        INPUTS,
        "Tokens for the decoder, of a model that has both.",
        only=(_TRAIN, _CONFIGURATION),
        unset="as many as seq",
    )
    lengths: tuple[Count, ...] = declared(
        (),
        INPUTS,
        "Tokens of the sequences of each micro-batch, in turn: so many steps are run, and seq is the longest.",
        only=(_TRAIN, _CONFIGURATION, Taken(scope="lengths", alone=True)),
        metavar="N,N,...",
        means="a list of lengths, one a micro-batch",
        unset="seq for all",
        read=numbers,
    )
    images: Count = declared(1, INPUTS, "Images of a sample, for a model that sees.", only=(_TRAIN, _CONFIGURATION))
    image_size: Annotated[str, Meta(pattern=r"\A([1-9]\d{0,4}x[1-9]\d{0,4})?\Z")] = declared(
        "",
        INPUTS,
        "Height and width of its images in pixels, as 448x336, or of both sides.",
        only=(_TRAIN, _CONFIGURATION),
        metavar="HxW",
        means="height and width in pixels such as '448x336', or '448' for both",
        unset="what the model is for, up to 448 where that is any",
        read=edges,
    )
    audio: Number = declared(
        0.0,
        INPUTS,
        "Seconds of audio of a sample, for a model that hears.",
        only=(_TRAIN, _CONFIGURATION),
        metavar="SECONDS",
        unset="its window",
    )
    checkpointing: Literal["", "nonreentrant", "reentrant", "selective"] = declared(
        "",
        COMMON,
        "Gradient checkpointing.",
        only=(_TRAIN, _CONFIGURATION),
        hints=("ckpt",),
        switches={"gradient_checkpointing": "nonreentrant"},
    )
    save: tuple[Kept, ...] = declared(
        (),
        LOOP,
        "What selective checkpointing keeps: outputs of matrix products, of fused attention.",
        only=(Only("checkpointing", ("selective",)),),
        metavar="matmul,attn",
        means="a list of 'matmul' and 'attn'",
        read=words,
        hints=("sac",),
    )
    every: Count = declared(1, LOOP, "Checkpoint every so many layers.", only=(Only("checkpointing"),))
    optimizer: str = declared(
        "adamw",
        COMMON,
        "What updates the weights.",
        only=(_TRAIN,),
        metavar="NAME",
        aliases=("optim",),
        known=optimizers.spellings,
    )
    sgd_momentum: Number = declared(0.0, LOOP, "Momentum of sgd.", only=(Only("optimizer", ("sgd",)),))
    step_in_backward: bool = declared(
        False, LOOP, "Each parameter has an optimizer of its own, which steps during backward."
    )
    lora: Annotated[int, Meta(ge=0, lt=LARGEST)] = declared(
        0,
        COMMON,
        "Rank of LoRA adapters; 0: all weights are trained.",
        only=(_CONFIGURATION,),
        metavar="RANK",
        aliases=("lora_r",),
    )
    lora_targets: tuple[Annotated[str, Meta(pattern=r"\A[A-Za-z_][\w.-]*\Z")], ...] = declared(
        (),
        ADAPTERS,
        "Modules that get adapters, as target_modules of peft.",
        only=(Only("lora"),),
        metavar="NAME,...",
        means="names of modules, such as ['q_proj', 'v_proj'] or 'q_proj+v_proj'",
        unset="those that peft takes",
        read=words,
        aliases=("lora_target_modules",),
    )
    accum: Count = declared(1, LOOP, "Micro-batches of a step.", aliases=("gradient_accumulation_steps",))
    grad_sync: Literal["each", "last"] = declared(
        "each",
        SEVERAL,
        "Gradients are synchronised after each micro-batch, or after the last.",
        only=(_TRAIN, Taken(scope="grad_sync")),
    )
    clip: Number = declared(
        0.0,
        LOOP,
        "Clip gradients to this norm; 0: not.",
        metavar="NORM",
        aliases=("max_grad_norm", "gradient_clipping"),
    )
    steps: Count = declared(3, LOOP, "Training steps.", aliases=("max_steps",))
    compile: Literal["", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = declared(
        "",
        LOOP,
        "torch.compile of the model, in this mode.",
        alone="default",
        hints=("inductor", "dynamo"),
        aliases=("torch_compile_mode",),
        switches={"torch_compile": "default"},
    )
    compile_blocks: bool = declared(
        False,
        LOOP,
        "Each block for itself, as torchtitan does, and FSDP2 always.",
        only=(Only("compile"),),
        aliases=("use_regional_compilation",),
    )
    use_cache: bool = declared(
        False, LOOP, "The model keeps keys and values, as in generation.", only=(_CONFIGURATION,)
    )
    outputs: Literal["dropped", "step", "next"] = declared(
        "dropped",
        LOOP,
        "How long the logits stay beside the loss: not at all, for the step, until the next ones.",
        only=(_CONFIGURATION,),
    )
    attention_mask: bool | Literal["padded"] = declared(
        False, INPUTS, "Attention mask of the batch: none, all ones, or with padding.", only=(_TRAIN, _CONFIGURATION)
    )
    cudnn_sdp: bool = declared(False, PRECISION, "cuDNN's attention may be chosen.")
    loss: Literal["", "transformers-4.29", "chunk8", "chunk8-ckpt"] = declared(
        "",
        LOOP,
        "The loss of a decoder; chunk8: head and loss over 8 parts of the sequence.",
        only=(_CONFIGURATION,),
        unset="the model's own",
    )
    experts: tuple[Number, ...] = declared(
        (),
        INPUTS,
        "Shares of the tokens that the experts get, where they run one by one.",
        only=(_CONFIGURATION,),
        metavar="X,X,...",
        means="a list of shares of at least 0, one an expert, or an empty list (all equal)",
        unset="equal ones",
        read=numbers,
    )

    # several GPUs
    strategy: str = declared(
        methods.ONE_GPU,
        COMMON,
        "How GPUs share the work.",
        metavar="NAME",
        hints=("stage",),
        known=methods.spellings,
    )
    world: Count = declared(
        1, COMMON, "Number of GPUs.", hints=("stages", "ranks"), aliases=("gpus", "nproc_per_node", "num_processes")
    )
    mesh: Mapping[Annotated[str, Meta(min_length=1)], Count] = declared(
        {},
        SEVERAL,
        "Sizes of the mesh's dimensions, as in fsdp2=4,tp=2.",
        metavar="NAME=N,...",
        means='axis sizes such as {"fsdp2": 4, "tp": 2}',
    )
    tp_loss: Literal["", "vocab"] = declared(
        "",
        SEVERAL,
        "vocab: the loss on logits that stay split by vocabulary (loss_parallel of torch).",
        only=(Taken(scope="tp_loss"),),
    )
    buckets: Count | None = declared(
        None,
        DEEPSPEED,
        "Its reduce_bucket_size and allgather_bucket_size, in elements.",
        unset="its own",
        hints=("bucket",),
    )
    overlap_comm: bool | Literal["default"] = declared("default", DEEPSPEED, "It overlaps communication.")
    grad_accum_dtype: Flavour = declared(
        "", DEEPSPEED, "Its type of accumulated gradients.", unset="that of the weights", values=_DTYPES
    )
    zero_extra: Mapping[Annotated[str, Meta(min_length=1)], bool | int | float | str] = declared(
        {},
        DEEPSPEED,
        "Further keys of its zero_optimization.",
        metavar="KEY=VALUE,...",
        means='further keys such as {"stage3_prefetch_bucket_size": 0} or "key=value,key=value"',
        read=pairs,
    )
    init: Literal["cpu", "zero.Init"] = declared(
        "cpu", DEEPSPEED, "How its model is made.", only=(Taken(scope="zero.Init"),)
    )
    reshard_backward: bool = declared(
        True,
        SEVERAL,
        "FSDP2 reshards after the backward of micro-batches that do not synchronise.",
        only=(Taken(scope="reshard_backward"), Only("grad_sync", ("last",))),
    )
    schedule: Literal["1F1B", "GPipe"] = declared("1F1B", PIPELINE, "The order of its micro-batches.")
    microbatches: Count = declared(4, PIPELINE, "Its micro-batches.", hints=("num_microbatches",))
    return_outputs: bool = declared(True, PIPELINE, "Its last stage keeps its outputs.")
    shapes: Literal["given", "runtime"] = declared(
        "given", PIPELINE, "Whether its stages know their shapes before they run."
    )
    offload: Literal["", "optimizer", "parameters", "activations", "activations-pin", "checkpoints"] = declared(
        "", LOOP, "What is kept on the host."
    )

    # inference
    prompt: Count = declared(512, INFERENCE, "Tokens of the prompt.")
    new: Count = declared(32, INFERENCE, "Tokens to generate.", aliases=("max_new_tokens",))
    cache: Literal["dynamic", "static"] = declared(
        "dynamic", INFERENCE, "Kind of KV cache.", aliases=("cache_implementation",)
    )
    mode: Literal["generate", "manual"] = declared(
        "generate", INFERENCE, "model.generate, or a loop that computes the logits of all prompt positions."
    )

    # where
    gpu: Line = declared(
        "A100-80GB",
        COMMON,
        "GPU, such as A100-80GB, V100-16GB or H100.",
        metavar="NAME",
        means="the name of a GPU",
        hints=("device",),
    )
    memory: Size | Annotated[tuple[Size | None, ...], Meta(min_length=1)] | None = declared(
        None,
        COMMON,
        "Total memory of the GPU as cudaMemGetInfo shows it, such as 24GB (with commas: by rank).",
        metavar="SIZE",
        means="bytes (at least 1 MiB), null for the card's own, or a list of these by rank",
        unset="the card's own",
        hints=("mem",),
    )
    alloc_conf: Annotated[str, Meta(pattern=r"\A[^\n]*\Z")] = declared(
        "",
        DEVICE,
        "Allocator settings, as in PYTORCH_ALLOC_CONF.",
        metavar="CONF",
        means="a line of text",
        unset="PyTorch's own",
        aliases=("allocator",),
        hints=("expandable",),
    )
    release: Annotated[str, Meta(pattern=r"\A\d+\.\d+(\.\d+)?(\S*)\Z")] = declared(
        installed_release(),
        DEVICE,
        "PyTorch release whose allocator and kernels are imitated.",
        metavar="R",
        means="a PyTorch release such as '2.13'",
        unset="the installed PyTorch's",
        hints=("torch",),
    )
    deferred: Literal["prompt", "late"] = declared(
        "prompt",
        DEVICE,
        "When memory that another stream used comes back: at once, or when the host waits.",
        hints=("lag",),
    )
    sync: bool = declared(True, DEVICE, "The host waits for the GPU at phase boundaries.")

    #: Values of keys that `register` added; they are attributes as well.
    own: Mapping[str, Any] = field(default_factory=dict)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The value of a key that `register` added."""
            if name in _FIELDS or name not in KEYS:
                raise AttributeError(f"a case has no {name!r}")
            return self.own.get(name, KEYS[name].default)

    def __post_init__(self) -> None:
        checked = {name: key.checked(getattr(self, name)) for name, key in KEYS.items()}
        for name in _FIELDS:
            object.__setattr__(self, name, checked.pop(name))
        object.__setattr__(self, "own", checked)
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", _usual_dtype(self))
        object.__setattr__(self, "save", tuple(one for one in get_args(Kept) if one in self.save))
        if self.mesh and self.world == 1:
            object.__setattr__(self, "world", math.prod(self.mesh.values()))
        if self.lengths:
            self._by_lengths()
        for refused in self._contradictions():
            raise ConfigError(f"key {refused}")

    def _by_lengths(self) -> None:
        """The sequence is the longest of `lengths`, and steps are as many as these are micro-batches for."""
        longest, (steps, rest) = max(self.lengths), divmod(len(self.lengths), self.accum)
        for name, value in (("seq", longest), ("steps", steps)):
            if getattr(self, name) not in (KEYS[name].default, value):
                raise ConfigError(f"key '{name}': {value} by 'lengths'")
            object.__setattr__(self, name, value)
        if rest:
            raise ConfigError(f"key 'lengths': {len(self.lengths)} micro-batches make no steps of 'accum' {self.accum}")

    def _contradictions(self) -> Iterator[str]:
        """What no key can say alone."""
        if self.checkpointing == "selective" and not self.save:
            yield "'save': selective checkpointing needs 'matmul', 'attn' or both to keep"
        if self.offload == "checkpoints" and not self.checkpointing:
            yield "'offload': 'checkpoints' needs 'checkpointing'"
        if self.outputs != "dropped" and self.loss:
            yield f"'outputs': the loss {self.loss!r} makes its logits itself and drops them"
        if self.outputs != "dropped" and KEYS["return_outputs"].unmet(self) is None:
            yield "'outputs': a pipeline has 'return_outputs' instead"
        if self.step_in_backward and (self.accum > 1 or self.clip or self.autocast == "fp16"):
            yield "'step_in_backward': not with 'accum', 'clip' or 'autocast': 'fp16'"
        if self.step_in_backward and self.strategy != methods.ONE_GPU:
            yield "'step_in_backward': only with 'strategy': 'single'"
        if self.strategy == methods.ONE_GPU and self.world != 1 and not self.mesh:
            yield f"'world': {self.world} ranks need a 'strategy' other than 'single'"
        if isinstance(self.memory, tuple) and len(self.memory) != self.world:
            yield f"'memory': {len(self.memory)} sizes for a world of {self.world}"
        if self.quant and self.task == "train" and not self.lora:
            yield "'quant': quantized weights train only under adapters; set 'lora'"
        if self.experts and not any(self.experts):
            yield f"'experts': {shown(list(self.experts))} should be {KEYS['experts'].wanted()}"

    @classmethod
    def of(cls, mapping: Mapping[str, Any], where: str = "case", *, any_strategy: bool = False) -> Case:
        """Read a case from its JSON form, for instance one line of a `CASES.jsonl`.

        `where` names the place in the error (`cases.jsonl line 3`). Raises ConfigError, naming the key and the nearest
        valid one, for an unknown key, a value of a wrong kind or out of its range, keys that contradict each other, and
        a key that means nothing for the case (with `any_strategy`: for no strategy that it could have), unless its
        value is the default. Keys that are not given have their defaults, or what is usual for the strategy or the
        model.
        """
        try:
            given = _named(mapping)
            strategy = KEYS["strategy"].checked(given.get("strategy", methods.ONE_GPU))
            values = {**methods.usual(strategy), **_usual_of_model(given), **given}
            own = {name: values.pop(name) for name in set(values) - _FIELDS}
            case = cls(**values, own=own)
            case._check_scopes(given, any_strategy)
            return case
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _check_scopes(self, given: Mapping[str, Any], any_strategy: bool) -> None:
        for name in given:
            key = KEYS[name]
            unmet = key.unmet(self) if getattr(self, name) != key.default else None
            if unmet is not None and not (any_strategy and unmet.key == "strategy"):
                raise ConfigError(f"key '{name}': only with {unmet}")

    def whole(self) -> dict[str, Any]:
        """The case as JSON would hold it, with the values of all keys."""
        return {name: _plain(getattr(self, name)) for name in KEYS}

    def headline(self) -> dict[str, Any]:
        """What one line says of the case: keys that matter for every answer, and those that differ from the default.

        Keys of the batch are left out where a function of the user's own has its own.
        """
        inputs = ("batch", "seq", "optimizer") if self.task == "train" else ("batch", "prompt", "new")
        own = is_function(self.model)
        said = {"dtype", "gpu", *(inputs[2:] if own else inputs), *self.document()}
        return {name: value for name, value in self.whole().items() if name in said}

    def document(self) -> dict[str, Any]:
        """The case as JSON would hold it: `model`, and what differs from the defaults. `Case.of` reads it back."""
        found: dict[str, Any] = {}
        usual_names = {*methods.usual(self.strategy), *_usual_of_model({"model": self.model, "task": self.task})}
        for name, key in KEYS.items():
            value = getattr(self, name)
            named = name in usual_names  # where a missing key would mean another value
            usual = value == key.default or (name == "dtype" and value == _usual_dtype(self) == "fp32")
            if named or not usual:
                found[name] = _plain(value)
        return found


def _usual_of_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of keys that are usual for the model of a case, where they are not the defaults."""
    kind = _configuration(str(given["model"])).get("_class_name") if given.get("task", "train") == "train" else None
    return {"seq": _TOKENS[kind]} if isinstance(kind, str) and kind in _TOKENS else {}


def _usual_dtype(case: Case) -> str:
    """The dtype of a case that names none: that of its configuration, as transformers loads it, else fp32.

    Autocast is for weights in fp32; quantized models have for inference what bitsandbytes computes in.
    """
    if case.autocast:
        return "fp32"
    if case.quant and case.task == "inference":
        return {"nf4": "bf16", "int8": "fp16"}[case.quant]
    document = _configuration(case.model)
    parts = [document, document.get("text_config")]
    named = [part.get(name) for part in parts if isinstance(part, dict) for name in ("dtype", "torch_dtype")]
    return next((_DTYPES[one] for one in named if isinstance(one, str) and one in _DTYPES), "fp32")


def _configuration(model: str) -> dict[str, Any]:
    """The configuration that `model` names; empty where there is none to read, as is said when the model is built."""
    try:
        return {} if is_function(model) else configuration(model).document
    except ConfigError:
        return {}


def _plain(value: object) -> Any:
    """A value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _named(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A case's keys by their own names; ConfigError for an unknown one, and for one that is given under two names."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"a case is an object of keys and values, not {shown(mapping)}")
    found: dict[str, Any] = {}
    for given, value in mapping.items():
        name = _NAMES.get(given) if isinstance(given, str) else None
        if name is None:
            word = str(given).casefold()
            raise ConfigError(f"unknown key {shown(given)}; the nearest is '{_HINTS.get(word) or nearest(word, KEYS)}'")
        if given in KEYS[name].about.switches:
            if not isinstance(value, bool):
                raise ConfigError(f"key '{given}': {shown(value)} should be true or false")
            if not value:
                continue
            value = KEYS[name].about.switches[given]
        if name in found:
            raise ConfigError(f"key '{given}': '{name}' is given under two names; give one of them")
        found[name] = value
    if "model" not in found:
        raise ConfigError("key 'model' is missing: a catalogue name, a config.json or module:function")
    return found


def meaningful(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a case in JSON form without those that mean nothing for its strategy and mesh."""
    there = SimpleNamespace(strategy=keys.get("strategy", methods.ONE_GPU), mesh=keys.get("mesh", {}))
    conditions = {name: [one for one in KEYS[name].only if one.key == "strategy"] for name in keys}
    return {name: value for name, value in keys.items() if all(one.holds(there) for one in conditions[name])}


def register(name: str, kind: Any, default: Any, group: Group, text: str, **about: Any) -> None:
    """Add a key to the cases of this process: name, type as msgspec takes it, default, group and help, as `declared`.

    Its value is an attribute of every case, part of its document, and an option of the commands that are imported
    afterwards. Raises ConfigError where a name is taken.
    """
    key = Key(name, kind, default, About(group, text, **about))
    for taken in set(key.names) & set(_NAMES):
        raise ConfigError(f"key {taken!r} is a name of {_NAMES[taken]!r} already; give yours another")
    KEYS[name] = key
    _NAMES.update(dict.fromkeys(key.names, name))
    _HINTS.update(dict.fromkeys(key.about.hints, name))


#: Every key of a case by its name, in order; `register` adds to it.
KEYS: Final[dict[str, Key]] = keys_of(Case)
_FIELDS: Final = frozenset(KEYS)
#: Names that are taken for each key, and words that an error knows.
_NAMES: Final = {name: key.name for key in KEYS.values() for name in key.names}
_HINTS: Final = {word: key.name for key in KEYS.values() for word in key.about.hints}
