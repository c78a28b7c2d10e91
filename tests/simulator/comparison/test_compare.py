"""Two runs side by side: what each kind of file says, what grew by phase, module and tensor, and regressions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import traces
from simulator.cli import main
from simulator.comparison.compare import Change, Figures, Limit, Side, compare, load, module_of, phase_words, unwrapped
from simulator.engine.replay import replay
from simulator.reports.compare import document_of, render_json, render_markdown, verdict
from simulator.reports.run import render_json as result_json
from simulator.snapshots.reader import read
from tests.places import ROOT
from tests.simulator.what_if.test_stress import training
from traces.errors import ConfigError, TraceError
from traces.model import Trace

MIB = 1 << 20
SNAPSHOT = ROOT / "tests/data/snapshots/opt-125m_fp32_sdpa_b2_s512_sgd_A100.pickle.gz"


def written(folder: Path, name: str, trace: Trace) -> str:
    traces.write(trace, folder / name)
    return str(folder / name)


def result(folder: Path, name: str, trace: Trace) -> str:
    (folder / name).write_text(json.dumps(result_json(replay(trace))))
    return str(folder / name)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """The second run's largest activation is 60 MiB, not 50."""
    return written(tmp_path, "a.json", training()), written(tmp_path, "b.npz", training((30, 60, 40, 20)))


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["compare", *words, "-q"])
    return done.exit_code, done.stdout


def document(*words: str) -> dict[str, Any]:
    return dict(json.loads(invoke(*words, "--json")[1]))


# Figures ------------------------------------------------------------------------------------------------------------


def test_what_grew_by_hand(pair: tuple[str, str]) -> None:
    """At the peak: 8 of the weight, 16 of the state, 50 or 60 of the activation, 8 of the gradient."""
    (rank,) = document(*pair)["ranks"]
    figures = rank["figures"]
    assert figures["peak_allocated"] == {
        "before": 82 * MIB,
        "after": 92 * MIB,
        "difference": 10 * MIB,
        "share": pytest.approx(10 / 82),
    }
    assert rank["phases"]["bwd.1"]["peak"]["difference"] == 10 * MIB
    assert rank["phases"]["bwd.2"]["peak"]["difference"] == 0
    assert rank["phases"]["bwd.1"]["left"]["difference"] == 0
    assert {name: change["difference"] for name, change in rank["categories"].items()} == {"activation": 10 * MIB}
    assert {name: change["difference"] for name, change in rank["modules"].items()} == {"layer.*": 10 * MIB}
    assert {name: change["difference"] for name, change in rank["tensors"].items()} == {
        "layer.0: out (activation)": 10 * MIB
    }


def test_figures_are_those_of_the_replay(tmp_path: Path) -> None:
    side = load(SNAPSHOT)
    (rank,) = replay(read(SNAPSHOT)).ranks
    (figures,) = side.ranks
    assert figures.values["peak_reserved"] == rank.peak_reserved == 1_702_887_424
    assert figures.values["peak_requested"] == rank.memory_stats["requested_bytes.all.peak"]
    assert sum(figures.categories.values()) == rank.peak_allocated


def test_results_and_traces_say_the_same(tmp_path: Path) -> None:
    trace = training()
    one, two = written(tmp_path, "a.json", trace), result(tmp_path, "a.result.json", trace)
    assert load(one).kind == "trace"
    assert load(two).kind == "result"
    for words in ((one, two), (two, one)):
        (rank,) = document(*words)["ranks"]
        assert all(change["difference"] == 0 for change in rank["figures"].values())
        assert all(phase["peak"]["difference"] == 0 for phase in rank["phases"].values())
        assert rank["categories"] == rank["modules"] == rank["tensors"] == {}


def test_a_prediction_against_a_measurement(tmp_path: Path) -> None:
    """An answer of an estimate has peaks and phases alone; of one that does not fit, the verdict alone."""
    answer = {"model": "m", "verdict": "fits", "peak_allocated": 80 * MIB, "peak_reserved": 120 * MIB}
    answer["phases"] = {"bwd.1": {"peak": 80 * MIB, "left": 0}}
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(answer))
    found = document(str(path), written(tmp_path, "measured.json", training()))
    (rank,) = found["ranks"]
    assert found["before"]["kind"] == "answer"
    assert rank["figures"]["peak_allocated"]["difference"] == 2 * MIB
    assert list(rank["phases"]) == ["bwd.1"]
    path.write_text(
        json.dumps({**answer, "verdict": "oom", "peak_allocated": None, "peak_reserved": None, "phases": None})
    )
    (rank,) = document(str(path), str(tmp_path / "measured.json"))["ranks"]
    assert rank["figures"]["peak_allocated"]["difference"] is None


