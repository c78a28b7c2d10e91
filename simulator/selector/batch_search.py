"""The largest micro-batch of a method: simulated at one after the other, each captured, until the next does not fit.

Of the sizes that people use (`rungs`) the largest that fits is captured (`largest_rung`); LLMem's policy takes the
largest of all (`largest`). Where to look next is read off replays of what was captured with the sizes of other
micro-batches (`simulator.selector.extrapolate`). The answer itself is a captured step that fits; that one sample more
does not is decided by a captured step, or by a replay with the sizes on the lines through two captured ones, of which
the answer is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.models.lookup import configuration
from simulator.estimator.estimate import captured
from simulator.estimator.outside import bytes_of, communicators
from simulator.estimator.step_time import step_seconds
from simulator.estimator.traced import trace_of
from simulator.selector.extrapolate import PRIMES, Line, prime_for, sizes_in
from strategies import registry
from traces.errors import LLMemError
from traces.model import Trace

if TYPE_CHECKING:
    from graph.case import Case
    from graph.loop.method import Method
    from graph.model import StepGraph
    from simulator.engine.result import OutsideTerm, Result
    from strategies.timing.clock import Clock

#: A device on which peaks are taken where nothing fits.
AMPLE: Final = 1 << 42


class Probe:
    """Simulates a method at one micro-batch after the other; keeps what it saw.

    `keys` are those of the case; `outside(groups)` the terms outside the allocator for a rank in so many groups,
    `margin` the bytes of the device that stay free beside them.
    """

    def __init__(
        self, keys: Mapping[str, Any], name: str, outside: Callable[[int], tuple[OutsideTerm, ...]], margin: int
    ) -> None:
        self.keys = keys
        self.name = name
        self.outside = outside
        self.margin = margin
        self.traces: dict[int, Trace] = {}
        self.results: dict[int, Result] = {}
        self.alone: int | None = None  # the rank that needs most, where it stands for all

    @property
    def tried(self) -> dict[int, bool]:
        """Micro-batches that were captured, and whether they fit."""
        return {batch: found.verdict != "oom" for batch, found in sorted(self.results.items())}

    def case(self, batch: int, **more: object) -> Case:
        """The case of the method at a micro-batch."""
        return Case.of({**self.keys, "batch": batch, **more}, where=self.name)

    def first(self, near: int = 0) -> int:
        """The micro-batch to begin with: a prime, of `near` or more where that is known to be of use."""
        try:
            sizes = sizes_in(configuration(str(self.keys["model"])).document)
        except LLMemError:  # a function of the user's own
            sizes = []
        return prime_for(sizes, near)

    def fits(self, batch: int) -> bool:
        """Whether a micro-batch fits, captured."""
        if batch in self.results:
            return self.results[batch].verdict != "oom"
        case = self.case(batch)
        made = self.trace(case)
        found = self.replayed(made)
        if self.alone is None and registry.find(case).steps_alike:
            self.alone = max(found.ranks, key=lambda rank: rank.peak_allocated).ranks[0]
            made = self.trace(case)
        self.traces[batch], self.results[batch] = made, found
        return found.verdict != "oom"

    def guess(self, low: int, high: int) -> tuple[int, bool]:
        """The largest of `low` .. `high` - 1 that fits by the lines through what was captured, and whether that is
        sure: by two captured steps, of which `low` is one.
        """
        base = low if low in self.traces else min(self.traces, key=lambda batch: abs(batch - high))
        others = sorted((batch for batch in self.traces if batch != base), key=lambda batch: abs(batch - base))
        known = self.traces[base]
        line = Line.through(known, base, self.traces[others[0]], others[0]) if others else Line.of(known, base)
        stride = 1 if base == low else high
        found = low
        while high - found > 1:
            place = min(found + stride, high - 1) if stride < high - found else (found + high) // 2
            if self.replayed(line.at(place)).verdict != "oom":
                found, stride = place, 2 * stride
            else:
                high, stride = place, high
        return found, bool(others) and base == low

    def replayed(self, trace: Trace) -> Result:
        """The replay of a trace on its devices, less what lies outside the allocator and the margin: of its sides the
        last, or the first that runs out of memory.
        """
        from simulator.engine.replay import replay
        from simulator.estimator.judging import sides

        aside = self.aside(trace)
        for side in sides(trace, self.terms(trace)):
            found = replay(side, context=aside, analyse=False)
            if found.verdict == "oom":
                break
        return found

    def aside(self, trace: Trace) -> int:
        """Bytes of a device that the allocator may not have: the likely size of what lies outside, and the margin."""
        return bytes_of(self.terms(trace)) + self.margin

    def terms(self, trace: Trace) -> tuple[OutsideTerm, ...]:
        """What lies outside the allocator."""
        return self.outside(communicators(trace))

    def unlimited(self, case: Case) -> Result:
        """The replay of a case on ample devices."""
        from simulator.engine.replay import replay

        return replay(self.trace(replace(case, memory=AMPLE)), context=0, analyse=False)

    def seconds(self, case: Case, clock: Clock) -> float:
        """Seconds of a step of a case, by the clock of its slowest GPU."""
        return step_seconds(self.trace(case, clock), clock)

    def trace(self, case: Case, clock: Clock | None = None) -> Trace:
        """The trace of a case: of all kinds of rank, or of the one that needs most, which then stands for all."""
        rank = registry.find(case).heaviest(case) if self.alone is None else self.alone
        return trace_of(case, capture=shared_graph, speed=None if clock is None else clock.speed(), rank=rank)


def shared_graph(case: Case, method: Method | None) -> StepGraph:
    """Captures a case; the graph of one GPU that a strategy rewrites is shared by all its meshes."""
    if method is None:
        case = replace(case, world=1, mesh={}, memory=None)
    return captured(case, None, method)


def rungs(most: int, whole: int | None) -> list[int]:
    """Micro-batches that people use, up to `most`: powers of two, or those that divide `whole` samples of a rank."""
    if whole is None:
        return [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return [one for one in range(1, min(whole, most) + 1) if whole % one == 0]


def largest_rung(
    sizes: Sequence[int], fits: Callable[[int], bool], guess: Callable[[int, int], tuple[int, bool]], first: int
) -> tuple[int, int]:
    """The largest of these sizes that fits (0: none), which is asked of `fits`; and the largest number that does, up to
    the last of them, as far as the guesses say.

    Arguments are those of `largest`; `first` need not be one of the sizes.
    """
    best, low, high = 0, 0, sizes[-1] + 1
    place = min(first, sizes[-1])
    while True:
        if fits(place):
            low, best = max(low, place), max(best, place if place in sizes else 0)
        else:
            high = place
        guessed, sure = guess(low, high) if high - low > 1 else (low, low > 0)
        left = [one for one in sizes if best < one < high]
        under = [one for one in left if one <= guessed]
        if not left or (not under and sure):
            return best, guessed
        place = under[-1] if under else left[0]


def largest(
    fits: Callable[[int], bool], guess: Callable[[int, int], tuple[int, bool]], most: int, first: int = PRIMES[0]
) -> int:
    """The largest whole number up to `most` that fits, 0 for none; what fits is taken to be monotonous.

    `fits` is dear and asked once a number, `first` first. `guess(low, high)` says which of `low` .. `high` - 1 is the
    largest that fits, and whether it is to be believed when it says `low`, which is known to fit.
    """
    low, high = 0, most + 1
    place = min(first, most)
    while True:
        low, high = (place, high) if fits(place) else (low, place)
        if high - low == 1:
            return low
        place, sure = guess(low, high)
        if place <= low:
            if sure and low:
                return low
            place = low + 1
        place = min(place, high - 1)
