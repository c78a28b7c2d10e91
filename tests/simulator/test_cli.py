"""The command line: exit codes, one clear line for every fault, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome

import traces
from simulator.cli import COMMANDS, main
from simulator.engine.result import Result
from tests.places import ROOT
from tests.support.handmade import out_of_memory, rank_result, result, timeline
from traces.errors import TraceError

REPOSITORY = ROOT
HEAVY = ("torch", "numba", "networkx", "numpy", "rich", "pyarrow", "jinja2")

TRACE = {
    "format": "memory-trace",
    "version": 1,
    "ranks": [
        {
            "rank": [0, 1, 2],
            "events": [
                {"op": "phase", "name": "forward", "step": 0},
                {"op": "alloc", "id": 1, "bytes": 3_000_000, "category": "activation"},
                {"op": "free", "id": 1},
            ],
        }
    ],
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(TRACE))
    return str(path)


def call(*arguments: str) -> Outcome:
    return CliRunner().invoke(main, list(arguments))


def fault(outcome: Outcome, code: int = 1) -> str:
    """The one line that tells an error; nothing else may have been printed."""
    assert outcome.exit_code == code, outcome.output
    assert isinstance(outcome.exception, SystemExit)
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(("error: ", "internal error: "))
    return str(line)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Result], list[dict[str, Any]]]:
    """Let `replay` return a given result; what it was called with is appended to the list."""

    def install(made: Result) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []

        def replay(source: Any, **options: Any) -> Result:
            seen.append(options)
            return made

        module = ModuleType("simulator.engine.replay")
        module.__dict__["replay"] = replay
        monkeypatch.setitem(sys.modules, "simulator.engine.replay", module)
        return seen

    return install


@pytest.fixture
def no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a replay begins."""

    def replay(*args: Any, **options: Any) -> None:
        raise AssertionError("the replay began before the options were checked")

    module = ModuleType("simulator.engine.replay")
    module.__dict__["replay"] = replay
    monkeypatch.setitem(sys.modules, "simulator.engine.replay", module)


# ------------------------------------------------------------------------------------------------ start and usage


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom simulator.cli import main\n"
        "try: main.main(sys.argv[1:])\n"
        f"finally: print('loaded:', *(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = f"import sys, simulator, traces; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_names_its_functions() -> None:
    import simulator

    assert simulator.parse_release("2.11.0").text == "2.11"
    assert callable(simulator.render_json)
    assert set(simulator.__all__) <= set(dir(simulator))
    with pytest.raises(AttributeError, match="no attribute 'frob'"):
        simulator.frob  # type: ignore[attr-defined]  # noqa: B018


def test_every_command_is_listed_and_has_its_own_help() -> None:
    listing = call("--help")
    assert listing.exit_code == 0
    for name, line in COMMANDS.items():
        assert name in listing.stdout
        assert line in listing.stdout
        assert call(name, "-h").exit_code == 0


def test_version() -> None:
    assert call("--version").stdout.startswith("vramsim")


@pytest.mark.parametrize(
    "arguments", [["frob"], ["run"], ["run", "--frob", "x"], ["run", "a", "b"], ["convert", "a"], ["verify"]]
)
def test_usage_errors(arguments: list[str]) -> None:
    outcome = call(*arguments)
    assert outcome.exit_code == 2
    assert "Usage:" in outcome.stderr
    assert outcome.stdout == ""


def test_two_sources_of_allocator_settings(trace: str) -> None:
    assert call("run", trace, "--allocator", "", "--allocator-from-env").exit_code == 2


# ----------------------------------------------------------------------------------------------------- bad options


