"""From a case to a model without weights: a catalogue name, a config.json, or a user's own function.

`build(case)` makes the `nn.Module` on the meta device, in the right dtype, tied, with adapters and checkpointing, in
training mode; nothing is downloaded and no weight is made. What it cannot make is one line that says what to mend.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

from graph import methods
from graph.case import KEYS, Case
from graph.errors import CaptureError
from graph.fake_cuda.torch_private import tree_flatten_with_path, tree_leaves, tree_unflatten
from graph.fake_cuda.values import Values, on_meta
from graph.keys import function_of, is_function
from graph.loop.inputs import DTYPES, Input, arguments, hosts, training_batch
from graph.loop.losses import chunked, in_parts, like_transformers_4_29
from graph.model import ModelFacts
from graph.models import denoisers, own_modules
from graph.models.adapters import with_lora
from graph.models.architectures import Architecture, architecture, facts, trained, transformers
from graph.models.given import MODULES, without_weights
from graph.models.lookup import configuration
from graph.models.mixtures import shares
from graph.models.modalities import Fed, check_senses, feed, takes_more_than_text
from graph.models.transformers_4_29.attention import like_transformers_4_29 as like_old_attention
from graph.optimizers import OPTIMIZERS
from graph.user_code import quiet, told
from traces.errors import ConfigError, LLMemError
from traces.release import version_of
from traces.text import reason

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils.generic import ModelOutput

#: Classes of an image classifier whose configuration names none: those of ImageNet.
_IMAGE_CLASSES: Final = 1000

#: Heads whose inputs are texts of one length.
_OF_TEXT: Final = ("causal-lm", "masked-lm", "sequence-classification")

Place = Callable[[Any, Callable[[torch.Tensor], bool]], Any]


@dataclass
class Built:
    """A model ready to be placed and trained.

    `module` is on the meta device until `load` has placed it; `load` may replace it (quantization, adapters). `loss`
    maps (module, keyword arguments) to the scalar to differentiate. `assumptions`: what was assumed, one line each.
    `held`: outputs of the model that the training loop keeps (`Case.outputs`). `batches`: the micro-batches in turn,
    where they are not all like `batch`.
    """

    module: Any
    config: Any
    head: str
    batch: tuple[Input, ...]
    loss: Callable[[Any, dict[str, Any]], Any]
    where: str
    facts: ModelFacts
    assumptions: tuple[str, ...] = ()
    loader: Callable[[Built, Place], Any] | None = field(default=None, repr=False)
    held: list[Any] = field(default_factory=list, repr=False)
    batches: tuple[tuple[Input, ...], ...] = ()

    def host(self, number: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, host tensor) of a micro-batch, in the order in which they go to the device."""
        return hosts(self.batches[number] if self.batches else self.batch)

    def forward(self, module: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        """The loss of one micro-batch; `inputs` by the names that `host` gave."""
        return self.loss(module, arguments(self.batch, inputs))

    def load(self, place: Place) -> Any:
        """Put the model on the device by `place(module, keep)`, as its users load it; answers what `place` answered.

        `place` moves every tensor for which `keep(tensor)` is false.
        """
        if self.loader is not None:
            return self.loader(self, place)
        return place(self.module, _nothing_kept)


def _nothing_kept(tensor: torch.Tensor) -> bool:
    return False


def build(case: Case) -> Built:
    """The model and the inputs of a case, without weights.

    Raises ConfigError for a missing or malformed configuration, an unknown model or architecture, a sequence longer
    than the model's positions and the like; CaptureError where transformers refuses what is asked for.
    """
    with quiet():
        if case.quant or OPTIMIZERS[case.optimizer].of_bitsandbytes:
            from graph.models.quantization import ready

            ready()
        if case.model in MODULES:
            return _from_module(case, *MODULES[case.model])
        if is_function(case.model):
            return _from_function(case)
        found = configuration(case.model)
        built = _from_configuration(case, found.document, found.place)
        built.assumptions = (*filter(None, (found.note,)), *built.assumptions)
        return built


# ------------------------------------------------------------------------------------------- configurations


def transformers_config(document: Mapping[str, Any], place: str) -> Any:
    """The configuration object of transformers; ConfigError for an unknown architecture or bad values."""
    library = transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = document.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{place}: key 'model_type' is missing; it names the architecture, such as 'llama'")
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind[:60], list(CONFIG_MAPPING.keys()), n=1, cutoff=0.0)
        raise ConfigError(
            f"{place}: transformers {library.__version__} knows no model_type {kind[:60]!r}; the nearest is "
            f"{near[0]!r}. A model of your own goes by module:function"
        )
    values = {key: value for key, value in document.items() if key not in ("model_type", "auto_map")}
    try:
        return library.AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise ConfigError(f"{place}: {reason(error)}") from error


