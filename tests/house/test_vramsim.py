"""The Python face: one import, cheap; models by name, by keyword and in hand; results that show themselves briefly."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import vramsim
from tests.places import ROOT
from traces.errors import ConfigError

SAMPLE = ROOT / "traces" / "samples" / "tiny.json"
MODEL = ROOT / "tests" / "data" / "tiny_gpt2.json"


def test_every_name_is_there_and_the_import_is_cheap() -> None:
    code = "import sys, vramsim; print(*{'torch', 'numba', 'numpy', 'networkx', 'rich', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert {"compare", "estimate", "read", "replay", "select", "stress", "sweep", "write"} <= set(vramsim.__all__)
    for name in vramsim.__all__:
        assert callable(getattr(vramsim, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vramsim.nothing  # noqa: B018


@pytest.fixture(scope="module")
def replayed() -> Any:
    return vramsim.replay(vramsim.read(SAMPLE))


def test_a_result_shows_itself_in_a_line(replayed: Any) -> None:
    text = repr(replayed)
    assert "fits: needs 24.00 MiB of 14.74 GiB" in text
    assert len(text) < 200
    html = replayed._repr_html_()
    assert "<td>12.01 MiB</td><td>24.00 MiB</td>" in html
    assert html.count("<tr>") == 1 + len(replayed.ranks)


def test_a_frame_is_the_timeline_with_its_phases(replayed: Any) -> None:
    pytest.importorskip("pandas")
    frame = replayed.to_pandas()
    timeline = replayed.ranks[0].timeline
    assert frame["reserved"].tolist() == timeline.reserved.tolist()
    assert frame["allocated"].max() == replayed.ranks[0].peak_allocated
    for span in timeline.phases:
        rows = frame[span.start : span.stop]
        assert set(rows["phase"]) == {span.name}
        assert set(rows["step"]) == {-1 if span.step is None else span.step}
    with pytest.raises(ConfigError, match="there is no rank 5"):
        replayed.to_pandas(rank=5)


@pytest.mark.parametrize(("library", "method"), [("pandas", "to_pandas"), ("matplotlib", "plot")])
def test_a_missing_library_is_named(replayed: Any, monkeypatch: pytest.MonkeyPatch, library: str, method: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"needs {library}; install it with: pip install {library}"):
        getattr(replayed, method)()


def test_a_plot_has_the_timeline_and_the_limit(replayed: Any) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = replayed.plot()
    labels = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert labels["allocated"].max() * 2**30 == pytest.approx(replayed.ranks[0].peak_allocated)
    assert set(labels) == {"allocated", "reserved", "limit"}


# Models in hand


@pytest.fixture(scope="module")
def by_name() -> Any:
    pytest.importorskip("transformers")
    return vramsim.estimate(str(MODEL), batch=2, seq=32, steps=2)


def test_keywords_are_keys_of_the_case(by_name: Any) -> None:
    same = vramsim.estimate({"model": str(MODEL), "batch": 2, "seq": 32, "steps": 2})
    assert same.result.ranks[0].memory_stats == by_name.result.ranks[0].memory_stats
    with pytest.raises(ConfigError, match="unknown key 'bacth'; the nearest is 'batch'"):
        vramsim.estimate(str(MODEL), bacth=2)
    assert len(repr(by_name)) < 250
    assert repr(by_name).startswith("<Estimate ")


def test_a_model_of_transformers_is_estimated_as_its_configuration(by_name: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(MODEL))
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    found = vramsim.estimate(model, batch=2, seq=32, steps=2)
    assert found.result.ranks[0].memory_stats == by_name.result.ranks[0].memory_stats
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before  # untouched
    assert all(value.device.type == "cpu" for value in model.parameters())


def test_any_module_with_example_inputs() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1024, 1024, bias=False)
            self.outer = torch.nn.Linear(1024, 1024, bias=False)
            self.outer.weight = self.inner.weight

        def forward(self, x: Any) -> Any:
            return self.outer(self.inner(x)).sum()

    found = vramsim.estimate(Net(), inputs={"x": torch.zeros(4, 1024)}, optimizer="sgd", steps=2)
    alive = found.result.ranks[0].peak.by_category
    assert alive["parameter"] == 4 * 2**20  # tied: once
    half = vramsim.estimate(Net().to(torch.bfloat16), inputs={"x": torch.zeros(4, 1024)}, optimizer="sgd", steps=2)
    assert half.result.ranks[0].peak.by_category["parameter"] == 2 * 2**20
    with pytest.raises(ConfigError, match="Net has no configuration of transformers: give example inputs"):
        vramsim.estimate(Net())
    with pytest.raises(ConfigError, match=r"not int$"):
        vramsim.estimate(5)  # type: ignore[arg-type]
