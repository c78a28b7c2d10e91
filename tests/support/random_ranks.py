"""Random ranks in simulated time: streams, groups of every shape, deferred frees, waits that may be a deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.support.timed import (
    MIB,
    Case,
    Groups,
    Row,
    alloc,
    busy,
    collective,
    free,
    hold,
    kernel,
    plain,
    record,
    synchronize,
    wait_stream,
)

GROUPS: Groups = {
    "all": [0, 1, 2, 5, 7],  # 7 is missing, 4 is none of them
    "pair": [[0, 1], [2, 4], [5]],
    "cross": [[4, 0], [1, 2]],
    "self": [[0], [1], [2], [4], [5], [9]],
}
RANKS = (0, 1, 2, 4, 5)
SIZES = (512, 700, MIB, 2 * MIB, 3 * MIB, 12 * MIB, 30 * MIB)
STREAMS = (0, 1, 2)


def in_group(rank: int, group: str) -> bool:
    parts: list[Any] = list(GROUPS[group])
    return rank in parts or any(rank in part for part in parts if not isinstance(part, int))


@dataclass
class Script:
    """Grows the rows of a rank (or of several) from draws; every sequence of draws is legal."""

    groups: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    ids: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def meet(self, group: str, duration: int, stream: int) -> None:
        """A collective; of 1 ns at least, so that none could end at the very time of a poll that comes before it."""
        self.calls[group] += 1
        self.rows.append(collective(group, duration, stream))

    def malloc(self, size: int, stream: int) -> None:
        self.ids += 1
        self.alive.append(self.ids)
        self.rows.append(alloc(self.ids, size, stream))

    def release(self, position: int) -> None:
        if self.alive:
            self.freed.append(self.alive.pop(position % len(self.alive)))
            self.rows.append(free(self.freed[-1]))

    def share(self, stream: int, duration: int) -> None:
        """The newest allocation is used by work of another stream and freed; what deferred frees are there for."""
        if self.alive:
            self.rows += [record(self.alive[-1], stream), kernel(duration, stream)]
            self.release(-1)

    def take(self, kind: str, number: int, stream: int) -> None:
        """Add what a draw stands for."""
        match kind:
            case "alloc":
                self.malloc(SIZES[number % len(SIZES)], stream % 2)
            case "free":
                self.release(number)
            case "share":
                self.share(stream, number)
            case "record" if self.alive:
                self.rows.append(record(self.alive[number % len(self.alive)], stream))
            case "collective" if self.groups:
                self.meet(self.groups[number % len(self.groups)], 1 + number // 2, stream)
            case "kernel":
                self.rows.append(kernel(number, stream))
            case "busy":
                self.rows.append(busy(number))
            case "wait_stream":
                self.rows.append(wait_stream(stream, on=number % len(STREAMS)))
            case "synchronize":
                self.rows.append(synchronize((None, *STREAMS)[number % 4]))
            case "complete_free" if self.freed:
                self.rows.append(plain("complete_free", id=self.freed.pop(number % len(self.freed))))
            case "hold":
                self.rows.append(hold(number % 2 == 0))
            case "complete_events" | "empty_cache":
                self.rows.append(plain(kind, **({"stream": stream} if kind == "complete_events" else {})))


KINDS = (
    *("alloc", "alloc", "alloc", "alloc", "free", "share", "share", "record", "collective", "collective", "collective"),
    *("kernel", "kernel", "busy", "busy", "wait_stream", "wait_stream"),
    *("synchronize", "complete_free", "hold", "complete_events", "empty_cache"),
)
draws = st.lists(
    st.tuples(st.sampled_from(KINDS), st.one_of(st.integers(0, 9), st.integers(0, 200)), st.sampled_from(STREAMS)),
    min_size=8,
    max_size=40,
)


@st.composite
def cases(draw: st.DrawFn, *, total_bytes: int = 80 << 30, together: bool = True) -> Case:
    """Several ranks, some of them alike; every rank comes to a collective of a group as often as the others of it.

    Without `together` ranks do not meet.
    """
    numbers = draw(st.permutations(RANKS))
    scripts: dict[tuple[int, ...], Script] = {}
    for many in draw(st.sampled_from(((1, 1), (1, 1, 1), (2, 1), (2, 2), (1,), (3, 2), (1, 2, 1, 1), (5,)))):
        taken, numbers = tuple(sorted(numbers[:many])), numbers[many:]
        shared = [group for group in GROUPS if together and all(in_group(rank, group) for rank in taken)]
        scripts[taken] = Script(shared)
        for step in draw(draws):
            scripts[taken].take(*step)
    return finish(draw, scripts, total_bytes)


def finish(draw: st.DrawFn, scripts: dict[tuple[int, ...], Script], total_bytes: int) -> Case:
    """Add the collectives that a rank lacks, and an end."""
    for group in GROUPS:
        most = max(script.calls[group] for script in scripts.values())
        for script in scripts.values():
            while group in script.groups and script.calls[group] < most:
                script.meet(group, 3, draw(st.sampled_from(STREAMS)))
    for script in scripts.values():
        script.rows += [kernel(1), *([synchronize()] if draw(st.booleans()) else []), alloc(10**6), alloc(10**6 + 1)]
    return Case(
        {ranks: script.rows for ranks, script in scripts.items()},
        GROUPS,
        launch_ns=draw(st.sampled_from((0, 3))),
        total_bytes=total_bytes,
    )
