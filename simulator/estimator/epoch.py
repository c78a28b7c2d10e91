"""The batches of an epoch: samples of many lengths, each batch padded to its longest, and the peaks that they have.

Not every batch is run. Of the lengths that batches are padded to, at most `POINTS` are, in one training run in a random
order; between two of them peaks are taken as linear in the length, as activations nearly are. The longest is run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from graph.case import KEYS, Case
from traces.errors import ConfigError
from traces.files import read_bytes
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.engine.result import RankResult

Int64Array = npt.NDArray[np.int64]
#: Lengths that are run.
POINTS: Final = 24


@dataclass(frozen=True)
class Epoch:
    """Padded lengths of the batches of an epoch, in its order, with the samples of each (numbers from 0), and how many
    samples were longer than `seq`, to which they are cut."""

    lengths: Int64Array
    samples: tuple[tuple[int, ...], ...]
    cut: int

    def case(self, case: Case) -> Case:
        """The case that runs batches of an epoch: one of the median length, then each of `POINTS` lengths.

        ConfigError for a case that says itself what is run.
        """
        for name in ("lengths", "steps"):
            if getattr(case, name) != KEYS[name].default:
                raise ConfigError(f"key '{name}': not with the samples of a data set, whose batches are run")
        known = np.unique(self.lengths)
        if len(known) > POINTS:
            known = np.unique(np.quantile(self.lengths, np.linspace(0, 1, POINTS), method="nearest"))
        order = random.Random(0).sample(known.tolist(), len(known))
        median = int(np.quantile(self.lengths, 0.5, method="nearest"))
        lengths = [length for length in (median, *order) for _ in range(case.accum)]
        rest = {name: value for name, value in case.document().items() if name != "seq"}
        return Case.of({**rest, "lengths": lengths})


@dataclass(frozen=True)
class Peaks:
    """Peaks of the batches of an epoch in allocated bytes: the largest, of batch `worst` (from 0), which has so many
    tokens in each of its rows and these samples; of 99 and of 50 of 100 batches at most. `run`: lengths that were run.
    """

    batches: int
    largest: int
    worst: int
    tokens: int
    samples: tuple[int, ...]
    p99: int
    median: int
    run: int

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "batches": self.batches,
            "peak_allocated": {"max": self.largest, "p99": self.p99, "median": self.median},
            "worst_batch": {"number": self.worst, "tokens": self.tokens, "samples": list(self.samples)},
            "lengths_run": self.run,
        }


def read_lengths(path: str) -> list[int]:
    """The lengths of a file: a whole number of tokens a line (of more columns the last; empty lines are left out).

    Raises TraceError where it cannot be read, ConfigError for anything else in it.
    """
    found = []
    for number, line in enumerate(read_bytes(path).decode("utf-8", errors="replace").splitlines(), 1):
        words = line.replace(",", " ").split()
        if words and not (words[-1].isdecimal() and int(words[-1]) > 0):
            raise ConfigError(f"{path_text(path)}, line {number}: {line.strip()[:40]!r} is no length in tokens")
        found += [int(words[-1])] if words else []
    return found


def epoch_of(lengths: Sequence[int], batch: int, seq: int, seed: int = 0) -> Epoch:
    """The batches that a DataLoader with shuffle makes of samples with these lengths (tokens), cut to `seq`.

    The last ones that fill no batch are left out. ConfigError where there are fewer samples than a batch has.
    """
    if len(lengths) < batch:
        raise ConfigError(f"{len(lengths)} samples are less than a batch, which has {batch}")
    order = random.Random(seed).sample(range(len(lengths)), len(lengths))
    whole = np.minimum(np.asarray(lengths, np.int64), seq)
    groups = np.asarray(order[: len(order) // batch * batch]).reshape(-1, batch)
    cut = int((np.asarray(lengths) > seq).sum())
    return Epoch(whole[groups].max(axis=1), tuple(map(tuple, groups.tolist())), cut)


def peaks_of(epoch: Epoch, case: Case, rank: RankResult) -> Peaks | None:
    """The peaks of all batches, from the replay of a run of `epoch.case(case)`; None where it ran out of memory."""
    if rank.oom is not None:
        return None
    run = case.lengths[case.accum :: case.accum]  # in the first step the optimizer has no states yet
    peaks_run = rank.step_peaks
    known = {length: peaks_run[number] for number, length in enumerate(run, 1)}
    points = sorted(known)
    peaks = np.interp(epoch.lengths, points, [known[one] for one in points]).astype(np.int64)
    worst = int(peaks.argmax())
    return Peaks(
        batches=len(peaks),
        largest=int(peaks[worst]),
        worst=worst,
        tokens=int(epoch.lengths[worst]),
        samples=epoch.samples[worst],
        p99=int(np.quantile(peaks, 0.99, method="higher")),
        median=int(np.quantile(peaks, 0.5, method="higher")),
        run=len(points),
    )
