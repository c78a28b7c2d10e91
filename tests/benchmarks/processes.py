"""Measures of fresh processes: a large file from the command line, start-up, the first compilation, and `estimate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import traces
from tests.benchmarks.figures import Figure
from tests.benchmarks.launch import SHOW
from tests.benchmarks.workloads import transformer
from tests.places import ROOT

TINY: Final = "traces/samples/tiny.json"
GIB: Final = 2**30
FILE_GOAL_S: Final = 10.0
FILE_GOAL_GIB: Final = 4.0
HELP_GOAL_MS: Final = 150.0
RUN_GOAL_S: Final = 1.5
COLD_GOAL_S: Final = 60.0
#: The case that `estimate` and MemTracker are both given.
CASE: Final = {"model": "opt-1.3b", "dtype": "bf16", "batch": 4, "seq": 512}
CASE_NAME: Final = "OPT-1.3B, bf16, AdamW, batch 4 x 512"
ESTIMATE_GOAL_S: Final = 5.0
STRESS_GOAL_S: Final = 60.0
#: Meshes of 8 ranks beside one of 1,024, and the most that the latter may take, as many times the former.
FEW_RANKS: Final = ("fsdp2=4,tp=2", "fsdp2=8")
MANY_RANKS: Final = "fsdp2=128,tp=8"
RANKS_MODEL: Final = ("llama-2-70b", "--dtype", "bf16", "--checkpointing", "nonreentrant", "--memory", "200GiB")
RANKS_GOAL: Final = 2.0
#: Programs in tests/benchmarks/programs, how they are recorded, and the seconds that each may take.
PROGRAMS: Final = (
    ("Llama 3.1 8B, Trainer", ("--gpu", "H100"), ("trainer_full.py",), 60.0),
    (
        "Llama 3.1 70B, FSDP2",
        ("--gpu", "H200", "--ranks", "0"),
        ("torchrun", "--nproc-per-node=8", "fsdp2_full.py"),
        180.0,
    ),
)
PROGRAM_GOAL_GIB: Final = 8.0
#: Values of settings; together a thousand.
STRESS_GRID: Final = (
    "max_split_size_mb=none/32/40/48/56/64/80/96/112/128/160/192/224/256/320/384/448/512/768/1024",
    "large_segment_size_mb=20/22/24/26/28",
    "roundup_power2_divisions=none/2/4/8/16",
    "expandable_segments=False/True",
)


@dataclass(frozen=True)
class Usage:
    """What a process took; `said` is the JSON it printed, if it was asked for."""

    wall: float
    cpu: float
    peak: int
    said: Mapping[str, Any]


def launch(*arguments: str, show: bool = False, environment: Mapping[str, str] | None = None) -> Usage:
    """Run this Python with some arguments in a fresh process. Raises RuntimeError where it fails."""
    command = [sys.executable, "-m", "tests.benchmarks.launch", *([SHOW] if show else []), sys.executable, *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    taken = json.loads(lines[-1]) if lines else {"code": done.returncode}
    if taken["code"] != 0:
        raise RuntimeError(f"'{' '.join(arguments)}' failed with exit code {taken['code']}: {done.stderr.strip()}")
    said = json.loads(lines[0]) if show else {}
    return Usage(taken["wall"], taken["cpu"], taken["peak"], said)


def fastest_launch(rounds: int, *arguments: str) -> Usage:
    """The run with the least wall time."""
    return min((launch(*arguments) for _ in range(rounds)), key=lambda usage: usage.wall)


def large_file(events: int, rounds: int) -> list[Figure]:
    """A columnar file of transformer training: `run` on it, and reading and replay apart."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.npz"
        traces.write(transformer(events).trace("", "2.13"), path)
        size = path.stat().st_size
        run = fastest_launch(rounds, "-m", "simulator", "run", "--json", str(path))
        apart = launch("-m", "tests.benchmarks.read_and_replay", str(path), show=True).said
    speed = {"s of CPU": run.cpu, "M events/s": events / run.wall / 1e6}
    grown = apart["after_replay"] - apart["before"]
    return [
        Figure("`run` on the file", run.wall, "s", FILE_GOAL_S, speed),
        Figure("peak memory of `run`", run.peak / GIB, "GiB", FILE_GOAL_GIB, {"bytes an event": run.peak / events}),
        Figure("traces.read, checks included", apart["read"], "s"),
        Figure("replay()", apart["replay"], "s"),
        Figure("memory that both add at the peak", grown / events, "bytes an event"),
        Figure("the file itself", size / events, "bytes an event"),
    ]


