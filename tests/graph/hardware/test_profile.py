"""GPUs as a capture sees them: the same names as the simulator's cards, attributes as published, forgiving spelling."""

from __future__ import annotations

import pytest

from graph.hardware.gpus import GPUS
from graph.hardware.profile import profile
from traces.errors import ConfigError


@pytest.mark.parametrize(
    ("gpu", "arch", "sm_count", "max_threads", "shared_kib", "l2_mib"),
    [  # NVIDIA's architecture whitepapers, and the table of the CUDA C++ Programming Guide by compute capability
        ("V100", (7, 0), 80, 2048, 96, 6),
        ("T4", (7, 5), 40, 1024, 64, 4),
        ("A10", (8, 6), 72, 1536, 99, 6),
        ("A100", (8, 0), 108, 2048, 163, 40),
        ("RTX3090", (8, 6), 82, 1536, 99, 6),
        ("RTX4090", (8, 9), 128, 1536, 99, 72),
        ("L4", (8, 9), 58, 1536, 99, 48),
        ("H100", (9, 0), 132, 2048, 227, 50),
        ("H200", (9, 0), 132, 2048, 227, 60),
        ("B200", (10, 0), 148, 2048, 227, 126),
    ],
)
def test_attributes(
    gpu: str, arch: tuple[int, int], sm_count: int, max_threads: int, shared_kib: int, l2_mib: int
) -> None:
    card = profile(gpu, "2.13")
    assert (card.arch, card.sm_count, card.max_threads_per_sm) == (arch, sm_count, max_threads)
    assert (card.shared_memory_per_block, card.l2_bytes) == (shared_kib << 10, l2_mib << 20)
    assert card.shared_memory_per_sm >= card.shared_memory_per_block


def test_every_card_of_the_table_has_a_profile() -> None:
    for name, card in GPUS.items():
        for spelling in (name, card.product, *card.aliases):
            found = profile(spelling, "2.13")
            assert (found.name, found.product, found.total_bytes) == (name, card.product, card.total_bytes)


def test_spelling_is_free() -> None:
    assert profile("rtx 3090", "2.13") == profile("RTX3090-24GB", "2.13") == profile("nvidia geforce rtx 3090", "2.13")


@pytest.mark.parametrize(
    ("text", "release"),
    [("2.13", (2, 13)), ("2.9.1", (2, 9)), ("2.13.0+cu130", (2, 13)), ("2.15.0a0+git1", (2, 15)), ("v2.11", (2, 11))],
)
def test_releases(text: str, release: tuple[int, int]) -> None:
    assert profile("T4", text).release == release


@pytest.mark.parametrize("text", ["", "2", "two", "2.x", "latest"])
def test_no_release(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no version of PyTorch"):
        profile("T4", text)


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown GPU 'A1000'; the nearest is 'A10-24GB'|'A100"):
        profile("A1000", "2.13")


def test_cudnn_is_off_unless_asked_for() -> None:
    assert not profile("H100", "2.13").cudnn_sdp
    assert profile("H100", "2.13", cudnn_sdp=True).cudnn_sdp
