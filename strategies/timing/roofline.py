"""How long kernels take: the longer of computing and of moving bytes (a roofline), plus a fixed part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from graph.model import Int64Array, StepGraph
from strategies.timing.host import copies, one_way


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a GPU is, for durations of kernels: the longer of computing and of moving bytes, plus a fixed part.

    `by_dtype` are FLOP/s by the type of an operator's operands; `flops_per_second` those of other types. Copies between
    host and device carry `host_bytes_per_second`; where that is 0 neither they nor the host's optimizer are reckoned.
    """

    flops_per_second: float
    bytes_per_second: float
    fixed_ns: int = 2_000
    by_dtype: Mapping[str, float] = field(default_factory=dict)
    host_bytes_per_second: float = 0.0

    def duration_ns(self, flops: Int64Array, moved: Int64Array) -> Int64Array:
        """Nanoseconds of kernels that do `flops` and move `moved` bytes (arrays of equal length)."""
        busy = np.maximum(flops / self.flops_per_second, moved / self.bytes_per_second)
        return np.asarray(np.rint(busy * 1e9), dtype=np.int64) + self.fixed_ns

    def kernels_ns(
        self, graph: StepGraph, flops: Int64Array | None = None, moved: Int64Array | None = None
    ) -> Int64Array:
        """Nanoseconds of every operator of a graph, by the type of what it reads; 0 where there is no work.

        `flops` and `moved` stand for the graph's own where a rank does only a part of an operator.
        """
        flops = graph.operators.flops if flops is None else flops
        moved = graph.operators.moved if moved is None else moved
        rates = np.asarray([self.by_dtype.get(name, self.flops_per_second) for name in (*graph.names, "")])
        busy = np.maximum(flops / rates[_dtypes(graph)], moved / self.bytes_per_second)
        if self.host_bytes_per_second:
            over = copies(graph)
            busy[over] = one_way(graph, over) / self.host_bytes_per_second
        return np.where((flops > 0) | (moved > 0), np.rint(busy * 1e9).astype(np.int64) + self.fixed_ns, 0)


def _dtypes(graph: StepGraph) -> Int64Array:
    """The type of each operator's first operand in memory (of its result, where it reads nothing); -1: none."""
    found = np.full(len(graph.operators), -1, dtype=np.int64)
    for accesses in (graph.writes, graph.reads):
        some = np.flatnonzero(np.diff(accesses.start) > 0)
        found[some] = graph.storages.dtype[accesses.storage[accesses.start[some]]]
    return found
