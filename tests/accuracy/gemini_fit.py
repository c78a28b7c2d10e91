"""The largest batch that fits a 16 GB V100 under Gemini, beside the largest one that the real code completed.

    python -m tests.accuracy gemini_fit [MODEL]...

Recorded: tests/data/gemini/fit.csv, with 450 MiB of context, no other rank in the way. The search is that of the
recordings: from the batch that LLMem's estimator chose, in growing steps, then halving; it takes fitting as monotonous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tests.accuracy.gemini import SETTINGS, trace_of
from tests.support.gemini_data import rows

#: cudaMemGetInfo's total of the card, and the assumed context.
TOTAL: Final = 16_935_419_904
CONTEXT: Final = 450 << 20
#: How far from the recorded batch is near: 3 per cent or 1.
NEAR: Final = 0.03


def fits(row: dict[str, Any], batch: int) -> bool:
    """Whether a batch runs in the setting of a recorded row."""
    from simulator.engine.replay import replay
    from traces.model import Device

    trace = replace(trace_of({**row, "batch": batch}), devices=(Device("V100-16GB", TOTAL, CONTEXT),))
    return replay(trace, analyse=False).verdict != "oom"


def largest(fitting: Callable[[int], bool], start: int) -> int:
    """The largest batch that fits (0: none), searched from `start`."""
    good, bad = (start, 0) if fitting(start) else (0, start)
    step = 1
    while not bad:
        if fitting(good + step):
            good, step = good + step, 2 * step
        else:
            bad = good + step
    while not good and bad > 1:
        low = max(1, bad - step)
        if fitting(low):
            good = low
        else:
            bad, step = low, 2 * step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fitting(middle) else (good, middle)
    return good


def main(models: list[str]) -> None:
    """Print the table."""
    chosen = [row for row in rows("fit.csv") if not models or row["model"] in models]
    missed = 0
    print(f"{'model':14}{'setting':9}{'ours':>6}{'recorded':>10}{'LLMem':>7}")
    for row in chosen:
        recorded, own = int(row["largest_batch"]), int(row["llmem_batch"])
        known: dict[int, bool] = {}

        def fitting(batch: int, row: dict[str, Any] = row, known: dict[int, bool] = known) -> bool:
            if batch not in known:
                known[batch] = fits(row, batch)
            return known[batch]

        found = largest(fitting, max(own, 1))
        near = abs(found - recorded) <= max(1, NEAR * recorded)
        missed += not near
        print(f"{row['model']:14}{SETTINGS[row['world'], row['tp']]:9}{found:6}{recorded:10}{own:7}"
              f"{'' if near else '  MISSED'}", flush=True)  # fmt: skip
    print(f"{len(chosen) - missed} of {len(chosen)} within 3 % or 1")
