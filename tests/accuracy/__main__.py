"""How close predictions come to recorded runs, each figure beside its goal.

    python -m tests.accuracy [TABLE]... [--where KEY=VALUE]... [--sample N] [--jobs N] [--results FILE] [--worst N]

TABLE is single, seq2seq, inference (these by default), min_fit, multi, offload, pipeline, deepspeed or releases (rows
of the installed torch and transformers), or the path of such a table with `--kind TABLE`. Finished cases are kept in
--results and not run again. `gemini [MODEL]...` prints errors on recorded runs of Gemini beside those of LLMem's own
estimator, by setting; `gemini_fit [MODEL]...` the largest batches on a 16 GB card; `table2 [MODEL]...` the paper's
Table 2; `published` peaks that others measured on real GPUs; `programs [NAME]...` whole programs that `record` runs;
`scripts [NAME]...` the training scripts that are written for cases, beside the estimates of those cases; `sft
[WORD]...`, `fitcheck [WORD]...`, `guide [WORD]...`, `litgpt [WORD]...`, `notebooks [WORD]...`, `trainers [WORD]...`,
`galvatron [WORD]...`, `axolotl [WORD]...`, `adapters [WORD]...`, `adapters_images [WORD]...`, `speedrun [WORD]...`
training that others measured, `pipelines [WORD]...` inference, by their own programs; `fit` the first plans of `fit`
for cases that do not fit, beside others; `opinfo [NAME]...` PyTorch's own operator database; `architectures [WORD]...`
models of transformers and timm under `record`; `on_gpu [WORD]...` trainings on real GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.accuracy.recordings import TABLES, Recording, recordings

#: What is printed by a module of its own.
MODULES: Final = frozenset(
    {
        *(
            "adapters",
            "adapters_images",
            "architectures",
            "axolotl",
            "fit",
            "fitcheck",
            "galvatron",
            "gemini",
            "gemini_fit",
            "guide",
            "litgpt",
            "notebooks",
            "on_gpu",
            "opinfo",
            "pipelines",
            "programs",
            "published",
        ),
        *("scripts", "sft", "speedrun", "table2", "trainers"),
    }
)
#: median, 95th percentile and worst relative error that are allowed, by table and figure
GOALS: Final[Mapping[str, Mapping[str, tuple[float, float, float]]]] = {
    "single": {"peak_allocated": (0.001, 0.005, 0.015), "peak_reserved": (0.003, 0.015, 0.04), "phases": (0.01, 1, 1)},
    "seq2seq": {"peak_allocated": (0.005, 1, 0.04)},
    "inference": {"peak_allocated": (0.005, 1, 0.04)},
    "min_fit": {"min_fit": (0.01, 1, 0.04)},
    "multi": {"peak_allocated": (0.005, 1, 0.03), "peak_reserved": (0.015, 0.06, 1)},
    "offload": {"peak_allocated": (0.02, 1, 0.08)},
    "pipeline": {"peak_allocated": (0.02, 1, 0.08)},
    "deepspeed": {"peak_allocated": (0.02, 1, 0.08)},
    "releases": {"peak_allocated": (0, 0, 0), "peak_reserved": (0, 0, 0)},
}


@dataclass(frozen=True)
class Outcome:
    """One recording beside its prediction (`answer`: what `estimate` says of the case)."""

    recording: Recording
    answer: Mapping[str, Any]

    @property
    def figures(self) -> Mapping[str, Any]:
        """The answer's figures of the rank that was recorded."""
        rank = int(self.recording.row.get("rank") or 0)
        return next((one for one in self.answer.get("ranks") or () if rank in one["ranks"]), self.answer)

    def error(self, figure: str) -> float | None:
        """Relative error of a figure, signed; None where one of the two sides has none."""
        recorded, predicted = self.recording.figure(figure), self.figures.get(figure)
        return None if not recorded or predicted is None else predicted / recorded - 1

    def phase_errors(self) -> dict[str, float]:
        """Relative error of the peak of every phase that both sides have."""
        predicted = self.figures.get("phases") or {}
        both = {key: peak for key, peak in self.recording.phases().items() if key in predicted}
        return {key: predicted[key]["peak"] / peak - 1 for key, peak in both.items()}


def predict(case: Mapping[str, Any], smallest: bool) -> dict[str, Any]:
    """The answer of `estimate` for a case, with `seconds`, or with `error`."""
    from simulator.estimator.estimate import answer

    started = time.perf_counter()
    try:
        found = answer(case, min_memory=smallest, context=0)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": time.perf_counter() - started}


def outcomes(chosen: Iterable[Recording], jobs: int, results: Path | None) -> Iterator[Outcome]:
    """Predictions for all recordings, kept in `results` as they come."""
    known = _known(results)
    waiting: dict[str, list[Recording]] = {}  # rows of several ranks share a case
    for recording in chosen:
        key = _key(recording)
        if key in known:
            yield Outcome(recording, known[key])
        else:
            waiting.setdefault(key, []).append(recording)
    with ProcessPoolExecutor(jobs) as pool:
        running = {
            pool.submit(predict, dict(rows[0].case), rows[0].table == "min_fit"): key for key, rows in waiting.items()
        }
        for number, done in enumerate(as_completed(running)):
            key, answer = running[done], done.result()
            if results is not None:
                with results.open("a") as file:
                    print(json.dumps([key, answer], default=str), file=file)
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {len(waiting)}", end="", file=sys.stderr)
            yield from (Outcome(recording, answer) for recording in waiting[key])