def _from_configuration(case: Case, document: dict[str, Any], place: str) -> Built:
    if isinstance(document.get("_class_name"), str):
        return _of_diffusers(case, document, place)

    def make(chosen: Architecture) -> Any:
        if chosen.head == "image-classification" and not {"num_labels", "id2label"} & set(document):
            chosen.config.num_labels = _IMAGE_CLASSES
        return _model(case, chosen, place)

    return _configured(case, transformers_config(document, place), place, make)


def _configured(case: Case, found: Any, place: str, make: Callable[[Architecture], Any]) -> Built:
    """A model of transformers by its configuration; `make` builds it."""
    chosen = architecture(case, found, place)
    config, head = chosen.config, chosen.head
    if case.dec_seq is not None and head not in ("seq2seq-lm", ""):
        raise ConfigError(f"key 'dec_seq': {place} is {head}, which has no decoder beside its encoder; use 'seq'")
    fed = Fed(())
    usual = head and (case.head or head == "image-classification" or not takes_more_than_text(chosen.kind))
    if usual and case.task == "train":
        check_senses(case, place, images=head == "image-classification", audio=False)
        fed = Fed(training_batch(case, head, config, place))
    module = make(chosen)
    module.tie_weights()
    if not usual and case.task == "train":
        fed = feed(case, module, place)
    held: list[Any] = []
    options = dict(fed.constants)
    if head not in ("", "image-classification") or (not head and module.can_generate()):
        options["use_cache"] = case.use_cache
    loss = _offloaded(case, _loss(case, head, config, held, options))
    stated = (*filter(None, (chosen.note,)), *_stated(case, config), *fed.assumptions)
    model = facts(module, case.quant, chosen.named)
    built = Built(module, config, head, fed.batch, loss, place, model, stated, held=held)
    if case.lengths:
        built.batches = _in_turn(case, head if usual else "", config, place)
    return _ready(built, case, prepare)


def _in_turn(case: Case, head: str, config: Any, place: str) -> tuple[tuple[Input, ...], ...]:
    """The micro-batches of a case with `lengths`, which are texts."""
    if head not in _OF_TEXT:
        raise ConfigError(f"key 'lengths': {place} is {head or 'of another kind'}; it is for {', '.join(_OF_TEXT)}")
    found = {
        seq: training_batch(dataclasses.replace(case, seq=seq, lengths=()), head, config, place)
        for seq in sorted(set(case.lengths), reverse=True)
    }
    return tuple(found[seq] for seq in case.lengths)


def _of_diffusers(case: Case, document: Mapping[str, Any], place: str, module: Any = None) -> Built:
    made = denoisers.denoiser(case, document, place, module)
    stated = (*_quantized(case, SimpleNamespace(**document)), *made.assumptions)
    model = facts(made.module, case.quant)
    built = Built(made.module, None, "", made.batch, _offloaded(case, made.loss), place, model, stated)
    return _ready(built, case, denoisers.prepare)


def _ready(built: Built, case: Case, prepare: Callable[..., None]) -> Built:
    """The model as a training script has it: quantized while it is loaded, if at all."""
    if case.quant:
        from graph.models.quantization import loader

        built.loader = functools.partial(loader, case, prepare)
    else:
        prepare(built, case)
    return built


def prepare(built: Built, case: Case, device: str = "meta") -> None:
    """Adapters, checkpointing and the mode, in the order in which a training script asks for them."""
    if case.loss.startswith("chunk"):
        in_parts(built.module, checkpointed=case.loss == "chunk8-ckpt")
    if case.lora:
        built.module, assumed = with_lora(built.module, case.lora, case.lora_targets, built.head, device, built.where)
        built.assumptions += assumed
        built.facts = dataclasses.replace(built.facts, trained=trained(built.module))
    if case.task == "inference":
        built.facts = dataclasses.replace(built.facts, trained=0)
        built.module.eval()
        return
    if case.checkpointing:
        if case.lora and not case.quant:
            built.module.enable_input_require_grads()
        _checkpoint(built.module, case)
    if case.loss == "transformers-4.29" and case.attn == "eager":
        like_old_attention(built.module, cloned=methods.clones_dropout(case.strategy))
    built.module.train()


def _model(case: Case, chosen: Architecture, place: str) -> Any:
    named = version_of(transformers().__version__) >= (4, 56)
    options: dict[str, Any] = {"dtype" if named else "torch_dtype": DTYPES[case.dtype]}
    if case.repeat_kv or case.attn != "default":
        options["attn_implementation"] = repeated_sdpa() if case.repeat_kv else case.attn
    try:
        with torch.device("meta"):
            return chosen.kind._from_config(chosen.config, **options)
    except Exception as error:
        text = reason(error)
        if "attention" in text and case.attn == "sdpa":
            raise CaptureError(
                f"{place}: transformers has no attn 'sdpa' for {chosen.config.model_type}; use 'eager' or 'default'"
            ) from None
        raise CaptureError(f"{place}: transformers cannot build it: {text}") from error