@pytest.mark.usefixtures("no_replay")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--release", "2.99"], "from 2.0 to 2.15"),
        (["--memory", "80g"], "--memory: size '80g' is ambiguous"),
        (["--memory", "0"], "without memory"),
        (["--memory", "lots"], "not understood"),
        (["--context", "-1"], "--context: size '-1'"),
        (["--context", "auto"], "--context auto is not available for traces"),
        (["--allocator", "max_split_size:128"], "nearest is 'max_split_size_mb"),
        (["--allocator", "max_split_size_mb:5"], "at least 20"),
        (["--allocator", "backend:cudaMallocAsync"], "only native is"),
        (["--release", "2.8", "--allocator", "large_segment_size_mb:12"], "came with PyTorch 2.11"),
        (["--ranks", "0,x"], "not understood"),
        (["--ranks", "3"], "rank 3 is not in the trace, which has ranks 0-2"),
        (["--timeline", "a.txt"], "must end in one of .csv"),
        (["--events", "-"], "standard output is taken"),
        (["--events", ""], "standard output is taken"),
        (["--events", "/nowhere/at/all/a.csv"], "no folder /nowhere/at/all"),
        (["--events", "/"], "is a directory"),
        (["--html", "a\nb\0"], "not a file name"),
        (["--events", "a.csv", "--calls", "./a.csv"], "would replace the file of --events"),
        (["--events", "x" * 300], "file name too long"),
    ],
)
def test_bad_options_are_found_before_the_replay(
    trace: str, options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in fault(call("run", trace, *options))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.usefixtures("no_replay")
@pytest.mark.parametrize("option", ["--events", "--calls", "--snapshot", "--html"])
def test_existing_files_are_not_replaced(trace: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    assert "exists already; give --force" in fault(call("run", trace, option, str(path)))
    assert path.read_text() == "mine"


@pytest.mark.usefixtures("no_replay")
def test_the_input_is_never_replaced(trace: str) -> None:
    assert "would replace the input" in fault(call("run", trace, "--events", trace, "--force"))
    assert "is the input itself" in fault(call("convert", trace, trace, "--force"))


@pytest.mark.usefixtures("no_replay")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(trace: str, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    assert "permission denied" in fault(call("run", trace, "--events", str(folder / "a.csv")))


@pytest.mark.usefixtures("no_replay")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"hello", "neither a trace"),
        (b'{"format": "memory-trace"', "JSON"),
        (b"\x1f\x8b\x08", "gzip"),
        (b'{"format": "memory-trace", "version": 1, "ranks": [{"rank": 0, "events": [{"op": "frob"}]}]}', "frob"),
        (b'{"format": "memory-trace", "version": 1, "ranks": [{"rank": 0, "events": [{"op": "free", "id": 7}]}]}', "7"),
        (b"[" * 1_000_000, "error:"),
    ],
)
@pytest.mark.parametrize("command", [["run"], ["convert", "--to", "npz"]])
def test_bad_traces(tmp_path: Path, content: bytes | None, words: str, command: list[str]) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    target = [str(tmp_path / "out.npz")] if command[0] == "convert" else []
    line = fault(call(command[0], str(path), *target, *command[1:]))
    assert words in line
    assert "bad.json" in line
    assert not (tmp_path / "out.npz").exists()


# --------------------------------------------------------------------------------------------- results and output


def test_fits(trace: str, replayed: Callable[[Result], list[dict[str, Any]]]) -> None:
    seen = replayed(result(rank_result(timeline(30)), notes=("assumed release 2.13", "assumed release 2.13")))
    outcome = call("run", trace)
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("fits: needs 39.20 GiB of 79.25 GiB (40.05 GiB left)\n1 rank, ")
    assert outcome.stderr.count("note: assumed release 2.13") == 1
    assert seen == [
        {
            "conf": None,
            "release": None,
            "memory": None,
            "context": None,
            "after_oom": "stop",
            "events": False,
            "log": False,
            "snapshot": False,
            "picture": False,
        }
    ]


def test_out_of_memory_is_exit_code_3(trace: str, replayed: Callable[[Result], list[dict[str, Any]]]) -> None:
    replayed(
        result(rank_result(timeline(900, ranks=(0,)), oom=out_of_memory(600)), rank_result(timeline(9, ranks=(1,))))
    )
    outcome = call("run", trace)
    assert outcome.exit_code == 3
    said = "out of memory: asked for 3.00 GiB with 512.00 MiB of 79.25 GiB left on rank 0"
    assert outcome.stdout.startswith(f"{said}\n2 ranks")
    partly = call("run", trace, "--ranks", "1", "--json")
    assert partly.exit_code == 3
    assert [rank["rank"] for rank in json.loads(partly.stdout)["ranks"]] == [1]
    assert "note: the verdict of a rank that is not shown: out of memory" in partly.stderr


def test_options_reach_the_replay(
    trace: str, tmp_path: Path, replayed: Callable[[Result], list[dict[str, Any]]]
) -> None:
    seen = replayed(result(rank_result(timeline(30))))
    outcome = call(
        *("run", trace, "--allocator", "expandable_segments:True", "--release", "2.9.1+cu128", "--memory", "16GB"),
        *("--context", "1MiB", "--html", str(tmp_path / "a.html"), "-q"),
    )
    assert outcome.exit_code == 0, outcome.output
    assert seen[0]["conf"] == "expandable_segments:True"
    assert seen[0]["release"] == "2.9.1+cu128"
    assert (seen[0]["memory"], seen[0]["context"]) == (16 * 10**9, 1 << 20)
    assert (tmp_path / "a.html").stat().st_size > 1000
    assert outcome.stderr == ""


