"""Estimates beside real GPUs: peaks of 263 trainings on an H100 and 148 on an H200, and largest batches of the H100.

    python -m tests.accuracy on_gpu [WORD]... [--jobs N]

(rows whose case has all WORDs, as `gpt2` or `gpu=H200-141GB`.) What was run, and how: tests/data/gpu/README.md. An
estimate has two pairs of peaks: those of the events as recordings have them, whose libraries do nothing, and those
`on_gpu`, with what cuBLAS and cuDNN take there and with addresses as the driver gives them. Both stand beside the
cards'.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.accuracy.recordings import Recording, read_table, recordings
from tests.places import DATA

FOLDER: Final = DATA / "gpu"
FIGURES: Final = ("peak_allocated", "peak_reserved")
#: What cudaMemGetInfo said the card has.
TOTAL: Final = 85_017_493_504


@dataclass(frozen=True)
class Row:
    """A training on a card beside its estimate: its own figures, ours on a GPU, ours where libraries do nothing."""

    recording: Recording
    ours: Mapping[str, int]
    bare: Mapping[str, int]

    def off(self, figure: str, ours: Mapping[str, int]) -> float:
        """Our figure's relative error."""
        theirs = self.recording.figure(figure)
        assert theirs is not None
        return ours[figure] / theirs - 1


def trainings() -> list[Recording]:
    """The trainings, as cases."""
    return list(recordings("single", FOLDER / "training.csv.gz"))


def judged(recording: Recording) -> Row:
    """The estimate of a training."""
    found = _answer(recording.case)
    return Row(recording, found["on_gpu"], {name: found[name] for name in FIGURES})


def _answer(case: Mapping[str, Any]) -> dict[str, Any]:
    from simulator.estimator.estimate import answer

    return answer(dict(case))


def edges() -> Iterator[tuple[dict[str, Any], str]]:
    """Batches near the largest one as cases, and whether they trained."""
    for row in read_table(FOLDER / "edges.csv"):
        case = {name: row[name] for name in ("model", "dtype", "autocast", "attn", "checkpointing")}
        numbers = {"batch": int(row["batch"]), "seq": int(row["seq"]), "steps": 3, "cudnn_sdp": False}
        yield {**case, **numbers, "gpu": "H100-80GB", "memory": TOTAL, "release": "2.11"}, row["verdict"]


def verdict(case: Mapping[str, Any]) -> str:
    """What the estimate says: "oom" or "fits"."""
    return "oom" if _answer(case)["verdict"] == "oom" else "fits"


def summary(card: str, rows: Iterable[Row]) -> str:
    """How many of a card are exact, and how far off the others are."""
    found = list(rows)
    lines = []
    for title, which in (("on a GPU", "ours"), ("as recordings have it, whose libraries do nothing", "bare")):
        lines.append(f"{card}, {title}, {len(found)} trainings:")
        for figure in FIGURES:
            errors = np.abs([row.off(figure, getattr(row, which)) for row in found])
            exact = f"{int((errors == 0).sum())} to the byte"
            p95 = f"95th percentile {np.quantile(errors, 0.95):.2%}"
            lines.append(f"  {figure}: {exact}, median {np.median(errors):.3%}, {p95}, worst {errors.max():.2%}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Estimate the trainings and the batches, and print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy on_gpu", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    chosen = [one for one in trainings() if all(word in str(one) for word in options.words)]
    near = [] if options.words else list(edges())
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(judged, chosen))
        verdicts = list(pool.map(verdict, (case for case, _ in near)))
    for row in rows:
        off = {figure: f"{row.off(figure, row.ours):+.2%}" for figure in FIGURES if row.off(figure, row.ours)}
        if off:
            print(row.recording, off)
    for card in dict.fromkeys(row.recording.case["gpu"] for row in rows):
        print(summary(card, (row for row in rows if row.recording.case["gpu"] == card)))
    for (case, theirs), ours in zip(near, verdicts, strict=True):
        if theirs != ours:
            print(f"{case['model']} {case['dtype']} batch {case['batch']}: {ours} for {theirs}")
    if near:
        right = sum(theirs == ours for (_, theirs), ours in zip(near, verdicts, strict=True))
        print(f"batches up to the largest: {right} of {len(near)} verdicts are the card's")
