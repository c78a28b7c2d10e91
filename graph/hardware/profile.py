"""GPUs as a capture sees them: what PyTorch asks of a card when it chooses kernels and sizes their workspaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from graph.hardware.gpus import gpu as gpu_of
from traces.release import Version, version_of

#: Streams beside the default one: so many PyTorch makes of each priority, and then gives them out again
#: (kStreamsPerPool of c10/cuda/CUDAStream.cpp).
STREAMS: Final = 32


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
    release: Version
    cudnn_sdp: bool = False
    warp_size: int = 32
    max_threads_per_block: int = 1024


def profile(gpu: str, release: str, cudnn_sdp: bool = False) -> Profile:
    """The profile of card `gpu` (name, alias or product name) under PyTorch `release` (`2.13`, `2.13.0+cu130`).

    Raises ConfigError if the card is unknown or the release is not a version.
    """
    card = gpu_of(gpu)
    shared = card.architecture
    return Profile(
        name=card.name,
        product=card.product,
        arch=card.arch,
        sm_count=card.sm_count,
        max_threads_per_sm=shared.max_threads_per_sm,
        max_blocks_per_sm=shared.max_blocks_per_sm,
        shared_memory_per_block=shared.shared_memory_per_block,
        shared_memory_per_sm=shared.shared_memory_per_sm,
        l2_bytes=card.l2_bytes,
        total_bytes=card.total_bytes,
        release=version_of(release),
        cudnn_sdp=cudnn_sdp,
    )
