"""Recorded memory snapshots of training and inference runs, and the case of each.

Every recording holds the whole run since before the model was loaded. What may remain between it and a prediction is
said in `tests/graph/recorder/test_recorded_events.py`.

    python -m tests.accuracy.recorded_events [FOLDER] [--show N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.snapshots.reader import read
from tests.accuracy.sequences import Difference, compare
from tests.places import DATA

FOLDER: Final = DATA / "training" / "snapshots"

_PLAIN: Final = {"gpu": "A100-80GB", "release": "2.11"}

#: The case of each recording, by the name of its file without endings.
CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bloom-560m_fp32_eager_b1_s512_adamw_A100": {"model": "bloom-560m", "attn": "eager"},
    "codegen-350m_fp32_eager_b2_s512_adamw_A100": {"model": "codegen-350m", "attn": "eager", "batch": 2},
    "gpt2-medium_fp32_sdpa_b4_s1024_ckpt_adamw_A100": {
        "model": "gpt2-medium",
        "batch": 4,
        "seq": 1024,
        "checkpointing": "nonreentrant",
    },
    "gpt2_fp32_eager_b8_s512_adamw_A100": {"model": "gpt2", "attn": "eager", "batch": 8},
    "infer_tinyllama-1.1b_bf16_dynamic_b4_p512_n32_A100": {
        "model": "tinyllama-1.1b",
        "task": "inference",
        "dtype": "bf16",
        "batch": 4,
    },
    "infer_tinyllama-1.1b_nf4_dynamic_b1_p512_n32_A100": {
        "model": "tinyllama-1.1b",
        "task": "inference",
        "dtype": "bf16",
        "quant": "nf4",
    },
    "llama-2-7b_bf16_sdpa_b1_s512_ckpt_adamw_A100": {
        "model": "llama-2-7b",
        "dtype": "bf16",
        "checkpointing": "nonreentrant",
    },
    "offload_gpt2_bf16_fsdp2x4_accum4_nosync_b2_s512_A100": {
        "model": "gpt2",
        "dtype": "bf16",
        "batch": 2,
        "strategy": "fsdp2",
        "world": 4,
        "accum": 4,
        "grad_sync": "last",
    },
    "offload_opt-125m_bf16_sac-matmul-attn_b2_s512_A100": {
        "model": "opt-125m",
        "dtype": "bf16",
        "batch": 2,
        "checkpointing": "selective",
        "save": "matmul+attn",
    },
    "opt-125m_fp32_sdpa_b2_s512_adamw-fused_A100": {"model": "opt-125m", "batch": 2, "optimizer": "adamw-fused"},
    "opt-125m_fp32_sdpa_b2_s512_adamw_A100": {"model": "opt-125m", "batch": 2},
    "opt-125m_fp32_sdpa_b2_s512_sgd_A100": {"model": "opt-125m", "batch": 2, "optimizer": "sgd"},
    "pipe_gpt2_bf16_1F1B_rank1of4_mb8x1_s512_A100": {
        "model": "gpt2",
        "dtype": "bf16",
        "strategy": "pp",
        "world": 4,
        "microbatches": 8,
        "shapes": "runtime",
    },
    "pythia-410m_fp32_sdpa_b4_s512_amp-fp16_adamw_A100": {"model": "pythia-410m", "batch": 4, "autocast": "fp16"},
    "seq2seq_t5-small_bf16_b4_s512-128_adamw_A100": {
        "model": "t5-small",
        "dtype": "bf16",
        "attn": "default",
        "batch": 4,
        "dec_seq": 128,
    },
    "tinyllama-1.1b_bf16_ddpx4_b2_s512_adamw_A100": {
        "model": "tinyllama-1.1b",
        "dtype": "bf16",
        "batch": 2,
        "strategy": "ddp",
        "world": 4,
    },
    "tinyllama-1.1b_bf16_fsdp2x4_b2_s512_adamw_A100": {
        "model": "tinyllama-1.1b",
        "dtype": "bf16",
        "batch": 2,
        "strategy": "fsdp2",
        "world": 4,
    },
    "tinyllama-1.1b_bf16_sdpa_b4_s512_lora8_adamw_A100": {
        "model": "tinyllama-1.1b",
        "dtype": "bf16",
        "batch": 4,
        "lora": 8,
    },
    "zero_opt-125m_bf16_stage3x4_b2_s512_adamw_A100": {
        "model": "opt-125m",
        "dtype": "bf16",
        "batch": 2,
        "strategy": "deepspeed-3",
        "world": 4,
    },
}

#: The rank that was recorded, where it is not 0.
RANKS: Final[Mapping[str, int]] = {"pipe_gpt2_bf16_1F1B_rank1of4_mb8x1_s512_A100": 1}


def recorded(folder: Path = FOLDER) -> Iterator[Path]:
    """The recordings of a folder whose case is known."""
    for path in sorted(folder.glob("*.pickle.gz")):
        if path.name.removesuffix(".pickle.gz") in CASES:
            yield path


def difference(path: Path) -> Difference:
    """What remains between a recording and the events predicted for its case."""
    from simulator.estimator.estimate import estimate

    name = path.name.removesuffix(".pickle.gz")
    predicted = estimate({**_PLAIN, **CASES[name]}, context=0, analyse=False).trace
    rank = RANKS.get(name, 0)
    place = next(i for i, entry in enumerate(predicted.ranks) if rank in entry.ranks)
    return compare(read(path), predicted, rank=place)


def main() -> None:
    """Print how many events differ, by recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--show", type=int, default=0)
    options = parser.parse_args()
    for path in recorded(options.folder):
        try:
            found = difference(path)
        except Exception as error:
            print(f"{path.name}: {type(error).__name__}: {error}")
            continue
        print(
            f"{len(found.recorded.tokens):7} events, {found.count:5} differ ({found.share:.3%})  {path.name}",
            flush=True,
        )
        for edit in found.edits[: options.show]:
            print(
                "   ",
                found.recorded.tokens[edit.a : edit.b][:8],
                "|",
                found.predicted.tokens[edit.c : edit.d][:8],
                found.predicted.name[max(edit.c - 2, 0) : edit.c + 2],
            )


if __name__ == "__main__":
    main()
