"""LLMem's closed form: the paper's terms by hand, and DNNMem's sum."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.gemini.equations import (
    GRAIN,
    Description,
    dnnmem_peak,
    llmem_peak,
    output_term,
    up,
)
from tests.support.gemini_data import parameters
from traces.errors import ConfigError

MIB = 2**20
LAYERS = {
    "opt-125m": 12,
    "opt-350m": 24,
    "opt-1.3b": 24,
    "opt-2l": 2,
    "bloom-560m": 24,
    "biogpt": 24,
    "codegen-350M": 20,
}


def described(model: str) -> Description:
    """CodeGen casts its logits to fp32; the others keep those of the weights."""
    return Description.of(parameters()[model], logits_bytes=4 if "codegen" in model else 2)


def test_descriptions() -> None:
    found = {name: described(name) for name in LAYERS}
    assert {name: one.layers for name, one in found.items()} == LAYERS
    assert {name: one.hidden for name, one in found.items()} == {
        "opt-125m": 768,
        "opt-350m": 1024,
        "opt-1.3b": 2048,
        "opt-2l": 768,
        "bloom-560m": 1024,
        "biogpt": 1024,
        "codegen-350M": 1024,
    }
    assert [name for name, one in found.items() if not one.tied] == ["codegen-350M"]
    assert [name for name, one in found.items() if one.embeddings == 1] == ["bloom-560m", "codegen-350M"]
    assert found["opt-350m"].head == (50272, 512)
    assert len(found["opt-125m"].operators()) == 2 + 12 * 6 * 2


def test_terms_of_the_paper_by_hand() -> None:
    # OPT-125m at batch 8: embed_p = 50272 x 768, other_p packed into chunks of 44,101,632 elements.
    terms = llmem_peak(described("opt-125m"), 8, 512).terms
    embed = 50272 * 768
    chunks = ceil((125_239_296 - embed) / 44_101_632)
    assert chunks == 2
    whole = (embed + chunks * 44_101_632) * 6
    assert terms["m_p16"] + terms["m_p32"] == ceil(whole / GRAIN) * GRAIN
    assert terms["m_out"] == ceil(14 * 8 * 512 * 768 * 2 / GRAIN) * GRAIN
    logits, shifted = (ceil(8 * n * 50272 * 2 / GRAIN) * GRAIN for n in (512, 511))
    assert terms["m_lm"] == logits + 2 * shifted + 74 * MIB
    matrices = [(50272 * 768, 1), (2050 * 768, 1), (768 * 768, 48), (768 * 3072, 24), (768, 60), (3072, 12)]
    assert terms["m_os"] == sum(n * ceil(size * 8 / GRAIN) * GRAIN for size, n in matrices)
    assert terms["m_base"] == 0


def test_fp32_logits_double_the_loss() -> None:
    shapes = parameters()["codegen-350M"]
    half, single = (Description.of(shapes, layers=20, logits_bytes=size) for size in (2, 4))
    weight = up(51200 * 1024 * 2)
    ratio = (llmem_peak(single, 8, 512).terms["m_lm"] - weight) / (llmem_peak(half, 8, 512).terms["m_lm"] - weight)
    assert ratio == pytest.approx(2, rel=0.01)


def test_methods_against_one_gpu() -> None:
    model = described("opt-1.3b")
    one = llmem_peak(model, 4, 512).terms
    assert llmem_peak(model, 4, 512, dp=4, sharded=False).terms == one
    shared = llmem_peak(model, 4, 512, dp=4).terms
    assert (shared["m_p16"], shared["m_p32"], shared["m_os"]) == (one["m_p16"], one["m_p32"] // 4, one["m_os"] // 4)
    split = llmem_peak(model, 4, 512, tp=4).terms
    assert (split["m_p16"], split["m_p32"], split["m_os"]) == tuple(one[n] // 4 for n in ("m_p16", "m_p32", "m_os"))
    assert split["m_back"] == up(24 * 4 * 512 * 2048 * 0.75 * 2)
    assert (split["m_out"], split["m_lm"]) == (one["m_out"], one["m_lm"])


def test_hybrid_in_both_readings() -> None:
    model = described("opt-1.3b")
    one = llmem_peak(model, 4, 512).terms
    same = [llmem_peak(model, 4, 512, dp=2, tp=2, physical=physical).terms["m_p16"] for physical in (True, False)]
    assert same == [one["m_p16"] // 2] * 2
    physical = llmem_peak(model, 4, 512, dp=2, tp=4).terms["m_p16"]
    printed = llmem_peak(model, 4, 512, dp=2, tp=4, physical=False).terms["m_p16"]
    assert (physical, printed) == (one["m_p16"] // 4, one["m_p16"] // 2)


def test_base_and_chunk_are_taken_as_given() -> None:
    model = described("opt-125m")
    assert llmem_peak(model, 1, 512, base=7 * MIB).total == llmem_peak(model, 1, 512).total + 7 * MIB
    terms = llmem_peak(model, 1, 512, chunk=125_239_296).terms
    assert terms["m_p16"] == 2 * (50272 * 768 + 125_239_296)


def test_sum_in_the_manner_of_dnnmem() -> None:
    mlp = Description.of([("e.weight", (1000, 64)), ("a.weight", (128, 64)), ("a.bias", (128,))], layers=1)
    terms = dnnmem_peak(mlp, 2, 8, size=4).terms
    assert terms["weights"] == terms["gradients"] == 256_000 + 32_768 + 512
    assert terms["optimizer"] == 2 * terms["weights"]
    assert terms["outputs"] == 16 * 4 * (64 + 128 + 1000)
    assert terms["loss"] == 63 * 512  # 16 tokens x 1000 x 2 B


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Description.of([("b", (4,))], layers=1), "the equations need one of each"),
        (lambda: llmem_peak(described("opt-2l"), 0, 512), "batch is 0"),
        (lambda: llmem_peak(described("opt-2l"), 1, 512, tp=2, sharded=False), "tp=2: conventional"),
        (lambda: llmem_peak(described("opt-2l"), 1, 0), "seq is 0"),
    ],
)
def test_bad_input_is_one_line(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@given(st.integers(1, 64), st.integers(1, 2048))
def test_estimates_grow_with_the_batch(batch: int, seq: int) -> None:
    model = described("opt-125m")
    assert llmem_peak(model, batch + 1, seq, chunk=2**25).total >= llmem_peak(model, batch, seq, chunk=2**25).total
    assert output_term(model, batch, seq) % GRAIN == 0
