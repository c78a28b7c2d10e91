"""Architectures under `record`, beside what was recorded of them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest

from tests.accuracy.architectures import TOGETHER, compared, rows, summary
from traces.release import DEFAULT_RELEASE, installed_release

#: They begin a process: the first one makes cuBLAS's workspace.
FIRST = 4


def test_the_first_architectures_are_as_recorded() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    if installed_release() != DEFAULT_RELEASE:
        pytest.skip("recorded with another release")
    chosen = [row for row in rows() if (row.program, row.mode) == ("language_models", "bf16")][:FIRST]
    found = list(compared(chosen, sys.executable))
    assert [theirs.name for theirs, _ in found if theirs.figures] == [row.name for row in chosen]
    assert [ours for _, ours in found] == chosen


def test_rows_are_whole_and_summed_up() -> None:
    found = rows()
    assert Counter((row.program, row.mode) for row in found) == {
        ("language_models", "amp"): 189,
        ("language_models", "bf16"): 189,
        **{("image_models", mode): 135 for mode in ("fp32", "amp", "channels_last")},
    }
    some = [row for row in found if row.figures][: TOGETHER + 1]
    first, *rest = [(row, row) for row in some]
    assert first[0].figures is not None
    wrong = replace(first[0], figures=(2 * first[0].figures[0], *first[0].figures[1:]))
    assert summary([(first[0], wrong), *rest]).splitlines()[:2] == [
        f"language_models amp: {len(some)} architectures, {len(some)} end as recorded, {len(some)} have figures",
        f"  peak_allocated: {len(rest)} equal, worst 100.00%",
    ]
    assert "1 end as recorded" not in summary([(first[0], None)])
