"""The options of a case (model, precision, batch, optimizer, GPU ...), shared by every command that takes one.

Each key of a `graph.case.Case` is one option of the same name. Only what was given is passed on: the defaults are the
case's own, and so are the checks of values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from traces.errors import ConfigError, LLMemError
from traces.text import number

if TYPE_CHECKING:
    from graph.case import Case

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: Keys in the order of `--help`: key, metavar (None: a switch), what it says.
_OPTIONS: Final = (
    ("head", "NAME", "What stands on the model: causal-lm, seq2seq-lm, masked-lm, sequence-classification ..."),
    ("task", "train|inference", "What runs."),
    ("dtype", "fp32|bf16|fp16", "Precision of the weights."),
    ("autocast", "none|bf16|fp16", "Automatic mixed precision (with a GradScaler for fp16)."),
    ("quant", "none|nf4|int8", "Quantised linear layers, as bitsandbytes stores them."),
    ("compute", "fp32|bf16|fp16", "What nf4 layers compute in."),
    ("double_quant", None, "The absolute maxima of nf4 are quantised as well."),
    ("attn", "sdpa|eager|default", "Attention implementation."),
    ("repeat_kv", None, "Keys and values of grouped heads are repeated before sdpa."),
    ("lora", "RANK", "LoRA of this rank; 0: all weights are trained."),
    ("lora_targets", "NAME,...", "Modules that get adapters; without it those that peft takes."),
    ("batch", "N", "Sequences in a micro-batch, on each GPU."),
    ("seq", "N", "Tokens in a sequence."),
    ("dec_seq", "N", "Tokens for the decoder, of a model that has both."),
    ("attention_mask", "false|true|padded", "Attention mask of the batch: none, all ones, or with padding."),
    ("use_cache", None, "The model keeps keys and values, as in generation."),
    ("outputs", "dropped|step|next", "How long the logits stay beside the loss."),
    ("cudnn_sdp", None, "cuDNN's attention may be chosen."),
    ("loss", "NAME", "none (the model's own), transformers-4.29, chunk8 or chunk8-ckpt."),
    ("experts", "X,X,...", "Shares of the tokens that the experts get; without it equal ones."),
    ("optimizer", "NAME", "adamw, adamw-fused, adamw-foreach, adamw-forloop, adamw-8bit, adafactor or sgd."),
    ("sgd_momentum", "X", "Momentum of sgd."),
    ("step_in_backward", None, "Each parameter's optimizer steps during backward."),
    ("checkpointing", "NAME", "Gradient checkpointing: none, nonreentrant, reentrant or selective."),
    ("save", "matmul,attn", "What selective checkpointing keeps."),
    ("every", "N", "Checkpoint every so many layers."),
    ("accum", "N", "Micro-batches in a step."),
    ("grad_sync", "each|last", "Gradients are synchronised after each micro-batch, or after the last."),
    ("clip", "NORM", "Clip gradients to this norm; 0: not."),
    ("steps", "N", "Training steps."),
    ("strategy", "NAME", "How GPUs share the work: single, ddp, fsdp2, deepspeed-3, tp, pp, gemini ..."),
    ("world", "N", "Number of GPUs."),
    ("tp_loss", "vocab", "Tensor parallel loss on split logits."),
    ("mesh", "NAME=N,...", "Sizes of the mesh's dimensions, as in fsdp2=4,tp=2."),
    ("buckets", "N", "DeepSpeed's bucket sizes, in elements."),
    ("overlap_comm", "true|false|default", "DeepSpeed overlaps communication."),
    ("grad_accum_dtype", "fp32|bf16|fp16", "DeepSpeed's type of accumulated gradients."),
    ("zero_extra", "KEY=VALUE,...", "More of DeepSpeed's zero_optimization."),
    ("init", "cpu|zero.Init", "How DeepSpeed's model is made."),
    ("reshard_backward", None, "FSDP2 reshards after each backward."),
    ("schedule", "1F1B|GPipe", "Pipeline schedule."),
    ("microbatches", "N", "Micro-batches of the pipeline."),
    ("return_outputs", None, "The pipeline's last stage keeps its outputs."),
    ("shapes", "given|runtime", "Whether pipeline stages know their shapes before they run."),
    ("offload", "NAME", "none, optimizer, parameters, activations, activations-pin or checkpoints."),
    ("prompt", "N", "Inference: tokens of the prompt."),
    ("new", "N", "Inference: tokens to generate."),
    ("cache", "dynamic|static", "Inference: kind of KV cache."),
    ("mode", "generate|manual", "Inference: model.generate, or a plain loop."),
    ("gpu", "NAME", "GPU, such as A100-80GB, V100-16GB or H100."),
    ("memory", "SIZE", "Total memory of the GPU, over the card's own (with commas: by rank)."),
    ("alloc_conf", "CONF", "Allocator settings, as in PYTORCH_ALLOC_CONF."),
    ("release", "R", "PyTorch release to imitate."),
    ("deferred", "prompt|late", "When memory that another stream used comes back."),
    ("sync", None, "The host waits for the GPU at phase boundaries."),
)

#: The keys of a case that are options.
OPTION_KEYS: Final[tuple[str, ...]] = tuple(key for key, _, _ in _OPTIONS)

_NUMBERS: Final = frozenset(key for key, metavar, _ in _OPTIONS if metavar in ("N", "X", "NORM", "RANK"))
#: Keys whose value may be true or false, or a word.
_MAY_BE_TRUTH: Final = frozenset({"attention_mask", "overlap_comm"})
#: Keys for which `none` stands for the empty text.
_MAY_BE_NONE: Final = frozenset({"autocast", "quant", "checkpointing", "loss", "offload", "save"})


def case_options(command: _Command) -> _Command:
    """Decorator: gives a click command an option for each key of a case (but `model`); `case_from` takes their values.

    The option of `dec_seq` is `--dec-seq`; switches have a `--no-` form. An option that is not given is None.
    """
    for key, metavar, meaning in reversed(_OPTIONS):
        name = key.replace("_", "-")
        if metavar is None:
            command = click.option(f"--{name}/--no-{name}", default=None, help=meaning)(command)
        else:
            command = click.option(f"--{name}", metavar=metavar, help=meaning)(command)
    return command


def case_from(model: str, options: Mapping[str, Any]) -> Case:
    """The case that a command line says: `model`, and those of `options` that were given (other names are passed by).

    Raises ConfigError for a value that its key cannot have, and for an unknown GPU.
    """
    from graph.case import Case

    given = {key: _value(key, options[key]) for key in OPTION_KEYS if options.get(key) is not None}
    try:
        case = Case.of({"model": model, **given}, where="options")
    except ConfigError as error:
        raise ConfigError(_in_options(str(error))) from None
    from simulator.estimator.devices import device

    device(case.gpu)
    return case


def _in_options(text: str) -> str:
    """The text of an error about a case, with its keys as the options that they are here."""
    keys = re.compile(rf"(?:\bkey )?'({'|'.join(OPTION_KEYS)})'(?=:| |$|;|,)")
    return keys.sub(lambda match: "--" + match[1].replace("_", "-"), text.removeprefix("options: "))


def _value(key: str, given: object) -> Any:
    """What an option's text means as the value of `key` in a case document; what is wrong is left to the case."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    if text.lower() == "none" and key in _MAY_BE_NONE:
        return ""
    if text.lower() in ("true", "false") and key in _MAY_BE_TRUTH:
        return text.lower() == "true"
    if key == "memory":
        return _memory(text)
    if key == "mesh":
        return _mesh(text)
    if key == "experts":
        return [number(part) for part in text.split(",")]
    return number(text) if key in _NUMBERS else text


def _memory(text: str) -> int | list[int]:
    from simulator.allocator.settings import parse_size

    try:
        sizes = [parse_size(part) for part in text.split(",")]
    except LLMemError as error:
        raise ConfigError(f"--memory: {error}") from None
    return sizes[0] if len(sizes) == 1 else sizes


def _mesh(text: str) -> dict[str, int]:
    """`fsdp2=4,tp=2`."""
    from strategies.parallel.mesh import Mesh

    return dict(Mesh.parse(text).axes)
