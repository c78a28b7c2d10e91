"""Stress: predictions under settings that were recorded, draws by seed, workers, files, interruption, pictures."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import traces
from simulator.allocator.conf import parse_conf
from simulator.allocator.releases import parse_release
from simulator.cli import main
from simulator.engine.machine import limit_of
from simulator.engine.min_memory import smallest_memory
from simulator.engine.replay import REMEDIES, prepare, replay
from simulator.estimator.results_file import Results
from simulator.reports.html.page import render
from simulator.reports.stress import document_of, drawn, render_json, short
from simulator.snapshots.reader import read
from simulator.what_if.stress import Axes, Scenario, Stress, grid, settings_for, stress
from simulator.what_if.variants import Variant, movable_steps, vary
from tests.places import ROOT
from tests.support import golden
from tests.support.browser import Browser, find_chromium
from tests.support.fast import to_trace
from traces.errors import ConfigError, Interrupted
from traces.model import Device, Events, Op, RankEvents, Strings, Trace

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"


# Settings that were recorded ----------------------------------------------------------------------------------------


def recorded(workload: str) -> dict[str, tuple[golden.Recording, str]]:
    """The recordings of the same events by setting, each with its whole string of settings.

    Two of them begin with set_per_process_memory_fraction, which is the same as the option of that name.
    """
    base = golden.load(f"same_events/{workload}.default")
    found = {}
    for name in golden.names(f"same_events/{workload}."):
        recording = golden.load(name)
        conf, rows = recording.setup.conf, list(recording.rows)
        if rows[0][0] == "g" and base.rows[0][0] != "g":
            conf += f",per_process_memory_fraction:{rows.pop(0)[1]}"
        assert len(rows) == len(base.rows)
        found[name.split(".", 1)[1]] = recording, conf
    assert len(found) == 9
    return found


def truth(recording: golden.Recording) -> tuple[int, int, int]:
    """Peak reserved, retries and out-of-memory events of a recording."""
    states = [state for state in recording.observed.states if state is not None]
    return max(state[1] for state in states), states[-1][5], states[-1][6]


@pytest.mark.parametrize("workload", ["transformer", "log-uniform", "stress"])
def test_predicts_recordings_from_the_events_of_the_default_one(workload: str) -> None:
    recordings = recorded(workload)
    base = recordings["default"][0]
    found = stress(to_trace(base.rows, base.setup), Axes(settings=[conf for _, conf in recordings.values()]))
    rows = {row.conf: row for row in found.rows()}
    for name, (recording, conf) in recordings.items():
        (one,) = rows[conf].outcomes
        assert (one["peak_reserved"], one["num_alloc_retries"], one["num_ooms"]) == truth(recording), name
    figures = {conf: truth(recording) for recording, conf in recordings.values()}
    least = min(figures.values(), key=lambda one: (one[2], one[0], one[1]))
    best = found.best()
    assert best is not None
    assert figures[best.conf] == least
    assert found.saved() == figures[""][0] - least[0]


#: Peak reserved of real training under each setting: the run of the snapshot below (PyTorch 2.11.0+cu130, its own
#: allocator, as tests/data/training/README.md tells) once more with PYTORCH_CUDA_ALLOC_CONF set.
TRAINED = {
    "": 3_342_860_288,
    "expandable_segments:True": 2_686_451_712,
    "max_split_size_mb:128": 3_529_506_816,
    "roundup_power2_divisions:4": 3_573_547_008,
    "large_segment_size_mb:128": 3_246_391_296,
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.05": 2_915_041_280,
}


def test_a_recorded_training_run_says_which_setting_helps() -> None:
    snapshot = ROOT / "tests/data/training/snapshots/opt-125m_fp32_sdpa_b2_s512_adamw_A100.pickle.gz"
    found = stress(read(snapshot), Axes(settings=list(TRAINED)))
    assert {row.conf: row.most("peak_reserved") for row in found.rows()} == TRAINED
    best = found.best()
    assert best is not None
    assert best.conf == "expandable_segments:True"
    assert found.saved() == TRAINED[""] - TRAINED["expandable_segments:True"]


# A training run by hand -----------------------------------------------------------------------------------------------


def training(
    activations: Sequence[int] = (30, 50, 40, 20),
    *,
    hands_on: bool = True,
    second_stream: bool = False,
    conf: str = "",
    device: int = 1 << 30,
) -> Trace:
    """Steps of an activation, a gradient that the next step frees, and an optimizer's state made by the first."""
    rows: list[tuple[Any, ...]] = [
        (Op.PHASE, -1, 0, "load", -1, None),
        (Op.ALLOC, 0, 8 * MIB, "weight", -1, "parameter"),
    ]
    gradient = -1
    for step, size in enumerate(activations):
        act, grad = 10 + 10 * step, 11 + 10 * step
        rows.append((Op.PHASE, -1, 0, "forward", step, None))
        if gradient >= 0 and hands_on:
            rows.append((Op.FREE, gradient, 0, None, -1, None))
        rows.append((Op.ALLOC, act, size * MIB, "layer.0: out", -1, "activation"))
        rows.append((Op.PHASE, -1, 0, "backward", step, None))
        rows.append((Op.ALLOC, grad, 8 * MIB, "weight.grad", -1, "gradient"))
        if second_stream:
            rows.append((Op.RECORD_STREAM, act, 0, None, -1, None))
        rows.append((Op.FREE, act, 0, None, -1, None))
        rows.append((Op.PHASE, -1, 0, "optimizer", step, None))
        if step == 0:
            rows.append((Op.ALLOC, 1, 16 * MIB, "weight.exp_avg", -1, "optimizer_state"))
        gradient = grad
    op, ids, sizes, names, steps, categories = zip(*rows, strict=True)
    ops = np.asarray(op, np.uint8)
    events = Events(
        ops,
        {
            "id": np.asarray(ids, np.int64),
            "bytes": np.asarray(sizes, np.int64),
            "stream": np.where(ops == Op.RECORD_STREAM, 1, 0).astype(np.int64),
            "step": np.asarray(steps, np.int64),
            "name": Strings.encode(names),
            "category": Strings.encode(categories),
        },
    )
    return Trace((RankEvents((0,), events),), conf=conf, release="2.13", devices=(Device("d", device),))


