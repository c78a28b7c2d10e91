"""The same events at another micro-batch: a trace whose allocations follow straight lines through what was seen.

Nearly every tensor of a training step either has a dimension for the micro-batch or does not know it, so that its bytes
are linear in it. Two captured steps show by how much each allocation grows; of one step alone those grow whose bytes
are multiples of its micro-batch, which a prime that divides no size of the model tells apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from traces.model import Column, Events, Op, RankEvents, Trace

#: Micro-batches to begin with.
PRIMES: Final = (7, 11, 13, 17, 19, 23, 31, 47, 67, 97, 131, 193, 257, 383, 509, 769, 1021, 2053)
#: Categories in which bytes may follow the micro-batch.
FOLLOWING: Final = frozenset({"activation", "input", "temporary", "communication", "unknown"})
#: Numbers of a configuration below this are no sizes of tensors.
_SIZE: Final = 64

Growth = npt.NDArray[np.float64]


def prime_for(sizes: Sequence[int], near: int = 0) -> int:
    """A micro-batch of `near` or more, if there is one, that divides none of these sizes."""
    primes = [prime for prime in PRIMES if prime >= near] or [PRIMES[-1]]
    return next((prime for prime in primes if all(size % prime for size in sizes)), primes[0])


def sizes_in(document: Mapping[str, Any]) -> list[int]:
    """The numbers of a model's configuration that may be sizes of tensors, those of its parts too."""
    found = []
    for value in document.values():
        if isinstance(value, Mapping):
            found += sizes_in(value)
        elif isinstance(value, int) and value >= _SIZE:
            found.append(value)
    return found


@dataclass(frozen=True)
class Line:
    """A trace at a micro-batch, and for each event of each rank the bytes that a sample more adds to it, by column."""

    trace: Trace
    batch: int
    growth: tuple[Mapping[str, Growth], ...]

    @classmethod
    def of(cls, trace: Trace, batch: int) -> Line:
        """The line of one trace: what is a multiple of its micro-batch is proportional to it."""
        return cls(trace, batch, tuple(_proportional(entry.events, batch) for entry in trace.ranks))

    @classmethod
    def through(cls, trace: Trace, batch: int, other: Trace, other_batch: int) -> Line:
        """The line from one trace through another at another micro-batch, of which allocations are found by name.

        Where one has more allocations of a name than the other they are taken to be as in `of`.
        """
        if len(trace.ranks) != len(other.ranks):
            return cls.of(trace, batch)
        pairs = zip(trace.ranks, other.ranks, strict=True)
        growth = (_matched(one.events, two.events, batch, batch - other_batch) for one, two in pairs)
        return cls(trace, batch, tuple(growth))

    def at(self, batch: int) -> Trace:
        """The trace with the sizes of another micro-batch."""
        pairs = zip(self.trace.ranks, self.growth, strict=True)
        return replace(self.trace, ranks=tuple(self._grown(entry, growth, batch) for entry, growth in pairs))

    def _grown(self, entry: RankEvents, growth: Mapping[str, Growth], batch: int) -> RankEvents:
        columns: dict[str, Column] = {}
        for name, added in growth.items():
            size = entry.events.ints(name)
            grown = np.rint(size + (batch - self.batch) * added).astype(np.int64)
            columns[name] = np.maximum(grown, np.minimum(size, 1))
        return replace(entry, events=entry.events.with_columns(**columns))


def _proportional(events: Events, batch: int) -> dict[str, Growth]:
    """What a sample more adds to every column of bytes, where those are proportional to the micro-batch."""
    categories = events.strings("category")
    following = np.asarray([name in FOLLOWING for name in categories.table] + [True])[categories.codes]
    follows = (events.op == Op.ALLOC) & following
    sizes = {name: events.ints(name) for name in ("bytes", "gpu_bytes") if name in events.columns}
    return {name: np.where(follows & (size % batch == 0), size / batch, 0.0) for name, size in sizes.items()}


def _matched(events: Events, other: Events, batch: int, distance: int) -> dict[str, Growth]:
    growth = _proportional(events, batch)
    rows, codes = _allocations(events, events.strings("name").table)
    others, other_codes = _allocations(other, events.strings("name").table)
    count = len(events.strings("name").table) + 1
    same = np.bincount(codes, minlength=count) == np.bincount(other_codes, minlength=count)
    rows, others = rows[same[codes]], others[same[other_codes]]
    for name, added in growth.items():
        added[rows] = (events.ints(name)[rows] - other.ints(name)[others]) / distance
    return growth


def _allocations(events: Events, table: tuple[str, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The places of allocations, those of one name together in their order, and their names' places in `table`.

    Allocations of other names are left out; those without a name come last.
    """
    names = events.strings("name")
    known = {text: code for code, text in enumerate(table)}
    codes = np.asarray([known.get(text, -1) for text in names.table] + [len(table)], dtype=np.int64)[names.codes]
    rows = np.flatnonzero((events.op == Op.ALLOC) & (codes >= 0))
    rows = rows[np.argsort(codes[rows], kind="stable")]
    return rows, codes[rows]
