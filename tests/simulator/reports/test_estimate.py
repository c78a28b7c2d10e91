"""What a report says of an estimate beyond its replay."""

from __future__ import annotations

import pytest

from simulator.fit.changes import Change
from simulator.fit.plans import Judged, Plan, Plans
from simulator.reports.document import Lines
from simulator.reports.estimate import what_fits
from tests.support.handmade import GIB


def _plan(batch: int, needs: int) -> Plan:
    change = Change("batch", "smaller batches", "inputs", lambda case: iter(()))
    return Plan((change,), {"batch": batch}, Judged(needs, 4 * GIB, "oom"))


@pytest.mark.parametrize(("tried", "more"), [(3, ""), (5, "; and 2 more")])
def test_of_what_is_not_enough_the_nearest_are_named(tried: int, more: str) -> None:
    plans = tuple(_plan(number, (4 + number) * GIB) for number in reversed(range(1, tried + 1)))
    untried = tuple(f"--seq {number}" for number in range(1, tried + 1))
    blocks = list(what_fits(Plans(Judged(20 * GIB, 4 * GIB, "oom"), plans, untried)))
    nearest = "--batch 1 (5.00 GiB); --batch 2 (6.00 GiB); --batch 3 (7.00 GiB)"
    assert blocks == [
        Lines(("Nothing that was tried would fit.",)),
        Lines(
            (
                f"Not enough: {nearest}{more}{' (--json has all)' * bool(more)}.",
                f"Not tried, for want of time: --seq 1; --seq 2; --seq 3{more}.",
            )
        ),
    ]
