"""Sweeps: every case has its answer, whatever becomes of the others; what is finished survives an interruption."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graph.case import Case
from graph.model import StepGraph
from simulator.estimator import jobs as dispatching
from simulator.estimator.jobs import chunks, dask_executor, default_jobs, named_executor
from simulator.estimator.results_file import Case as Given
from simulator.estimator.results_file import Results, content, read_cases
from simulator.estimator.sweep import sweep
from tests.places import ROOT
from tests.support.step_graphs import stub
from traces.errors import ConfigError, OutputError, TraceError

MIB = 1 << 20


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def threads(count: int = 2) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


# What a sweep writes ------------------------------------------------------------------------------------------------


def test_worker_processes_answer_every_case(tmp_path: Path) -> None:
    """Good cases, one that does not fit, and every kind of bad one, one of which takes its worker with it."""
    path = tmp_path / "cases.jsonl"
    path.write_text(
        '{"model": "m", "steps": 2}\n\n{"model": "m", "memory": 5000000}\nno json\n[1]\n{"model": "m", "bathc": 2}\n'
        '{"model": "fails"}\n{"model": "exits"}\n{"model": "dies"}\n{"model": "m", "accum": 2, "gpu": "A100"}\n'
    )
    out = tmp_path / "results.jsonl"
    summary = sweep(read_cases(path), out, jobs=2, capture=stub)
    assert (summary.total, summary.fits, summary.tight, summary.oom, summary.failed) == (9, 2, 0, 1, 6)
    answers = {}
    for line in lines(out):
        answers[line.get("line") or line["model"] + str(line.get("memory", line.get("accum", "")))] = line
    assert len(lines(out)) == 9
    assert answers["m5000000"]["verdict"] == "oom"
    assert answers["m2"]["peak_allocated"] == 5 * 3 * MIB  # weight, gradient, state, two activations
    assert answers["m2"]["gpu"] == "A100"  # as it was given
    assert answers["no json"]["error"] == f"{path}, line 4: not JSON: Expecting value: line 1 column 1 (char 0)"
    assert answers["[1]"]["error"] == f"{path}, line 5: a case is a JSON object, not list"
    assert "RuntimeError: first line second line" in answers["fails"]["error"]
    assert answers["exits"]["error"].startswith("SystemExit")
    assert answers["dies"]["error"].startswith("the worker process ended")
    bad = next(line for line in lines(out) if "bathc" in line)
    assert "unknown key 'bathc'; the nearest is 'batch'" in bad["error"]


def test_answers_are_those_of_estimate(tmp_path: Path) -> None:
    from simulator.estimator.estimate import answer

    case = {"model": "m", "batch": 3, "alloc_conf": "expandable_segments:True"}
    sweep([case], tmp_path / "r", executor=threads(), capture=stub, min_memory=True, context=5 * MIB)
    (found,) = lines(tmp_path / "r")
    expected = answer(case, capture=stub, min_memory=True, context=5 * MIB)
    assert {**found, "seconds": 0} == {**expected, "seconds": 0, "schema_version": 1}
    assert found["min_fit"] == 20 * MIB + 5 * MIB


def test_models_captured_by_worker_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    cases: list[Mapping[str, Any]] = [
        {"model": "opt-125m", "dtype": "bf16", "memory": memory} for memory in (None, 1 << 30)
    ]
    cases.append({"model": "no-such-model"})
    summary = sweep(cases, tmp_path / "r", jobs=1)
    assert (summary.fits, summary.oom, summary.failed) == (1, 1, 1)
    (error,) = (line["error"] for line in lines(tmp_path / "r") if "error" in line)
    assert "no-such-model" in error


# Going on -----------------------------------------------------------------------------------------------------------


class Counting:
    """A capture that notes what it was asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, case: Case) -> StepGraph:
        self.seen.append(f"{case.model} {case.batch}")
        return stub(case)


