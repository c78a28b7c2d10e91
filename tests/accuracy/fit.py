"""The first plan of `fit` for recorded cases on GPUs that are too small: whether it fits, what it costs, how long it
takes to find.

    python -m tests.accuracy fit [--sample N] [--seed N] [--where KEY=VALUE]... [--layers N] [--results FILE]
                                 [--seconds N] [--jobs N] [--most N] [--record]

Rows of the recorded tables are drawn at random, each with a GPU that has 10 to 60 % less than the run reserved. With
`--layers` their models have no more layers than that, and the memory is taken from what their estimates reserve. Every
case is searched by a new process, and its seconds are those of all processors together, imports included. Finished
cases are kept in `--results` and not run again.

That the first plan fits is held against a row that was recorded with those settings, where there is one, and else
against a new estimate of the changed case; with `--record` against `record` of the script that is written for it, on
the GPU that is too small. That nothing cheaper does is held against all other combinations of the same changes, up to
five at once, that are foreseen to be faster than the first plan (their single times added up), `--most` of them, the
fastest first: each is captured and replayed, whatever memory it should need, by the allocator's default settings and
with expandable segments.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from graph.case import Case
from graph.hardware.gpus import gpu
from graph.models import lookup
from simulator.estimator.estimate import captured, estimate
from simulator.estimator.jobs import local_pool
from simulator.fit.changes import changed, options_for
from simulator.fit.fit import PRELOADED, fit
from simulator.fit.measure import measured
from simulator.fit.plans import Judged, Plan, Plans
from simulator.launch.configuration import absent
from tests.accuracy.recordings import Recording, recordings
from tests.accuracy.scripts import run

TABLES: Final = ("single", "multi", "offload")
#: Shares by which a GPU is too small.
SMALLER: Final = (0.1, 0.6)
MOST_CHANGES: Final = 5
#: Goals: processor seconds, on two cores a minute, and the time of the first plan beside that of the best.
SECONDS: Final = 110
WITHIN: Final = 1.05
#: Keys that only say where a case runs.
_PLACE: Final = ("memory", "release", "gpu", "cudnn_sdp")
#: Keys of a configuration that count layers.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Row:
    """What `fit` found for a case: options of the first plan (empty: none), its time as a share and what it costs, how
    it is known to fit, and processor seconds; how many others were tried and how many were not, and the least time of
    those that fit."""

    case: Mapping[str, Any]
    plan: str = ""
    time: float = 1.0
    costs: str = ""
    proof: str = ""
    seconds: float = 0.0
    captures: int = 0
    unfinished: bool = False
    tried: int = 0
    left: int = 0
    best: float | None = None
    best_plan: str = ""

    @property
    def ratio(self) -> float:
        """The time of the first plan beside the least that is known."""
        return self.time / min(self.time, self.best or self.time)

    def __str__(self) -> str:
        keys = " ".join(f"{name}={value}" for name, value in self.case.items())
        best = f", best {self.best:.3f} {self.best_plan}" if self.ratio > 1 else ""
        how = f"{self.captures} tried{' (time was up)' if self.unfinished else ''}, {self.seconds:.0f} s"
        plan = f"{self.plan or 'no plan'} ({self.time:.3f}, {self.costs}): {self.proof}"
        return f"{keys}\n    {plan}; {how}; {self.tried} others, {self.left} left{best}"


def drawn(sample: int, seed: int, where: Sequence[str], layers: int = 0, folder: Path | None = None) -> list[Case]:
    """Recorded cases that fitted, on GPUs that are too small for them; models of few `layers` are put in `folder`."""
    chosen = random.Random(seed)
    rows = [row for table in TABLES for row in recordings(table) if row.fits and _matches(row, where)]
    found = []
    for row in chosen.sample(rows, len(rows))[:sample]:
        less = 1 - chosen.uniform(*SMALLER)
        keys = {**row.case}
        reserved = row.figure("peak_reserved") or 0
        if layers and folder is not None:
            keys = {**keys, "model": _thin(str(row.case["model"]), layers, folder), "memory": None}
            reserved = max(rank.peak_reserved for rank in estimate(keys, context=0, analyse=False).result.ranks)
        found.append(Case.of({**keys, "memory": int(reserved * less)}))
    return found


def _thin(model: str, layers: int, folder: Path) -> str:
    """The folder of a model's configuration with no more layers than that."""
    document = dict(lookup.configuration(model).document)
    document |= {key: min(layers, document[key]) for key in _LAYERS if key in document}
    (folder / model).mkdir(exist_ok=True)
    (folder / model / "config.json").write_text(json.dumps(document))
    return str(folder / model)


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


