"""GPUs as a capture sees them: what PyTorch asks of a card when it chooses kernels and sizes their workspaces.

Names and aliases are those of the simulator's table of cards (`llmem estimate --gpu`). Architecture, multiprocessors,
threads, shared memory and cache of each card are the device attributes that CUDA shows on it (NVIDIA's CUDA C++
Programming Guide, table of technical specifications by compute capability, and the data sheet of each card).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from traces.errors import ConfigError

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU under one release of PyTorch.

    `arch` is the compute capability; sizes are in bytes; `release` is (major, minor) of PyTorch; `cudnn_sdp` is
    `torch.backends.cuda.enable_cudnn_sdp`. `shared_memory_per_block` is the opt-in limit (sharedMemPerBlockOptin);
    without opting in it is 48 KiB on every card.
    """

    name: str
    product: str
    arch: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    shared_memory_per_block: int
    shared_memory_per_sm: int
    l2_bytes: int
    total_bytes: int
    release: tuple[int, int]
    cudnn_sdp: bool = False
    warp_size: int = 32
    max_threads_per_block: int = 1024


@dataclass(frozen=True, slots=True)
class _Card:
    """What `Profile` says of a card, without the release."""

    product: str
    arch: tuple[int, int]
    sm_count: int
    l2_mib: int
    total_bytes: int
    aliases: tuple[str, ...] = ()


#: by compute capability: threads and blocks a multiprocessor, shared memory a block (opt-in) and a multiprocessor
_ARCHITECTURES: Final[Mapping[tuple[int, int], tuple[int, int, int, int]]] = {
    (7, 0): (2048, 32, 96 * _KIB, 96 * _KIB),
    (7, 5): (1024, 16, 64 * _KIB, 64 * _KIB),
    (8, 0): (2048, 32, 163 * _KIB, 164 * _KIB),
    (8, 6): (1536, 16, 99 * _KIB, 100 * _KIB),
    (8, 9): (1536, 24, 99 * _KIB, 100 * _KIB),
    (9, 0): (2048, 32, 227 * _KIB, 228 * _KIB),
    (10, 0): (2048, 32, 227 * _KIB, 228 * _KIB),
}

_CARDS: Final[Mapping[str, _Card]] = {
    "V100-16GB": _Card("Tesla V100-SXM2-16GB", (7, 0), 80, 6, 16_935_419_904, ("V100",)),
    "V100-32GB": _Card("Tesla V100-SXM2-32GB", (7, 0), 80, 6, 34_079_899_648),
    "T4-16GB": _Card("Tesla T4", (7, 5), 40, 4, 15_828_320_256, ("T4",)),
    "A10-24GB": _Card("NVIDIA A10", (8, 6), 72, 6, 23_835_246_592, ("A10",)),
    "A100-40GB": _Card("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 42_298_834_944),
    "A100-80GB": _Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 85_097_971_712, ("A100",)),
    "RTX3090-24GB": _Card("NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 25_438_126_080, ("RTX3090",)),
    "RTX4090-24GB": _Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 25_386_352_640, ("RTX4090",)),
    "L4-24GB": _Card("NVIDIA L4", (8, 9), 58, 48, 23_669_440_512, ("L4",)),
    "H100-80GB": _Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 84_930_789_376, ("H100",)),
    "H200-141GB": _Card("NVIDIA H200", (9, 0), 132, 60, 150_121_545_728, ("H200",)),
    "B200-192GB": _Card("NVIDIA B200", (10, 0), 148, 126, 191_510_052_864, ("B200",)),
}


def _key(name: str) -> str:
    """`name` without case, blanks and punctuation: `RTX 3090` and `rtx-3090` are one card."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


_NAMES: Final[Mapping[str, str]] = {
    _key(spelling): name for name, card in _CARDS.items() for spelling in (name, card.product, *card.aliases)
}


def profile(gpu: str, release: str, cudnn_sdp: bool = False) -> Profile:
    """The profile of card `gpu` (name, alias or product name) under PyTorch `release` (`2.13`, `2.13.0+cu130`).

    Raises ConfigError if the card is unknown or the release is not a version.
    """
    known = _NAMES.get(_key(gpu))
    if known is None:
        near = difflib.get_close_matches(_key(gpu)[:60], list(_NAMES), n=1, cutoff=0.0)
        raise ConfigError(f"unknown GPU {gpu[:60]!r}; the nearest is '{_NAMES[near[0]]}', all are: {', '.join(_CARDS)}")
    card = _CARDS[known]
    threads, blocks, block_shared, sm_shared = _ARCHITECTURES[card.arch]
    return Profile(
        name=known,
        product=card.product,
        arch=card.arch,
        sm_count=card.sm_count,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        shared_memory_per_block=block_shared,
        shared_memory_per_sm=sm_shared,
        l2_bytes=card.l2_mib * _MIB,
        total_bytes=card.total_bytes,
        release=_release(release),
        cudnn_sdp=cudnn_sdp,
    )


def _release(text: str) -> tuple[int, int]:
    """(major, minor) of a PyTorch version."""
    found = re.fullmatch(r"v?(\d{1,3})\.(\d{1,3})(?:[.+a-z-].*)?", text.strip())
    if found is None:
        raise ConfigError(f"release {text[:40]!r} is no version of PyTorch; write it like 2.13")
    return int(found[1]), int(found[2])
