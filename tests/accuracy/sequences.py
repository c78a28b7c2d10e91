"""Two traces compared event for event: allocations and frees in order and size.

    python -m tests.accuracy.sequences RECORDED PREDICTED [--from N] [--show N]

Sizes are compared as the allocator rounds them, to 512 bytes. The order inside one uninterrupted run of frees is not
compared: autocast drops its cached weights in the order of their addresses.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.snapshots.reader import read
from tests.accuracy.diffing import Edit, edits
from traces.model import Op, Trace

Token = tuple[str, int]


@dataclass(frozen=True)
class Sequences:
    """Tokens of one trace; `place[i]` is the event of the trace behind token `i`, `name[i]` what it is called there."""

    tokens: tuple[Token, ...]
    place: tuple[int, ...]
    name: tuple[str, ...]


def tokens(trace: Trace, rank: int = 0) -> Sequences:
    """The allocations and frees of a rank, sizes rounded to 512 bytes, every run of frees sorted by size."""
    events = trace.ranks[rank].events
    ids, sizes, names = events.ints("id"), events.ints("bytes"), events.strings("name")
    size_of: dict[int, tuple[int, str]] = {}
    out: list[tuple[str, int, int, str]] = []
    frees: list[tuple[str, int, int, str]] = []
    for index, op in enumerate(events.op.tolist()):
        if op == Op.ALLOC:
            size = -(-int(sizes[index]) // 512) * 512
            if not size:
                continue
            out += sorted(frees, key=lambda free: free[1])
            frees.clear()
            size_of[int(ids[index])] = size, names.get(index) or ""
            out.append(("+", size, index, names.get(index) or ""))
        elif op == Op.FREE and int(ids[index]) in size_of:
            size, name = size_of[int(ids[index])]
            frees.append(("-", size, index, name))
    out += sorted(frees, key=lambda free: free[1])
    return Sequences(
        tuple((sign, size) for sign, size, _, _ in out),
        tuple(place for _, _, place, _ in out),
        tuple(n for *_, n in out),
    )


@dataclass(frozen=True)
class Difference:
    """What remains between two traces: `edits`, and how many of the recorded tokens that is."""

    recorded: Sequences
    predicted: Sequences
    edits: tuple[Edit, ...]

    @property
    def count(self) -> int:
        """Tokens that only one of the two has."""
        return sum(max(edit.b - edit.a, edit.d - edit.c) for edit in self.edits)

    @property
    def share(self) -> float:
        """`count` as a part of the recorded tokens."""
        return self.count / max(len(self.recorded.tokens), 1)


def compare(recorded: Trace, predicted: Trace, limit: int = 4000, rank: int = 0) -> Difference:
    """The difference of a recording's first rank and entry `rank` of a prediction; ValueError beyond `limit` tokens."""
    one, two = tokens(recorded), tokens(predicted, rank)
    return Difference(one, two, tuple(edits(one.tokens, two.tokens, limit)))


def _text(found: Sequence[Token], names: Sequence[str]) -> str:
    return " ".join(
        f"{sign}{size}[{name[-60:]}]" if name else f"{sign}{size}"
        for (sign, size), name in zip(found, names, strict=True)
    )


def main() -> None:
    """Print the differences, each with what stands before it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded")
    parser.add_argument("predicted")
    parser.add_argument("--show", type=int, default=40)
    options = parser.parse_args()
    found = compare(read(options.recorded), read(options.predicted))
    one, two = found.recorded, found.predicted
    print(f"{len(one.tokens)} recorded, {len(two.tokens)} predicted, {found.count} differ ({found.share:.2%})")
    kinds = Counter((one.tokens[e.a : e.b], two.tokens[e.c : e.d]) for e in found.edits)
    print(f"{len(kinds)} kinds of difference")
    for edit in found.edits[: options.show]:
        near = max(edit.c - 3, 0)
        print(f"@{edit.a}/{edit.c} after {_text(two.tokens[near : edit.c], two.name[near : edit.c])}")
        print(f"    recorded  {_text(one.tokens[edit.a : edit.b], one.name[edit.a : edit.b])}")
        print(f"    predicted {_text(two.tokens[edit.c : edit.d], two.name[edit.c : edit.d])}")
    peak = [np.cumsum([size if sign == "+" else -size for sign, size in s.tokens]).max(initial=0) for s in (one, two)]
    print(f"peak of the rounded bytes: recorded {peak[0]}, predicted {peak[1]}")


if __name__ == "__main__":
    main()
