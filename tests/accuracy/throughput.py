"""Predicted tokens per second beside those that others measured and published.

    python -m tests.accuracy.throughput [WORD]...

(rows whose name has a WORD; all by default). Training without torch.compile. `time_steps` is a model, not fitted to
these rows: its speeds are data sheets and the shares of them that large kernels reach (`graph.hardware.gpus`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest import mock

#: What all Llama rows share: fp32 weights under FSDP2's bf16 policy; all that the publishers' machines hold.
_LLAMA: Final[Mapping[str, Any]] = {
    "dtype": "fp32", "autocast": "bf16", "strategy": "fsdp2", "optimizer": "adamw-fused", "gpu": "A100-80GB",
    "memory": 200 << 30,
}  # fmt: skip
_OPERATORS: Final[Mapping[str, Any]] = {"checkpointing": "selective", "save": ("matmul", "attn")}
_TITAN: Final = "pytorch/torchtitan docs/performance.md (2024), 64 A100"
_H100: Final = "pytorch/torchtitan benchmarks/llama3_h100_202412 (2024)"
#: Those H100: memory of 2.4 TB/s and, at 500 W, a peak "between SXM and NVL"; here the NVL's, by its data sheet.
_SLOW: Final[Mapping[str, float]] = {"memory": 2.4e12, "half": 835e12}


@dataclass(frozen=True)
class Row:
    """A published figure: tokens per second of one GPU, and the case that is taken for it."""

    name: str
    published: float
    case: Mapping[str, Any]
    source: str
    card: Mapping[str, float] = field(default_factory=dict)  # what is other than in `graph.hardware.gpus`


ROWS: Final = (
    Row(
        "Llama 2 7B, 128 A100",
        3700,
        {**_LLAMA, "model": "llama-2-7b", "batch": 2, "seq": 4096, "world": 128},
        "pytorch.org/blog/maximizing-training (2024), no checkpointing",
    ),
    Row(
        "Llama 2 13B, 64 A100",
        2162,
        {**_LLAMA, "model": "llama-2-13b", "batch": 2, "seq": 4096, "world": 64},
        _TITAN,
    ),
    Row(
        "Llama 2 13B, selective, 64 A100",
        1904,
        {**_LLAMA, **_OPERATORS, "model": "llama-2-13b", "batch": 2, "seq": 4096, "world": 64},
        _TITAN,
    ),
    Row(
        "Llama 2 70B, full, 64 A100",
        353,
        {**_LLAMA, "checkpointing": "nonreentrant", "model": "llama-2-70b", "batch": 2, "seq": 4096, "world": 64},
        _TITAN,
    ),
    Row(
        "Llama 3 8B, selective, 64 A100",
        2973,
        {**_LLAMA, **_OPERATORS, "model": "llama-3.1-8b", "batch": 1, "seq": 8192, "world": 64},
        _TITAN,
    ),
    Row(
        "Llama 3 70B, full, 64 A100",
        331,
        {**_LLAMA, "checkpointing": "nonreentrant", "model": "llama-3.1-70b", "batch": 1, "seq": 8192, "world": 64},
        _TITAN,
    ),
    Row(
        "GPT-2, 1 A100",
        12 * 1024 / 0.25,
        {"model": "gpt2", "dtype": "fp32", "autocast": "bf16", "attn": "eager", "batch": 12, "seq": 1024,
         "gpu": "A100-40GB"},
        "karpathy/nanoGPT README: about 250 ms for 12 x 1,024 tokens (December 2022, before fused attention)",
    ),
    Row(
        "Llama 3.1 8B, selective, 8 H100",
        5762,
        {**_LLAMA, **_OPERATORS, "model": "llama-3.1-8b", "batch": 2, "seq": 8192, "world": 8, "gpu": "H100-80GB"},
        _H100,
        _SLOW,
    ),
    Row(
        "Llama 3.1 8B, selective, 128 H100",
        5605,
        {**_LLAMA, **_OPERATORS, "model": "llama-3.1-8b", "batch": 2, "seq": 8192, "world": 128, "gpu": "H100-80GB"},
        _H100,
        _SLOW,
    ),
)  # fmt: skip


def predicted(row: Row) -> float:
    """Tokens per second of one GPU, as `estimate --time` says."""
    from graph.hardware.gpus import GPUS
    from simulator.estimator.estimate import estimate, forget_graphs
    from simulator.estimator.step_time import StepTime

    name = row.case["gpu"]
    changes: Any = row.card
    table: Any = GPUS
    with mock.patch.dict(table, {name: replace(GPUS[name], **changes)}):
        found = estimate(row.case, context=0, analyse=False, time_steps=True)
    forget_graphs()
    if not isinstance(found.step, StepTime):
        raise ValueError("it runs out of memory")
    return found.step.tokens_per_second / found.step.ranks


def main(words: list[str]) -> None:
    """Print the table."""
    print(f"{'run':34}{'published':>10}{'predicted':>10}{'ratio':>7}  source")
    for row in ROWS:
        if words and not any(word.lower() in row.name.lower() for word in words):
            continue
        found = predicted(row)
        figures = f"{row.published:>10,.0f}{found:>10,.0f}{found / row.published:>7.2f}"
        print(f"{row.name:34}{figures}  {row.source}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
