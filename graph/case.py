"""A case: which model runs how on which GPU, as checked values; no torch here.

A case is what the options of `estimate` say, or one line of a `CASES.jsonl`. `Case.of` reads it from a mapping and
refuses what it does not know; a `Case` always holds values of the right kinds, though not yet a model that exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Final, cast

from traces.errors import ConfigError
from traces.text import number

Check = Callable[[Any], Any]

STRATEGIES: Final = (
    "single",
    "ddp",
    "ddp-view",
    "zero1",
    "fsdp1",
    "fsdp2",
    "fsdp2-nr",
    "fsdp2-offload",
    "fsdp2-tp",
    "hsdp",
    "tp",
    "tp-sp",
    "tp-megatron",
    "tp-megatron-sp",
    "deepspeed-1",
    "deepspeed-2",
    "deepspeed-3",
    "pp",
    "gemini",
)
HEADS: Final = ("causal-lm", "seq2seq-lm", "masked-lm", "sequence-classification", "image-classification")

#: Keys that a strategy has other defaults for: "gemini" is LLMem's own setting, Colossal-AI with transformers 4.29 and
#: PyTorch 2.0. The GPU stays the user's.
USUAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemini": {
        "dtype": "fp16",
        "attn": "eager",
        "checkpointing": "reentrant",
        "loss": "transformers-4.29",
        "attention_mask": True,
        "release": "2.0",
    }
}

#: Other usual spellings of a key, for the hint in the error of an unknown one.
_SPELLINGS: Final[Mapping[str, str]] = {
    "ckpt": "checkpointing",
    "gradient_checkpointing": "checkpointing",
    "device": "gpu",
    "mem": "memory",
    "expandable": "alloc_conf",
    "torch": "release",
    "lag": "deferred",
    "stages": "world",
    "mb_size": "batch",
    "micro_batch": "batch",
    "bucket": "buckets",
    "sac": "save",
    "load": "quant",
    "attention": "attn",
    "max_new_tokens": "new",
    "ranks": "world",
}


class _BadValueError(Exception):
    """What a value should have been."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word[:60], [one for one in known if one], n=1, cutoff=0.0)
    return near[0] if near else ""