def _key(recording: Recording) -> str:
    return json.dumps([recording.table == "min_fit", recording.case], sort_keys=True)


def _known(results: Path | None) -> dict[str, dict[str, Any]]:
    if results is None or not results.exists():
        return {}
    return {key: answer for key, answer in map(json.loads, results.read_text().splitlines()) if "error" not in answer}


def _line(name: str, errors: list[float], goal: tuple[float, float, float] | None) -> str:
    sizes = np.abs(errors)
    found = np.median(sizes), np.percentile(sizes, 95), sizes.max()
    text = f"{name:18}{len(errors):6}" + "".join(f"{value:10.3%}" for value in found)
    if goal is None:
        return text
    missed = [label for label, value, most in zip(("median", "p95", "worst"), found, goal, strict=True) if value > most]
    allowed = " / ".join("-" if most >= 1 else f"{most:.2%}" for most in goal)
    return f"{text}   goal {allowed}  {'MISSED: ' + ', '.join(missed) if missed else 'met'}"


def summary(table: str, found: list[Outcome], worst: int) -> str:
    """The table of errors, failures, verdicts and the worst rows of one table."""
    lines = [f"{table}: {len(found)} runs", f"{'':18}{'runs':>6}{'median':>10}{'p95':>10}{'worst':>10}"]
    failed = [o for o in found if "error" in o.answer]
    fitting = [o for o in found if o not in failed and o.recording.fits]
    goals = GOALS[table]
    for figure in goals:
        if figure == "phases":
            continue
        pairs = [(error, o) for o in fitting if (error := o.error(figure)) is not None]
        if pairs:
            lines.append(_line(figure, [error for error, _ in pairs], goals[figure]))
    phases = [o.phase_errors() for o in fitting]
    for key in dict.fromkeys(key for one in phases for key in one):
        lines.append(_line(key, [one[key] for one in phases if key in one], goals.get("phases")))
    counts = [e for o in fitting if (e := o.error("events")) is not None]
    if counts:
        lines.append(_line("events", counts, None))
    lines += _verdicts(found)
    lines += [f"failed: {o.recording}: {o.answer['error'][:300]}" for o in failed[:worst]]
    if failed:
        lines.append(f"{len(failed)} failed")
    figure = next(iter(goals))
    ranked = sorted(fitting, key=lambda o: -abs(o.error(figure) or 0))
    lines += [f"  {_short(o, figure)}" for o in ranked[:worst]]
    return "\n".join(lines)


def _short(outcome: Outcome, figure: str) -> str:
    others = " ".join(f"{name} {outcome.error(name) or 0:+.3%}" for name in (figure, "peak_reserved", "events"))
    phases = " ".join(f"{key}{error:+.2%}" for key, error in outcome.phase_errors().items() if abs(error) > 5e-4)
    return f"{others}  {outcome.recording} | {phases}"


def _verdicts(found: list[Outcome]) -> list[str]:
    told = [o for o in found if "verdict" in o.answer and "verdict" in o.recording.row]
    wrong = [o for o in told if (o.answer["verdict"] == "oom") != (o.recording.row["verdict"] == "oom")]
    lines = [f"verdicts: {len(told) - len(wrong)} of {len(told)} right"] if told else []
    return lines + [f"  said {o.answer['verdict']}: {o.recording}" for o in wrong[:20]]


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, list[Recording]]]:
    for table in options.tables or TABLES:
        path = Path(table)
        name = options.kind if path.suffix else table
        rows = [r for r in recordings(name, path if path.suffix else None) if _matches(r, options.where)]
        if options.sample and options.sample < len(rows):
            rows = random.Random(options.seed).sample(rows, options.sample)
        yield name, rows


def _matches(recording: Recording, where: list[str]) -> bool:
    return all(
        str(recording.case.get(key, recording.row.get(key))) == value
        for key, _, value in (w.partition("=") for w in where)
    )


def main() -> None:
    """Run the chosen recordings through `estimate` and print the errors."""
    if sys.argv[1:2] and sys.argv[1] in MODULES:
        importlib.import_module(f"tests.accuracy.{sys.argv[1]}").main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--kind", default="single", help="what kind of table a path is")
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sample", type=int, default=0, help="so many rows, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=Path)
    parser.add_argument("--worst", type=int, default=10)
    options = parser.parse_args()
    for name, rows in _chosen(options):
        started = time.perf_counter()
        found = list(outcomes(rows, options.jobs, options.results))
        print(summary(name, found, options.worst) if found else f"{name}: no rows")
        print(f"{time.perf_counter() - started:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
