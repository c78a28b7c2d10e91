"""The first plan of `fit` for recorded cases on GPUs that are too small: whether it fits, what it costs, how long it
takes to find.

    python -m tests.accuracy fit [--sample N] [--seed N] [--where KEY=VALUE]... [--jobs N] [--most N] [--no-others]

Rows of the recorded tables are drawn at random, each with a GPU that has 10 to 60 % less than the run reserved. That
the first plan fits is held against a row that was recorded with those settings, where there is one, and else against a
new estimate of the changed case. That nothing cheaper does is held against all other combinations of the same changes,
up to five at once, that are foreseen to be faster (their single times added up): each is captured and replayed,
whatever memory it should need, up to `--most`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

from graph.case import Case
from graph.hardware.gpus import gpu
from simulator.estimator.estimate import captured, estimate
from simulator.fit.changes import changed, options_for
from simulator.fit.fit import Fitted, fit
from simulator.fit.measure import measured
from simulator.fit.plans import Judged, Plan
from tests.accuracy.recordings import Recording, recordings

TABLES: Final = ("single", "multi", "offload")
#: Shares by which a GPU is too small.
SMALLER: Final = (0.1, 0.6)
MOST_CHANGES: Final = 5
#: Goals: seconds, and the time of the first plan beside that of the best.
SECONDS: Final = 60
WITHIN: Final = 1.05
#: Keys that only say where a case runs.
_PLACE: Final = ("memory", "release", "gpu", "cudnn_sdp")


@dataclass(frozen=True)
class Row:
    """A case that does not fit, what `fit` found and in how many seconds; how the first plan is known to fit, how many
    other combinations were tried, and the least time of those that fit."""

    case: Case
    found: Fitted
    seconds: float
    proof: str
    tried: int = 0
    best: float | None = None

    @property
    def first(self) -> Plan | None:
        """The first plan."""
        return next(iter(self.found.plans.fitting), None)

    @property
    def cheap(self) -> bool:
        """Whether nothing is cheaper by more than is allowed."""
        time = None if self.first is None else self.first.time
        return self.best is None or time is None or time <= WITHIN * self.best

    def __str__(self) -> str:
        what = "no plan" if self.first is None else f"{self.first.options} ({self.first.time or 0:.3f})"
        best = "" if self.best is None else f", best {self.best:.3f}"
        keys = " ".join(f"{name}={value}" for name, value in self.case.document().items())
        return f"{keys}\n    {what}: {self.proof}, {self.seconds:.0f} s; {self.tried} others tried{best}"


def drawn(sample: int, seed: int, where: Sequence[str]) -> list[Case]:
    """Recorded cases that fitted, on GPUs that are too small for them."""
    chosen = random.Random(seed)
    rows = [row for table in TABLES for row in recordings(table) if row.fits and _matches(row, where)]
    found = []
    for row in chosen.sample(rows, min(sample, len(rows))):
        reserved = row.figure("peak_reserved") or 0
        found.append(Case.of({**row.case, "memory": int(reserved * (1 - chosen.uniform(*SMALLER)))}))
    return found


def _matches(row: Recording, where: Sequence[str]) -> bool:
    return all(str(row.case.get(key)) == value for key, _, value in (one.partition("=") for one in where))


def recorded() -> dict[str, list[Recording]]:
    """Recorded runs by the keys of their cases that say what runs."""
    found: dict[str, list[Recording]] = {}
    for table in TABLES:
        for row in recordings(table):
            found.setdefault(_key(Case.of(row.case)), []).append(row)
    return found


def _key(case: Case) -> str:
    return str({name: value for name, value in case.whole().items() if name not in _PLACE})


def proof_of(case: Case, plan: Plan, rows: Mapping[str, list[Recording]]) -> str:
    """How it is known whether a plan fits: a recorded run with its settings, or an estimate of the changed case."""
    made = changed(case, plan.keys)
    assert made is not None
    for row in rows.get(_key(made), ()):
        if row.case["gpu"] == made.gpu and row.fits:
            room = made.memory if isinstance(made.memory, int) else gpu(made.gpu).total_bytes
            return "recorded, fits" if (row.figure("peak_allocated") or 0) <= room else "TOO LARGE"
    again = estimate(made, context=0, analyse=False)
    return "estimated, fits" if again.verdict != "oom" else "DOES NOT FIT"


def others(case: Case, found: Fitted, most: int, jobs: int) -> tuple[int, float | None]:
    """How many combinations that should be faster than the first plan were tried, and the least time that fits."""
    first = found.plans.fitting[0]
    choices = sorted(_faster(case, found, first), key=lambda pair: pair[0])[:most]
    cases = [made for _, keys in choices if (made := changed(case, keys)) is not None]
    with ProcessPoolExecutor(jobs) as pool:
        judged = list(pool.map(_judge, cases))
    ours = found.whole.ns or 1.0
    times = [one.ns / ours for one in judged if one is not None and one.ns is not None and one.verdict == "fits"]
    return len(cases), min(times, default=None)


def _judge(case: Case) -> Judged | None:
    return measured(case, 0, partial(_graph_of))


def _graph_of(case: Case, method: Any) -> Any:
    return captured(case, None, method)


def _faster(case: Case, found: Fitted, first: Plan) -> Iterator[tuple[float, dict[str, Any]]]:
    """Combinations of the changes up to the first plan's level whose single times together are below its own."""
    singles = {str(dict(one.keys)): one.time for one in found.plans.tried if len(one.changes) == 1 and one.time}
    parts: dict[str, list[tuple[float, Mapping[str, Any]] | None]] = {}
    for change, values in options_for(case, found.whole.needs or 0):
        if change.level <= first.level and not change.alone:
            offered = [(singles[str(dict(keys))], keys) for keys in values if str(dict(keys)) in singles]
            parts.setdefault(change.part, [None]).extend(offered)
    for picked in product(*parts.values()):
        choice = [one for one in picked if one is not None]
        share = 1.0 + sum(time - 1.0 for time, _ in choice)
        keys = {name: value for _, part in choice for name, value in part.items()}
        if 0 < len(choice) <= MOST_CHANGES and share < (first.time or 1.0) and keys != first.keys:
            yield share, keys


def row_of(case: Case, rows: Mapping[str, list[Recording]], options: argparse.Namespace) -> Row:
    """What comes of one case."""
    started = time.perf_counter()
    found = fit(case, context=0, jobs=options.jobs)
    seconds = time.perf_counter() - started
    if not found.plans.fitting:
        return Row(case, found, seconds, "none fits" if found.whole.verdict == "oom" else "it fits as it is")
    proof = proof_of(case, found.plans.fitting[0], rows)
    tried, best = (0, None) if options.no_others else others(case, found, options.most, options.jobs or 2)
    return Row(case, found, seconds, proof, tried, best)


def main(arguments: list[str]) -> None:
    """Print every case with its first plan, and the shares that reach the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--no-others", action="store_true")
    options = parser.parse_args(arguments)
    known = recorded()
    rows = []
    for case in drawn(options.sample, options.seed, options.where):
        rows.append(row_of(case, known, options))
        print(rows[-1], flush=True)
    planned = [row for row in rows if row.first is not None]
    fitting = sum(row.proof.endswith("fits") for row in planned)
    print(f"{len(rows)} cases, {len(planned)} with a plan; the first plan fits in {fitting}")
    print(f"within {WITHIN - 1:.0%} of the best that was found: {sum(row.cheap for row in planned)} of {len(planned)}")
    print(f"within {SECONDS} s: {sum(row.seconds < SECONDS for row in rows)} of {len(rows)}")
