"""GPUs by name, with the total that cudaMemGetInfo shows on each (what the allocator can see, not the label's size)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from traces.errors import ConfigError
from traces.model import DEFAULT_DEVICE, Device


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU: its product name, its total in bytes, and where that number comes from."""

    product: str
    total_bytes: int
    source: str
    aliases: tuple[str, ...] = ()


_OBSERVED: Final = "total of cudaMemGetInfo on such a card, ECC as shipped"
_GROUND_TRUTH: Final = f"{_OBSERVED}; the size in the recorded training runs"

#: Every known card by the name used in traces, cases and reports.
CARDS: Final[Mapping[str, Card]] = {
    "V100-16GB": Card("Tesla V100-SXM2-16GB", 16_935_419_904, _GROUND_TRUTH, ("V100",)),
    "V100-32GB": Card("Tesla V100-SXM2-32GB", 34_079_899_648, _OBSERVED),
    "T4-16GB": Card("Tesla T4", 15_828_320_256, _GROUND_TRUTH, ("T4",)),
    "A10-24GB": Card("NVIDIA A10", 23_835_246_592, _OBSERVED, ("A10",)),
    "A100-40GB": Card("NVIDIA A100-SXM4-40GB", 42_298_834_944, _OBSERVED),
    "A100-80GB": Card("NVIDIA A100-SXM4-80GB", 85_097_971_712, _GROUND_TRUTH, ("A100",)),
    "RTX3090-24GB": Card("NVIDIA GeForce RTX 3090", 25_438_126_080, _GROUND_TRUTH, ("RTX3090",)),
    "RTX4090-24GB": Card("NVIDIA GeForce RTX 4090", 25_386_352_640, _OBSERVED, ("RTX4090",)),
    "L4-24GB": Card("NVIDIA L4", 23_669_440_512, _OBSERVED, ("L4",)),
    "H100-80GB": Card("NVIDIA H100 80GB HBM3", 84_930_789_376, _GROUND_TRUTH, ("H100",)),
    "H200-141GB": Card("NVIDIA H200", 150_121_545_728, _OBSERVED, ("H200",)),
    "B200-192GB": Card("NVIDIA B200", 191_510_052_864, _OBSERVED, ("B200",)),
}


def _key(name: str) -> str:
    """`name` without case, blanks and punctuation: `RTX 3090`, `rtx-3090` and `RTX3090` are one card."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


_NAMES: Final[Mapping[str, str]] = {
    _key(spelling): name for name, card in CARDS.items() for spelling in (name, card.product, *card.aliases)
}


def device(name: str) -> Device:
    """The device called `name` (a name of `CARDS`, an alias or the product's name); ConfigError if none is."""
    known = _NAMES.get(_key(name))
    if known is None:
        near = difflib.get_close_matches(_key(name)[:60], list(_NAMES), n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown GPU {name[:60]!r}; the nearest is '{_NAMES[near[0]]}', all are: {', '.join(CARDS)}; "
            "any other goes by its size in bytes (--memory)"
        )
    return DEFAULT_DEVICE if known == DEFAULT_DEVICE.name else Device(known, CARDS[known].total_bytes)
