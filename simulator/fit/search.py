"""The search for the cheapest changes that make a case, or a program, fit.

Single changes are tried first. What a combination takes, in time and in memory by parts of phases, is then predicted
from them and from the combinations that are known already, and the combinations are tried from the cheapest on. What
is left unproved is what the prediction says does not fit: it is ruled out at once where the strongest of it together do
not fit, since one change more needs no more memory. Else what nearly should fit is tried, and what differs from the
cheapest plan in one change. What does not fit is replayed again with expandable segments, from the same graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from graph.case import Case
from simulator.fit.changes import LEVELS, Change, changed, check_keys, left_of, options_for, options_of
from simulator.fit.plans import Judged, Plan, Plans, priced
from traces.errors import Interrupted

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Seconds after which no further change is tried.
SECONDS: Final = 45.0
#: The shares of them that are kept for what changes more, by level: for another method, as adapters, and for other
#: hardware; each is named beside milder plans, for many would take it first.
KEPT: Final = {LEVELS["method"]: 0.2, LEVELS["hardware"]: 0.15}
#: The share of what is left of them that combinations of a level may take while none of them fits for sure: what alters
#: more may do so.
MILDER: Final = 0.5
#: Changes of a combination, at most.
MOST_CHANGES: Final = 6
#: Shares of the predicted peak: where it is tried first, and where it is worth a try.
SURE: Final = 0.97
NEAR: Final = 0.92
#: Of a peak that is as much as another one, and of a price that is worth another try.
EQUAL: Final = 1.01
WORTH: Final = 0.995

#: What is changed: a case, or a program.
Subject = TypeVar("Subject")
#: As `map`, or in several processes: of a function of several cases that share a graph.
Mapped = Callable[[Callable[[Sequence[Any]], "list[Judged | None]"], Sequence[Sequence[Any]]], Iterable[Any]]


@dataclass(frozen=True)
class Table(Generic[Subject]):
    """What there is to change: `offered` gives changes that apply to what needs so many bytes, each with what it may
    set, `changed` what then is (None: it cannot be), `left` the share that stays of what a change saves beside others,
    `said` words for a command line."""

    offered: Callable[[Subject, int], Iterable[tuple[Change, Iterable[Mapping[str, Any]]]]]
    changed: Callable[[Subject, Mapping[str, Any]], Subject | None]
    left: Callable[[Subject, Change, Mapping[str, Any]], float]
    said: Callable[[Mapping[str, Any]], str]


def search(
    case: Case,
    judge: Callable[[Case], Judged | None],
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
    table = Table(partial(options_for, keep=keep, gpus=gpus), changed, left_of, options_of)
    return search_table(case, judge, table, seconds=seconds, mapped=mapped, width=width, trying=trying)


def search_table(
    case: Subject,
    judge: Callable[[Subject], Judged | None],
    table: Table[Subject],
    *,
    seconds: float,
    mapped: Mapped = map,
    width: int = 1,
    trying: Callable[[str], object] | None = None,
) -> Plans:
    """The same with the changes of a table."""
    deadline = time.monotonic() + seconds
    whole = next(iter(mapped(partial(_judged, judge), [[case]])))[0]
    if whole is None or whole.needs is None or whole.verdict == "fits":
        return Plans(whole)
    found = _Search(case, whole, judge, table, mapped, width, deadline, seconds, trying or (lambda _: None))
    try:
        found.run([(change, list(values)) for change, values in table.offered(case, whole.needs)])
    except KeyboardInterrupt:
        raise Interrupted(found.result()) from None
    return found.result()


@dataclass(frozen=True, eq=False)
class _Option:
    """One value of a change; `bit` is its own, and the bits of options grow in the order of the table."""

    change: Change
    keys: Mapping[str, Any]
    bit: int


def _judged(judge: Callable[[Subject], Judged | None], cases: Sequence[Subject]) -> list[Judged | None]:
    """The answers for cases, up to the first that fits."""
    found: list[Judged | None] = []
    for case in cases:
        found.append(judge(case))
        if found[-1] is None or found[-1].verdict == "fits":
            break
    return found


#: Options, at most one of a part.
_Choice = tuple[_Option, ...]


def _mask(choice: _Choice) -> int:
    return sum(option.bit for option in choice)


@dataclass
class _Candidate:
    """A choice that is not tried, the price that is foreseen for it, and the peak."""

    choice: _Choice
    mask: int
    price: float = 0.0
    peak: float = 0.0


@dataclass(frozen=True)
class _Times:
    """What each option takes alone beside the whole's time, as a share of it, by bit; their bits; what is known."""

    alone: Mapping[int, float]
    timed: int
    known: tuple[int, ...]


