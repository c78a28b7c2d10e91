"""LLMem's Table 2 beside the simulation: one 16 GB V100, 512 tokens, the largest batch that fits.

    python -m tests.accuracy table2 [MODEL]...

The paper's figures are device totals in MB (of 2^20 bytes, as nvidia-smi prints them) out of 16,384. It does not print
batches, driver, context or torch's release; everything that is assumed instead is printed above the table.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import Final

from strategies.gemini.equations import llmem_peak
from tests.accuracy.gemini_fit import largest
from tests.support.gemini_data import case_of

MIB: Final = 1 << 20
#: nvidia-smi's total of the card; what PyTorch sees less, the driver keeps to itself.
CAPACITY: Final = 16_384 * MIB
#: A batch that fits no card.
MOST: Final = 1 << 20
SEQ: Final = 512
#: LLMem's estimate, DNNMem's, and what was measured, in MB (IJCAI 2024, table 2).
TABLE: Final = {
    "opt-125m": (16_314, 10_402, 16_378),
    "opt-350m": (16_004, 9_354, 16_264),
    "bloom-560m": (16_578, 10_726, 16_324),
    "codegen-350m": (16_236, 6_910, 16_100),
}


def simulated(model: str, batch: int) -> tuple[bool, int, int, int]:
    """Whether a batch fits, the device's total by nvidia-smi, the context and the driver's reserve, all in bytes."""
    from simulator.estimator.estimate import estimate, forget_graphs

    found = estimate(case_of(model, batch), context="auto", analyse=False)
    forget_graphs()
    rank = found.worst
    reserve = CAPACITY - rank.device.total_bytes
    context = sum(term.bytes for term in found.outside)
    return found.verdict != "oom", rank.peak_reserved + context + reserve, context, reserve


def by_equations(model: str, base: int) -> tuple[int, int]:
    """The largest batch by LLMem's equations, and the device's total that they say, with `base` bytes outside."""
    from graph.case import Case
    from simulator.estimator.closed_form import described

    description = described(Case.of(case_of(model, 1)))

    def peak(batch: int) -> int:
        return llmem_peak(description, batch, SEQ, base=base).total

    batch = bisect.bisect_right(range(1, MOST), CAPACITY, key=peak)
    return batch, peak(batch)


def main(models: list[str]) -> None:
    """Print assumptions and the table."""
    fits: dict[int, tuple[bool, int, int, int]] = {}

    def fitting(model: str, batch: int) -> bool:
        fits[batch] = simulated(model, batch)
        return fits[batch][0]

    _, _, context, reserve = simulated("opt-125m", 1)
    print(
        "assumed: torch 2.0, transformers 4.29's loss and attention, fp16, Gemini on one GPU, reentrant checkpointing"
    )
    print(f"assumed: context, kernels and the like {context / MIB:,.0f} MB; driver {reserve / MIB:,.0f} MB of 16,384")
    print(f"assumed: {SEQ} tokens; worst moment of 3 steps; the paper prints no batch: it is the largest that")
    print(
        "assumed: fits, searched from the one that LLMem's equations give (a smaller one may not fit: 72 of opt-125m)"
    )
    print(f"{'model':14}{'batch':>6}{'simulated':>11}{'measured':>10}{'error':>8}"
          f"   {'LLMem there':>12}{'error':>8}   LLMem by its equations here: batch, MB")  # fmt: skip
    for model in models or TABLE:
        theirs, _, measured = TABLE[model]
        fits.clear()
        own, peak = by_equations(model, context + reserve)
        batch = largest(partial(fitting, model), own)
        total = fits[batch][1] / MIB
        print(f"{model:14}{batch:6}{total:11,.0f}{measured:10,}{total / measured - 1:8.1%}"
              f"   {theirs:12,}{theirs / measured - 1:8.1%}   {own}, {peak / MIB:,.0f}", flush=True)  # fmt: skip
