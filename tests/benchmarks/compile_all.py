"""Calls every kernel that plain Python calls, so that all of them are compiled (or loaded from the cache).

python -m tests.benchmarks.compile_all
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import traces
from simulator.engine.replay import replay
from tests.benchmarks.workloads import uniform
from tests.places import ROOT
from traces.check import check
from traces.model import Initial, InitialBlock, InitialSegment, RankEvents, Trace

RANKS: Final = ROOT / "traces" / "samples" / "ranks.json"
SEGMENT: Final = InitialSegment(
    address=0x7F0000000000,
    bytes=20 << 20,
    stream=0,
    pool="large",
    expandable=True,
    blocks=(InitialBlock(-1, 20 << 20, 20 << 20, "active_allocated"),),
)


def with_initial(trace: Trace) -> Trace:
    """The trace, as recorded from a state with one expandable segment."""
    (rank,) = trace.ranks
    free_id = int(rank.events.ints("id").max()) + 1
    segment = replace(SEGMENT, blocks=(replace(SEGMENT.blocks[0], id=free_id),))
    return replace(trace, ranks=(RankEvents((0,), rank.events, initial=Initial((segment,))),))


def main() -> None:
    """Read a trace with collectives, and replay and check one that began with memory in use."""
    replay(traces.read(RANKS))
    trace = with_initial(uniform(20_000).trace("expandable_segments:True", "2.13"))
    check(trace)
    replay(trace, events=True, log=True, snapshot=True)


if __name__ == "__main__":
    main()