def proof_of(case: Case, plan: Plan, rows: Mapping[str, list[Recording]], by_record: bool) -> str:
    """How it is known whether a plan fits: its script run by `record`, or a recorded run with its settings, or an
    estimate of the changed case."""
    made = changed(case, plan.keys)
    assert made is not None
    if by_record and "train.py" not in absent(made):
        return _of_record(made)
    for row in rows.get(_key(made), ()):
        if row.case["gpu"] == made.gpu and row.fits:
            room = made.memory if isinstance(made.memory, int) else gpu(made.gpu).total_bytes
            return "recorded, fits" if (row.figure("peak_allocated") or 0) <= room else "TOO LARGE"
    again = estimate(made, context=0, analyse=False)
    return "estimated, fits" if again.verdict != "oom" else "DOES NOT FIT"


def _of_record(case: Case) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        if not Path(case.model).is_dir():  # the script takes the configuration from a folder, not from the Hub
            case = Case.of({**case.document(), "model": _thin(case.model, sys.maxsize, Path(scratch))})
        done = run(case, Path(scratch), "--memory", str(case.memory or gpu(case.gpu).total_bytes))
    if done.returncode and "out of memory" in (done.stdout + done.stderr).lower():  # the exit code is the script's
        return "OUT OF MEMORY in record"
    return "record, fits" if done.returncode == 0 else f"NOT RUN: {done.stderr.strip().splitlines()[-1:]}"


def others(case: Case, found: Plans, first: Plan, most: int, jobs: int) -> tuple[int, int, float | None, str]:
    """How many combinations were tried, of those up to the first plan's level that should be faster than it, how many
    were left, and the least time that fits, with its options."""
    parts = _parts(case, found, first)
    known = _known(found)
    with local_pool(jobs, PRELOADED) as pool:

        def tried(several: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float | None, bool]]:
            new = [keys for keys in several if str(keys) not in known and changed(case, keys) is not None]
            known.update(zip(map(str, new), pool.map(partial(_judge, case), new), strict=True))
            return [(keys, *_share(known.get(str(keys)), found)) for keys in several]

        alone = tried([keys for values in parts.values() for keys in values])
        times = {str(keys): share for keys, share, _ in alone if share}
        faster = [one for one in _choices(parts, times) if 1 + one[0] < (first.time or 1.0)]
        several = [keys for _, keys in sorted(faster, key=lambda pair: pair[0])]
        done = alone + tried(several[:most])
    fitting = [(share, _words(keys)) for keys, share, fits in done if fits and share]
    return len(done), len(several[most:]), *min(fitting, default=(None, ""))


def _known(found: Plans) -> dict[str, Judged | None]:
    """What the search knows already by changed keys: with expandable segments where these made it fit."""
    known: dict[str, Judged | None] = {}
    for plan in found.tried:
        keys = {name: value for name, value in plan.keys.items() if name != "alloc_conf"}
        if plan.judged.verdict == "fits" or str(keys) not in known:
            known[str(keys)] = plan.judged
    return known


def _words(keys: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in keys.items())


def _share(judged: Judged | None, found: Plans) -> tuple[float | None, bool]:
    whole = None if found.whole is None else found.whole.ns
    if judged is None or judged.ns is None or not whole:
        return None, False
    return judged.ns / whole, judged.verdict == "fits"


