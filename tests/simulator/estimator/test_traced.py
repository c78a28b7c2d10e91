"""Cases whose traces are recorded of their scripts, since a capture cannot have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.errors import CaptureError
from graph.recorder.capture import capture
from simulator.estimator.estimate import estimate
from simulator.selector.batch_search import Probe
from tests.support.launched import model
from traces.errors import ConfigError
from traces.release import DEFAULT_RELEASE, installed_release

#: What PyTorch 2.13.0 (CUDA 13.0, stub libraries, an A100) had allocated and reserved at its peaks, and how often it
#: allocated, in three steps of the script of `keys` (RANDOM_WEIGHTS=1).
MIB: Final = 1 << 20
RECORDED: Final = (51_164_160, 88_080_384, 1_958)


def keys(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": model(folder / "model"), "batch": 2, "seq": 64, "compile": "reduce-overhead", **more}


@pytest.mark.skipif(installed_release() != DEFAULT_RELEASE, reason="recorded of another release")
def test_cuda_graphs_need_what_was_recorded(tmp_path: Path) -> None:
    found = estimate(keys(tmp_path), time_steps=True)
    (rank,) = found.result.ranks
    peaks = rank.peak_allocated, rank.peak_reserved
    assert (*peaks, rank.memory_stats["allocation.all.allocated"]) == RECORDED
    assert not any("/tmp/" in text for text in found.assumptions)
    assert found.facts["parameters"] == 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert {phase.step for phase in rank.phases} == {None, 0, 1, 2}
    assert found.document()["step_time_ns"] > 0
    assert rank.memory_stats["num_ooms"] == 0
    small = estimate(keys(tmp_path, memory=RECORDED[0] - MIB), time_steps=True, context=0)  # the same run again
    assert small.verdict == "oom"


def test_a_method_is_probed_by_its_script(tmp_path: Path) -> None:
    probe = Probe({**keys(tmp_path), "strategy": "ddp", "world": 4}, "ddp", lambda _: (), 0)
    trace = probe.trace(probe.case(2))
    assert sorted(rank for entry in trace.ranks for rank in entry.ranks) == [0, 1, 2, 3]  # one stands for all
    assert probe.fits(2)


def test_what_has_no_script_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'reduce-overhead' is worked out by running the case's training script"):
        estimate({**keys(tmp_path), "loss": "transformers-4.29"})


def test_a_capture_has_no_allocator(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="CUDA graphs ask the allocator"):
        capture(Case.of(keys(tmp_path)))
