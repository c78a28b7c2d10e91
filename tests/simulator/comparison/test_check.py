"""`check`: budgets, baselines, exit codes and what is printed, of traces, results and cases."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

import simulator.estimator.estimate as estimation
import traces
from graph.case import Case
from graph.model import StepGraph
from simulator.cli import main
from simulator.engine.replay import replay
from simulator.reports.run import render_json
from simulator.reports.schemas import schema
from tests.simulator.what_if.test_stress import training
from tests.support.step_graphs import stub
from tests.support.step_graphs import training as stubbed
from traces.units import format_bytes

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    traces.write(training(), tmp_path / "run.json")
    return str(tmp_path / "run.json")


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["check", *words, "-q"])
    return done.exit_code, done.stdout


def test_budgets(path: str) -> None:
    """The budget holds what the run reserves, to the byte, and --context with it."""
    reserved = replay(training()).ranks[0].peak_reserved
    assert invoke(path, "--budget", str(reserved))[0] == 0
    code, shown = invoke(path, "--budget", str(reserved - 1))
    assert code == 3
    assert shown.startswith("check: over budget: run.json needs ")
    assert shown.endswith(f"; `llmem stress {path}` tries other allocator settings\n")
    assert len(shown.splitlines()) == 1
    assert invoke(path, "--budget", str(reserved + MIB), "--context", "1MiB")[0] == 0
    assert invoke(path, "--budget", str(reserved + MIB - 1), "--context", "1MiB")[0] == 3


def test_out_of_memory(tmp_path: Path) -> None:
    traces.write(training(device=64 * MIB), tmp_path / "run.json")
    code, shown = invoke(str(tmp_path / "run.json"), "--budget", "80GiB")
    assert code == 3
    needed = replay(training()).ranks[0].peak_reserved
    told = f"needs {format_bytes(needed)}, lacks {format_bytes(needed - 64 * MIB)} (the GPU has 64.00 MiB)"
    path = str(tmp_path / "run.json")
    assert shown == f"check: out of memory: run.json {told}; `llmem stress {path}` tries other allocator settings\n"
    (tmp_path / "result.json").write_text(CliRunner().invoke(main, ["run", path, "--json"]).stdout)
    assert told in invoke(str(tmp_path / "result.json"), "--budget", "80GiB")[1]


def test_what_would_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are held against the budget, though the GPU has more; then no larger card is tried."""

    pytest.importorskip("torch")  # FSDP2 is tried

    def graph(case: Case, progress: object = None, method: object = None) -> StepGraph:
        return stubbed(case.document(), unit=30 * MIB if case.checkpointing else 60 * MIB)

    monkeypatch.setattr(estimation, "captured", graph)
    monkeypatch.setattr("simulator.options.case.configuration", lambda model: None)
    words = ["m", "--context", "0", "--budget", "150MiB"]
    code, shown = invoke(*words)
    assert code == 3
    assert shown.splitlines() == [
        "check: over budget: m needs 240.00 MiB of 150.00 MiB (160.0%)",
        "check: it would fit with --checkpointing nonreentrant --every 4 (120.00 MiB)",
    ]
    document = json.loads(invoke(*words, "--json")[1])
    assert document["remedies"][0]["gpu_bytes"] == 150 * MIB
    assert not any("gpu" in one["change"] for one in document["remedies"])
    jsonschema.validate(document, schema("check"))
    text = invoke(*words, "--markdown")[1]
    assert "| --checkpointing nonreentrant --every 4 | fits | 120.00 MiB | 150.00 MiB |" in text
    assert len(invoke(*words, "--no-remedies")[1].splitlines()) == 1
    code, shown = invoke("m", "--context", "0", "--budget", "1GiB", "--memory", "150MiB")
    assert shown.startswith("check: out of memory: m needs 240.00 MiB, lacks 90.00 MiB (the GPU has 150.00 MiB)\n")
    assert "--checkpointing nonreentrant --every 4 (120.00 MiB); --gpu " in shown


def test_baselines(path: str, tmp_path: Path) -> None:
    traces.write(training((30, 60, 40, 20)), tmp_path / "grown.json")
    grown = str(tmp_path / "grown.json")
    assert invoke(path, "--against", path)[0] == 0
    assert invoke(grown, "--against", path)[0] == 4  # without --fail-over nothing may grow
    assert invoke(grown, "--against", path, "--fail-over", "20%")[0] == 0
    code, shown = invoke(grown, "--budget", "80GiB", "--against", path, "--fail-over", "2%")
    assert code == 4
    assert "check: regression: grown.json" in shown
    assert invoke(grown, "--budget", "1MiB", "--against", path, "--fail-over", "2%")[0] == 3