def test_finished_cases_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "r"
    cases: list[Mapping[str, Any]] = [{"model": "m", "batch": batch} for batch in (1, 2, 3, 4)]
    sweep(cases[:2], out, executor=threads(), capture=stub)
    before = out.read_text()
    counting = Counting()
    again: list[Mapping[str, Any]] = [{"batch": 2, "model": "m", "seq": 512}, *cases[2:], {"model": "m"}]
    summary = sweep(again, out, executor=threads(), capture=counting)
    assert sorted(counting.seen) == ["m 3", "m 4"]  # found by content, whatever its spelling
    assert out.read_text().startswith(before)
    assert (summary.total, summary.kept, summary.done) == (4, 2, 4)
    assert len(lines(out)) == 4


@pytest.mark.parametrize("cut", [1, 20, -2, None])
def test_a_last_line_that_was_cut_short(tmp_path: Path, cut: int | None) -> None:
    """A part of an answer goes; an answer that lacks but its line's end stays."""
    out = tmp_path / "r"
    sweep([{"model": "m"}, {"model": "m", "batch": 2}], out, executor=threads(1), capture=stub)
    first, second = out.read_text().splitlines()
    out.write_text(first + "\n" + second[:cut])
    counting = Counting()
    summary = sweep([{"model": "m"}, {"model": "m", "batch": 2}], out, executor=threads(), capture=counting)
    assert len(counting.seen) == (0 if cut is None else 1)
    assert [line.get("batch") for line in lines(out)] == [None, 2]
    assert any("cut short" in note for note in summary.notes) == (cut is not None)


def test_equal_cases_have_an_answer_each(tmp_path: Path) -> None:
    out = tmp_path / "r"
    cases: list[Mapping[str, Any]] = [{"model": "m"}, {"model": "m", "batch": 1}, {"model": "m"}]
    sweep(cases[:1], out, executor=threads(), capture=stub)
    assert sweep(cases, out, executor=threads(), capture=stub).kept == 1
    assert len(lines(out)) == 3
    assert sweep(cases, out, executor=threads(), capture=stub).kept == 3


def test_errors_are_final_unless_retried(tmp_path: Path) -> None:
    out = tmp_path / "r"
    cases = [{"model": "fails"}, {"model": "m"}]
    sweep(cases, out, executor=threads(), capture=stub)
    assert sweep(cases, out, executor=threads(), capture=stub).kept == 2
    counting = Counting()
    summary = sweep(cases, out, executor=threads(), capture=counting, retry=True)
    assert counting.seen == ["fails 1"]
    assert (summary.kept, summary.failed, len(lines(out))) == (1, 1, 2)


def test_an_answer_without_the_smallest_memory_is_no_answer_to_that(tmp_path: Path) -> None:
    out = tmp_path / "r"
    sweep([{"model": "m"}], out, executor=threads(), capture=stub)
    summary = sweep([{"model": "m"}], out, executor=threads(), capture=stub, min_memory=True)
    assert summary.kept == 0
    assert [("min_fit" in line) for line in lines(out)] == [False, True]
    assert any("more answers" in note for note in summary.notes)


def test_an_interruption_keeps_what_is_finished(tmp_path: Path) -> None:
    """Ctrl-C ends the workers at once, exits with 130 and leaves whole lines, from which the next sweep goes on."""
    out = tmp_path / "r"
    cases: list[Mapping[str, Any]] = [{"model": "m"}, {"model": "m", "batch": 2}, {"model": "sleeps:120"}]
    script = (
        "import sys; from simulator.cli import _guarded; from simulator.estimator.sweep import sweep; "
        f"from tests.support.step_graphs import stub; "
        f"sys.exit(_guarded(lambda: sweep({cases}, {str(out)!r}, jobs=2, capture=stub).failed))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 100
        while (not out.exists() or out.read_text().count("\n") < 2) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: parent, fork server and workers
        _, said = process.communicate(timeout=30)  # ends when the last worker has closed it
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "error: interrupted\n")
    assert [line["verdict"] for line in lines(out)] == ["fits", "fits"]
    summary = sweep([*cases[:2], {"model": "sleeps:0"}], out, executor=threads(), capture=stub)
    assert (summary.kept, summary.fits) == (2, 3)


