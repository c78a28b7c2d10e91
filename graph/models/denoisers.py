"""Denoisers of diffusers, what is fine-tuned of FLUX and Stable Diffusion: made, fed and trained as its scripts do it.

A configuration of diffusers names its class (`_class_name`). Pictures and texts are encoded beforehand, so that neither
their encoders nor the decoder are on the GPU: the model gets latents of an eighth of a picture's sides, the tokens of a
text and a time, and its output is held against a target by the mean squared error (examples/text_to_image and
examples/dreambooth of diffusers). Classes whose inputs are not known are refused: `module:function` can give them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.functional import mse_loss

from graph import methods
from graph.case import KEYS, Case
from graph.loop.inputs import DTYPES, Input, image_edges
from graph.models.adapters import refused
from graph.models.architectures import trained
from traces.errors import ConfigError
from traces.text import reason

if TYPE_CHECKING:
    from graph.models.sources import Built

#: Pixels of a latent's side (the autoencoders of FLUX and Stable Diffusion halve a picture three times).
_PIXELS: Final = 8
#: Sides of the latents of models whose configuration names none (FluxPipeline.default_sample_size).
_LATENT: Final = 128
#: Keys that mean nothing to a denoiser.
_STRANGE: Final = (
    *("head", "images", "audio", "dec_seq", "attention_mask", "repeat_kv", "use_cache", "outputs", "loss", "experts"),
    *("every", "save"),
)
#: The values that it takes of keys whose others are for transformers.
_TAKEN: Final[Mapping[str, tuple[str, ...]]] = {
    "task": ("train",),
    "attn": ("default", "sdpa"),
    "checkpointing": ("", "nonreentrant"),
    "offload": ("", "optimizer", "parameters", "activations", "activations-pin"),
}
#: Keys of a configuration that are not for the class: the case has the dtype, and quantization is its own matter.
_ELSEWHERE: Final = frozenset(["dtype", "torch_dtype", "quantization_config"])
#: Numbers of a picture that SDXL is told: its size, the crop's corner, the size that is wanted.
_TIME_IDS: Final = 6


class _Sizes(NamedTuple):
    """The sizes of a micro-batch: samples, tokens of their texts, height and width of their latents."""

    batch: int
    tokens: int
    height: int
    width: int


@dataclass(frozen=True)
class _Kind:
    """A class of diffusers, by its configuration: `feed` makes its inputs and its target, `edges` are what the sides of
    a picture in pixels are multiples of and the longest (0: any), `strange` is the key that asks for inputs which are
    not known here (empty: none). `adapted`: the modules that its LoRA scripts adapt."""

    feed: Callable[[Mapping[str, Any], _Sizes, torch.dtype], tuple[Input, ...]]
    adapted: tuple[str, ...]
    edges: Callable[[Mapping[str, Any]], tuple[int, int]]
    strange: Callable[[Mapping[str, Any]], str] = lambda config: ""


class Denoiser(NamedTuple):
    """A denoiser on the meta device, its inputs with the target, its loss, and what was assumed."""

    module: Any
    batch: tuple[Input, ...]
    loss: Callable[[Any, dict[str, Any]], torch.Tensor]
    assumptions: tuple[str, ...]


def denoiser(case: Case, document: Mapping[str, Any], place: str, module: Any = None) -> Denoiser:
    """The denoiser of a configuration of diffusers, which stands at `place`; `module` where it is made already.

    Raises ConfigError for a class that is not known here, for bad values, for keys of the case that mean nothing to it,
    and where diffusers is not installed.
    """
    name = str(document["_class_name"])
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"{place}: a configuration of diffusers ({name[:60]}), whose inputs are not known here; write a function "
            "that makes the model and its inputs, and name it as module:function"
        )
    _check(case, place)
    module, unused = (module, []) if module is not None else _made(name, document, place)
    _check_module(case, kind, module, place)
    height, width = _edges(case, kind, module.config, place)
    sizes = _Sizes(case.batch, case.seq, height // _PIXELS, width // _PIXELS)
    batch = kind.feed(module.config, sizes, DTYPES[case.dtype])
    said = [
        f"a sample is a picture of {height} x {width} pixels with {case.seq} tokens of text, both encoded beforehand: "
        "no encoder is on the GPU",
        f"the loss is the mean squared error of the output of {name}, in fp32",
    ]
    if unused:
        said.append(f"{place}: {name} of diffusers takes no {', '.join(unused)}")
    return Denoiser(module.to(DTYPES[case.dtype]), batch, _loss, tuple(said))


def prepare(built: Built, case: Case, device: str = "meta") -> None:
    """Adapters (made on `device`), checkpointing and the mode, as a training script of diffusers asks for them."""
    if case.lora:
        built.assumptions += _adapted(built.module, case, device, built.where)
        built.facts = dataclasses.replace(built.facts, trained=trained(built.module))
    if case.checkpointing:
        built.module.enable_gradient_checkpointing()
    built.module.train()


def _adapted(module: Any, case: Case, device: str, place: str) -> tuple[str, ...]:
    """LoRA by the model's own `add_adapter`, on what the scripts adapt where the case names no modules."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(f"key 'lora': needs peft ({error}); pip install 'vramsim[torch]'") from None
    usual = _KINDS[type(module).__name__].adapted
    targets = case.lora_targets or usual
    names: Any = targets[0] if targets == ("all-linear",) else list(targets)
    try:
        with torch.device(device):
            module.add_adapter(LoraConfig(r=case.lora, lora_alpha=16, target_modules=names))
    except ValueError as error:
        raise refused(place, error) from None
    return () if case.lora_targets else (f"lora: on {', '.join(usual)}, as in diffusers' scripts",)