def repeated_sdpa() -> str:
    """The name under which transformers knows an sdpa that gets keys and values once for every head."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    name = "sdpa_repeated"

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        alone: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # it names no groups
        return sdpa_attention_forward(
            alone, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **options
        )

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _checkpoint(module: PreTrainedModel, case: Case) -> None:
    """As transformers' own switch does it, with PyTorch's selective policies where outputs are kept."""
    options: dict[str, Any] = {"use_reentrant": case.checkpointing == "reentrant"}
    if case.save:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, saved_operators(case.save))
    extra: dict[str, Any] = {}
    if case.every > 1:
        extra["every_n_layers"] = case.every
    if case.offload == "checkpoints":
        extra["offload"] = True
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    try:
        enable(options, **extra)
    except ValueError as error:
        raise CaptureError(f"key 'checkpointing': {reason(error)}") from error


def saved_operators(save: tuple[str, ...]) -> list[Any]:
    """The operators whose outputs selective checkpointing keeps, by the words of `Case.save`."""
    aten = torch.ops.aten
    known = {
        "matmul": [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default],
        "attn": [
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        ],
    }
    return [operator for word in save for operator in known[word]]


def _loss(
    case: Case, head: str, config: PreTrainedConfig, held: list[Any], extra: dict[str, Any]
) -> Callable[[Any, dict[str, Any]], Any]:
    if case.loss and head != "causal-lm":
        raise ConfigError(f"key 'loss': {case.loss!r} is for decoders (head causal-lm), and this model is {head}")
    if case.loss == "transformers-4.29":
        return functools.partial(like_transformers_4_29, extra, config.model_type)
    if case.loss:
        return functools.partial(chunked, extra)

    def own(module: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        outputs = module(**inputs, **extra)
        if case.outputs != "dropped":
            held[:] = [outputs]
        loss = getattr(outputs, "loss", None)
        return _first(outputs).float().mean() if loss is None else loss

    return own


def _first(outputs: ModelOutput) -> torch.Tensor:
    """The first output that has a gradient."""
    found: torch.Tensor = next(t for t in tree_leaves(outputs.to_tuple()) if getattr(t, "requires_grad", False))
    return found


def _offloaded(case: Case, loss: Callable[[Any, dict[str, Any]], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    """The loss with what it saves for backward on the host, where the case offloads activations."""
    if not case.offload.startswith("activations"):
        return loss

    def forward(module: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=case.offload == "activations-pin"):
            return loss(module, inputs)

    return forward


def _stated(case: Case, config: PreTrainedConfig) -> tuple[str, ...]:
    return (*_quantized(case, config), *_routed(case, config))


def _quantized(case: Case, config: PreTrainedConfig | SimpleNamespace) -> tuple[str, ...]:
    """What is made of a configuration's own quantization, which is not simulated."""
    own = getattr(config, "quantization_config", None)
    found = []
    if own:
        own = own if isinstance(own, Mapping) else own.to_dict()
        method = own.get("quant_method", "of an unnamed method")
        found.append(
            f"the quantization_config of the configuration ({method}) is not followed: weights are in {case.dtype}"
            + (f", linear layers in {case.quant}" if case.quant else "; 'quant' has nf4 and int8")
        )
    if case.quant == "int8":
        found.append("int8: no column of the activations holds an outlier")
    return tuple(found)


def _routed(case: Case, config: PreTrainedConfig) -> tuple[str, ...]:
    count = len(shares(case, config))
    if not count:
        if case.experts:
            raise ConfigError("key 'experts': the model has no experts")
        return ()
    given = "equal shares" if not case.experts else "shares " + ", ".join(f"{share:g}" for share in case.experts)
    return (f"mixture of experts: the {count} experts get {given} of the tokens",)


# ------------------------------------------------------------------------------------------ a user's function


def _from_function(case: Case) -> Built:
    """What a user's `module:function` returns: (module, inputs) or (module, inputs, loss).

    Called without arguments, or with those of `batch`, `seq` and `dtype` that it names. `inputs`: a mapping of keyword
    arguments, a sequence of positional ones, or one tensor, nested as the forward takes them; of floating-point tensors
    only shapes and dtypes count, others keep their values. The loss is `loss(output)` where given, else the output
    itself, its `loss`, or its first element.
    """
    return _of_user(case, *_called(case))


