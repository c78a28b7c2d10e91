"""GPUs by name: totals are those that cudaMemGetInfo shows, names are forgiving, unknown ones are one clear line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.hardware.gpus import GPUS
from simulator.estimator.devices import device
from traces.errors import ConfigError
from traces.model import DEFAULT_DEVICE


@pytest.mark.parametrize(
    ("name", "known", "total"),
    [
        ("A100", "A100-80GB", 85_097_971_712),
        ("A100-80GB", "A100-80GB", 85_097_971_712),
        ("a100 80gb", "A100-80GB", 85_097_971_712),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 85_097_971_712),
        ("A100-40GB", "A100-40GB", 42_298_834_944),
        ("V100", "V100-16GB", 16_935_419_904),
        ("T4", "T4-16GB", 15_828_320_256),
        ("T4-16GB", "T4-16GB", 15_828_320_256),
        ("RTX 3090", "RTX3090-24GB", 25_438_126_080),
        ("H100-80GB", "H100-80GB", 84_930_789_376),
        ("H200", "H200-141GB", 150_121_545_728),
    ],
)
def test_names(name: str, known: str, total: int) -> None:
    found = device(name)
    assert (found.name, found.total_bytes, found.context_bytes) == (known, total, 0)


def test_the_default_device_is_in_the_table() -> None:
    assert GPUS[DEFAULT_DEVICE.name].total_bytes == DEFAULT_DEVICE.total_bytes
    assert device(DEFAULT_DEVICE.name) is DEFAULT_DEVICE


def test_totals_fit_the_labels() -> None:
    for name, card in GPUS.items():
        label = int(name.rpartition("-")[2].removesuffix("GB"))
        assert 0.9 * label * 2**30 < card.total_bytes < label * 2**30, name
        assert card.total_source
        assert card.speed_source
        for spelling in (name, card.product, *card.aliases):
            assert device(spelling).name == name


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="nearest is 'A100-80GB'") as caught:
        device("A100-81")
    assert "--memory" in str(caught.value)


def check_line(text: str) -> None:
    assert len(text.splitlines()) == 1


@given(st.text(max_size=200))
def test_any_text_is_a_device_or_one_clear_line(text: str) -> None:
    try:
        assert device(text).name in GPUS
    except ConfigError as error:
        check_line(str(error))
