"""Whole programs, run unmodified by `record`, beside what real PyTorch did when they ran.

    python -m tests.accuracy programs [NAME]... [--folder FOLDER] [--assets FOLDER] [--sample N] [--results FILE]
                                      [--as-recorded] [--late]

FOLDER has `programs.csv` and the programs (default: tests/data/programs, whose README says what the columns are), and
`releases.csv` with rows of other releases of PyTorch: those of the installed one are run. They run in a scratch copy of
it, with `assets` linked there to what `--assets` names. A program of several ranks has a row for each. `--results`
keeps what was found, and does not run it again.
`--as-recorded` has programs read whole numbers and booleans as where they were recorded (0, or what FAKEGPU_D2H_BOOL
says): what differs then is not of the values. `--late` runs them with `--deferred late`, beside the rows recorded so
(columns `lag1_*`: a CUDA event completes when the host waits for it).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.accuracy.recordings import read_table
from tests.places import DATA, ROOT
from tests.support import warm
from traces.release import installed_release, version_of

FOLDER: Final = DATA / "programs"
#: Our figure, and the column with theirs.
FIGURES: Final = {
    "peak_allocated": "peak_allocated",
    "peak_reserved": "peak_reserved",
    "allocations": "allocations",
    "num_alloc_retries": "retries",
    "num_ooms": "ooms",
    "end_allocated": "end_allocated",
    "end_reserved": "end_reserved",
}
#: The same of runs in which events complete when the host waits.
LATE: Final = {"peak_allocated": "lag1_peak_allocated", "peak_reserved": "lag1_peak_reserved"}
LIMIT: Final = 600  # seconds for a program


@dataclass(frozen=True)
class Run:
    """One rank's row of a program, and what `record` said of the program (`error`: why it said nothing)."""

    row: Mapping[str, str]
    answer: Mapping[str, Any]
    columns: Mapping[str, str] = field(default_factory=lambda: FIGURES)

    def figures(self) -> dict[str, tuple[int, int]]:
        """Ours and theirs; empty where the program did not run."""
        for found in self.answer.get("ranks", ()):
            if int(self.row["rank"]) in found["ranks"]:
                return {name: (found[name], int(self.row[column])) for name, column in self.columns.items()}
        return {}


def table(folder: Path = FOLDER) -> list[dict[str, str]]:
    """The rows that were recorded under the installed PyTorch's release."""
    rows = [{"torch": "2.13.0", **row} for row in read_table(folder / "programs.csv")]
    if (folder / "releases.csv").exists():
        rows += read_table(folder / "releases.csv")
    return [row for row in rows if str(version_of(row["torch"])) == installed_release()]


def copied(folder: Path, assets: Path | None, where: Path) -> Path:
    """A scratch copy of the programs, with the assets."""
    shutil.copytree(folder, where, ignore=shutil.ignore_patterns("results", "snapshots"))
    if assets is not None:
        (where / "assets").symlink_to(assets.resolve())
    return where


def run(
    row: Mapping[str, str], where: Path, *options: str, as_recorded: bool = False, start: warm.Run = warm.cold
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """What `record --json` says of a program that runs in `where`, and the finished process, as `start` starts it."""
    settings = dict(word.split("=", 1) for word in row["env"].split())
    valueless = (str(Path(__file__).with_name("as_recorded.py")), settings.get("FAKEGPU_D2H_BOOL", "1"))
    memory = settings.pop("FAKEGPU_MEM", None)
    own = {name: value for name, value in settings.items() if not name.startswith("FAKEGPU_")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **own}
    answer = where / "answer.json"
    command = [sys.executable, "-m", "simulator", "record", "--gpu", row["device"], "--steps", "all"]
    launcher = ["--", "torchrun", "--nproc-per-node", row["ranks"]] if row["start"] == "torchrun" else []
    command += ["--json", str(answer), "--force", *options, *(("--memory", memory) if memory else ())]
    command += [*launcher, *(valueless if as_recorded else ()), *shlex.split(row["command"])]
    answer.unlink(missing_ok=True)
    done = start(command, cwd=where, env=environment, timeout=LIMIT)
    if not answer.exists():
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}, done
    return json.loads(answer.read_text()), done


def runs(
    rows: list[dict[str, str]], where: Path, results: Path | None, as_recorded: bool, late: bool = False
) -> Iterator[Run]:
    """All of them, one after another; a program that raises where the recorded one did not has an error."""
    options = ("--deferred", "late") if late else ()
    known: dict[str, dict[str, Any]] = {}
    if results is not None and results.exists():
        known = dict(map(json.loads, results.read_text().splitlines()))
    for row in rows:
        answer = known.get(row["name"])
        if answer is None:
            started = time.perf_counter()
            try:
                answer, done = run(row, where, *options, as_recorded=as_recorded)
            except subprocess.TimeoutExpired:
                answer = {"error": f"not done in {LIMIT} s"}
            else:
                if "error" not in answer and (answer["exit_code"] == 0) != (row["ended"] == "ok"):
                    lines = [line for line in done.stderr.splitlines() if "Error" in line]
                    answer = {"error": lines[-1] if lines else f"exit code {answer['exit_code']}"}
            answer["seconds"] = round(time.perf_counter() - started, 1)
            known[row["name"]] = answer
            if results is not None:
                with results.open("a") as file:
                    print(json.dumps([row["name"], answer]), file=file)
        yield Run(row, answer, LATE if late else FIGURES)


def line(found: Run) -> str:
    """Ours beside theirs, where they differ."""
    name = f"{found.row['name']:28}{found.row['rank']:>2}"
    if "error" in found.answer:
        return f"{name} FAILED: {found.answer['error'][:160]}"
    parts = [
        f"{figure} {ours:,} for {theirs:,} ({ours / theirs - 1:+.3%})" if theirs else f"{figure} {ours:,} for 0"
        for figure, (ours, theirs) in found.figures().items()
        if ours != theirs
    ]
    return f"{name} {'exact' if not parts else '; '.join(parts)}   {found.answer['seconds']} s"


def main(arguments: list[str]) -> None:
    """Run the chosen programs and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy programs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--sample", type=int, default=0, help="so many programs, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--as-recorded", action="store_true", help="values as where the programs were recorded")
    parser.add_argument("--late", action="store_true", help="with --deferred late, beside columns lag1_*")
    options = parser.parse_args(arguments)
    rows = [row for row in table(options.folder) if not options.names or row["name"] in options.names]
    rows = [row for row in rows if row.get("lag1_peak_allocated")] if options.late else rows
    names = sorted({row["name"] for row in rows})
    if options.sample and options.sample < len(names):
        names = random.Random(options.seed).sample(names, options.sample)
        rows = [row for row in rows if row["name"] in names]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        where = copied(options.folder, options.assets, Path(scratch) / "programs")
        for one in runs(rows, where, options.results, options.as_recorded, options.late):
            print(line(one), flush=True)
            found.append(one)
    print(summary(found))


def summary(found: list[Run]) -> str:
    """How many ran, and of each figure how many are exact and the worst."""
    ran = [one for one in found if one.figures()]
    lines = [f"{len(ran)} of {len(found)} ran"]
    for figure in ran[0].columns if ran else ():
        pairs = [one.figures()[figure] for one in ran]
        exact = sum(ours == theirs for ours, theirs in pairs)
        worst = max(abs(ours / theirs - 1) if theirs else float(ours != 0) for ours, theirs in pairs)
        lines.append(f"{figure:18} exact in {exact} of {len(pairs)}   worst {worst:.3%}")
    return "\n".join(lines)