def _choice(default: str, *values: str) -> Any:
    """One of the texts, exactly as written."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in values:
            return value
        near = f"; the nearest is {_nearest(value, values)!r}" if isinstance(value, str) and value else ""
        raise _BadValueError(f"one of {', '.join(map(repr, values))}{near}")

    return field(default=default, metadata={"check": check})


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(default: int | None, least: int, *, optional: bool = False) -> Any:
    """A whole number of at least `least`, below 2^53 so that every JSON reader keeps it."""

    def check(value: Any) -> int | None:
        if optional and value is None:
            return None
        if _whole(value) and least <= value < 2**53:
            return cast(int, value)
        raise _BadValueError(f"a whole number of at least {least}{' or null' if optional else ''}")

    return field(default=default, metadata={"check": check})


def _flag(default: bool) -> Any:
    def check(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise _BadValueError("true or false")

    return field(default=default, metadata={"check": check})


def _one_of_kinds(default: bool | str, *texts: str) -> Any:
    """True, false or one of the texts."""

    def check(value: Any) -> bool | str:
        if isinstance(value, bool) or (isinstance(value, str) and value in texts):
            return value
        raise _BadValueError(f"true, false or {', '.join(map(repr, texts))}")

    return field(default=default, metadata={"check": check})


def _number(default: float) -> Any:
    """A finite number of at least 0."""

    def check(value: Any) -> float:
        if (isinstance(value, float) or _whole(value)) and math.isfinite(value) and value >= 0:
            return float(value)
        raise _BadValueError("a number of at least 0")

    return field(default=default, metadata={"check": check})


def _text(default: str | None, *, pattern: str = r"[^\n]*", means: str = "a line of text") -> Any:
    def check(value: Any) -> str:
        if isinstance(value, str) and re.fullmatch(pattern, value):
            return value
        raise _BadValueError(means)

    if default is None:
        return field(metadata={"check": check})
    return field(default=default, metadata={"check": check})


def _memory() -> Any:
    def positive(value: Any) -> bool:
        return _whole(value) and 0 < value < 2**53

    def check(value: Any) -> int | tuple[int | None, ...] | None:
        if value is None or positive(value):
            return cast("int | None", value)
        if isinstance(value, list | tuple) and value and all(one is None or positive(one) for one in value):
            return tuple(value)
        raise _BadValueError("bytes (at least 1), null for the card's own, or a list of these by rank")

    return field(default=None, metadata={"check": check})


def _parts(*known: str) -> Any:
    """A set of words, given as a list or as one text with `+` or `,` between them; kept in the order of `known`."""

    def check(value: Any) -> tuple[str, ...]:
        words = [word for word in re.split(r"[+,]", value) if word] if isinstance(value, str) else value
        if isinstance(words, list | tuple) and all(isinstance(word, str) and word in known for word in words):
            return tuple(word for word in known if word in words)
        raise _BadValueError(f"a list of {' and '.join(map(repr, known))}")

    return field(default=(), metadata={"check": check})


def _mesh() -> Any:
    def check(value: Any) -> Mapping[str, int]:
        if isinstance(value, Mapping) and all(
            isinstance(name, str) and name and _whole(size) and size > 0 for name, size in value.items()
        ):
            return dict(value)
        raise _BadValueError('axis sizes such as {"fsdp2": 4, "tp": 2}')

    return field(default_factory=dict, metadata={"check": check})


def _names() -> Any:
    """Names of modules, given as a list or as one text with `+` or `,` between them."""

    def check(value: Any) -> tuple[str, ...]:
        words = [word for word in re.split(r"[+,]", value) if word] if isinstance(value, str) else value
        if isinstance(words, list | tuple) and all(
            isinstance(word, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", word) for word in words
        ):
            return tuple(words)
        raise _BadValueError("names of modules, such as ['q_proj', 'v_proj'] or 'q_proj+v_proj'")

    return field(default=(), metadata={"check": check})


def _extra() -> Any:
    def read(text: str) -> int | float | bool | str:
        return text.lower() == "true" if text in ("true", "True", "false", "False") else number(text)

    def check(value: Any) -> Mapping[str, int | float | bool | str]:
        if isinstance(value, str) and re.fullmatch(r"([A-Za-z_]\w*=[^=,\s]+(,[A-Za-z_]\w*=[^=,\s]+)*)?", value):
            return {key: read(one) for key, _, one in (part.partition("=") for part in value.split(",") if part)}
        if isinstance(value, Mapping) and all(
            isinstance(key, str) and key and isinstance(one, int | float | str) for key, one in value.items()
        ):
            return dict(value)
        raise _BadValueError('further keys such as {"stage3_prefetch_bucket_size": 0} or "key=value,key=value"')

    return field(default_factory=dict, metadata={"check": check})


def _split() -> Any:
    def check(value: Any) -> tuple[float, ...]:
        if isinstance(value, list | tuple):
            good = all((isinstance(one, float) or _whole(one)) and 0 <= one < math.inf for one in value)
            if good and (not value or sum(value) > 0):
                return tuple(float(one) for one in value)
        raise _BadValueError("a list of shares of at least 0, one an expert, or an empty list (all equal)")

    return field(default=(), metadata={"check": check})


@dataclass(frozen=True, slots=True)
class Case:
    """One case; the fields are the keys of its JSON form, and every field but `model` has a default.

    Make one with `Case.of`, which checks; the plain constructor checks as well. Bytes are bytes, lengths are tokens.
    """

    model: str = _text(None, pattern=r"[^\n]+", means="a catalogue name, a path of a config.json, or module:function")
    """A name of the catalogue (`graph.models.catalogue.names()`), the path of a Hugging Face config.json or of its
    folder, or
    `module:function`, a function of the user's own that returns an `nn.Module` and its example inputs."""
    head: str = _choice("", "", *HEADS)
    """What stands on the model: "" takes the one that `architectures` in its configuration names, else the usual one of
    its architecture (T5 and BART: seq2seq-lm, BERT and RoBERTa: masked-lm, ViT: image-classification, decoders:
    causal-lm)."""
    task: str = _choice("train", "train", "inference")

    # what is computed, and in what
    dtype: str = _choice("fp32", "fp32", "bf16", "fp16")
    """Of the weights. Without it a quantized model of the task inference has bf16 (nf4) or fp16 (int8)."""
    autocast: str = _choice("", "", "bf16", "fp16")
    """fp16 trains with a GradScaler."""
    quant: str = _choice("", "", "nf4", "int8")
    """Linear layers but the head, as bitsandbytes stores them."""
    compute: str = _choice("", "", "fp32", "bf16", "fp16")
    """In what nf4 layers compute: "" is bf16, for inference the model's dtype where that has 16 bits."""
    double_quant: bool = _flag(True)
    """nf4: the absolute maxima are quantized once more."""
    attn: str = _choice("sdpa", "sdpa", "eager", "default")
    """What transformers is asked for; `default` asks for nothing."""
    repeat_kv: bool = _flag(False)
    """sdpa: keys and values of grouped heads are repeated before it, as transformers before 4.48, torchtune and LitGPT
    do; false: left to PyTorch (`enable_gqa`)."""
    batch: int = _count(1, 1)
    """Of one micro-batch on one rank."""
    seq: int = _count(512, 1)
    dec_seq: int | None = _count(None, 1, optional=True)
    """Decoder tokens of an encoder-decoder model; null: as many as `seq`."""
    checkpointing: str = _choice("", "", "nonreentrant", "reentrant", "selective")
    save: tuple[str, ...] = _parts("matmul", "attn")
    """What selective checkpointing keeps: outputs of mm, addmm, bmm, baddbmm; outputs of fused attention."""
    every: int = _count(1, 1)
    """Checkpoint every n-th layer."""
    optimizer: str = _choice(
        "adamw", "adamw", "adamw-fused", "adamw-forloop", "sgd", "adafactor", "adamw-8bit", "adamw-foreach"
    )
    sgd_momentum: float = _number(0.0)
    step_in_backward: bool = _flag(False)
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there and drops it."""
    lora: int = _count(0, 0)
    """Rank of the adapters; 0: none."""
    lora_targets: tuple[str, ...] = _names()
    """The modules that get adapters, as peft's `target_modules`; empty: those that peft takes for the architecture."""
    accum: int = _count(1, 1)
    """Micro-batches a step."""
    grad_sync: str = _choice("each", "each", "last")
    """After which micro-batches gradients are synchronized between ranks."""
    clip: float = _number(0.0)
    """Largest gradient norm; 0: no clipping."""
    steps: int = _count(3, 1)
    use_cache: bool = _flag(False)
    outputs: str = _choice("dropped", "dropped", "step", "next")
    """How long the model's outputs (logits) stay beside the loss: not at all, as in transformers' Trainer; until the
    step ends, as in a function of one step; until the next ones take their place, as in a plain loop."""
    attention_mask: bool | str = _one_of_kinds(False, "padded")
    """False: none given; true: all ones; `padded`: one that does pad, so that a mask is built from it."""
    cudnn_sdp: bool = _flag(False)
    """cuDNN's attention is allowed."""
    loss: str = _choice("", "", "transformers-4.29", "chunk8", "chunk8-ckpt")
    """The model's own; that of transformers 4.29 (logits in the weights' dtype, a contiguous shifted copy); head and
    loss over 8 parts of the sequence, without or with checkpointing of each part."""
    experts: tuple[float, ...] = _split()
    """Shares of the tokens that each expert of a mixture gets; empty: equal ones, as a router has no values here. They
    matter where experts run one by one (DBRX, Switch, NLLB-MoE), not where all run as one grouped product."""

    # several GPUs
    strategy: str = _choice("single", *STRATEGIES)
    world: int = _count(1, 1)
    mesh: Mapping[str, int] = _mesh()
    tp_loss: str = _choice("", "", "vocab")
    """tp, tp-sp: "" gathers whole logits; `vocab` leaves them split by vocabulary (torch's `loss_parallel`)."""
    buckets: int | None = _count(None, 1, optional=True)
    """DeepSpeed's reduce_bucket_size and allgather_bucket_size in elements; null: its defaults."""
    overlap_comm: bool | str = _one_of_kinds("default", "default")
    grad_accum_dtype: str = _choice("", "", "fp32", "bf16", "fp16")
    zero_extra: Mapping[str, int | float | bool | str] = _extra()
    """Further keys of DeepSpeed's zero_optimization."""
    init: str = _choice("cpu", "cpu", "zero.Init")
    reshard_backward: bool = _flag(True)
    """FSDP2: false is set_reshard_after_backward(False) in micro-batches that do not synchronize."""
    schedule: str = _choice("1F1B", "1F1B", "GPipe")
    microbatches: int = _count(4, 1)
    return_outputs: bool = _flag(True)
    shapes: str = _choice("given", "given", "runtime")
    """Whether the pipeline infers the shapes of its stages by a run."""
    offload: str = _choice("", "", "optimizer", "parameters", "activations", "activations-pin", "checkpoints")

    # inference
    prompt: int = _count(512, 1)
    new: int = _count(32, 1)
    """Tokens generated."""
    cache: str = _choice("dynamic", "dynamic", "static")
    mode: str = _choice("generate", "generate", "manual")
    """`model.generate`, or a plain loop that computes the logits of all prompt positions."""

    # where
    gpu: str = _text("A100-80GB", pattern=r"[^\n]+", means="the name of a GPU")
    memory: int | tuple[int | None, ...] | None = _memory()
    """Bytes of the device as cudaMemGetInfo shows them; null: the card's own; a list: by rank."""
    alloc_conf: str = _text("")
    """As PYTORCH_ALLOC_CONF."""
    release: str = _text("2.13", pattern=r"\d+\.\d+(\.\d+)?(\S*)", means="a PyTorch release such as '2.13'")
    deferred: str = _choice("prompt", "prompt", "late")
    """When blocks that wait for other streams return: at once, or when the host waits."""
    sync: bool = _flag(True)
    """The host waits for the device at the boundaries of phases."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            try:
                checked = one.metadata["check"](value)
            except _BadValueError as wanted:
                raise ConfigError(f"key '{one.name}': {_shown(value)} should be {wanted}") from None
            object.__setattr__(self, one.name, checked)
        self._agree()

    def _agree(self) -> None:
        """What no key can say alone."""
        if self.checkpointing == "selective" and not self.save:
            raise ConfigError("key 'save': selective checkpointing needs 'matmul', 'attn' or both to keep")
        if self.save and self.checkpointing != "selective":
            raise ConfigError("key 'save': only for 'checkpointing': 'selective'")
        if self.every > 1 and not self.checkpointing:
            raise ConfigError("key 'every': only with 'checkpointing'")
        if self.lora_targets and not self.lora:
            raise ConfigError("key 'lora_targets': only with 'lora'")
        if self.repeat_kv and self.attn != "sdpa":
            raise ConfigError("key 'repeat_kv': only with 'attn': 'sdpa'")
        if self.outputs != "dropped" and self.loss:
            raise ConfigError(f"key 'outputs': the loss {self.loss!r} makes its logits itself and drops them")
        if self.outputs != "dropped" and self.strategy == "pp":
            raise ConfigError("key 'outputs': a pipeline has 'return_outputs' instead")
        if self.step_in_backward and (self.accum > 1 or self.clip or self.autocast == "fp16"):
            raise ConfigError("key 'step_in_backward': not with 'accum', 'clip' or 'autocast': 'fp16'")
        if self.step_in_backward and self.strategy != "single":
            raise ConfigError("key 'step_in_backward': only with 'strategy': 'single'")
        if self.mesh and self.world == 1:
            object.__setattr__(self, "world", math.prod(self.mesh.values()))
        if self.strategy == "single" and self.world != 1 and not self.mesh:
            raise ConfigError(f"key 'world': {self.world} ranks need a 'strategy' other than 'single'")
        if self.tp_loss and self.strategy not in ("tp", "tp-sp"):
            raise ConfigError("key 'tp_loss': only with 'strategy': 'tp' or 'tp-sp'")
        if isinstance(self.memory, tuple) and len(self.memory) != self.world:
            raise ConfigError(f"key 'memory': {len(self.memory)} sizes for a world of {self.world}")
        if self.quant and self.task == "train" and not self.lora:
            raise ConfigError("key 'quant': quantized weights train only under adapters; set 'lora'")

    @classmethod
    def of(cls, mapping: Mapping[str, Any], where: str = "case") -> Case:
        """Read a case from its JSON form, for instance one line of a `CASES.jsonl`.

        `where` names the place in the error (`cases.jsonl line 3`). Raises ConfigError, naming the key and the nearest
        valid one, for an unknown key, a value of a wrong kind or out of its range, and keys that contradict each other.
        Keys that are not given have their defaults, under strategy "gemini" those of `USUAL`.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{where}: a case is an object of keys and values, not {_shown(mapping)}")
        known = [one.name for one in dataclasses.fields(cls)]
        for key in mapping:
            if not isinstance(key, str) or key not in known:
                word = str(key)
                near = _SPELLINGS.get(word.casefold()) or _nearest(word.casefold(), known)
                raise ConfigError(f"{where}: unknown key {_shown(key)}; the nearest is '{near}'")
        if "model" not in mapping:
            raise ConfigError(f"{where}: key 'model' is missing: a catalogue name, a config.json or module:function")
        strategy = mapping.get("strategy")
        values = {**(USUAL.get(strategy, {}) if isinstance(strategy, str) else {}), **mapping}
        if "dtype" not in values and values.get("task") == "inference":
            values["dtype"] = {"nf4": "bf16", "int8": "fp16"}.get(str(values.get("quant", "")), "fp32")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def document(self) -> dict[str, Any]:
        """The case as JSON would hold it: `model`, and what differs from the defaults. `Case.of` reads it back."""
        found: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            named = one.name in USUAL.get(self.strategy, {})  # where a missing key would mean another value
            if value != default or named or (one.name == "dtype" and self.quant):
                found[one.name] = list(value) if isinstance(value, tuple) else _plain(value)
        return found


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


#: Every key of a case, in order.
KEYS: Final = tuple(one.name for one in dataclasses.fields(Case))
