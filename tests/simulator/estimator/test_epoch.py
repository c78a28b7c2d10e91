"""Batches of several lengths: the peaks of a run of them as recorded, and those of an epoch of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from simulator.estimator import epoch
from simulator.estimator.epoch import Peaks, epoch_of, read_lengths
from simulator.estimator.estimate import estimate
from tests.support.several_lengths import ALLOCATED, LENGTHS, RESERVED
from traces.errors import ConfigError

SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000, "n_positions": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt2")
    document = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SMALL}
    (folder / "config.json").write_text(json.dumps(document))
    return str(folder)


def by_step(model: str, **keys: Any) -> list[tuple[int, int]]:
    """Allocated and reserved peaks of each step."""
    phases = estimate(model, dtype="bf16", batch=4, context=0, **keys).worst.phases
    steps = {one.step for one in phases if one.step is not None and one.step >= 0}
    mine = [[one for one in phases if one.step == step] for step in sorted(steps)]
    return [(max(one.peak for one in some), max(one.peak_reserved for one in some)) for some in mine]


def test_batches_of_several_lengths_need_what_was_recorded(model: str) -> None:
    assert by_step(model, lengths=LENGTHS) == list(zip(ALLOCATED, RESERVED, strict=True))


def test_an_epoch_has_the_peaks_of_its_batches(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [20, 30, 44, 128, 70, 64, 90, 25, 33, 111, 50, 12, 60, 61, 80, 100]
    whole = epoch_of(samples, 4, 128)
    every = found(model, samples)
    assert every.run == len(set(whole.lengths.tolist()))
    peaks = {one: by_step(model, lengths=(40, one))[1][0] for one in whole.lengths.tolist()}
    assert every.largest == max(peaks.values()) == peaks[128]
    assert every.median in peaks.values()
    assert 3 in every.samples  # the sample of 128 tokens
    monkeypatch.setattr(epoch, "POINTS", 3)
    fewer = found(model, samples)
    assert (fewer.run, fewer.largest) == (3, every.largest)
    assert fewer.median == pytest.approx(every.median, rel=0.02)


def found(model: str, samples: list[int]) -> Peaks:
    made = estimate(model, dtype="bf16", batch=4, seq=128, samples=samples, context=0)
    assert made.epoch is not None
    assert made.document()["epoch"]["peak_allocated"]["max"] == made.epoch.largest
    assert made.epoch.largest == made.worst.peak_allocated
    return made.epoch


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=200), st.integers(1, 16), st.integers(1, 4096))
def test_batches_hold_samples_once_and_are_padded_to_the_longest(lengths: list[int], batch: int, seq: int) -> None:
    if len(lengths) < batch:
        with pytest.raises(ConfigError, match="less than a batch"):
            epoch_of(lengths, batch, seq)
        return
    made = epoch_of(lengths, batch, seq)
    drawn = [one for batch_ in made.samples for one in batch_]
    assert len(drawn) == len(set(drawn)) == len(lengths) // batch * batch
    longest = [max(min(lengths[one], seq) for one in batch_) for batch_ in made.samples]
    assert made.lengths.tolist() == longest
    assert made.cut == sum(one > seq for one in lengths)


def test_the_run_of_an_epoch_has_its_shortest_and_longest_batch() -> None:
    made = epoch_of(list(range(1, 1001)), 2, 4096)
    case = made.case(Case.of({"model": "gpt2", "batch": 2, "accum": 2}))
    assert {min(case.lengths), max(case.lengths)} == {int(made.lengths.min()), int(made.lengths.max())}
    assert len(case.lengths) <= 2 * (epoch.POINTS + 1)
    assert case.lengths[::2] == case.lengths[1::2]  # micro-batches of a step are alike
    assert case.lengths[0] == int(np.quantile(made.lengths, 0.5, method="nearest"))


def test_lengths_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n\nid7, 40\n")
    assert read_lengths(str(path)) == [12, 40]
    path.write_text("12\nmany\n")
    with pytest.raises(ConfigError, match=r"line 2: 'many' is no length"):
        read_lengths(str(path))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"seq": 64}, "key 'seq': 128 by 'lengths'"),
        ({"steps": 5}, "key 'steps': 2 by 'lengths'"),
        ({"accum": 3}, "make no steps of 'accum' 3"),
        ({"strategy": "pp", "world": 2}, "key 'lengths': only with"),
        ({"model": "tests.support.worked_models:mlp"}, "key 'lengths': only with"),
        ({"lengths": [0]}, "key 'lengths'"),
    ],
)
def test_lengths_that_contradict_the_case(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Case.of({"model": "gpt2", "lengths": [128, 64], **keys})


@pytest.mark.parametrize("keys", [{"lengths": [128, 64]}, {"steps": 5}])
def test_samples_say_what_is_run(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not with the samples of a data set"):
        estimate("gpt2", samples=[100, 200], context=0, **keys)


def test_a_mesh_with_stages_has_no_lengths(model: str) -> None:
    with pytest.raises(ConfigError, match=r"key 'lengths': .* stages of a pipeline are made for one length"):
        estimate(model, lengths=[128, 64], mesh={"pp": 2, "dp": 2}, context=0)


def test_what_has_no_length_is_told() -> None:
    with pytest.raises(ConfigError, match=r"key 'lengths': .* is image-classification"):
        estimate("vit-base", lengths=[128, 64], context=0)