def sizes(trace: Trace, category: str) -> list[int]:
    """MiB of the allocations of a category, in order."""
    events = trace.ranks[0].events
    names = events.strings("category")
    chosen = [i for i in range(len(events)) if names.get(i) == category]
    return [int(events.ints("bytes")[i]) // MIB for i in chosen]


def test_steps_change_places() -> None:
    trace = training()
    assert movable_steps(trace) == 3  # the first one makes the optimizer's state
    seen = set()
    for number in range(1, 40):
        other = vary(trace, Variant(order=number))
        prepare(other)  # valid: nothing is freed twice, nothing before its birth
        order = sizes(other, "activation")
        assert order[0] == 30
        assert sorted(order) == [20, 30, 40, 50]
        assert replay(other).ranks[0].memory_stats["allocated_bytes.all.current"] == 32 * MIB
        assert [int(s) for s in other.ranks[0].events.ints("step")] == [
            int(s) for s in trace.ranks[0].events.ints("step")
        ]
        seen.add(tuple(order))
    assert len(seen) == 6
    assert vary(trace, Variant(order=1)).ranks[0].events.ints("bytes").tolist() == (
        vary(trace, Variant(order=1)).ranks[0].events.ints("bytes").tolist()
    )


def test_lengths_scale_activations_alone() -> None:
    trace = training()
    other = vary(trace, Variant(lengths=1, seed=7))
    prepare(other)
    found = sizes(other, "activation")
    assert len(found) == 1 + 8  # recorded steps come again
    allowed = {int(size * part) for size in (50, 40, 20) for part in (0.25, 0.5, 0.75, 1.0)}
    assert set(found[1:]) <= allowed
    assert set(sizes(other, "gradient")) == {8}
    assert found != sizes(vary(trace, Variant(lengths=2, seed=7)), "activation")
    assert found != sizes(vary(trace, Variant(lengths=1, seed=8)), "activation")
    assert replay(other).ranks[0].memory_stats["allocated_bytes.all.current"] == 32 * MIB


def test_lengths_need_one_step_that_comes_again() -> None:
    trace = training((30, 50))
    found = sizes(vary(trace, Variant(lengths=1)), "activation")
    assert len(found) == 1 + 8
    assert set(found[1:]) <= {int(50 * part) for part in (0.25, 0.5, 0.75, 1.0)}
    outcome = stress(trace, Axes(settings=[""], orders=3, lengths=2))
    assert [one.scenario.variant.lengths for one in outcome.outcomes] == [None, 1, 2]
    assert any(note.startswith("orders are left out: 1 of") for note in outcome.notes)


def test_traces_without_steps_are_left_as_they_are() -> None:
    recording = golden.load("same_events/log-uniform.default")
    trace = to_trace(recording.rows, recording.setup)
    found = stress(trace, Axes(settings=[EXPANDABLE], orders=2, lengths=2))
    assert len(found.outcomes) == 2
    assert any("0 of the trace's steps could change places" in note for note in found.notes)
    with pytest.raises(ConfigError, match="fewer than 2 steps"):
        vary(trace, Variant(order=1))


def test_frees_prompt_and_late() -> None:
    """By hand: 20 MiB for the weight and gradients; 50 MiB for an activation, in whose place the state comes to lie, so
    that the second one needs another 50. Late, the state needs 16 of its own, and every activation 50.
    """
    trace = training((50, 50, 50), second_stream=True)
    found = stress(trace, Axes(settings=[""], deferred=["prompt", "late"]))
    peaks = {one.scenario.variant.deferred: one["peak_reserved"] // MIB for one in found.outcomes}
    assert peaks == {"recorded": 20 + 2 * 50, "prompt": 20 + 2 * 50, "late": 20 + 16 + 3 * 50}
    assert any("prompt and late are the same" in note for note in stress(training(), Axes(deferred=["late"])).notes)


# Scenarios ------------------------------------------------------------------------------------------------------------


def test_a_grid_combines_values() -> None:
    assert grid({"max_split_size_mb": ["none", "64"], "roundup_power2_divisions": ["[256:1,>:4]", "none"]}) == [
        "roundup_power2_divisions:[256:1,>:4]",
        "",
        "max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4]",
        "max_split_size_mb:64",
    ]


def test_settings_of_old_releases() -> None:
    assert EXPANDABLE in settings_for("2.1")
    assert EXPANDABLE not in settings_for("2.0")
    assert not any("large_segment" in conf for conf in settings_for("2.10"))
    assert any("large_segment" in conf for conf in settings_for("2.11"))


def test_garbage_collection_is_tried_below_a_limit() -> None:
    """Without one it never runs: on 2.10 and later a fraction of 1.0 sets none."""
    tried = 0
    for conf in {*REMEDIES, *(conf for release in ("2.9", "2.10", "2.15") for conf in settings_for(release))}:
        if "garbage_collection_threshold" in conf:
            release = parse_release("2.10")
            fraction = parse_conf(conf, release).per_process_memory_fraction
            assert limit_of(fraction, 1 << 30, release) > 0, conf
            tried += 1
    assert tried >= 3


def test_short_names() -> None:
    assert short("") == "default"
    assert short("expandable_segments:True,roundup_power2_divisions:[256:1,>:8]") == "expandable + roundup [256:1,>:8]"


def test_releases_devices_and_the_smallest() -> None:
    trace = training(device=90 * MIB, conf="max_split_size_mb:32")
    axes = Axes(settings=["", EXPANDABLE], releases=["2.10", "2.13"], memories=[64 * MIB, 2048 * MIB])
    found = stress(trace, axes, smallest=True)
    assert len(found.outcomes) == 3 * 3 * 2
    for one in found.outcomes:
        scenario = one.scenario
        how = {"conf": scenario.conf, "release": scenario.release, "memory": scenario.memory}
        expected = replay(trace, **how, analyse=False, after_oom="continue")  # type: ignore[arg-type]
        (rank,) = expected.ranks
        assert (one["verdict"] == "oom") == (expected.verdict == "oom")
        assert one["peak_reserved"] == rank.peak_reserved
        assert one["num_ooms"] == rank.memory_stats["num_ooms"]
        assert one["device_calls"] == rank.memory_stats["num_device_alloc"] + rank.memory_stats["num_device_free"]
        assert one["stranded"] == rank.fragmentation.stranded
        if scenario.memory is None:
            fit = smallest_memory(trace, conf=scenario.conf, release=scenario.release)
            assert one["min_fit"] == fit
            fits = replay(trace, conf=scenario.conf, release=scenario.release, memory=fit, analyse=False)
            assert fits.verdict != "oom"


def test_settings_that_no_release_knows() -> None:
    with pytest.raises(ConfigError, match="unknown allocator option 'no_such_option'"):
        stress(training(), Axes(settings=["no_such_option:1", EXPANDABLE]))
    with pytest.raises(ConfigError, match="no_such_option"):
        stress(training(), Axes(combined=grid({"no_such_option": ["1", "2"]})))
    found = stress(training(), Axes(settings=["large_segment_size_mb:64"], releases=["2.10", "2.13"]))
    assert [row.release for row in found.rows() if row.conf] == ["2.13"]
    assert any("left out for PyTorch 2.10" in note for note in found.notes)
    mixed = grid({"max_split_size_mb": ["10", "64"]})  # the first one is too small
    assert [row.conf for row in stress(training(), Axes(combined=mixed)).rows()] == ["", "max_split_size_mb:64"]


def test_what_no_replay_can_do_is_told(path: Path) -> None:
    code, shown = invoke(str(path), "-q", "--context", "2GiB")
    assert code == 1
    assert "does not fit a device" in " ".join(shown.split())


# Workers and files ----------------------------------------------------------------------------------------------------

AXES = Axes(settings=["", EXPANDABLE, "max_split_size_mb:32"], orders=3, lengths=3, seed=3)


def plain(found: Stress) -> list[Mapping[str, Any]]:
    return [{**one.scenario.document, **one.figures, "cpu_seconds": 0} for one in found.outcomes]


def test_workers_find_the_same() -> None:
    trace = training()
    here = stress(trace, AXES, smallest=True)
    assert len(here.outcomes) == 3 * 7
    assert plain(stress(trace, AXES, smallest=True, jobs=2)) == plain(here)
    assert plain(stress(trace, AXES, smallest=True, executor=lambda: ThreadPoolExecutor(2))) == plain(here)
    assert plain(stress(trace, AXES, smallest=True)) == plain(here)


def test_results_are_kept(tmp_path: Path) -> None:
    trace = training()
    path = tmp_path / "r.jsonl"
    whole = stress(trace, AXES, results=path)
    lines = path.read_text().splitlines()
    assert len(lines) == len(whole.outcomes)
    path.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])
    again = stress(trace, AXES, results=path)
    assert again.kept == 5
    assert plain(again) == plain(whole)
    assert len(path.read_text().splitlines()) == len(lines)
    assert stress(trace, AXES, results=path).kept == len(lines)
    assert stress(training((1, 2, 3)), AXES, results=path).kept == 0  # another trace
    assert stress(trace, AXES, results=path, smallest=True).kept == 0  # the smallest devices are not there


