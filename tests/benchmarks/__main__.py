"""Prints how fast the replay is, each figure beside its goal.

    python -m tests.benchmarks [--only NAME]... [--cold] [--events N] [--rounds N] [--json]

`--only estimate` measures `estimate` beside torch's own MemTracker, `--only ranks` its 1,024 ranks beside 8; both need
torch and transformers, as does `--only programs`, which measures `record`. `--only page` measures pages in Chromium.

Times of kernels and replays are CPU time of this process, fastest of several rounds; times of whole commands are wall
time; the first compilation shows both and is judged by CPU time. On a machine that others use too, compare two runs
by their ratios to the calibration, a small fixed loop.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from typing import Any, Final

import numba
import numpy as np

from tests.benchmarks import page, processes, timing, workloads
from tests.benchmarks.figures import GOAL_NS, REAL_NS, REAL_RANGE, Figure, Section, as_document, as_text, number
from tests.benchmarks.workloads import Workload

EVENTS: Final = 1_000_000
ROUNDS: Final = 5
SETTINGS: Final = {"default": "", "expandable": "expandable_segments:True"}
RELEASES: Final = ("2.11", "2.13")
FREE_BLOCKS: Final = (10, 1_000, 100_000)
FEW: Final = 100  # blocks whose records stay in the caches, however long the list is
REFERENCE: Final = (
    f"real allocator (C++): {REAL_RANGE[0]}-{REAL_RANGE[1]} ns a pair, as measured with the recordings; "
    f"ratios below are to {REAL_NS} ns"
)


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    events: int
    rounds: int


@cache
def both(events: int) -> tuple[Workload, ...]:
    """The two workloads like recordings."""
    return workloads.transformer(events), workloads.uniform(events)


def _pair(name: str, workload: Workload, seconds: float, *, goal: float | None = None, recorded: bool = True) -> Figure:
    """ns for a pair, and events per second; for a workload like a recording, the ratio to the real allocator."""
    ns = seconds / max(workload.pairs, 1) * 1e9
    timed = len(workload.events) - workload.untimed
    details = {"M events/s": timed / max(seconds, 1e-9) / 1e6}
    if recorded:
        details["x the real allocator"] = REAL_NS / max(ns, 1e-9)
    return Figure(name, ns, "ns a pair", goal, details)


def kernels(options: Options) -> list[Figure]:
    """The kernels alone."""
    return [
        _pair(
            f"{workload.name}, {label}, {release}",
            workload,
            timing.kernel_seconds(workload, conf, release, options.rounds),
            goal=GOAL_NS,
        )
        for workload in both(options.events)
        for label, conf in SETTINGS.items()
        for release in RELEASES
    ]


def whole(options: Options) -> list[Figure]:
    """Whole replays."""
    return [
        _pair(
            f"{workload.name}, {label}, {release}",
            workload,
            timing.replay_seconds(workload.trace(conf, release), options.rounds),
        )
        for workload in both(options.events)
        for label, conf in SETTINGS.items()
        for release in RELEASES
    ]


def free_lists(options: Options) -> list[Figure]:
    """Long free lists, and how the cost grows with them; as fast as log n is the most that is wanted."""
    few = f"{FEW} of them in use"
    cases: list[tuple[int, int | None, str]] = [(FREE_BLOCKS[0], None, "all in use")]
    cases += [(blocks, used, label) for used, label in ((None, "all in use"), (FEW, few)) for blocks in FREE_BLOCKS[1:]]
    figures, growth = [], []
    for blocks, used, label in cases:
        workload = workloads.free_list(blocks, options.events, used=used)
        seconds = timing.kernel_seconds(workload, "", "2.13", options.rounds)
        figures.append(_pair(f"{blocks:,} free blocks, {label}", workload, seconds, recorded=False))
        if blocks != FREE_BLOCKS[0]:
            ratio = figures[-1].value / max(figures[0].value, 1e-9)
            name = f"{blocks:,} against {FREE_BLOCKS[0]}, {label}"
            growth.append(Figure(name, ratio, "times", log(blocks) / log(FREE_BLOCKS[0])))
    return figures + growth


def memory(options: Options) -> list[Figure]:
    """Bytes of the arrays."""
    figures = []
    for workload in both(options.events):
        events = len(workload.events)
        figures.append(Figure(f"{workload.name}, trace", timing.column_bytes(workload) / events, "bytes an event"))
        added = timing.replay_bytes(workload, "", "2.13")
        figures.append(Figure(f"{workload.name}, replay", added / events, "bytes an event"))
    return figures


#: Name, title and work of every part.
PARTS: Final[dict[str, tuple[str, Callable[[Options], list[Figure]]]]] = {
    "kernels": ("Kernels alone: CPU of a malloc and its free, {events:,} events", kernels),
    "replay": ("Whole replay() with its analyses: CPU of a malloc and its free, {events:,} events", whole),
    "free-lists": ("Free lists: CPU of a malloc and its free, kernels alone, {events:,} events", free_lists),
    "memory": ("Memory: arrays of a trace, and what the replay adds, {events:,} events", memory),
    "file": (
        "Columnar file in a fresh process: transformer training, {many:,} events",
        lambda options: processes.large_file(10 * options.events, min(options.rounds, 2)),
    ),
    "stress": (
        "A thousand replays by two worker processes: transformer training, {few:,} events",
        lambda options: processes.thousand_replays(max(options.events // 10, 1)),
    ),
    "start-up": ("Start-up: wall time of fresh processes", lambda options: processes.start_up(options.rounds)),
    "cold": (
        "First compilation (one thread): empty cache, beyond the same with a full one",
        lambda _: processes.cold_start(),
    ),
    "estimate": (
        f"`estimate` beside torch's MemTracker in fresh processes, beyond imports: {processes.CASE_NAME}",
        lambda options: processes.beside_mem_tracker(min(options.rounds, 3)),
    ),
    "ranks": (
        "1,024 ranks beside 8: `estimate` of Llama 2 70B in fresh processes",
        lambda options: processes.by_ranks(min(options.rounds, 2)),
    ),
    "programs": (
        "`record` of programs with large models whose weights are not there, in fresh processes",
        lambda options: processes.recorded_programs(),
    ),
    "page": (
        "The page in Chromium, median wall time until it is drawn anew: {events:,} events and twice as many",
        lambda options: page.answers(options.events),
    ),
}
#: Parts that run only where they are asked for.
ASKED: Final = ("cold", "estimate", "ranks", "programs", "page")


def about(options: Options) -> dict[str, Any]:
    """What was measured where."""
    return {
        "events": options.events,
        "rounds": options.rounds,
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "real_allocator_ns": list(REAL_RANGE),
        "compared_with_ns": REAL_NS,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description="Measure the speed of the replay.")
    parser.add_argument("--only", metavar="NAME", action="append", choices=PARTS, help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--cold", action="store_true", help="also compile all kernels with an empty cache")
    parser.add_argument("--events", type=_positive, default=EVENTS, help="events of a workload; the file has 10 times")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="rounds, of which the fastest counts")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    chosen = _options(arguments)
    options = Options(chosen.events, chosen.rounds)
    only = set(chosen.only or [name for name in PARTS if name not in ASKED]) | ({"cold"} if chosen.cold else set())
    names = [name for name in PARTS if name in only]
    if not chosen.json:
        print(f"Python {platform.python_version()}, numba {numba.__version__}; fastest of {options.rounds} rounds")
        print(f"calibration: a fixed loop takes {number(timing.calibrate())} ns of CPU a step now")
        print(REFERENCE)
    sections = []
    for name in names:
        title, work = PARTS[name]
        title = title.format(events=options.events, many=10 * options.events, few=options.events // 10)
        section = Section(name, title, timing.calibrate(), work(options))
        sections.append(section)
        if not chosen.json:
            print(f"\n{as_text(section)}", flush=True)
    if chosen.json:
        json.dump(as_document(sections, about(options)), sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
