"""Megatron-style tensor parallelism and the loss over a split vocabulary: shards, peaks against runs, and errors.

The peaks were recorded by running the same layers, and torch's `loss_parallel`, with PyTorch 2.13.0+cu130's allocator
on a stand-in for an H100 (rank 0, NCCL that does nothing; the training loop of `graph.loop.training`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.model import StepGraph
from graph.recorder.capture import capture
from simulator.estimator.estimate import estimate
from strategies import lower, registry
from traces.errors import LLMemError

JOB: dict[str, Any] = {"dtype": "bf16", "batch": 4, "world": 4, "gpu": "H100"}
RECORDED = [
    ({"model": "tinyllama-1.1b", "strategy": "tp", "tp_loss": "vocab"}, 4_151_572_992, 0),
    ({"model": "tinyllama-1.1b", "strategy": "tp-megatron"}, 3_996_130_304, 0),
    ({"model": "tinyllama-1.1b", "strategy": "tp-megatron-sp"}, 2_847_823_360, 4_096),  # positions are an input here
    ({"model": "opt-125m", "strategy": "tp-megatron-sp"}, 517_408_768, 0),
]


@pytest.mark.parametrize(("document", "peak", "more"), RECORDED)
def test_peak_is_the_recorded_one(document: dict[str, Any], peak: int, more: int) -> None:
    answer = estimate(Case.of({**JOB, **document}))
    assert answer.result.ranks[0].peak_allocated == peak + more


def sizes(model: str, strategy: str, world: int, **keys: Any) -> tuple[dict[str, tuple[int, ...]], StepGraph]:
    """Shapes of rank 0's parameters by name, and its graph."""
    case = Case.of({"model": model, "dtype": "bf16", "seq": 64, "strategy": strategy, "world": world, **keys})
    graph = capture(case, method=registry.find(case).method(case, 0))
    return {one.name: one.shape for one in graph.tensors if one.kind == "parameter"}, graph


def test_gpt2_is_split_by_role() -> None:
    shapes, _ = sizes("gpt2", "tp-megatron", 4)
    layer = "transformer.h.0"
    # 50,257 tokens are padded to a multiple of 4 * 128, that is 50,688; a tied head has no parameter of its own.
    assert shapes["transformer.wte.weight"] == (12_672, 768)
    assert "lm_head.weight" not in shapes
    assert shapes["transformer.wpe.weight"] == (1_024, 768)
    assert shapes[f"{layer}.attn.c_attn.weight"] == (3 * 768 // 4, 768)
    assert shapes[f"{layer}.attn.c_attn.bias"] == (3 * 768 // 4,)
    assert shapes[f"{layer}.attn.c_proj.weight"] == (768, 192)
    assert shapes[f"{layer}.attn.c_proj.bias"] == (768,)
    assert shapes[f"{layer}.mlp.c_fc.weight"] == (768, 768)
    assert shapes[f"{layer}.mlp.c_proj.weight"] == (768, 768)
    assert shapes[f"{layer}.ln_1.weight"] == (768,)


@pytest.mark.parametrize("model", ["gpt2", "opt-125m", "pythia-160m"])
@pytest.mark.parametrize("checkpointing", ["", "nonreentrant"])
def test_sequence_parallel_sums_the_gradients_of_norms(model: str, checkpointing: str) -> None:
    shapes, graph = sizes(model, "tp-megatron-sp", 2, checkpointing=checkpointing)
    whole = [shape[0] for name, shape in shapes.items() if len(shape) == 1 and ("norm" in name or "ln_" in name)]
    assert whole
    kinds = [name.split()[0] for name in graph.names if name.endswith("default_pg")]
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(kinds)


def test_ranks_are_alike() -> None:
    case = Case.of({"model": "pythia-70m", "seq": 64, "strategy": "tp-megatron", "world": 2})
    made = lower(case)
    assert [entry.ranks for entry in made.ranks] == [(0, 1)]


BAD = [
    ({"model": "gpt2", "strategy": "tp-megatron", "world": 5}, "num_attention_heads is 12, which 5"),
    ({"model": "tinyllama-1.1b", "strategy": "tp-megatron", "world": 8}, "num_key_value_heads is 4, which 8"),
    ({"model": "tinyllama-1.1b", "strategy": "tp", "world": 8}, "num_key_value_heads is 4, which 8"),
    ({"model": "gpt2", "strategy": "tp", "world": 2}, "'attn.c_attn' is a Conv1D"),
    ({"model": "opt-125m", "strategy": "tp-sp", "world": 2}, "tp-sp knows norms called"),
    ({"model": "bert-base", "strategy": "tp-megatron", "world": 2}, "is for decoders"),
    (
        {"model": "gpt2", "strategy": "tp-megatron-sp", "world": 2, "seq": 65},
        "key 'seq': not 65 with strategy 'tp-megatron-sp': 2 ranks do not divide 65",
    ),
    ({"model": "gpt2", "strategy": "tp-megatron-sp", "world": 2, "attn": "eager"}, "key 'attn'"),
    ({"model": "gpt2", "strategy": "tp-megatron", "world": 2, "lora": 8}, "key 'lora'"),
    ({"model": "gpt2", "strategy": "tp-megatron", "world": 2, "loss": "chunk8"}, "key 'loss'"),
    ({"model": "gpt2", "strategy": "ddp", "world": 2, "tp_loss": "vocab"}, "key 'tp_loss'"),
]


@pytest.mark.parametrize(("document", "words"), BAD)
def test_one_line_says_what_is_wrong(document: dict[str, Any], words: str) -> None:
    with pytest.raises(LLMemError) as caught:
        lower(Case.of(document))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_without_columns_are_refused(tmp_path: Path) -> None:
    # Phi-3's query, key and value are one layer of another name: its output projection cannot be split alone.
    path = tmp_path / "config.json"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    path.write_text(json.dumps({"model_type": "phi3", "vocab_size": 500, "pad_token_id": 0, **small}))
    case = Case.of({"model": str(path), "seq": 16, "strategy": "tp-megatron", "world": 2})
    with pytest.raises(LLMemError, match=r"'self_attn\.o_proj' would be split by rows, but no layer beside it"):
        capture(case, method=registry.find(case).method(case, 0))