def test_an_interruption_keeps_what_was_finished() -> None:
    def stop(done: int, _: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        stress(training(), AXES, progress=stop)
    assert len(caught.value.found.outcomes) == 4
    assert caught.value.found.total == 21


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_an_answer_is_written_leaves_it_whole(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Results.append
    calls = 0

    def interrupted(self: Results, answer: Mapping[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 and moment == "before":
            signal.raise_signal(signal.SIGINT)
        real(self, answer)
        if calls == 3 and moment == "after":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Results, "append", interrupted)
    with pytest.raises(Interrupted) as caught:
        stress(training(), AXES, results=tmp_path / "r.jsonl")
    assert len(caught.value.found.outcomes) == len((tmp_path / "r.jsonl").read_text().splitlines()) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_share_of_answers_is_taken_keeps_all_of_it(tmp_path: Path) -> None:
    """A worker gives several answers at once; the signal comes with the first of them."""

    def stop(done: int, _: int) -> None:
        if done == 1:
            signal.raise_signal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool, pytest.raises(Interrupted) as caught:
        stress(training(), AXES, results=tmp_path / "r.jsonl", executor=pool, jobs=1, progress=stop)
    assert len(caught.value.found.outcomes) == len((tmp_path / "r.jsonl").read_text().splitlines()) > 1


def test_ctrl_c_prints_what_was_finished(tmp_path: Path) -> None:
    from tests.benchmarks.workloads import transformer

    traces.write(transformer(30_000).trace("", "2.13"), tmp_path / "t.npz")
    out = tmp_path / "r.jsonl"
    words = [
        "stress",
        str(tmp_path / "t.npz"),
        "-o",
        str(out),
        "--json",
        "--vary",
        "max_split_size_mb=" + "/".join(map(str, range(21, 400))),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "simulator", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while (not out.exists() or out.stat().st_size < 10) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    shown, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "the same command goes on" in told
    document = json.loads(shown)
    assert 0 < document["finished"] == len(out.read_text().splitlines()) < document["scenarios"]


# The command ----------------------------------------------------------------------------------------------------------


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["stress", *words])
    return done.exit_code, done.stdout


@pytest.fixture
def path(tmp_path: Path) -> Path:

    traces.write(training(device=128 * MIB), tmp_path / "t.json")
    return tmp_path / "t.json"


def test_the_command(path: Path, tmp_path: Path) -> None:
    words = (str(path), "-q", "--memory", "1GiB", "--orders", "2", "--html", str(tmp_path / "p.html"))
    code, shown = invoke(*words, "-o", str(tmp_path / "r.json"))
    assert code == 0
    assert shown.startswith("best: ")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["finished"] == document["scenarios"] == len(document["outcomes"])
    assert document["best"]["conf"] in shown.replace("\n", "")
    assert document["best"]["peak_reserved"] == min(
        row["peak_reserved"] for row in document["settings"] if row["memory"] is None
    )
    assert "Memory over time, on one axis" in (tmp_path / "p.html").read_text()


def test_nothing_runs_through(path: Path) -> None:
    code, shown = invoke(str(path), "-q", "--context", "100MiB", "--no-smallest")
    assert code == 3
    assert "none of the settings runs through" in shown.replace("\n", " ")


def test_bad_words(path: Path) -> None:
    for words in (["--vary", "x"], ["--vary", "x=1//2"], ["--deferred", "soon"]):
        done = CliRunner().invoke(main, ["stress", str(path), *words])
        assert done.exit_code == 2, words


def test_the_document_has_a_row_for_each_setting() -> None:
    document = render_json(stress(training(), AXES))
    assert [row["conf"] for row in document["settings"]] == ["", EXPANDABLE, "max_split_size_mb:32"]
    assert {row["replays"] for row in document["settings"]} == {7}
    assert document["own"]["conf"] == ""
    assert document["best"]["saves"] == document["own"]["peak_reserved"] - document["best"]["peak_reserved"]
    json.dumps(document)


@pytest.mark.parametrize(
    ("conf", "release", "variable"),
    [
        (EXPANDABLE, "2.13", "PYTORCH_ALLOC_CONF"),
        (EXPANDABLE, "2.9", "PYTORCH_CUDA_ALLOC_CONF"),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", "2.13", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_best_setting_is_a_line_for_a_shell(conf: str, release: str, variable: str) -> None:
    found = stress(training(conf=conf), Axes(settings=[conf], releases=[release]))
    best = found.best()
    assert best is not None
    assert (best.conf, best.release) == (conf, release)
    (line,) = document_of(found).head[0].lines  # type: ignore[union-attr]
    assert shlex.split(line) == ["export", f"{variable}={best.conf}"]


# Pictures -------------------------------------------------------------------------------------------------------------


def test_the_page_escapes_what_a_trace_says() -> None:
    found = stress(training(), Axes(settings=[""]))
    page = render(document_of(replace(found, notes=("<script>alert(1)</script>",))))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_page_draws_own_and_best_settings() -> None:
    trace = training(conf="roundup_power2_divisions:2")
    found = stress(trace, Axes(settings=[""]))
    best, own = found.best(), found.baseline()
    assert best is not None
    assert own is not None
    assert best.conf == ""
    pictures = drawn(found, trace)
    assert [result.conf for _, result in pictures] == ["roundup_power2_divisions:2", ""]
    assert [result.ranks[0].peak_reserved for _, result in pictures] == [
        row.most("peak_reserved") for row in (own, best)
    ]
    assert all(rank.picture is not None for _, result in pictures for rank in result.ranks)
    page = render(document_of(found, pictures))
    assert all(words in page for words in ("own: roundup 2", "best: default", "Memory over time, on one axis"))


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    axes = replace(AXES, memories=[100 * MIB], settings=["", EXPANDABLE, "roundup_power2_divisions:[256:1,512:2,>:8]"])
    trace = training()
    found = stress(trace, axes, smallest=True)
    path = tmp_path / "page.html"
    path.write_text(render(document_of(found, drawn(found, trace))))
    chromium = find_chromium()
    assert chromium is not None
    with Browser(chromium, tmp_path / "profile") as browser:
        for width in (1200, 390):
            browser.view(width, 800, dark=width == 390)
            browser.open(path)
            assert browser.faults() == []
            assert browser.requests() == []
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            top = max(max(row.most("peak_reserved"), row.min_fit or 0) for row in found.rows() if row.memory is None)
            bars = browser.evaluate(
                "[...document.querySelectorAll('.bars')[0].querySelectorAll('svg')].map(s => "
                "[...s.querySelectorAll('rect')].reduce((w, r) => w + r.getBoundingClientRect().width, 0)"
                " / s.getBoundingClientRect().width)"
            )
            peaks = [row.most("peak_reserved") / top for row in sorted(found.comparable(), key=lambda row: row.rank())]
            assert bars == pytest.approx(peaks, abs=0.01)
            tape = "document.querySelector('.rank:not([hidden]) .tape').dataset.blocks"
            assert int(browser.evaluate(tape)) > 0


def test_a_scenario_is_its_document() -> None:
    scenario = Scenario("", "2.13", 5, Variant("late", None, 2, 9))
    assert Scenario.of(json.loads(json.dumps(scenario.document))) == scenario