def thousand_replays(events: int) -> list[Figure]:
    """`stress` on a file of transformer training under a thousand settings, with two worker processes."""
    grid = [word for values in STRESS_GRID for word in ("--vary", values)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        traces.write(transformer(events).trace("", "2.13"), path)
        words = ("-m", "simulator", "stress", str(path), "--no-smallest", "--jobs", "2", "--json", "-q", *grid)
        run = launch(*words, "-o", str(Path(folder) / "found.jsonl"))
        with open(Path(folder) / "found.jsonl", encoding="utf-8") as file:
            taken = [found["cpu_seconds"] for line in file if "error" not in (found := json.loads(line))]
    cpu = run.cpu + sum(taken)
    details = {"s of wall time": run.wall, "replays": len(taken), "ms of CPU a replay": 1e3 * sum(taken) / len(taken)}
    return [Figure("`stress` with all settings", cpu / 2, "s of CPU on each of two cores", STRESS_GOAL_S, details)]


def start_up(rounds: int) -> list[Figure]:
    """`--help` beyond Python's own start, and `run` on a small sample with kernels compiled before."""
    run = ("-m", "simulator", "run", TINY)
    launch(*run)
    nothing = fastest_launch(2 * rounds, "-c", "pass")
    shown = fastest_launch(2 * rounds, "-m", "simulator", "--help")
    small = fastest_launch(rounds, *run)
    return [
        Figure(
            "--help, beyond `python -c pass`",
            1e3 * (shown.wall - nothing.wall),
            "ms",
            HELP_GOAL_MS,
            {"ms of CPU": 1e3 * (shown.cpu - nothing.cpu)},
        ),
        Figure(f"run {TINY}, kernels in the cache", small.wall, "s", RUN_GOAL_S, {"s of CPU": small.cpu}),
    ]


def cold_start() -> list[Figure]:
    """The first run ever: with an empty cache, beyond what it takes with a full one."""
    return [
        _compilation("compile all kernels", "-m", "tests.benchmarks.compile_all"),
        _compilation(f"compile what `run {TINY}` needs", "-m", "simulator", "run", TINY),
    ]


def _compilation(name: str, *arguments: str) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        cold = launch(*arguments, environment={"NUMBA_CACHE_DIR": folder})
        kept = sum(1 for _ in Path(folder).rglob("*.nbc"))
        warm = launch(*arguments, environment={"NUMBA_CACHE_DIR": folder})
    details = {"s of wall time": cold.wall - warm.wall, "files in the cache": kept, "s of CPU when cached": warm.cpu}
    return Figure(name, cold.cpu - warm.cpu, "s of CPU", COLD_GOAL_S, details)


def beside_mem_tracker(rounds: int) -> list[Figure]:
    """Seconds and peak of `estimate` (3 steps, capture and replay) and of MemTracker (2 steps) on the same case."""
    module, case = "tests.benchmarks.against_mem_tracker", json.dumps(CASE)
    launch("-m", module, "estimate", case)  # compiles, where nothing is in the cache
    ours = min(
        (launch("-m", module, "estimate", case, show=True) for _ in range(rounds)), key=lambda one: one.said["seconds"]
    )
    theirs = launch("-m", module, "mem-tracker", case, show=True)
    faster = theirs.said["seconds"] / max(ours.said["seconds"], 1e-9)
    details = {"times as fast as MemTracker": faster}
    beside = {"times MemTracker's peak": ours.said["peak"] / theirs.said["peak"]}
    return [
        Figure("estimate", ours.said["seconds"], "s", ESTIMATE_GOAL_S, details),
        Figure("MemTracker", theirs.said["seconds"], "s"),
        Figure("peak allocated, estimate", ours.said["peak"] / GIB, "GiB", None, beside),
        Figure("peak of live bytes, MemTracker", theirs.said["peak"] / GIB, "GiB"),
        Figure("memory of the process of estimate", ours.peak / GIB, "GiB"),
    ]


def by_ranks(rounds: int) -> list[Figure]:
    """`estimate` of a 70 B model on 1,024 ranks and on 8, in fresh processes: CPU, and peak memory of the process."""

    def estimate(mesh: str) -> Usage:
        words = ("-m", "simulator", "estimate", *RANKS_MODEL, "--mesh", mesh, "-q")
        return min((launch(*words) for _ in range(rounds)), key=lambda usage: usage.cpu)

    many = estimate(MANY_RANKS)
    details = {"s of wall time": many.wall, "GiB": many.peak / GIB}
    figures = [Figure(f"estimate, {MANY_RANKS}", many.cpu, "s of CPU", None, details)]
    for mesh in FEW_RANKS:
        few = estimate(mesh)
        details = {"s of wall time": few.wall, "GiB": few.peak / GIB}
        figures.append(Figure(f"estimate, {mesh}", few.cpu, "s of CPU", None, details))
        figures.append(Figure(f"time, against {mesh}", many.cpu / few.cpu, "times", RANKS_GOAL))
        figures.append(Figure(f"memory, against {mesh}", many.peak / few.peak, "times", RANKS_GOAL))
    return figures


def recorded_programs() -> list[Figure]:
    """`record` of programs with large models whose weights are not there: wall time, and peak memory of a process."""
    figures = []
    for name, options, words, goal in PROGRAMS:
        program = str(ROOT / "tests" / "benchmarks" / "programs" / words[-1])
        run = launch("-m", "simulator", "record", "-q", *options, "--", *words[:-1], program)
        figures.append(Figure(f"record, {name}", run.wall, "s", goal, {"s of CPU": run.cpu}))
        figures.append(Figure(f"memory, {name}", run.peak / GIB, "GiB", PROGRAM_GOAL_GIB))
    return figures