# ------------------------------------------------------------------------------------------------ what is made


def _check(case: Case, place: str) -> None:
    for key in _STRANGE:
        if getattr(case, key) != KEYS[key].default:
            mend = f"strategy {case.strategy!r} sets it" if key in methods.usual(case.strategy) else "leave it out"
            raise ConfigError(f"key '{key}': it means nothing to a denoiser of diffusers ({place}); {mend}")
    for key, takes in _TAKEN.items():
        if getattr(case, key) not in takes:
            known = " or ".join(map(repr, filter(None, takes)))
            raise ConfigError(
                f"key '{key}': a denoiser of diffusers ({place}) takes {known}, not {getattr(case, key)!r}"
            )


def _check_module(case: Case, kind: _Kind, module: Any, place: str) -> None:
    name = type(module).__name__
    if key := kind.strange(module.config):
        raise ConfigError(
            f"{place}: what a {name} with {key!r} {module.config[key]!r} is fed is not known here; give model and "
            "inputs by module:function"
        )
    if case.quant and not case.autocast and any(isinstance(part, torch.nn.Conv2d) for part in module.modules()):
        raise ConfigError(
            f"key 'quant': peft keeps the convolutions of {name} in fp32, so that it trains with 'autocast' alone"
        )


def _made(name: str, document: Mapping[str, Any], place: str) -> tuple[Any, list[str]]:
    """The module on the meta device, and the keys of its configuration that the class does not take."""
    try:
        kind = getattr(importlib.import_module("diffusers"), name)
        taken = set(inspect.signature(kind.__init__).parameters) - {"self"}
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{place}: diffusers is needed to build {name} ({reason(error)}); pip install 'vramsim[diffusers]'"
        ) from None
    try:
        with torch.device("meta"):
            module = kind(**{key: value for key, value in document.items() if key in taken})
    except Exception as error:
        raise ConfigError(f"{place}: diffusers cannot build it: {reason(error)}") from error
    return module, sorted(key for key in document if key not in taken | _ELSEWHERE and not key.startswith("_"))


def _edges(case: Case, kind: _Kind, config: Mapping[str, Any], place: str) -> tuple[int, int]:
    """Height and width of a picture in pixels: the case's, else those that the model is for."""
    own = config.get("sample_size") or _LATENT
    sides = (own, own) if isinstance(own, int) else tuple(own)
    if [type(side) for side in sides] != [int, int]:
        raise ConfigError(f"{place}: key 'sample_size': {own!r} should be height and width of a latent")
    height, width = image_edges(case) or (sides[0] * _PIXELS, sides[1] * _PIXELS)
    factor, most = kind.edges(config)
    if height % factor or width % factor or max(height, width) > (most or height + width):
        limit = f" of at most {most}" if most else ""
        raise ConfigError(
            f"key 'image_size': the model of {place} takes sides{limit} that are multiples of {factor} pixels, not "
            f"{height} x {width}"
        )
    return height, width


# -------------------------------------------------------------------------------------------------- what it is fed


def _values(key: str, *shape: int, dtype: torch.dtype) -> Input:
    return Input((key,), shape, dtype, "values")


