"""What lies outside the allocator: terms with ranges and sources, and how reports show them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from graph.case import Case
from graph.hardware.gpus import GPUS, gpu
from simulator.engine.result import OutsideTerm
from simulator.estimator.outside import communicator_terms, outside_of, outside_terms
from simulator.reports.run import range_of
from simulator.selector.select import Asked, outside

MIB = 1 << 20


CONTEXTS = {name: card.context for name, card in GPUS.items() if card.context is not None}


@pytest.mark.parametrize("card", GPUS)
def test_every_card_has_terms_with_a_range_and_a_source(card: str) -> None:
    terms = outside_terms(gpu(card))
    assert [term.name for term in terms] == ["CUDA context", "loaded kernels"]
    for term in terms:
        assert term.low is not None
        assert term.high is not None
        assert 0 < term.low <= term.bytes <= term.high < 1024 * MIB
        assert len(term.source) > 20


def test_measured_contexts_are_of_known_cards_and_cited() -> None:
    assert len(CONTEXTS) == 3
    for card, found in CONTEXTS.items():
        assert re.search(r"[\w.-]+/[\w.-]+#\d+", found.source), card


def test_the_rule_for_cards_without_a_measurement() -> None:
    """1 KiB of stack for every thread that can run: 108 x 2048 of an A100 are 216 MiB."""
    (context, _) = outside_terms(gpu("A100-80GB"))
    assert context.bytes == (216 + 200) * MIB
    assert (context.low, context.high) == ((216 + 60) * MIB, (216 + 360) * MIB)
    assert "no measurement" in context.source


@pytest.mark.parametrize("card", CONTEXTS)
def test_the_rule_holds_where_a_context_was_measured(card: str) -> None:
    (ruled, _) = outside_terms(replace(gpu(card), context=None))
    assert ruled.low is not None
    assert ruled.high is not None
    assert ruled.low <= CONTEXTS[card].likely * MIB <= ruled.high


def test_a_choice_and_an_estimate_count_the_same() -> None:
    """Of two kinds of GPU the one counts that has more outside."""
    keys = {"model": "gpt2", "dtype": "bf16"}
    case = Case.of({**keys, "gpu": "H100-80GB"})
    terms = outside_of(case, "auto", 1)
    assert [term.name for term in terms] == ["CUDA context", "loaded kernels", "NCCL buffers"]
    assert outside(Asked(keys, ("H100-80GB",) * 2), 1) == outside(Asked(keys, ("T4-16GB", "H100-80GB")), 1) == terms
    assert outside(Asked(keys, ("H100-80GB",), context=7 * MIB), 0) == (OutsideTerm("context", 7 * MIB, "as given"),)
    inference = Case.of({**keys, "gpu": "H100-80GB", "task": "inference"})
    assert [term.name for term in outside_of(inference, "auto", 0)] == ["CUDA context", "loaded kernels"]


def test_every_communicator_has_its_buffers() -> None:
    assert communicator_terms(0) == ()
    (one,), (two,) = communicator_terms(1), communicator_terms(2)
    assert (one.low, one.bytes, one.high) == (24 * MIB, 300 * MIB, 700 * MIB)
    assert (two.low, two.bytes, two.high) == (48 * MIB, 600 * MIB, 1400 * MIB)
    assert "nccl#964" in one.source


def test_a_remark_tells_the_range() -> None:
    term = OutsideTerm("CUDA context", 500 * MIB, "measured once", 400 * MIB, 600 * MIB)
    assert range_of(term) == "400.00 MiB to 600.00 MiB"
    assert range_of(OutsideTerm("context", 1, "as given")) == ""