def test_results_as_baseline_and_as_run(path: str, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps(render_json(replay(training()))))
    base = str(tmp_path / "base.json")
    assert invoke(path, "--against", base, "--fail-over", "0%")[0] == 0
    assert invoke(base, "--budget", "1GiB")[0] == 0


def test_a_result_counts_what_it_reserves_and_the_context(tmp_path: Path) -> None:
    """What the result itself has outside the allocator counts, or what --context says in its place."""
    result = replay(training(), context=64 * MIB)
    reserved = result.ranks[0].peak_reserved
    assert result.ranks[0].device_total == reserved + 64 * MIB
    (tmp_path / "r.json").write_text(json.dumps(render_json(result)))
    path = str(tmp_path / "r.json")
    assert invoke(path, "--budget", str(reserved + 64 * MIB))[0] == 0
    assert invoke(path, "--budget", str(reserved + 64 * MIB - 1))[0] == 3
    assert invoke(path, "--budget", str(reserved), "--context", "0")[0] == 0
    assert invoke(str(tmp_path / "r.json"), "--budget", str(reserved + MIB - 1), "--context", "1MiB")[0] == 3


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ('{"model": "m", "error": "boom"}', ["--budget", "1GiB"], "the answer of a case that failed: boom"),
        ('{"model": "m", "verdict": "fits", "peak_allocated": 1}', ["--budget", "1GiB"], "lacks something"),
        ('{"verdict": "fits", "peak_allocated": 1, "peak_reserved": null}', ["--budget", "1GiB"], "lacks something"),
        ('{"a": 1}', ["--budget", "1GiB"], "neither a trace"),
        ("{}", ["--budget", "80"], "--budget: size '80' has no unit: write 80GB or 80GiB"),
        ("{}", ["--budget", "80g"], "--budget: size '80g' is ambiguous"),
        ("{}", ["--against", "nothere", "--fail-over", "5"], "--fail-over '5': write a share or a size"),
    ],
)
def test_bad_runs_and_words_are_one_line(tmp_path: Path, text: str, words: list[str], says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    done = CliRunner().invoke(main, ["check", str(tmp_path / "x.json"), *words])
    assert done.exit_code == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_documents(path: str) -> None:
    code, shown = invoke(path, "--budget", "1MiB", "--against", path, "--json")
    document = json.loads(shown)
    assert code == document["exit_code"] == 3
    assert document["needed"] == document["peak_reserved"] == replay(training()).ranks[0].peak_reserved
    assert document["comparison"]["regressions"] == []
    code, shown = invoke(path, "--budget", "1GiB", "--against", path, "--markdown")
    assert code == 0
    assert shown.startswith("### ✅ ok: run.json needs ")


def test_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")  # FSDP2 is tried
    monkeypatch.setattr(estimation, "captured", lambda case, progress=None, method=None: stub(case))
    monkeypatch.setattr("simulator.options.case.configuration", lambda model: None)  # "m" is in no catalogue
    peak = estimation.estimate({"model": "m", "steps": 2}, capture=stub).worst.device_total
    assert invoke("m", "--steps", "2", "--budget", str(peak))[0] == 0
    assert invoke("m", "--steps", "2", "--budget", str(peak - 1))[0] == 3
    assert invoke("m", "--steps", "2", "--budget", str(peak - 1), "--context", "0")[0] == 0
    assert invoke("m", "--steps", "2", "--budget", str(peak), "--memory", "300MiB")[1].startswith("check: out of mem")
    code, shown = invoke("m", "--steps", "2", "--budget", str(peak), "--memory", str(peak))
    assert (code, shown.split(" needs ")[0]) == (0, "check: tight: m")
    (tmp_path / "case.json").write_text('{"model": "m", "steps": 2}')
    code, shown = invoke(str(tmp_path / "case.json"), "--budget", str(peak))
    assert code == 0
    assert shown.startswith("check: ok: case.json needs ")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--budget", "1GiB", "--fail-over", "2%"],
        ["--budget", "1GiB", "--json", "--markdown"],
        ["--budget", "1GiB", "--batch", "2"],
    ],
)
def test_wrong_usage(path: str, words: list[str]) -> None:
    assert CliRunner().invoke(main, ["check", path, *words]).exit_code == 2