def test_answers_that_are_there_at_an_interruption_are_taken(tmp_path: Path) -> None:
    """The first answer's report interrupts; the second has come meanwhile."""
    out = tmp_path / "r"
    both = threading.Barrier(2)

    def together(case: Case) -> StepGraph:
        both.wait(10)
        return stub(case)

    def report(summary: Any) -> None:
        if summary.done == 1:
            time.sleep(0.5)
            raise KeyboardInterrupt

    with threads() as pool, pytest.raises(KeyboardInterrupt):
        sweep([{"model": "m"}, {"model": "n"}], out, executor=pool, capture=together, progress=report)
    assert sorted(line["model"] for line in lines(out)) == ["m", "n"]


# The file of results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"model": "m"}\n', "a,b\n", "[]\n", "notes"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    out = tmp_path / "r"
    out.write_text(text)
    with pytest.raises(OutputError, match="--force"):
        sweep([{"model": "m"}], out, executor=threads(), capture=stub)
    assert out.read_text() == text
    sweep([{"model": "m"}], out, executor=threads(), capture=stub, force=True)
    assert len(lines(out)) == 1


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with Results(tmp_path / "r"), pytest.raises(OutputError, match="another sweep is writing"):
        Results(tmp_path / "r")
    Results(tmp_path / "r").__exit__()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Results(tmp_path / "r") as file:
        file.append({"model": "m", "verdict": "fits"})
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="no space left"):
            file.append({"model": "n", "verdict": "fits"})
    assert [line["model"] for line in lines(tmp_path / "r")] == ["m"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "directory"),
        (tmp_path / "no" / "r", "no folder"),
        (Path("/dev/null"), "appended"),
    ):
        with pytest.raises(OutputError, match=reason):
            Results(path)


def test_every_answer_is_on_the_disk_at_once(tmp_path: Path) -> None:
    counts = []
    sweep(
        [{"model": "m", "batch": batch} for batch in range(1, 4)],
        tmp_path / "r",
        executor=threads(1),
        capture=stub,
        progress=lambda summary: counts.append((summary.done, len(lines(tmp_path / "r")))),
    )
    assert counts == [(n, n) for n in range(4)]


def test_content_ignores_order_defaults_and_answers() -> None:
    assert content({"model": "m", "batch": 1}) == content({"verdict": "fits", "model": "m", "dtype": "fp32"})
    assert content({"model": "m"}) != content({"model": "m", "batch": 2})
    assert content({"b": 1, "a": 2}) == content({"a": 2, "b": 1, "error": "unknown key"})


