"""The recipes of CONTRIBUTING: what `tests.support.toys` registers from outside the packages works in `estimate`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import simulator  # noqa: E402
from graph import case as cases  # noqa: E402
from graph import optimizers  # noqa: E402
from graph.case import Case  # noqa: E402
from graph.hardware import gpus  # noqa: E402
from simulator.allocator import releases  # noqa: E402
from strategies import registry  # noqa: E402
from tests.places import ROOT  # noqa: E402
from tests.support import toys  # noqa: E402
from traces.errors import ConfigError  # noqa: E402

TABLES: tuple[dict[Any, Any], ...] = (
    registry._known,
    cases.KEYS,
    cases._NAMES,
    cases._HINTS,
    gpus.GPUS,
    gpus._NAMES,
    optimizers.OPTIMIZERS,
    releases.RELEASES,
)
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The toys, for one test."""
    registry.known()
    before = [dict(table) for table in TABLES]
    toys.register()
    yield
    for table, kept in zip(TABLES, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A tiny model's configuration."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def weights() -> int:
    """The blocks of the model's parameters: multiples of 512 bytes."""
    module = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**CONFIG))
    return sum(-(-parameter.numel() * 4 // 512) * 512 for parameter in module.parameters())


def left(model: str, phase: str, **keys: Any) -> int:
    """Bytes allocated when a phase ends."""
    case = {"model": model, "seq": 16, "steps": 2, "dtype": "fp32", **keys}
    found = simulator.estimate(case).result
    assert found is not None
    return next(one.left for one in found.ranks[0].phases if one.name == phase)


def test_a_method_and_its_key_work_in_estimate(model: str) -> None:
    alone = left(model, "load")
    assert left(model, "load", strategy="toy", world=2) == alone + weights()
    assert left(model, "load", strategy="toyish", world=2, toy_copies=3) == alone + 3 * weights()


def test_an_optimizer_works_in_estimate(model: str) -> None:
    assert left(model, "end", optimizer="three") == left(model, "end", optimizer="sgd") + 3 * weights()


def test_a_gpu_works_in_estimate(model: str) -> None:
    found = simulator.estimate({"model": model, "seq": 16, "gpu": "toy 5GB"})
    assert found.result is not None
    assert (found.result.ranks[0].device.name, found.result.ranks[0].device.total_bytes) == ("TOY-5GB", toys.TOTAL)


def reserved(model: str, release: str, conf: str = "") -> int:
    """The most that is reserved of a step whose logits take 4 MiB."""
    found = simulator.estimate({"model": model, "seq": 64, "batch": 32, "release": release, "alloc_conf": conf}).result
    assert found is not None
    assert found.release == release
    return found.ranks[0].peak_reserved


def test_a_release_works_in_estimate(model: str) -> None:
    large = "large_segment_size_mb:40"  # the toy has no such option
    assert reserved(model, "2.16") == reserved(model, "2.15")
    assert reserved(model, "2.16", large) == reserved(model, "2.15")
    assert reserved(model, "2.15", large) > reserved(model, "2.15")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"toy_copies": 2}, "key 'toy_copies': only with 'strategy': 'toy'"),
        (
            {"strategy": "toy", "world": 2, "toy_copies": -1},
            "key 'toy_copies': -1 should be a whole number of at least 0",
        ),
        ({"toy_copy": 2}, "unknown key 'toy_copy'; the nearest is 'toy_copies'"),
        ({"strategy": "toys", "world": 2}, "the nearest is 'toy'"),
        ({"optimizer": "thre"}, "the nearest is 'three'"),
    ],
)
def test_what_is_registered_is_checked_as_all_is(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Case.of({"model": "gpt2", **keys})
    assert text in str(caught.value)


def test_a_key_is_kept_in_the_document_of_a_case() -> None:
    case = Case.of({"model": "gpt2", "strategy": "toy", "world": 2, "toy_n": 4})
    assert case.document()["toy_copies"] == 4
    assert Case.of(json.loads(json.dumps(case.document()))) == case
    assert "toy_copies" not in Case.of({"model": "gpt2"}).document()


@pytest.mark.parametrize("again", [lambda: registry.register(registry.named("toy")), toys.register])
def test_a_name_is_registered_once(again: Any) -> None:
    with pytest.raises(ConfigError, match="registered already"):
        again()


def test_the_command_line_has_what_is_registered() -> None:
    code = (
        "from tests.support import toys; toys.register(); from simulator.cli import main; main(['estimate', '--help'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--toy-copies N" in shown
    assert "only with --strategy toy" in shown
