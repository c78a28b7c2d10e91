"""The search for the cheapest changes that make a case fit.

Single changes are tried first. What a combination takes, in time and in memory by phase, is then predicted from them
and from the combinations that are known already, and the combinations are tried from the cheapest on. What is left
unproved is what the prediction says does not fit: it is ruled out at once where the strongest of it together do not
fit, since one change more needs no more memory, and tried else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from graph.case import Case
from simulator.fit.changes import LEVELS, Change, changed, check_keys, options_for, options_of
from simulator.fit.plans import Judged, Plan, Plans, priced
from traces.errors import Interrupted

#: Seconds after which no further change is tried.
SECONDS: Final = 45.0
#: The share of them that is kept for other hardware.
HARDWARE: Final = 0.15
#: Changes of a combination, at most.
MOST_CHANGES: Final = 5
#: Combinations that are weighed at a time, the cheapest first.
LOOKED_AT: Final = 500
#: Share of the predicted peak that is taken for certain, and of a price that is worth another try.
SURE: Final = 0.97
WORTH: Final = 0.99

Judge = Callable[[Case], Judged | None]
#: As `map`, or in several processes.
Mapped = Callable[[Judge, Sequence[Case]], Iterable[Judged | None]]


def search(
    case: Case,
    judge: Judge,
    *,
    keep: Collection[str] = (),
    gpus: int | None = None,
    seconds: float = SECONDS,
    mapped: Mapped = map,
    width: int = 1,
    trying: Callable[[str], object] | None = None,
) -> Plans:
    """Try for about `seconds` what may help a case, but for what sets keys in `keep`.

    `judge` captures and replays a case (None: it cannot run so); `mapped` calls it for several, `width` at a time.
    With `gpus` so many GPUs may be used. `trying(options)` is called before each. Nothing is tried for a case that
    fits, or that fails on any GPU. Raises ConfigError for a key of `keep` that there is not, and Interrupted, with
    what was tried, on Ctrl-C.
    """
    check_keys(keep)
    spared = HARDWARE * seconds
    deadline = time.monotonic() + seconds - spared
    whole = next(iter(mapped(judge, [case])))
    if whole is None or whole.needs is None or whole.verdict == "fits":
        return Plans(whole)
    found = _Search(case, whole, judge, mapped, width, deadline, spared, trying or (lambda _: None))
    try:
        found.run([(change, list(values)) for change, values in options_for(case, whole.needs, keep, gpus)])
    except KeyboardInterrupt:
        raise Interrupted(found.result()) from None
    return found.result()


@dataclass(frozen=True, eq=False)
class _Option:
    """One value of a change; `bit` is its own, and the bits of options grow in the order of the table."""

    change: Change
    keys: Mapping[str, Any]
    bit: int


#: Options, at most one of a part.
_Choice = tuple[_Option, ...]


def _mask(choice: _Choice) -> int:
    return sum(option.bit for option in choice)


@dataclass
class _Search:
    case: Case
    whole: Judged
    judge: Judge
    mapped: Mapped
    width: int
    deadline: float
    spared: float
    trying: Callable[[str], object]
    singles: list[_Option] = field(default_factory=list)
    known: dict[int, Plan | None] = field(default_factory=dict)
    refused: list[_Choice] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    count: int = 0

    def result(self) -> Plans:
        tried = tuple(plan for plan in self.known.values() if plan is not None)
        return Plans(self.whole, tried, tuple(dict.fromkeys(self.untried)))

    def run(self, offered: Sequence[tuple[Change, list[Mapping[str, Any]]]]) -> None:
        """Level by level, mildest first: single changes, and combinations where nothing fits so far; last hardware.

        Where the strongest changes up to a level do not fit together, none of it does alone: it waits for the next.
        """
        options = [self._option(change, keys) for change, values in offered for keys in values]
        hardware = LEVELS["hardware"]
        waiting: list[_Option] = []
        for level in sorted({one.change.level for one in options} - {hardware}):
            ours = [one for one in options if one.change.level == level]
            if level == 0 and not self._hopeful(ours):
                waiting = ours
                continue
            self._alone(ours)
            if self._best(level - 1) or any(plan.level == level > 0 for plan in self._best(level)):
                continue
            if waiting and not self._hopeful(waiting):
                continue
            self._alone(waiting)
            waiting = []
            self._combined(level)
        self.deadline += self.spared
        self._alone([one for one in options if one.change.level == hardware])

    def _option(self, change: Change, keys: Mapping[str, Any]) -> _Option:
        self.count += 1
        return _Option(change, keys, 1 << self.count)

    # --- single changes ----------------------------------------------------------------------------------------------

    def _hopeful(self, options: Sequence[_Option]) -> bool:
        """Whether the strongest of every part fit together, or may: the last one of each by the order of the table, or
        that of the change before; of parts that exclude each other the first ones, or the last."""
        parts: dict[str, dict[Change, _Option]] = {}
        for one in (*self.singles, *options):
            if not one.change.alone:
                parts.setdefault(one.change.part, {})[one.change] = one
        room = self.whole.room or self.whole.total
        if self.whole.phases.get("load", 0) > room and not any(
            change.loads for part in parts.values() for change in part
        ):
            return False
        last, before = ([list(values.values())[-back:][0] for values in parts.values()] for back in (1, 2))
        return any(self._fits(join) for one in (before, last, last[::-1]) if (join := self._compatible(one)))

    def _compatible(self, options: Iterable[_Option]) -> _Choice:
        """Options, in their order, without those that earlier ones exclude."""
        found: _Choice = ()
        for option in options:
            if self._case((*found, option)) is not None:
                found = (*found, option)
        return tuple(sorted(found, key=lambda one: one.bit))

    def _alone(self, options: Sequence[_Option]) -> None:
        """Every value by itself: of each part the first one, then of those that do not fit the next, dearer one."""
        parts: dict[tuple[str, bool], list[_Option]] = {}
        for option in options:
            parts.setdefault((option.change.part, option.change.alone), []).append(option)
        left = list(parts.values())
        while left:
            plans = self._try([(values[0],) for values in left])
            tried = list(zip(left, plans, strict=True))
            self.singles += [one[0] for one, plan in tried if plan is not None and not one[0].change.alone]
            left = [one[1:] for one, plan in tried if one[1:] and (plan is None or plan.judged.verdict != "fits")]

    # --- combinations ------------------------------------------------------------------------------------------------

    def _combined(self, level: int) -> None:
        """The combinations of changes up to a level, the cheapest that may fit first; then what is unproved."""
        together = self._join(option for option in self.singles if option.change.level <= level)
        if len(together) < 2 or not self._fits(together):
            return
        left = sorted((one for one in self._choices(level) if len(one) > 1), key=self._foreseen)
        known = 0
        while not self._over():
            refused, known = self.refused[known:], len(self.refused)
            left = [one for one in left if _mask(one) not in self.known and not self._ruled_out(one, refused)]
            most = WORTH * self._price(level)
            cheaper = [one for one in left[:LOOKED_AT] if self._foreseen(one) < most]
            likely = sorted(filter(self._may_fit, cheaper), key=self._foreseen)[: self.width]
            if not likely and not (likely := self._unproved(cheaper)):
                return
            self._try(likely)

    def _fits(self, choice: _Choice) -> bool:
        """Whether a choice fits, or may, where it cannot be tried."""
        plan = self._try([choice])[0]
        return plan is None or plan.fits

    def _choices(self, level: int) -> Iterator[_Choice]:
        """Options of different parts up to a level, no more than `MOST_CHANGES`, that a case can have together."""
        parts: dict[str, list[_Option | None]] = {}
        for option in self.singles:
            if option.change.level <= level:
                parts.setdefault(option.change.part, [None]).append(option)
        for picked in product(*parts.values()):
            choice = tuple(one for one in picked if one is not None)
            if 0 < len(choice) <= MOST_CHANGES:
                yield choice

    def _unproved(self, choices: Sequence[_Choice]) -> list[_Choice]:
        """What to try of choices that should not fit: their join, which may rule them all out; then the smallest."""
        if not choices:
            return []
        join = self._join({option for choice in choices for option in choice})
        if _mask(join) not in self.known:
            return [join]
        return sorted(choices, key=self._peak)[: self.width]

    def _join(self, options: Iterable[_Option]) -> _Choice:
        """The strongest option of every part, without those that the others exclude."""
        parts: dict[str, _Option] = {}
        for option in options:
            now = parts.get(option.change.part)
            if now is None or (option.bit != now.bit and self._as_strong(option, now)) or self._saves_more(option, now):
                parts[option.change.part] = option
        return self._compatible(sorted(parts.values(), key=lambda one: self._peak((one,))))

    def _saves_more(self, option: _Option, other: _Option) -> bool:
        return not self._as_strong(other, option) and self._peak((option,)) < self._peak((other,))

    def _as_strong(self, option: _Option, other: _Option) -> bool:
        """Whether an option of a part needs no more than another one in any phase."""
        if option.bit == other.bit:
            return True
        ours, theirs = self.known.get(option.bit), self.known.get(other.bit)
        if ours is None or theirs is None:
            return option.bit > other.bit
        one, two = ours.judged.peaks, theirs.judged.peaks
        if one == two:
            return option.bit > other.bit
        return all(one.get(phase, 0) <= peak for phase, peak in two.items())

    def _ruled_out(self, choice: _Choice, refused: Sequence[_Choice]) -> bool:
        """Whether one of these that do not fit has an option as strong for each of a choice."""
        return any(
            all(any(b.change.part == a.change.part and self._as_strong(b, a) for b in one) for a in choice)
            for one in refused
        )

    # --- what is foreseen --------------------------------------------------------------------------------------------

    def _foreseen(self, choice: _Choice) -> float:
        """The price of a choice, from what is known of the largest part of it and of the rest alone."""
        base, rest = self._largest_known(choice)
        share = base.time if base is not None and base.time is not None else 1.0
        for option in rest:
            plan = self.known[option.bit]
            if plan is not None and plan.time is not None:
                share += plan.time - 1.0
        return priced(share, len(choice))

    def _largest_known(self, choice: _Choice) -> tuple[Plan | None, list[_Option]]:
        """The known plan with most of these options, and those that it has not."""
        mask, found, having = _mask(choice), None, 0
        for known, plan in self.known.items():
            if plan is not None and known & ~mask == 0 and known.bit_count() > having.bit_count():
                found, having = plan, known
        return found, [option for option in choice if not option.bit & having]

    def _peak(self, choice: _Choice) -> float:
        """The peak of allocated bytes that a choice should have, at the least: what options save is added by phase."""
        base, rest = self._largest_known(choice)
        peaks = dict((base.judged if base is not None else self.whole).peaks)
        for option in rest:
            plan = self.known[option.bit]
            now = {} if plan is None else plan.judged.peaks
            for phase in peaks.keys() & now.keys() & self.whole.peaks.keys():
                peaks[phase] += now[phase] - self.whole.peaks[phase]
        return max(peaks.values(), default=0)

    def _may_fit(self, choice: _Choice) -> bool:
        known = self.known[choice[0].bit]
        room = 0 if known is None else known.judged.room or known.judged.total
        return SURE * self._peak(choice) <= room

    # --- trying ------------------------------------------------------------------------------------------------------

    def _best(self, level: int) -> list[Plan]:
        """Plans up to a level that fit for sure."""
        return [p for p in self.known.values() if p is not None and p.judged.verdict == "fits" and p.level <= level]

    def _price(self, level: int) -> float:
        return min((plan.price for plan in self._best(level)), default=float("inf"))

    def _over(self) -> bool:
        return time.monotonic() > self.deadline

    def _try(self, choices: Sequence[_Choice]) -> list[Plan | None]:
        """What comes out of some choices; None for those that cannot be, or that there is no time for."""
        cases = {_mask(choice): case for choice in choices if (case := self._case(choice)) is not None}
        waiting = [choice for choice in choices if _mask(choice) in cases and _mask(choice) not in self.known]
        for choice in choices:
            self.known.setdefault(_mask(choice), None)
        for start in range(0, len(waiting), self.width):
            some = waiting[start : start + self.width]
            if self._over():
                self.untried += [options_of(_keys(choice)) for choice in some]
                continue
            self.trying("; ".join(options_of(_keys(choice)) for choice in some))
            for choice, judged in zip(some, self.mapped(self.judge, [cases[_mask(one)] for one in some]), strict=True):
                self._take(choice, judged)
        return [self.known[_mask(choice)] for choice in choices]

    def _take(self, choice: _Choice, judged: Judged | None) -> None:
        if judged is None:
            return
        share = None if judged.ns is None or not self.whole.ns else judged.ns / self.whole.ns
        plan = Plan(tuple(one.change for one in choice), _keys(choice), judged, share)
        self.known[_mask(choice)] = plan
        if not plan.fits:
            self.refused.append(choice)

    def _case(self, choice: _Choice) -> Case | None:
        """The case with a choice; None where keys contradict each other, or a change means nothing beside others."""
        case = changed(self.case, _keys(choice))
        if case is None or len(choice) == 1:
            return case
        for option in choice:
            others = changed(self.case, _keys(tuple(one for one in choice if one is not option)))
            if others is None or not option.change.applies(others, option.keys):
                return None
        return case


def _keys(choice: _Choice) -> dict[str, Any]:
    return {name: value for option in choice for name, value in option.keys.items()}
