"""What a model is fed: the tensors of one micro-batch, as they are made on the host and sent to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from graph.case import Case
from graph.dtypes import NAMES
from traces.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["ids", "mask", "padded", "labels", "values"]

#: `Case.dtype`, `autocast` and the like as torch names them.
DTYPES: Final[Mapping[str, torch.dtype]] = {key: getattr(torch, name) for key, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Input:
    """One input: `shape` and `dtype` on the host. Ids and labels are zeros, masks ones, values anything; a padded mask
    has a zero at the end of each row. `given`: the values themselves, where they matter.

    `keys`: under which argument names of the model's forward it is passed; several where one tensor serves twice.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    given: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The first of its argument names."""
        return self.keys[0]

    def host(self) -> torch.Tensor:
        """The tensor on the host."""
        if self.given is not None:
            return self.given.clone()
        make = torch.ones if self.kind in ("mask", "padded") else torch.zeros
        made = make(self.shape, dtype=self.dtype, device="cpu")
        if self.kind == "padded":
            made[..., -1] = 0
        return made


def hosts(batch: Sequence[Input]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, host tensor) in the order in which the inputs go to the device."""
    for one in batch:
        yield one.name, one.host()


def arguments(batch: Sequence[Input], tensors: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the model's forward for tensors by the names of `batch`."""
    return {key: tensors[one.name] for one in batch for key in one.keys}


def training_batch(case: Case, head: str, config: PreTrainedConfig, place: str) -> tuple[Input, ...]:
    """The inputs of a training step, in the order in which they go to the device.

    A decoder's labels are its input ids, the same tensor; an encoder-decoder's labels have `dec_seq` tokens, and the
    model makes the decoder's input of them; a masked language model has labels at all positions. Raises ConfigError
    where the sequence is longer than the model's positions.
    """
    long = torch.int64
    if head == "image-classification":
        if case.images != 1:
            raise ConfigError(f"key 'images': {place} classifies one image a sample")
        values = Input(("pixel_values",), image_pixels(case, config), DTYPES[case.dtype], "values")
        return values, Input(("labels",), (case.batch,), long, "labels")
    check_positions(config, case.seq, "seq", place)
    tokens = (case.batch, case.seq)
    ids = Input(("input_ids",), tokens, long, "ids")
    if head == "causal-lm":
        batch = [Input(("input_ids", "labels"), tokens, long, "ids")]
    elif head == "masked-lm":
        batch = [ids, Input(("labels",), tokens, long, "labels")]
    elif head == "sequence-classification":
        batch = [ids, Input(("labels",), (case.batch,), long, "labels")]
    else:
        decoded = case.seq if case.dec_seq is None else case.dec_seq
        check_positions(config, decoded, "dec_seq", place)
        batch = [ids, Input(("labels",), (case.batch, decoded), long, "labels")]
    if case.attention_mask:
        kind: Kind = "padded" if case.attention_mask == "padded" else "mask"
        batch.append(Input(("attention_mask",), tokens, long, kind))
    return tuple(batch)


def check_positions(config: PreTrainedConfig, length: int, key: str, place: str) -> None:
    """ConfigError if the model has fewer than `length` positions; `key` names the case key to mend."""
    found = positions(config)
    if found is not None and length > found[1]:
        name, most = found
        raise ConfigError(
            f"key '{key}': {length} tokens do not fit the {most} positions of the model ({name} in {place}); "
            f"{most} is the longest"
        )


def positions(config: PreTrainedConfig) -> tuple[str, int] | None:
    """The key of a configuration that limits the sequence, and its limit; None if there is no limit (ALiBi, T5).

    RoBERTa and its kin count positions from pad_token_id + 1 (transformers: create_position_ids_from_input_ids).
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions"):
        most = getattr(text, name, None)
        if isinstance(most, int) and most > 0 and not _relative(text):
            offset = _offset(text)
            return name, most - offset
    return None


def _relative(config: PreTrainedConfig) -> bool:
    """T5 and its kin have biases by distance, for any distance; their n_positions is not used."""
    return hasattr(config, "relative_attention_num_buckets")


def _offset(config: PreTrainedConfig) -> int:
    """Rows of the table of positions that stand before the first token's."""
    from_padding = "roberta" in str(getattr(config, "model_type", "")) or config.model_type in ("camembert", "mpnet")
    return int(config.pad_token_id) + 1 if from_padding and config.pad_token_id is not None else 0


def image_pixels(case: Case, config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """The shape of a batch of images: of the size that the case names, else of that which a configuration of vision
    names (224 x 224 where it names none)."""
    height, width = image_edges(case) or _pair(getattr(config, "image_size", 224))
    return case.batch * case.images, int(getattr(config, "num_channels", 3)), height, width


def image_edges(case: Case) -> tuple[int, int] | None:
    """Height and width in pixels that a case names."""
    height, _, width = case.image_size.partition("x")
    return (int(height), int(width)) if width else None


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