def test_ranks_meet_ranks_of_the_same_number() -> None:
    def rank(peak: int, *ranks: int) -> Figures:
        return Figures(ranks, "fits", {"peak_allocated": peak, "peak_reserved": peak})

    before = Side("a", "result", (rank(10, 0, 1), rank(5, 2, 3)))
    after = Side("b", "result", (rank(10, 0), rank(6, 1, 2, 3)))
    found = [(pair.before.ranks, pair.after.ranks) for pair in compare(before, after).pairs]
    assert sorted(found) == [((0, 1), (0,)), ((0, 1), (1, 2, 3)), ((2, 3), (1, 2, 3))]
    grown = compare(before, after, Limit(share=0.0)).regressions()
    assert [line.split(":")[0] for line in grown] == ["rank 1-3", "rank 1-3"]


@pytest.mark.parametrize(
    ("name", "category", "module"),
    [
        ("model.layers.3.fc1.weight", "parameter", "model.layers.*.fc1"),
        ("model.layers.3.fc1.weight.exp_avg", "optimizer_state", "model.layers.*.fc1"),
        ("model.layers.11.fc1: aten.addmm.default", "activation", "model.layers.*.fc1"),
        ("aten.addmm.default", "activation", "outside of modules"),
        ("weight", "parameter", "weight"),
    ],
)
def test_modules_of_tensors(name: str, category: str, module: str) -> None:
    assert module_of(name, category) == module


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.model.layers.3.fc1.weight", "model.layers.3.fc1.weight"),
        ("module: aten._log_softmax.default", "aten._log_softmax.default"),
        ("model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp: aten.mm", "model.layers.0.mlp: aten.mm"),
        ("_orig_mod.head.weight", "head.weight"),
        ("layers.0.module.weight", "layers.0.module.weight"),
        ("module", "module"),
        ("", ""),
    ],
)
def test_wrappers_do_not_matter(name: str, plain: str) -> None:
    assert unwrapped(name) == plain


# Regressions --------------------------------------------------------------------------------------------------------


def test_growth_over_the_limit(pair: tuple[str, str]) -> None:
    """Allocated grew by 12.2 %."""
    assert invoke(*pair)[0] == 0
    assert invoke(*pair, "--fail-over", "13%")[0] == 0
    code, shown = invoke(*pair, "--fail-over", "12%")
    assert code == 4
    assert "peak allocated grew by +12.20%" in " ".join(shown.split())
    assert invoke(*pair, "--fail-over", "10MiB")[0] == 0
    assert invoke(*pair, "--fail-over", "9.9MiB")[0] == 4
    assert invoke(*reversed(pair), "--fail-over", "0%")[0] == 0  # less is no regression


def test_many_regressions_are_told_in_one_line() -> None:
    """By hand: eight ranks whose peaks grew by 10 % to 80 %, the largest growth first and five left out."""

    def side(name: str, grows: int) -> Side:
        peaks = {rank: 100 + grows * (rank + 1) for rank in range(8)}
        return Side(name, "answer", tuple(Figures((n,), "fits", {"peak_reserved": size}) for n, size in peaks.items()))

    found = compare(side("a", 0), side("b", 10), Limit.parse("5%"))
    assert len(found.regressions()) == 8
    assert verdict(found) == (
        "regression over 5%: rank 7: peak reserved grew by +80.00% (100 B to 180 B); rank 6: peak reserved grew by "
        "+70.00% (100 B to 170 B); rank 5: peak reserved grew by +60.00% (100 B to 160 B); and 5 more"
    )
    assert document_of(found).badge == "regression"
    assert render_markdown(found).count("###") == 1
    assert render_markdown(found).count("| figure |") == 8
    nine = Side("c", "answer", tuple(Figures((n,), "fits", {"peak_reserved": 1}) for n in range(9)))
    assert render_markdown(compare(nine, nine)).rstrip().endswith("and 1 more pairs of ranks, which grew less")


def test_out_of_memory_is_a_regression(tmp_path: Path) -> None:
    one = written(tmp_path, "a.json", training())
    two = written(tmp_path, "b.json", training(device=64 * MIB))
    code, shown = invoke(one, two, "--fail-over", "50%")
    assert code == 4
    assert "runs out of memory, which it did not" in " ".join(shown.split())
    assert invoke(two, two, "--fail-over", "0%")[0] == 0