def test_files_of_cases(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_bytes(b'\xef\xbb\xbf{"model": "m"}\r\n  \n{"model": "n"}')
    assert [case.given for case in read_cases(path)] == [{"model": "m"}, {"model": "n"}]
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="has no cases"):
        read_cases(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_cases(tmp_path / "none")


# Dispatch -----------------------------------------------------------------------------------------------------------


def groups(*keys: str) -> list[Given]:
    return [Given({"model": key, "memory": (number + 1) << 20}) for number, key in enumerate(keys)]


def models(found: list[list[Given]]) -> list[str]:
    return ["".join(str(case.document["model"]) for case in chunk) for chunk in found]


def test_cases_with_one_graph_go_together() -> None:
    assert models(chunks(groups(*"abab"), 2)) == ["aa", "bb"]
    assert models(chunks(groups(*"aaaa"), 2)) == ["aa", "aa"]  # rather than one worker idle
    assert models(chunks(groups(*"aaab"), 4)) == ["aa", "a", "b"]
    assert models(chunks(groups(*"a" * 20, "b"), 2)) == ["a" * 8, "a" * 8, "a" * 4, "b"]


class Fragile(Executor):
    """An executor of threads that breaks at a case of the model `dies`, with whatever runs beside it."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.broken = False

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        if self.broken:
            raise BrokenExecutor("broken before")
        future: Future[Any] = Future()
        if any(case["model"] == "dies" for case in arguments[0]):
            self.broken = True
            future.set_exception(BrokenExecutor("a worker was lost"))
        else:
            future.set_result(function(*arguments, **named))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.broken = True


def test_an_executor_that_breaks_is_made_again(tmp_path: Path) -> None:
    Fragile.made = 0
    cases = [{"model": name, "batch": batch} for batch in (1, 2) for name in ("m", "dies", "n")]
    summary = sweep(cases, tmp_path / "r", executor=Fragile, capture=stub)
    assert (summary.fits, summary.failed) == (4, 2)
    assert {line["model"] for line in lines(tmp_path / "r") if "error" in line} == {"dies"}
    assert Fragile.made > 2


def test_an_executor_that_was_given_cannot_be_made_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not work any more"):
        sweep([{"model": "dies"}], tmp_path / "r", executor=Fragile(), capture=stub)


def test_an_executor_that_was_given_is_not_shut_down(tmp_path: Path) -> None:
    with threads() as pool:
        sweep([{"model": "m"}], tmp_path / "r", executor=pool, capture=stub)
        assert pool.submit(int, "7").result() == 7


def test_executors_by_name() -> None:
    assert named_executor("concurrent.futures:ThreadPoolExecutor") is ThreadPoolExecutor
    assert named_executor("tests.simulator.estimator.test_sweep:threads") is threads
    for name, message in (
        ("concurrent.futures", "write module:attribute"),
        ("nowhere.at.all:x", "cannot be imported"),
        ("concurrent.futures:Nothing", "has no 'Nothing'"),
        ("tests.simulator.estimator.test_sweep:MIB", "neither an executor"),
    ):
        with pytest.raises(ConfigError, match=message):
            named_executor(name)


def test_what_is_no_executor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have a method 'submit'"):
        sweep([{"model": "m"}], tmp_path / "r", executor=dict, capture=stub)  # type: ignore[arg-type]


def test_workers_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(dispatching, "free_bytes", lambda: 16 << 30)
    assert default_jobs() == 16
    monkeypatch.setattr(dispatching, "free_bytes", lambda: 1)
    assert default_jobs() == 1


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_does_the_work(tmp_path: Path) -> None:
    distributed = pytest.importorskip("dask.distributed")
    cases = [{"model": "m", "batch": batch} for batch in (1, 2, 3)] + [{"model": "fails"}]
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        dask_executor(cluster.scheduler_address) as (executor, slots),
    ):
        summary = sweep(cases, tmp_path / "r", executor=executor, capture=stub)
    assert (summary.fits, summary.failed, slots) == (3, 1, 2)
    assert sorted(line.get("batch", 1) for line in lines(tmp_path / "r") if "error" not in line) == [1, 2, 3]


def sampled() -> bool:
    """Whether the Dask worker's profiler looks at the frames of this thread."""
    distributed = importlib.import_module("dask.distributed")
    return bool(distributed.get_worker().periodic_callbacks["profile"].is_running())


@pytest.mark.filterwarnings("ignore")
def test_dask_does_not_hold_frames_meanwhile(tmp_path: Path) -> None:
    """Its profiler would keep tensors of functions that have returned; it pauses for our work alone."""
    distributed = pytest.importorskip("dask.distributed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        dask_executor(cluster.scheduler_address) as (executor, _),
    ):
        assert client.submit(sampled, pure=False).result()
        assert [executor.submit(sampled).result() for _ in range(3)] == [False] * 3
        assert client.submit(sampled, pure=False).result()


@pytest.mark.filterwarnings("ignore")
def test_no_scheduler_at_the_address() -> None:
    pytest.importorskip("dask.distributed")
    with pytest.raises(ConfigError, match="no scheduler answers"), dask_executor("tcp://127.0.0.1:1", timeout=0.5):
        pass


def test_without_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    with pytest.raises(ConfigError, match=r"pip install 'vramsim\[dask\]'"), dask_executor("tcp://127.0.0.1:1"):
        pass
