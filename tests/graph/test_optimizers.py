"""Optimizers of bitsandbytes: what their states take of the GPU, and what is in managed memory instead."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers

from graph.case import Case
from graph.model import Kind, StepGraph
from graph.recorder.capture import capture
from traces.units import format_bytes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

#: Parameters on every side of bitsandbytes' limits: fewer than 4,096 elements, than 100,000, and more.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
}  # fmt: skip
#: Elements from which a state is paged, those below which it is in 32 bits, those of a block, a code book's bytes.
PAGED, SMALL, BLOCK, BOOK = 100_000, 4096, 256, 1024


def elements() -> list[int]:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    return [parameter.numel() for parameter in model.parameters()]


def states(graph: StepGraph) -> int:
    """Bytes of optimizer states that are alive at the end."""
    number = graph.index[(graph.kind == Kind.ALLOC)]
    kept = np.setdiff1d(number, graph.index[graph.kind == Kind.FREE])
    of_optimizer = graph.storages.category[kept] == graph.names.index("optimizer_state")
    return int(graph.storages.bytes[kept][of_optimizer].sum())


def captured(folder: Path, optimizer: str) -> StepGraph:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    case: dict[str, Any] = {"model": str(folder), "dtype": "bf16", "seq": 32, "steps": 2, "optimizer": optimizer}
    return capture(Case.of(case))


@pytest.mark.parametrize(
    ("optimizer", "bits", "moments"),
    [
        ("paged_adamw_8bit", 8, 2),
        ("paged_adamw_32bit", 32, 2),
        ("paged_adamw", 32, 2),
        ("paged_lion_8bit", 8, 1),
        ("paged_lion_32bit", 32, 1),
    ],
)
def test_large_states_of_paged_optimizers_are_not_the_allocators(
    tmp_path: Path, optimizer: str, bits: int, moments: int
) -> None:
    """As in bitsandbytes.optim.optimizer: `get_state_buffer` and `init_state`."""
    sizes = elements()
    assert min(sizes) < SMALL < PAGED < max(sizes)
    assert any(SMALL <= size < PAGED for size in sizes)
    paged = device = 0
    for size in sizes:
        wide = 4 if bits == 32 or size < SMALL else 1
        if size >= PAGED:
            paged += moments * wide * size
        else:
            device += moments * wide * size
        if wide == 1:
            device += moments * 4 * math.ceil(size / BLOCK)
    graph = captured(tmp_path, optimizer)
    assert any(text.startswith(f"{format_bytes(paged)} of optimizer states are paged") for text in graph.assumptions)
    assert states(graph) - device in (0, moments * BOOK)


def test_states_that_are_not_paged_are(tmp_path: Path) -> None:
    sizes = elements()
    device = sum(4 * size if size < SMALL else size + 4 * math.ceil(size / BLOCK) for size in sizes)
    graph = captured(tmp_path, "lion-8bit")
    assert states(graph) - device in (0, BOOK)
    assert not any("paged" in text for text in graph.assumptions)