def _flux(config: Mapping[str, Any], sizes: _Sizes, dtype: torch.dtype) -> tuple[Input, ...]:
    """Latents in patches of 2 x 2, each with its place; guidance where the model was distilled with it."""
    batch, tokens = sizes.batch, sizes.tokens
    patches = sizes.height // 2 * (sizes.width // 2)
    channels = config["patch_size"] ** 2 * (config["out_channels"] or config["in_channels"])
    found = [
        _values("hidden_states", batch, patches, config["in_channels"], dtype=dtype),
        _values("encoder_hidden_states", batch, tokens, config["joint_attention_dim"], dtype=dtype),
        _values("pooled_projections", batch, config["pooled_projection_dim"], dtype=dtype),
        _values("timestep", batch, dtype=torch.float32),
        _values("img_ids", patches, 3, dtype=dtype),
        _values("txt_ids", tokens, 3, dtype=dtype),
    ]
    if config["guidance_embeds"]:
        found.append(_values("guidance", batch, dtype=torch.float32))
    return *found, _values("target", batch, patches, channels, dtype=dtype)


def _sd3(config: Mapping[str, Any], sizes: _Sizes, dtype: torch.dtype) -> tuple[Input, ...]:
    batch, *latent = sizes.batch, sizes.height, sizes.width
    return (
        _values("hidden_states", batch, config["in_channels"], *latent, dtype=dtype),
        _values("encoder_hidden_states", batch, sizes.tokens, config["joint_attention_dim"], dtype=dtype),
        _values("pooled_projections", batch, config["pooled_projection_dim"], dtype=dtype),
        _values("timestep", batch, dtype=torch.float32),
        _values("target", batch, config["out_channels"] or config["in_channels"], *latent, dtype=dtype),
    )


def _unet(config: Mapping[str, Any], sizes: _Sizes, dtype: torch.dtype) -> tuple[Input, ...]:
    """With "text_time" (SDXL) also the pooled text and the numbers of the picture, in `added_cond_kwargs`."""
    batch, *latent = sizes.batch, sizes.height, sizes.width
    found = [
        _values("sample", batch, config["in_channels"], *latent, dtype=dtype),
        Input(("timestep",), (batch,), torch.int64, "ids"),
        _values("encoder_hidden_states", batch, sizes.tokens, config["cross_attention_dim"], dtype=dtype),
    ]
    if config["addition_embed_type"] == "text_time":
        found.append(_values("text_embeds", batch, _pooled(config), dtype=dtype))
        found.append(_values("time_ids", batch, _TIME_IDS, dtype=dtype))
    return *found, _values("target", batch, config["out_channels"], *latent, dtype=dtype)


def _pooled(config: Mapping[str, Any]) -> int:
    """The width of the pooled text of SDXL."""
    return int(config["projection_class_embeddings_input_dim"] - _TIME_IDS * config["addition_time_embed_dim"])


def _strange_unet(config: Mapping[str, Any]) -> str:
    for key in ("class_embed_type", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim"):
        if config[key] is not None:
            return key
    if config["addition_embed_type"] not in (None, "text_time"):
        return "addition_embed_type"
    if config["addition_embed_type"] and _pooled(config) < 1:
        return "projection_class_embeddings_input_dim"
    if config["attention_type"] != "default":
        return "attention_type"
    return "" if isinstance(config["cross_attention_dim"], int) else "cross_attention_dim"


def _edges_of_sd3(config: Mapping[str, Any]) -> tuple[int, int]:
    factor = config["patch_size"] * _PIXELS
    return factor, config["pos_embed_max_size"] * factor


def _loss(module: Any, inputs: dict[str, Any]) -> torch.Tensor:
    target = inputs["target"]
    added = {key: inputs[key] for key in ("text_embeds", "time_ids") if key in inputs}
    given = {key: value for key, value in inputs.items() if key != "target" and key not in added}
    if added:
        given["added_cond_kwargs"] = added
    found = module(**given, return_dict=False)[0]
    return mse_loss(found.float(), target.float())


_ATTENTION: Final = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT: Final = tuple(f"attn.{name}" for name in (*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"))
_FEED: Final = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
#: By name. Modules with adapters: examples/dreambooth/train_dreambooth_lora_{flux,sd3}.py and
#: examples/text_to_image/train_text_to_image_lora.py.
_KINDS: Final[Mapping[str, _Kind]] = {
    "FluxTransformer2DModel": _Kind(_flux, (*_JOINT, *_FEED), lambda config: (2 * _PIXELS, 0)),
    "SD3Transformer2DModel": _Kind(_sd3, _JOINT, _edges_of_sd3),
    "UNet2DConditionModel": _Kind(_unet, _ATTENTION, lambda config: (_PIXELS, 0), _strange_unet),
}