def test_limits() -> None:
    assert Limit.parse("2%") == Limit(share=0.02)
    assert Limit.parse("100MiB") == Limit(bytes=100 * MIB)
    assert not Change("peak_reserved", 100, 102).exceeds(Limit(share=0.02))
    assert Change("peak_reserved", 100, 103).exceeds(Limit(share=0.02))
    assert not Change("peak_reserved", None, 103).exceeds(Limit(share=0.02))
    for bad in ("2", "x%", "-1%", "80g"):
        with pytest.raises(ConfigError, match="2% or 100MiB"):
            Limit.parse(bad)


# What is printed ----------------------------------------------------------------------------------------------------


def test_markdown_is_text_whatever_names_say(tmp_path: Path) -> None:
    def side(peak: int) -> Side:
        names = {"a|b<img>`x` (activation)": peak}
        return Side("run", "trace", (Figures((0,), "fits", {"peak_reserved": peak}, tensors=names),))

    text = render_markdown(compare(side(10), side(20), Limit(share=0.5)))
    assert text.startswith("### ❌ Memory: regression over 50%")
    row = next(line for line in text.splitlines() if "activation" in line)
    assert "<img" not in row
    assert row.replace("\\|", "").count("|") == 6
    assert render_markdown(compare(side(10), side(10), Limit(share=0.5))).startswith("### ✅")


def test_the_document_is_json(pair: tuple[str, str]) -> None:
    found = compare(load(pair[0]), load(pair[1]), Limit(share=0.01))
    shown = render_json(found)
    assert json.loads(json.dumps(shown)) == shown
    assert len(shown["regressions"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": "m", "error": "no such model"}', "a case that failed: no such model"),
        ('{"a": 1}', "neither a trace"),
        ('{"ranks": [{"memory_stats": {}, "rank": 0}]}', "lacks something"),
        ('{"verdict": "fits", "peak_allocated": 1}\n{"verdict": "fits"}\n', "give one line"),
    ],
)
def test_files_that_are_no_runs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        load(path)


# On the page ----------------------------------------------------------------------------------------------------------


def test_phases_have_the_names_that_they_have_elsewhere(pair: tuple[str, str], tmp_path: Path) -> None:
    """The step where both sides have it, else first and last."""
    code, text = invoke(*pair)
    assert code == 0
    assert "backward 1" in text
    assert not {"bwd", "fwd_first", "step_last"} & set(text.replace(".", " ").split())
    results = (result(tmp_path, name, read(path)) for name, path in zip(("a", "b"), pair, strict=True))
    assert "first backward" in invoke(*results)[1]


@pytest.mark.parametrize(
    ("key", "words"),
    [("fwd_first", "first forward"), ("bwd.1", "backward 1"), ("step_last", "last optimizer"), ("load", "load")],
)
def test_phase_words(key: str, words: str) -> None:
    assert phase_words(key) == words


def sided(name: str, reserved: int, total: int) -> Side:
    values = {"peak_allocated": reserved, "peak_reserved": reserved, "device_total": total}
    return Side(name, "trace", (Figures((0,), "fits", values),))


@pytest.mark.parametrize(("outside", "compared"), [((0, 0), True), ((5, 7), True), ((0, 7), False), ((5, 0), False)])
def test_totals_are_compared_where_both_count_the_same(outside: tuple[int, int], compared: bool) -> None:
    one, two = (sided("s", 100 * MIB, (100 + more) * MIB) for more in outside)
    comparison = compare(one, two)
    assert ("device_total" in {change.name for change in comparison.pairs[0].figures()}) is compared
    assert ("counted on one side alone" in render_markdown(comparison)) is not compared


def test_the_page_of_a_comparison_is_its_own(pair: tuple[str, str], tmp_path: Path) -> None:
    """No verdict for a badge, no category's colour for a side, and what changed as bars to both sides."""
    code, _ = invoke(*pair, "--html", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text("utf-8")
    assert code == 0
    assert '<span class="badge comparison">Comparison</span>' in text
    assert 'badge fits"' not in text
    phases = text[text.index("<h3>Peak allocated by phase") :].split("</div></div>")[0]
    assert 'class="swatch k-0"' in phases
    assert 'class="swatch k-1"' in phases
    bars = text[text.index("what changed</h3>") :].split("</div>\n<p")[0]
    (grown,) = re.findall(r'rect class="k-1" x="([0-9.]+)%" width="([0-9.]+)%"', bars)
    assert grown == ("50.00", "49.00")  # the activation alone, to the right
    assert "+10.00 MiB" in bars
    assert "memory over time" in text.lower()
