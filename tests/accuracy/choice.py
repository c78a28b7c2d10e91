"""LLMem's Table 3: the choice of method on 4 V100-16GB, and the order of predicted times, against the printed ones.

`python -m tests.accuracy.choice [MODEL ...]` simulates every method in LLMem's setting and prints both. The printed
figures are Table 3 of the LLMem paper (IJCAI 2024, arXiv 2404.10933): seconds for the same samples, None where it
prints out of memory. It takes about half a minute a model on a free core.
"""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Final

from simulator.selector.select import Asked, Selection, select

#: Model: LLMem's choice, then the seconds of 4DP, 2DP+2TP and 4TP.
TABLE_3: Final = {
    "opt-1.3b": ("4DP", 688, 1616, 2186),
    "opt-2.7b": ("4TP", None, 8174, 6038),
    "bloom-1b1": ("4DP", 680, 1724, 2631),
    "bloom-3b": ("4TP", None, None, 14495),
    "biogpt-large": ("4DP", 1022, 3315, 4773),
    "codegen-2b": ("4TP", None, 6314, 6244),
    "santacoder": ("4DP", 651, 1292, 1652),
    "gpt-neo-1.3b": ("4DP", 768, 1686, 2372),
    "llama-7b": ("CPU offload", None, None, None),
}
METHODS: Final = ("4DP", "2DP+2TP", "4TP")
#: Times that differ by less are not in any order.
APART: Final = 1.1


def misordered(found: Selection, printed: tuple[int | None, ...]) -> list[str]:
    """Pairs of methods whose predicted order is not the printed one, where the printed times differ enough."""
    speed = {one.name: one.samples / one.step_seconds for one in found.outcomes if one.fits}
    wrong = []
    for (one, first), (other, second) in combinations(zip(METHODS, printed, strict=True), 2):
        if first is None or second is None or max(first, second) < APART * min(first, second):
            continue
        if one in speed and other in speed and (speed[one] > speed[other]) != (first < second):
            wrong.append(f"{one} and {other}")
    return wrong


def main(models: list[str]) -> None:
    """Print the table."""
    for model in models or list(TABLE_3):
        printed, *times = TABLE_3[model]
        asked = Asked({"model": model, "seq": 512}, ("V100-16GB",) * 4, policy="llmem")
        found = select(asked, jobs=1)  # in one process, where the methods share what is captured
        chosen = found.winner.name if found.winner else found.advice
        verdict = "right" if chosen == printed else f"printed: {printed}"
        speeds = ", ".join(
            f"{one.name} {one.batch} ({one.samples / one.step_seconds:.1f}/s)" if one.fits else f"{one.name} oom"
            for one in found.outcomes
        )
        print(f"{model}: {chosen} ({verdict}); {speeds}; misordered: {misordered(found, tuple(times)) or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
