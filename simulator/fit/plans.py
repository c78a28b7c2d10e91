"""What came of the changes that were tried for a case: plans, each proved by a capture and a replay, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from simulator.engine.result import Verdict
from simulator.fit.changes import COSTS, Change, options_of

if TYPE_CHECKING:
    from simulator.engine.result import RankResult
    from simulator.fit.advice import Advice

#: What a change more counts as a share of the time, so that of plans that are about as fast the simpler one is first.
EACH: Final = 0.01


@dataclass(frozen=True)
class Judged:
    """The answer for a case: `needs` bytes of a GPU of `total` (None: not known), of which the allocator has at most
    `room`, and nanoseconds a token (None: not known), of which the allocator's retries take `waits`. `phases` has the
    peak of allocated bytes in every phase on a GPU without end, of the largest rank."""

    needs: int | None
    total: int
    verdict: Verdict
    ns: float | None = None
    room: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    waits: float = 0.0

    @property
    def works(self) -> float | None:
        """Nanoseconds a token without retries."""
        return None if self.ns is None else self.ns - self.waits

    @property
    def peaks(self) -> Mapping[str, int]:
        """`phases`, or what is needed where they are not known."""
        return self.phases or {"": self.needs or self.total}


@dataclass(frozen=True)
class Plan:
    """One or several changes, tried: `keys` of the case that differ, what came out, and `time` as a share of the
    case's own (None: not known). `said` has words for the keys."""

    changes: tuple[Change, ...]
    keys: Mapping[str, Any]
    judged: Judged
    time: float | None = None
    said: Callable[[Mapping[str, Any]], str] = options_of

    @property
    def fits(self) -> bool:
        """Whether it runs."""
        return self.judged.verdict != "oom"

    @property
    def options(self) -> str:
        """The options of the command line that say it."""
        return self.said(self.keys)

    @property
    def words(self) -> str:
        """What it changes."""
        return "; ".join(dict.fromkeys(change.words for change in self.changes))

    @property
    def cost(self) -> str:
        """The dearest of what its changes cost."""
        return max((change.cost for change in self.changes), key=COSTS.index)

    @property
    def level(self) -> int:
        """How much else the run is."""
        return max(change.level for change in self.changes)

    @property
    def price(self) -> float:
        """The share of the time, and `EACH` more for every change."""
        return priced(1.0 if self.time is None else self.time, len(self.changes))

    @property
    def order(self) -> tuple[bool, bool, int, float, int]:
        """The cheapest first: those after which the model learns the same, of these what fits for sure, then by how
        much else the run is, and by price."""
        price = self.judged.total if self.cost == "hardware" else self.price  # the smallest machine
        return (self.level > 1, self.judged.verdict != "fits", self.level, price, self.judged.needs or 0)

    def beside(self, other: Plan) -> bool:
        """Whether it spares changing something that `other` changes as well, at no higher cost and as surely."""
        if self.cost == "hardware":
            return False
        parts, others = ({change.part for change in one.changes} for one in (self, other))
        return parts <= others and self.level <= other.level and self.order < other.order and self.price <= other.price

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "change": dict(self.keys),
            "options": self.options,
            "needs": self.judged.needs,
            "gpu_bytes": self.judged.total,
            "verdict": self.judged.verdict,
            "time": None if self.time is None else round(self.time, 4),
            "costs": self.cost,
            "what": self.words,
        }


def priced(time: float, changes: int) -> float:
    """The price of so many changes that together take `time`."""
    return time * (1 + EACH * changes)


@dataclass(frozen=True)
class Plans:
    """What was tried for a case that is `whole` (None: it cannot run), in that order; options of what was not for want
    of time."""

    whole: Judged | None
    tried: tuple[Plan, ...] = ()
    untried: tuple[str, ...] = ()

    @property
    def needs(self) -> int:
        """Bytes that the case needs of its GPU."""
        return 0 if self.whole is None else self.whole.needs or 0

    @property
    def fitting(self) -> tuple[Plan, ...]:
        """Those that fit, the cheapest first, without those that change more than another one at no lower cost."""
        fits = sorted((one for one in self.tried if one.fits), key=lambda one: one.order)
        return tuple(one for one in fits if not any(other.beside(one) for other in fits))

    @property
    def short(self) -> tuple[Plan, ...]:
        """Those that do not fit, the smallest need first."""
        found = (one for one in self.tried if not one.fits)
        return tuple(sorted(found, key=lambda one: one.judged.needs or 1 << 62))

    def document(self) -> list[dict[str, Any]]:
        """As JSON: those that fit, then those that do not."""
        return [one.document() for one in (*self.fitting, *self.short)]


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What makes something fit; no plan changes a key of `keep`. `notes` are what else there is to say."""

    plans: Plans
    keep: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> Judged:
        """The answer as it is."""
        assert self.plans.whole is not None
        return self.plans.whole

    @property
    def fits(self) -> bool:
        """Whether it fits as it is, or by a plan."""
        return self.whole.verdict != "oom" or bool(self.plans.fitting)


@dataclass(frozen=True, kw_only=True)
class FittedProgram(Fitting):
    """A program, the plans that make it fit, and where its memory goes, with what one would change there."""

    program: tuple[str, ...]
    rank: RankResult
    """The one that needs most, on its GPU."""
    advice: tuple[Advice, ...] = ()
