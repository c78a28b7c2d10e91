"""What classes without one of the usual heads are fed: images and audio beside text, as their processors make them.

A sample has one image, or as many as the case says, and one piece of audio. How many tokens of the sequence an image
takes is asked of the model's own `get_image_features`, or follows from the grid of patches (`image_grid_thw`).
A class whose inputs are not known is refused: `module:function` can give them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.case import KEYS, Case
from graph.errors import CaptureError
from graph.loop.inputs import DTYPES, Input, check_positions, image_edges, image_pixels
from traces.errors import ConfigError
from traces.text import reason

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Edge in pixels of the image of models that take images of any size.
_EDGE: Final = 448
#: Frames of a second of Whisper's spectrograms: 16,000 samples in hops of 160.
_FRAMES: Final = 100
#: What a forward may take that nothing here makes.
_UNKNOWN: Final = ("input_values", "bbox", "input_points", "past_values")
#: Tokens that one image of Gemma 4 is at most.
_SOFT_TOKENS: Final = 280
#: Where the id of the tokens that stand for an image is configured.
_IMAGE_TOKEN: Final = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class Fed:
    """The inputs of one micro-batch, further arguments of the forward, and what was assumed."""

    batch: tuple[Input, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()


def takes_more_than_text(kind: type[PreTrainedModel]) -> bool:
    """Whether the forward of a class takes images or audio."""
    return bool({"pixel_values", "input_features", "input_values"} & set(_parameters(kind)))


def feed(case: Case, module: PreTrainedModel, place: str) -> Fed:
    """The inputs of a training step of `module` (on "meta"), in the order in which its processor gives them.

    Raises ConfigError where the sequence has no room for them, CaptureError for a class whose inputs are not known.
    """
    taken = _parameters(type(module))
    needed = [name for name, one in taken.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    text, images, audio = (name in taken for name in ("input_ids", "pixel_values", "input_features"))
    check_senses(case, place, images=images, audio=audio)
    if audio and hasattr(module.config, "num_mel_bins") and hasattr(module.config, "max_source_positions"):
        return _heard(case, module, place)
    if text and images and _image_token(module.config) is not None:
        return _read_with_images(case, module, taken, place)
    if text and images and "return_loss" in taken:
        check_positions(module.config, case.seq, "seq", place)
        _check_one(case, place)
        batch = (_ids(case), _mask(case), _pixels(case, module.config.vision_config))
        return Fed(batch, {"return_loss": True})
    strange = [name for name in taken if name in _UNKNOWN] or type(module).__name__.endswith("MultipleChoice")
    if images and not text and not strange and set(needed) <= {"pixel_values"}:
        _check_one(case, place)
        return Fed((_pixels(case, module.config),), {}, _mean(module))
    if text and not images and not audio and not strange and set(needed) <= {"input_ids"}:
        return _read(case, module, taken, place)
    raise CaptureError(
        f"{place}: what {type(module).__name__} is fed ({', '.join(list(taken)[:5])}, ...) is not known here; give "
        "model and inputs by module:function"
    )


def check_senses(case: Case, place: str, *, images: bool, audio: bool) -> None:
    """ConfigError where a case gives a model images or audio that it does not take."""
    for key, taken, what in (("images", images, "images"), ("image_size", images, "images"), ("audio", audio, "audio")):
        if not taken and getattr(case, key) != KEYS[key].default:
            raise ConfigError(f"key '{key}': the model of {place} takes no {what}; leave it out")


def _check_one(case: Case, place: str) -> None:
    if case.images != 1:
        raise ConfigError(f"key 'images': the model of {place} takes one image a sample")


def _parameters(kind: type[PreTrainedModel]) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(kind.forward).parameters)
    found.pop("self", None)
    return {name: one for name, one in found.items() if one.kind is not one.VAR_KEYWORD}


def _mean(module: PreTrainedModel) -> tuple[str, ...]:
    return (f"the mean of the first output of {type(module).__name__} stands for a loss",)


# --------------------------------------------------------------------------------------------------------- text


def _ids(case: Case, given: torch.Tensor | None = None) -> Input:
    return Input(("input_ids",), (case.batch, case.seq), torch.int64, "ids", given)


def _mask(case: Case) -> Input:
    kind: Any = "padded" if case.attention_mask == "padded" else "mask"
    return Input(("attention_mask",), (case.batch, case.seq), torch.int64, kind)


def _read(case: Case, module: PreTrainedModel, taken: Mapping[str, Any], place: str) -> Fed:
    """Text alone: labels by token or by sample where the class is for that, else the mean of its output."""
    check_positions(module.config, case.seq, "seq", place)
    name = type(module).__name__
    batch = [_ids(case), _mask(case)]
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        decoded = case.seq if case.dec_seq is None else case.dec_seq
        batch.append(Input(("decoder_input_ids",), (case.batch, decoded), torch.int64, "ids"))
    by_sample = {"QuestionAnswering": ("start_positions", "end_positions"), "NextSentencePrediction": ("labels",)}
    for ending, names in by_sample.items():
        if name.endswith(ending) and set(names) <= set(taken):
            batch += [Input((one,), (case.batch,), torch.int64, "labels") for one in names]
            return Fed(tuple(batch))
    if name.endswith(("TokenClassification", "LMHeadModel", "ForCausalLM")) and "labels" in taken:
        batch.append(Input(("labels",), (case.batch, case.seq), torch.int64, "labels"))
        return Fed(tuple(batch))
    return Fed(tuple(batch), {}, _mean(module))


# ------------------------------------------------------------------------------------------------------- images


def _pixels(case: Case, config: PreTrainedConfig) -> Input:
    return Input(("pixel_values",), image_pixels(case, config), DTYPES[case.dtype], "values")


def _image_token(config: PreTrainedConfig) -> int | None:
    found = next((value for name in _IMAGE_TOKEN if (value := getattr(config, name, None)) is not None), None)
    return None if found is None else int(found)


def _read_with_images(case: Case, module: PreTrainedModel, taken: Mapping[str, Any], place: str) -> Fed:
    """A text with images: the tokens of each stand after one of text, and are not learnt."""
    check_positions(module.config, case.seq, "seq", place)
    if "image_position_ids" in taken:
        pictures, count, said = _placed(case, module)
    elif "image_grid_thw" in taken:
        pictures, count, said = _grid(case, module)
    else:
        pictures, count, said = _picture(case, module, taken, place)
    number = "an image is" if case.images == 1 else f"{case.images} images are"
    if case.images * (count + 1) > case.seq:
        whole = case.images * count
        raise ConfigError(f"key 'seq': {number} {whole} tokens of the sequence, which has {case.seq}; give more")
    shown = torch.zeros(case.batch, case.seq, dtype=torch.int64)
    for first in range(1, case.images * (count + 1), count + 1):
        shown[:, first : first + count] = 1
    batch = [_ids(case, shown * _token(module)), _mask(case)]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in taken:
            batch.append(Input((name,), (case.batch, case.seq), torch.int64, "values", shown))
    labels = Input(("labels",), (case.batch, case.seq), torch.int64, "labels", shown * -100)
    number = "one image" if case.images == 1 else f"{case.images} images"
    tokens = f"{case.images * count} of its {case.seq} tokens"
    return Fed((*batch, *pictures, labels), {}, (f"{number} of {said} a sample, {tokens}",))


def _token(module: PreTrainedModel) -> int:
    return _image_token(module.config) or 0


def _grid(case: Case, module: PreTrainedModel) -> tuple[list[Input], int, str]:
    """Patches in rows, and the grid that they are of (Qwen2-VL's processor and its kin, which rounds both sides to
    whole tokens): a square image of `_EDGE` pixels, or as many as half of the sequence has room for, unless the case
    names its size."""
    vision = module.config.vision_config
    merged = int(getattr(vision, "spatial_merge_size", 2))
    factor = int(vision.patch_size) * merged
    edge = max(1, min(_EDGE // factor, math.isqrt(case.seq // (2 * case.images))))
    height, width = (max(1, round(size / factor)) for size in image_edges(case) or (edge * factor, edge * factor))
    tokens = height * width
    count = case.batch * case.images
    depth = int(getattr(vision, "in_channels", 3)) * int(getattr(vision, "temporal_patch_size", 1))
    shape = (count * tokens * merged**2, depth * int(vision.patch_size) ** 2)
    grid = torch.tensor([[1, height * merged, width * merged]] * count)
    pixels = Input(("pixel_values",), shape, DTYPES[case.dtype], "values")
    sizes = Input(("image_grid_thw",), (count, 3), torch.int64, "values", grid)
    return [pixels, sizes], tokens, f"{height * factor} x {width * factor} pixels"


def _placed(case: Case, module: PreTrainedModel) -> tuple[list[Input], int, str]:
    """Patches in rows and their places, -1 behind the last of an image (Gemma 4's processors, which bring each to as
    many tokens as its sides allow). Where no vision tower pools them, a row is what becomes a token."""
    vision = module.config.vision_config
    pooled = int(vision.pooling_kernel_size)
    height, width = image_edges(case) or (_EDGE, _EDGE)
    scale = math.sqrt(_SOFT_TOKENS / (height * width))
    rows, columns = (max(1, math.floor(size * scale)) for size in (height, width))
    inner = pooled if hasattr(module.model, "vision_tower") else 1
    edge = int(vision.patch_size) * pooled // inner
    count, most = case.batch * case.images, _SOFT_TOKENS * inner**2
    places = torch.cartesian_prod(torch.arange(rows * inner), torch.arange(columns * inner)).flip(-1)  # x, y
    places = torch.nn.functional.pad(places, (0, 0, 0, most - len(places)), value=-1)
    pixels = Input(("pixel_values",), (count, most, 3 * edge**2), DTYPES[case.dtype], "values")
    shape = (count, most, 2)
    given = Input(("image_position_ids",), shape, torch.int64, "values", places.expand(shape).contiguous())
    return [pixels, given], rows * columns, f"{rows * edge * inner} x {columns * edge * inner} pixels"


def _picture(case: Case, module: Any, taken: Mapping[str, Any], place: str) -> tuple[list[Input], int, str]:
    """Images of the size that the case or the model has; how many tokens one is, the model itself says."""
    count, channels, height, width = image_pixels(case, module.config.vision_config)
    sizes = torch.tensor([[height, width]])
    options = {"image_sizes": sizes} if "image_sizes" in taken and _accepts_sizes(module) else {}
    try:
        with torch.no_grad(), torch.device("meta"):
            pixels = torch.empty(1, channels, height, width, dtype=DTYPES[case.dtype])
            found = module.get_image_features(pixel_values=pixels, **options)
    except Exception as error:
        raise CaptureError(
            f"{place}: {type(module).__name__} does not take an image of {height} x {width} pixels: "
            f"{reason(error)}; give model and inputs by module:function"
        ) from error
    batch = [Input(("pixel_values",), (count, channels, height, width), DTYPES[case.dtype], "values")]
    if options:
        batch.append(Input(("image_sizes",), (count, 2), torch.int64, "values", sizes.repeat(count, 1)))
    return batch, _rows(found), f"{height} x {width} pixels"


def _accepts_sizes(module: PreTrainedModel) -> bool:
    """Whether images of any size go to the vision tower with their sizes (Pixtral)."""
    tower = getattr(getattr(module, "model", module), "vision_tower", None)
    return tower is not None and "image_sizes" in _parameters(type(tower))


def _rows(features: Any) -> int:
    """How many tokens the features of images are: those projected, else the last hidden states."""
    pooled = getattr(features, "pooler_output", None)
    if isinstance(pooled, torch.Tensor) and pooled.ndim < 3:
        pooled = None
    found = features.last_hidden_state if pooled is None else pooled
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(math.prod(part.shape[:-1]) for part in parts)


# -------------------------------------------------------------------------------------------------------- audio


def _heard(case: Case, module: PreTrainedModel, place: str) -> Fed:
    """Whisper: a spectrogram of the whole window, which its processor pads, and the tokens to be written."""
    config = module.config
    decoded = case.seq if case.dec_seq is None else case.dec_seq
    most = int(getattr(config, "max_target_positions", decoded))
    if decoded > most:
        key = "seq" if case.dec_seq is None else "dec_seq"
        raise ConfigError(f"key '{key}': {decoded} tokens do not fit the {most} positions of the decoder in {place}")
    frames = 2 * int(config.max_source_positions)
    if case.audio * _FRAMES > frames:
        raise ConfigError(
            f"key 'audio': {case.audio:g} seconds do not fit the window of {frames / _FRAMES:g} in {place}; its "
            "processor cuts them there"
        )
    sound = Input(("input_features",), (case.batch, config.num_mel_bins, frames), DTYPES[case.dtype], "values")
    said = (f"one window of {frames} frames of audio a sample (shorter ones are padded), {decoded} tokens of text",)
    if "labels" in _parameters(type(module)):
        labels = Input(("labels",), (case.batch, decoded), torch.int64, "labels")
        return Fed((sound, labels), {}, said)
    ids = Input(("decoder_input_ids",), (case.batch, decoded), torch.int64, "ids")
    return Fed((sound, ids), {}, (*said, *_mean(module)))
