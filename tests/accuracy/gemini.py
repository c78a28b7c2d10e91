"""How close the simulation and LLMem's own estimator come to recorded runs of the real Gemini, by setting and batch.

    python -m tests.accuracy.gemini [MODEL]...

The figure is the reserved memory after a step, which LLMem calls the peak; the peak of allocated memory stands beside.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tests.support.gemini_data import case_of, rows

if TYPE_CHECKING:
    from traces.model import Trace

SETTINGS = {("1", "0"): "1 GPU", ("4", "0"): "ADP, 4", ("4", "4"): "4TP", ("4", "2"): "2DP+2TP"}
#: Batches above 8 are those that LLMem chose; they share a line.
LARGE = 9
KEY = ("model", "world", "tp", "rank", "lag", "batch")


def trace_of(row: dict[str, Any]) -> Trace:
    """One rank's trace of a recorded run's case, alone in its groups: rank 0 where the row has none."""
    from dataclasses import replace

    from graph.case import Case
    from simulator.estimator.estimate import captured
    from strategies.lowering import lower

    world, tensor, number = int(row["world"]), max(1, int(row["tp"])), int(row.get("rank") or 0)
    deferred = "late" if row.get("lag") == "1" else "prompt"
    mesh = {"dp": world // tensor, "tp": tensor}
    case = Case.of(case_of(row["model"], int(row["batch"]), world=world, mesh=mesh, deferred=deferred))
    graph = captured(replace(case, world=1, mesh={}))
    trace = lower(replace(graph, case=case.document()))
    rank = next(entry for entry in trace.ranks if number in entry.ranks)
    alone = {name: ((number,),) for name in trace.groups}
    return replace(trace, ranks=(replace(rank, ranks=(number,), device=0),), groups=alone)


def predicted(row: dict[str, Any]) -> tuple[int, int]:
    """Peak of allocated memory in training, and the most reserved memory after a step, of a recorded run's case."""
    from dataclasses import replace

    from simulator.engine.replay import replay
    from traces.model import Device

    trace = replace(trace_of(row), devices=(Device("large", 2**42),))
    phases = [phase for phase in replay(trace, analyse=False).ranks[0].phases if phase.name != "load"]
    return max(phase.peak for phase in phases), max(phase.peak_reserved for phase in phases[2:])


def main(models: list[str]) -> None:
    """Print the table."""
    theirs = {tuple(row[key] for key in KEY): float(row["error_pct"]) for row in rows("llmem_error.csv")}
    table: dict[tuple[str, int], list[tuple[float, float, float | None]]] = defaultdict(list)
    recorded = [row for row in rows("runs.csv.gz") if row["keep_gathered"] == "1"]
    for row in sorted(recorded, key=lambda row: (row["model"], int(row["batch"]))):
        if models and row["model"] not in models:
            continue
        peak, reserved = predicted(row)
        allocation = 100 * (peak / int(row["train_peak_allocated"]) - 1)
        reservation = 100 * (reserved / int(row["after_step_device"]) - 1)
        other = theirs.get(tuple(row[key] for key in KEY))
        table[SETTINGS[row["world"], row["tp"]], min(int(row["batch"]), LARGE)].append((allocation, reservation, other))
        print(f"{row['model']:14} {SETTINGS[row['world'], row['tp']]:8} batch {row['batch']:>3} rank {row['rank']}"
              f" allocated {allocation:+6.2f} %  reserved {reservation:+6.2f} %", file=sys.stderr)  # fmt: skip
    print("setting   batch   n   allocated: mean, worst   reserved: mean, median, worst   LLMem: mean, worst")
    for (setting, batch), found in sorted(table.items()):
        allocated, reserved_ = [abs(one[0]) for one in found], [abs(one[1]) for one in found]
        llmem = [abs(one[2]) for one in found if one[2] is not None] or [float("nan")]
        print(
            f"{setting:8} {'larger' if batch == LARGE else batch:>6} {len(found):3}"
            f"   {mean(allocated):9.2f} % {max(allocated):7.2f} %"
            f"   {mean(reserved_):8.2f} % {median(reserved_):6.2f} % {max(reserved_):6.2f} %"
            f"   {mean(llmem):6.1f} % {max(llmem):6.1f} %"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