@dataclass
class _Search(Generic[Subject]):
    case: Subject
    whole: Judged
    judge: Callable[[Subject], Judged | None]
    table: Table[Subject]
    mapped: Mapped
    width: int
    deadline: float
    seconds: float
    trying: Callable[[str], object]
    singles: list[_Option] = field(default_factory=list)
    known: dict[int, Plan | None] = field(default_factory=dict)
    refused: list[_Choice] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    count: int = 0
    expandable: _Option | None = None
    """What every choice that does not fit is replayed with as well; it is in none otherwise."""

    def result(self) -> Plans:
        tried = tuple(plan for plan in self.known.values() if plan is not None)
        return Plans(self.whole, tried, tuple(dict.fromkeys(self.untried)))

    def run(self, offered: Sequence[tuple[Change, list[Mapping[str, Any]]]]) -> None:
        """Level by level, mildest first: single changes, and combinations where nothing fits so far; last hardware.

        Where the strongest changes up to a level do not fit together, none of it does alone: it waits for the next.
        """
        options = [self._option(change, keys) for change, values in offered for keys in values]
        self.expandable = next(
            (one for one in options if one.change.part == "allocator" and not one.change.alone), None
        )
        hardware = LEVELS["hardware"]
        waiting: list[_Option] = []
        kept = {level: self.seconds * KEPT.get(level, 0.0) for level in {one.change.level for one in options}}
        self.deadline -= sum(kept.values())
        self.levels = sorted(kept.keys() - {hardware})
        for level in self.levels:
            self.deadline += kept[level]
            ours = [one for one in options if one.change.level == level]
            if level == 0 and not self._hopeful(ours):
                waiting = ours
                continue
            self._alone(ours)
            if self._best(level - 1):
                continue
            if waiting:
                if not self._hopeful(waiting):
                    continue
                self._combined(level)  # first what of this level fits without them
                self._alone(self._helpful(waiting, level))
                waiting = []
            self._combined(level)
        self.deadline += kept.get(hardware, 0.0)
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
            if not one.change.alone and one is not self.expandable:
                parts.setdefault(one.change.part, {})[one.change] = one
        if not parts:
            return True  # but for the allocator's settings, which cost nothing
        if self.whole.phases.get("load", 0) > self.room and not any(
            change.loads for part in parts.values() for change in part
        ):
            return False
        last, before = ([list(values.values())[-back:][0] for values in parts.values()] for back in (1, 2))
        return any(self._fits(join) for one in (before, last, last[::-1]) if (join := self._compatible(one)))

    def _helpful(self, options: list[_Option], level: int) -> list[_Option]:
        """Options that may lead to a cheaper plan of a level: those that cost time do where something faster than the
        best plan lacks memory."""
        most, times = WORTH * self._price(level), self._times()
        known = (_mask(choice) for choice in self._choices(level) if self._foreseen(choice, times) < most)
        lacking = any(plan is None or not plan.fits for plan in map(self.known.get, known))
        return options if lacking else [one for one in options if one.change.cost == "nothing"]

    def _compatible(self, options: Iterable[_Option]) -> _Choice:
        """Options, in their order, without those that earlier ones exclude."""
        found: _Choice = ()
        for option in options:
            if self._case((*found, option)) is not None:
                found = (*found, option)
        return tuple(sorted(found, key=lambda one: one.bit))

    def _alone(self, options: Sequence[_Option]) -> None:
        """Every value by itself: of each part the first one, then of those that do not fit the next, dearer one. Values
        that are left out so are taken as they are where they are part of something that fits."""
        parts: dict[tuple[str, bool], list[_Option]] = {}
        for option in options:
            parts.setdefault((option.change.part, option.change.alone), []).append(option)
        self._try([(one,) for one in parts.pop(("allocator", True), [])])  # of one graph
        left = list(parts.values())
        while left:
            plans = self._try([(values[0],) for values in left])
            tried = list(zip(left, plans, strict=True))
            ours = [one[0] for one, _ in tried if self.known[one[0].bit] is not None]
            self.singles += [one for one in ours if not one.change.alone and one is not self.expandable]
            left = [one[1:] for one, plan in tried if one[1:] and (plan is None or plan.judged.verdict != "fits")]
        proved = [mask for mask, plan in self.known.items() if plan is not None and plan.fits]
        self.singles += [one for one in options if one.bit not in self.known and any(one.bit & mask for mask in proved)]

    # --- combinations ------------------------------------------------------------------------------------------------

    def _combined(self, level: int) -> None:
        """The combinations of changes up to a level, the cheapest that may fit first; then what is unproved."""
        now = time.monotonic()
        until = now + MILDER * (self.deadline - now) if level < self.levels[-1] else self.deadline
        together = self._join(option for option in self.singles if option.change.level <= level)
        if len(together) < 2 or not self._fits(together):
            return
        left = [_Candidate(one, _mask(one)) for one in self._choices(level) if len(one) > 1]
        refused, known = self.refused, list(self.known)
        self._foresee(left)
        while not self._over() and (time.monotonic() < until or self._best(level)):
            most = WORTH * self._price(level)
            left = [one for one in left if one.price < most and one.mask not in self.known]
            left = [one for one in left if not self._ruled_out(one.choice, refused)]
            likely = [one for one in left if SURE * one.peak <= self.room]
            chosen = sorted(likely, key=lambda one: one.price)[: self.width] or self._unproved(left, level)
            if not chosen:
                return
            refused, known = self.refused[:], list(self.known)
            self._try([one.choice for one in chosen])
            fresh = [mask for mask in self.known if mask not in set(known)]
            refused = self.refused[len(refused) :]
            self._foresee([one for one in left if any(mask & ~one.mask & ~self._pair() == 0 for mask in fresh)])

    def _foresee(self, candidates: Iterable[_Candidate]) -> None:
        times = self._times()
        for one in candidates:
            one.price, one.peak = self._foreseen(one.choice, times), self._peak(one.choice)

    def _pair(self) -> int:
        return 0 if self.expandable is None else self.expandable.bit

    @property
    def room(self) -> int:
        """Bytes that the allocator may have."""
        return self.whole.room or self.whole.total

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

    def _unproved(self, left: Sequence[_Candidate], level: int) -> list[_Candidate]:
        """What to try of candidates that should not fit: their join, which may rule them all out; then what nearly
        should, and what differs from the cheapest plan in one part, the smallest first."""
        if not left:
            return []
        join = self._join({option for one in left for option in one.choice})
        if _mask(join) not in self.known:
            return [_Candidate(join, _mask(join))]
        best = min(self._best(level), key=lambda plan: plan.price, default=None)
        masks = [mask for mask, plan in self.known.items() if plan is best or (best is None and plan and plan.fits)]
        near = [one for one in left if NEAR * one.peak <= self.room or self._beside(one, masks)]
        return sorted(near, key=lambda one: one.peak)[: self.width]

    def _beside(self, candidate: _Candidate, masks: Sequence[int]) -> bool:
        """Whether it has the options of one of these but one, which may be another one of its part."""
        pair = self._pair()
        return any(
            (candidate.mask & ~mask).bit_count() <= 1 and (mask & ~pair & ~candidate.mask).bit_count() <= 1
            for mask in masks
        )

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
        one, two = self._vector(ours.judged), self._vector(theirs.judged)
        if bool((one == two).all()):
            return option.bit > other.bit
        return bool((one <= EQUAL * two).all())

    def _ruled_out(self, choice: _Choice, refused: Sequence[_Choice]) -> bool:
        """Whether one of these that do not fit has an option as strong for each of a choice."""
        return any(
            all(any(b.change.part == a.change.part and self._as_strong(b, a) for b in one) for a in choice)
            for one in refused
        )

    # --- what is foreseen --------------------------------------------------------------------------------------------

    def _times(self) -> _Times:
        alone = {one.bit: self._works(plan) - 1.0 for one in self.singles if (plan := self.known.get(one.bit))}
        return _Times(alone, sum(alone), tuple(mask for mask, plan in self.known.items() if plan is not None))

    def _foreseen(self, choice: _Choice, times: _Times) -> float:
        """The price of a choice, from the known plan that differs least from it and what each option that differs takes
        alone; without what the allocator's retries take: with more room there are none."""
        mask, pair = _mask(choice), self._pair()
        base, least = 0, (len(choice), 0)
        for known in times.known:
            differing = (known ^ mask) & ~pair
            found = differing.bit_count(), -(known & mask).bit_count()
            if found < least and differing & ~times.timed == 0:
                base, least = known, found
        plan = self.known.get(base)
        share = 1.0 if plan is None else self._works(plan)
        share += sum(taken if bit & mask else -taken for bit, taken in times.alone.items() if bit & (base ^ mask))
        return priced(share, len(choice))

    def _works(self, plan: Plan) -> float:
        """Its time without retries, as a share of the whole's."""
        ours, whole = plan.judged.works, self.whole.works
        return ours / whole if ours is not None and whole else 1.0

    def _largest_known(self, choice: _Choice) -> tuple[Plan | None, list[_Option]]:
        """The known plan with most of these options, and those that it has not."""
        mask, found, having = _mask(choice), None, 0
        for known, plan in self.known.items():
            if plan is not None and known & ~mask == 0 and known.bit_count() > having.bit_count():
                found, having = plan, known
        return found, [option for option in choice if not option.bit & having]

    def _peak(self, choice: _Choice) -> float:
        """The peak of allocated bytes that a choice should have: what its options save by parts of phases is added,
        and what the largest known part of it has otherwise than that."""
        foreseen = self._summed(choice)
        base, rest = self._largest_known(choice)
        if base is not None and rest:
            foreseen += self._vector(base.judged) - self._summed([one for one in choice if one not in rest])
        return float((self._vector(base.judged) if base is not None and not rest else foreseen).max(initial=0))

    def _summed(self, choice: Sequence[_Option]) -> NDArray[np.float64]:
        """The whole's peaks, less what each option saves alone, as far as that stays beside the others."""
        whole = self._vector(self.whole)
        found = whole.copy()
        for option in choice:
            plan = self.known.get(option.bit)
            share = 1.0
            for other in choice:
                if other is not option:
                    share *= self.table.left(self.case, option.change, other.keys)
            if plan is not None:
                found += share * (self._vector(plan.judged) - whole)
        return found

    def _vector(self, judged: Judged) -> NDArray[np.float64]:
        """Peaks in the order of the whole's."""
        return np.array([judged.peaks.get(name, 0) for name in self.whole.peaks], dtype=np.float64)

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
        waiting = [one for one in choices if _mask(one) not in self.known and self._case(one) is not None]
        for choice in choices:
            self.known.setdefault(_mask(choice), None)
        for start in range(0, len(waiting), self.width):
            some = waiting[start : start + self.width]
            if self._over():
                self.untried += [self.table.said(_keys(choice)) for choice in some]
                continue
            self.trying("; ".join(self.table.said(_keys(choice)) for choice in some))
            groups = [self._together(choice) for choice in some]
            cases = [[case for one in group if (case := self._case(one)) is not None] for group in groups]
            for group, found in zip(groups, self.mapped(partial(_judged, self.judge), cases), strict=True):
                self._take(group, found)
        return [self._answer(choice) for choice in choices]

    def _together(self, choice: _Choice) -> list[_Choice]:
        """A choice, and the same with expandable segments, if it can have them."""
        pair = self.expandable
        if pair is None or pair in choice or any(one.change.alone for one in choice):
            return [choice]
        both = tuple(sorted((*choice, pair), key=lambda one: one.bit))
        return [choice] if self._case(both) is None or _mask(both) in self.known else [choice, both]

    def _take(self, group: Sequence[_Choice], found: Sequence[Judged | None]) -> None:
        """Note what came out of a group, up to the first that fits."""
        for choice, judged in zip(group, found, strict=False):
            if judged is not None:
                share = None if judged.ns is None or not self.whole.ns else judged.ns / self.whole.ns
                self.known[_mask(choice)] = Plan(
                    tuple(one.change for one in choice), _keys(choice), judged, share, self.table.said
                )
        if self.known[_mask(group[0])] is not None and not any(
            plan is not None and plan.fits for plan in (self.known.get(_mask(one)) for one in group)
        ):
            self.refused.append(group[0])

    def _answer(self, choice: _Choice) -> Plan | None:
        """What is known of a choice; with expandable segments, where it fits so alone, or for sure."""
        alone, both = self.known[_mask(choice)], self.known.get(_mask(choice) | self._pair())
        return both if both is not None and (alone is None or both.fits) else alone

    def _case(self, choice: _Choice) -> Subject | None:
        """The case with a choice; None where keys contradict each other, or a change means nothing beside others."""
        case = self.table.changed(self.case, _keys(choice))
        if case is None or len(choice) == 1:
            return case
        for option in choice:
            others = self.table.changed(self.case, _keys(tuple(one for one in choice if one is not option)))
            if others is None or not option.change.applies(others, option.keys):
                return None
        return case


def _keys(choice: _Choice) -> dict[str, Any]:
    return {name: value for option in choice for name, value in option.keys.items()}
