"""A run held against a memory budget and a baseline: what `check` decides, for CI."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.comparison.compare import Comparison, Limit, Side, compare


@dataclass(frozen=True)
class Check:
    """A run, the budget in bytes (None: none), and its comparison with a baseline, where there is one."""

    side: Side
    budget: int | None
    comparison: Comparison | None

    @property
    def needed(self) -> int | None:
        """Bytes that the rank that needs most has of its GPU: peak reserved, and what is known outside the allocator.

        Out of memory, what it would have (None: not known).
        """
        total = self.side.most("device_total")
        if self.side.verdict == "oom":
            return self.side.needs
        return self.side.most("peak_reserved") if total is None else total

    @property
    def exit_code(self) -> int:
        """3 out of memory or over the budget, 4 a regression, else 0."""
        needed = self.needed
        if self.side.verdict == "oom" or (self.budget is not None and (needed is None or needed > self.budget)):
            return 3
        return 4 if self.comparison is not None and self.comparison.regressions() else 0


def check(side: Side, *, budget: int | None = None, against: Side | None = None, limit: Limit | None = None) -> Check:
    """Hold a run against a budget in bytes, and against a baseline of which it may grow by `limit` (default: 0)."""
    comparison = None if against is None else compare(against, side, limit or Limit(share=0.0))
    return Check(side, budget, comparison)
