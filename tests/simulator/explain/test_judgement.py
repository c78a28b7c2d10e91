"""The cause that the figures show: against labels written by hand, and on both sides of each inequality."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.explain.judgement import WORDS, judge
from simulator.explain.message import OutOfMemory, Process
from simulator.explain.texts import parse
from tests.simulator.explain.posted import ROWS
from tests.support.out_of_memory_forms import written

GIB = 1 << 30
HALF = GIB // 2
#: What the bar asks of the labelled texts.
BAR = 0.95


def message(**figures: Any) -> OutOfMemory:
    """A message of a full card of 80 GiB, 2 GiB asked for, where `figures` does not say otherwise."""
    usual = {"asked": 2 * GIB, "total": 80 * GIB, "free": GIB // 2, "allocated": 78 * GIB, "unallocated": GIB // 4}
    return OutOfMemory(source="allocator", party="PyTorch", said="", **{"releases": "2.2 or newer", **usual, **figures})


@pytest.mark.parametrize("with_address", [True, False])
def test_causes_are_those_labelled_by_hand(with_address: bool) -> None:
    rows = [row for row in ROWS if bool(row["address"]) is with_address]
    wrong = [
        (row["address"], row["cause"], judged)
        for row in rows
        if (judged := judge(parse(written(row))[0]).cause) != row["cause"]
    ]
    assert len(rows) >= (200 if with_address else 16)
    assert 1 - len(wrong) / len(rows) >= BAR, wrong


@pytest.mark.parametrize("cause", [cause for cause in WORDS if cause != "unknown"])
def test_the_labels_have_every_cause_and_a_reason(cause: str) -> None:
    rows = [row for row in ROWS if row["cause"] == cause]
    assert len(rows) >= 3
    assert all(len(row["why"].split()) > 1 for row in rows)


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({}, "capacity"),
        ({"asked": 81 * GIB}, "capacity"),
        ({"asked": None}, "unknown"),
        ({"free": None}, "unknown"),
        ({"free": None, "asked": 81 * GIB}, "capacity"),
        ({"allocated": 90 * GIB, "free": 0, "unallocated": 5 * GIB}, "capacity"),
        # pieces and what is free, against what was asked for; 2 GiB are no small change
        ({"allocated": 76 * GIB, "unallocated": 2 * GIB}, "fragmentation"),
        ({"allocated": 76 * GIB, "unallocated": 2 * GIB - 1}, "capacity"),
        ({"allocated": 70 * GIB, "unallocated": 3 * GIB, "asked": 3 * GIB + HALF, "own": 76 * GIB}, "fragmentation"),
        ({"allocated": 70 * GIB, "unallocated": 3 * GIB, "asked": 4 * GIB, "own": 74 * GIB}, "other_process"),
        # of two that would do, the larger
        ({"allocated": 66 * GIB, "unallocated": 4 * GIB, "private": 9 * GIB, "own": 71 * GIB}, "private_pool"),
        ({"allocated": 60 * GIB, "unallocated": 4 * GIB, "own": 65 * GIB}, "other_process"),
        ({"allocated": 60 * GIB, "unallocated": 4 * GIB, "own": 79 * GIB}, "outside_pytorch"),
        # what is only inferred counts half: 8 GiB elsewhere, 1 GiB of it a context
        ({"allocated": 66 * GIB, "unallocated": 5 * GIB + HALF}, "fragmentation"),
        ({"allocated": 68 * GIB, "unallocated": 3 * GIB + HALF - 1}, "other_process"),
        # a process that is listed and large enough to be this one is this one, as in a container
        ({"allocated": 70 * GIB, "processes": (Process(7, 79 * GIB),)}, "outside_pytorch"),
        ({"allocated": 70 * GIB, "processes": (Process(7, 8 * GIB), Process(9, 71 * GIB))}, "other_process"),
        # limits
        ({"allowed": 40 * GIB, "allocated": 39 * GIB, "free": 39 * GIB}, "fraction"),
        ({"allowed": 40 * GIB, "allocated": 30 * GIB, "free": 49 * GIB}, "refused"),
        ({"allocated": 30 * GIB, "free": 49 * GIB}, "refused"),
        ({"allocated": 30 * GIB, "free": 49 * GIB, "own": 31 * GIB, "releases": "2.1"}, "fraction"),
        # 2.01 GiB free are what was asked for, but for rounding
        ({"allocated": 60 * GIB, "free": 2 * GIB + GIB // 100, "own": 61 * GIB}, "other_process"),
    ],
)  # fmt: skip
def test_the_inequality_decides(figures: dict[str, Any], cause: str) -> None:
    assert judge(message(**figures)).cause == cause


@pytest.mark.parametrize(
    ("releases", "advice"),
    [
        ("1.4 to 1.9", "newer PyTorch"),
        ("1.10 to 2.0", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb"),
        ("2.1", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("2.10 or newer", "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_advice_is_what_the_release_understands(releases: str, advice: str) -> None:
    judged = judge(message(allocated=60 * GIB, unallocated=19 * GIB, releases=releases))
    assert judged.cause == "fragmentation"
    assert advice in judged.first[0]


def test_segments_that_are_expandable_already_are_not_advised() -> None:
    judged = judge(message(allocated=60 * GIB, unallocated=19 * GIB, conf="expandable_segments:True"))
    assert not any("export" in step for step in judged.first)


SIZES = st.none() | st.integers(0, 200 * GIB)


@given(
    st.fixed_dictionaries(
        {name: SIZES for name in ("asked", "total", "free", "allowed", "allocated", "unallocated", "private", "own")}
    ),
    st.sampled_from(["allocator", "snapshot", "driver", "library", "host"]),
)
def test_any_figures_are_judged(figures: dict[str, Any], source: Any) -> None:
    found = OutOfMemory(source=source, party="PyTorch", said="", **figures)
    judged = judge(found)
    assert judged.because
    assert judged.first
    if judged.cause in ("fragmentation", "private_pool"):
        assert found.asked is not None
        assert found.free is not None
        held = found.pieces if judged.cause == "fragmentation" else found.private
        assert (held or 0) + found.free >= found.asked