def test_json_is_the_only_thing_on_stdout(trace: str, replayed: Callable[[Result], list[dict[str, Any]]]) -> None:
    replayed(result(rank_result(timeline(30)), notes=("something\nassumed",)))
    outcome = call("run", trace, "--json")
    assert json.loads(outcome.stdout)["schema_version"] == 1
    assert outcome.stderr.splitlines()[-1] == "note: something assumed"
    assert "something" not in call("run", trace, "--json", "-q").stderr


def test_allocator_from_the_environment(
    trace: str, replayed: Callable[[Result], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = replayed(result(rank_result(timeline(30))))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    call("run", trace)
    call("run", trace, "--allocator-from-env")
    call("run", trace, "--allocator-from-env", "--release", "2.9")
    assert [options["conf"] for options in seen] == [None, "max_split_size_mb:64", None]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size:64")
    assert "nearest" in fault(call("run", trace, "--allocator-from-env"))


# ------------------------------------------------------------------------------------------------- what goes wrong


@pytest.fixture
def reading_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def install(error: BaseException) -> None:
        def read(*args: Any, **options: Any) -> None:
            raise error

        monkeypatch.setattr("simulator.snapshots.reader.read", read)

    return install


def test_an_unexpected_error_is_one_line(
    trace: str, reading_fails: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_fails(ZeroDivisionError("boom\nbang"))
    assert "internal error: ZeroDivisionError: boom bang (please report it" in fault(call("run", trace))
    monkeypatch.setenv("LLMEM_TRACEBACK", "1")
    assert isinstance(call("run", trace).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("typed", "meant"), [("estimte", "estimate"), ("compair", "compare"), ("verfy", "verify"), ("frobnicate", "")]
)
def test_a_mistyped_command_is_answered_with_the_near_one(typed: str, meant: str) -> None:
    outcome = call(typed)
    assert outcome.exit_code == 2
    assert f"No such command '{typed}'." in outcome.stderr
    assert ("Did you mean" in outcome.stderr) == bool(meant)
    assert not meant or f"Did you mean '{meant}'?" in outcome.stderr


def test_a_traceback_may_be_asked_for_of_any_error(
    trace: str, reading_fails: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = TraceError("not a trace")
    error.__cause__ = KeyError("the cause")
    reading_fails(error)
    assert fault(call("run", trace)) == "error: not a trace"
    monkeypatch.setenv("LLMEM_TRACEBACK", "1")
    shown = call("run", trace).stderr
    assert "KeyError: 'the cause'" in shown
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("error: not a trace\n")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "not enough memory"),
        (RecursionError("too deep"), 1, "RecursionError"),
        (AssertionError(), 1, "AssertionError"),
    ],
)
def test_other_ends(
    trace: str, reading_fails: Callable[[BaseException], None], error: BaseException, code: int, words: str
) -> None:
    reading_fails(error)
    outcome = call("run", trace)
    assert outcome.exit_code == code
    assert outcome.stderr.strip().splitlines()[-1].startswith(("error: ", "internal error: "))
    assert words in outcome.stderr
    assert "Traceback" not in outcome.output


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "simulator", "--help"],
            cwd=REPOSITORY,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.stderr == b""
    assert done.returncode == 1


def test_module_and_function_speak_with_one_voice() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simulator", "run", "/nowhere.json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: /nowhere.json: cannot be read: no such file or directory\n"


# --------------------------------------------------------------------------------------------------------- convert


def test_native_forms_hold_the_same(trace: str, tmp_path: Path) -> None:
    names = {"a.json.gz": None, "b.npz": None, "c": "json-rows", "d": "json-columns", "e": "npz"}
    before = trace
    for name, form in names.items():
        target = str(tmp_path / name)
        outcome = call("convert", before, target, *(["--to", form] if form else []))
        assert outcome.exit_code == 0, outcome.output
        assert outcome.stdout == ""
        before = target
    first, last = traces.read(trace), traces.read(before)
    assert first.ranks[0].ranks == last.ranks[0].ranks == (0, 1, 2)
    assert np.array_equal(first.ranks[0].events.op, last.ranks[0].events.op)
    assert np.array_equal(first.ranks[0].events.ints("bytes"), last.ranks[0].events.ints("bytes"))
    assert "--force" in fault(call("convert", trace, before, "--to", "npz"))
    assert call("convert", trace, before, "--to", "npz", "--force").exit_code == 0


def test_convert_takes_a_release_along(trace: str, tmp_path: Path) -> None:
    target = str(tmp_path / "a.json")
    assert call("convert", trace, target, "--release", "2.11.0+cu130").exit_code == 0
    assert traces.read(target).release == "2.11"


@pytest.mark.parametrize(
    ("target", "words"), [("a.txt", "says no format"), ("a", "says no format"), ("/nowhere/a.json", "no folder")]
)
def test_bad_targets(trace: str, target: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in fault(call("convert", trace, target))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