def _of_user(case: Case, module: torch.nn.Module, inputs: Any, loss: Any, values: Values) -> Built:
    module = module.to(DTYPES[case.dtype]) if case.dtype != "fp32" else module
    leaves, structure = tree_flatten_with_path(_nested(inputs, case))
    names = ["/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves]
    tensors = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    batch = tuple(_input(name, tensor, case, values) for name, tensor in tensors.items())

    def forward(model: Any, placed: dict[str, Any]) -> Any:
        found = [placed.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
        given = tree_unflatten(found, structure)
        return _scalar(loss, model(**given) if isinstance(given, dict) else model(*given), case.model)

    loss_of = _offloaded(case, forward)
    built = Built(module, getattr(module, "config", None), "", batch, loss_of, case.model, facts(module))
    module.train(case.task == "train")
    return built


def _from_module(case: Case, module: Any, inputs: Any) -> Built:
    """A module that the caller has: with example inputs as a user's function, else by its configuration."""
    module = without_weights(module)
    if inputs is not None:
        return _of_user(case, module, inputs, None, Values(id))
    asked = [key for key in ("quant", "repeat_kv", "attn") if key in case.document()]
    if asked:
        raise ConfigError(f"key '{asked[0]}': the module is built already; build it so")
    if isinstance(module.config, Mapping):
        return _of_diffusers(case, {**module.config, "_class_name": type(module).__name__}, case.model, module)
    module.config.architectures = [type(module).__name__]
    return _configured(case, module.config, case.model, lambda chosen: module.to(DTYPES[case.dtype]))


def _called(case: Case) -> tuple[Any, Any, Any, Values]:
    """Module, inputs and loss that the function returns, and the values of integers and booleans that it made."""
    name, function = function_of(case.model) or ("", "")
    make = _function(name, function, case.model)
    known = {"batch": case.batch, "seq": case.seq, "dtype": DTYPES[case.dtype]}
    try:
        given = inspect.signature(make).parameters
    except (TypeError, ValueError):
        given = {}  # type: ignore[assignment]
    for key in ("batch", "seq"):
        if key not in given and getattr(case, key) != KEYS[key].default:
            raise ConfigError(
                f"key '{key}': {case.model} has no parameter {key!r}, so its inputs are of its own size; add the "
                f"parameter, which gets the value of the key, or leave the key out"
            )
    try:
        with own_modules.of(os.getcwd()).first(), on_meta() as values:
            made = make(**{key: value for key, value in known.items() if key in given})
    except LLMemError:
        raise
    except Exception as error:
        raise CaptureError(f"model {case.model}: {told(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise CaptureError(
            f"model {case.model}: the function should return (nn.Module, inputs) or (nn.Module, inputs, "
            f"loss), not {type(made).__name__}"
        )
    module, inputs, *loss = made
    return module, inputs, loss[0] if loss else None, values


def _function(name: str, function: str, model: str) -> Callable[..., Any]:
    here = os.getcwd()
    try:
        with own_modules.of(here).first():
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"model {model}: no module {error.name!r} in {here} or among the installed ones"
            ) from None
        raise CaptureError(f"model {model}: importing {name} failed: {reason(error)}") from error
    except Exception as error:
        raise CaptureError(f"model {model}: {told(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        near = difflib.get_close_matches(
            function, [one for one in vars(module) if not one.startswith("_")], n=1, cutoff=0.0
        )
        hint = f"; the nearest name is {near[0]!r}" if near else ""
        raise ConfigError(f"model {model}: {name} has no function {function!r}{hint}")
    return found  # type: ignore[no-any-return]


def _nested(inputs: object, case: Case) -> Any:
    """Example inputs as a dict of keyword arguments or a list of positional ones; mappings inside are dicts."""
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    if not isinstance(inputs, Mapping | list | tuple):
        raise CaptureError(
            f"model {case.model}: example inputs are a mapping, a sequence or a tensor, not {type(inputs).__name__}"
        )

    def plain(value: object) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if type(value) is list else value

    return plain(inputs if isinstance(inputs, Mapping) else list(inputs))


def _input(name: str, tensor: torch.Tensor, case: Case, values: Values) -> Input:
    """A tensor among example inputs: floating-point ones in the dtype of the case, others with their values."""
    if tensor.is_floating_point():
        dtype = tensor.dtype if case.dtype == "fp32" else DTYPES[case.dtype]
        return Input((name,), tuple(tensor.shape), dtype, "values")
    known = values.of(tensor)
    return Input((name,), tuple(tensor.shape), tensor.dtype, "ids", None if known is None else known.contiguous())


def _scalar(loss: Callable[[Any], Any] | None, output: Any, model: str) -> Any:
    if loss is not None:
        output = loss(output)
    elif getattr(output, "loss", None) is not None:
        output = output.loss
    elif isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or output.numel() != 1:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise CaptureError(
            f"model {model}: the forward gives {shape}, not a scalar loss; return a loss function as the third value"
        )
    return output
