"""Closed-form estimators beside the simulation: what they get of a case, and where they stand in an answer."""

from __future__ import annotations

from typing import Any

import pytest

from graph.case import Case
from simulator.estimator.closed_form import closed_forms, split
from traces.errors import ConfigError


def case(**keys: Any) -> Case:
    return Case.of({"model": "gpt2", "dtype": "fp16", "batch": 2, "seq": 64, **keys})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (1, 1)),
        ({"strategy": "fsdp2", "world": 4}, (4, 1)),
        ({"strategy": "tp", "world": 4}, (1, 4)),
        ({"strategy": "gemini", "world": 4, "mesh": {"dp": 2, "tp": 2}}, (2, 2)),
    ],
)
def test_split_of_a_case(keys: dict[str, Any], expected: tuple[int, int]) -> None:
    assert split(case(**keys)) == expected


def test_dnnmem_by_hand() -> None:
    pytest.importorskip("transformers")
    (found,) = closed_forms(case(strategy="gemini"), ["DNNMem"], base=7)
    count = 124_439_808  # GPT-2's parameters; each tensor is rounded up to 512 bytes
    assert found.terms["m_base"] == 7
    assert found.terms["weights"] == pytest.approx(2 * count, rel=1e-4)
    assert found.terms["optimizer"] == pytest.approx(8 * count, rel=1e-4)
    assert (
        found.terms["loss"] == 25_129 * 512
    )  # 2 x 64 x 50257 logits of 2 bytes: Gemini's loss keeps the weights' type
    assert found.total == sum(found.terms.values())


def test_llmem_shares_what_is_sharded() -> None:
    pytest.importorskip("transformers")
    (alone,) = closed_forms(case(), ["llmem"], base=0)
    (data,) = closed_forms(case(strategy="ddp", world=4), ["llmem"], base=0)
    (shared,) = closed_forms(case(strategy="fsdp2", world=4), ["llmem"], base=0)
    assert data.terms["m_os"] == alone.terms["m_os"] == 4 * shared.terms["m_os"]


def test_what_they_cannot_do() -> None:
    assert closed_forms(case(), [], 0) == ()
    with pytest.raises(ConfigError, match="estimator 'xmem' is not known"):
        closed_forms(case(), ["xmem"], 0)
    with pytest.raises(ConfigError, match="inference"):
        closed_forms(Case.of({"model": "gpt2", "task": "inference"}), ["llmem"], 0)