def _judge(case: Case, keys: Mapping[str, Any]) -> Judged | None:
    """What comes of the changed case; where it does not fit, of the same with expandable segments."""
    made = changed(case, keys)
    assert made is not None
    judged = measured(made, 0, _graph_of)
    if judged is not None and judged.verdict != "fits" and not made.alloc_conf:
        judged = measured(replace(made, alloc_conf="expandable_segments:True"), 0, _graph_of)
    return judged


def _graph_of(case: Case, method: Any) -> Any:
    return captured(case, None, method)


def _parts(case: Case, found: Plans, first: Plan) -> dict[str, list[dict[str, Any]]]:
    """What may be set up to the first plan's level, by part; settings of the allocator are tried with each."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for change, values in options_for(case, found.needs):
        if change.level <= first.level and not change.alone and change.part != "allocator":
            parts.setdefault(change.part, []).extend(map(dict, values))
    return parts


def _choices(
    parts: Mapping[str, list[dict[str, Any]]], times: Mapping[str, float]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Combinations of what runs alone, each with the time that is foreseen for it."""
    for picked in product(*([None, *(one for one in values if str(one) in times)] for values in parts.values())):
        choice = [one for one in picked if one is not None]
        if 1 < len(choice) <= MOST_CHANGES:
            yield sum(times[str(one)] - 1 for one in choice), {k: v for one in choice for k, v in one.items()}


def row_of(case: Case, options: argparse.Namespace) -> Row:
    """What comes of one case; in a process of its own, whose time is that of the search."""
    plans = fit(case, context=0, jobs=options.jobs, seconds=options.seconds).plans
    first = next(iter(plans.fitting), None)
    row = Row(case.document(), seconds=_processor_seconds(), captures=len(plans.tried), unfinished=bool(plans.untried))
    if first is None:
        fits = plans.whole is not None and plans.whole.verdict != "oom"
        return Row(**{**asdict(row), "proof": "it fits as it is" if fits else "none fits"})
    made: dict[str, Any] = {"plan": first.options, "time": first.time or 1.0, "costs": first.cost}
    made["proof"] = proof_of(case, first, recorded(), options.record)
    if options.most and first.cost != "hardware":
        made["tried"], made["left"], made["best"], made["best_plan"] = others(
            case, plans, first, options.most, options.jobs
        )
    return Row(**{**asdict(row), **made})


def _processor_seconds() -> float:
    """Of this process, the server of its workers and the workers that are done."""
    own, server = os.times(), multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    theirs = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:15] if server else []
    return own.user + own.system + sum(map(int, theirs)) / os.sysconf("SC_CLK_TCK")


def rows_of(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Row]:
    """What comes of the cases, kept in the file of results as it comes."""
    path: Path | None = options.results
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    known = {str(row["case"]): Row(**row) for row in map(json.loads, lines)}
    for case in cases:
        row = known.get(str(case.document()))
        if row is None:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
                row = alone.submit(row_of, case, options).result()
            if path is not None:
                with path.open("a") as file:
                    print(json.dumps(asdict(row)), file=file)
        yield row


def main(arguments: list[str]) -> None:
    """Print every case with its first plan, and the shares that reach the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        cases = drawn(options.sample, options.seed, options.where, options.layers, Path(scratch))
        for row in rows_of(cases, options):
            rows.append(row)
            print(row, flush=True)
    print(summary(rows))


def summary(rows: Sequence[Row]) -> str:
    """The shares that reach the goals."""
    planned = [row for row in rows if row.plan and row.costs != "hardware"]
    compared = [row.ratio for row in planned if row.tried]
    seconds = [row.seconds for row in rows]
    cheap = sum(ratio <= WITHIN for ratio in compared)
    return "\n".join(
        (
            f"{len(rows)} cases, {len(planned)} with a plan on the same hardware; the first plan fits in "
            f"{sum(row.proof.endswith('fits') for row in planned)}",
            f"within {WITHIN - 1:.0%} of the best that was found: {cheap} of {len(compared)}, "
            f"the worst {max(compared, default=1.0):.3f}",
            f"within {SECONDS} processor seconds: {sum(one < SECONDS for one in seconds)} of {len(rows)}, "
            f"median {median(seconds):.0f}, worst {max(seconds):.0f}",
        )
    )
