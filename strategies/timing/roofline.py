"""How long kernels take, by a roofline: the longer of arithmetic and memory traffic, and a fixed time for each.

Both are taken at the share of the peak that is usually reached; the fixed time, to start and drain the GPU, is what
makes small kernels slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from graph.hardware.gpus import Gpu
from graph.model import Int64Array, StepGraph
from strategies.timing.host import copies, one_way

#: The shares of the peak that large kernels reach: cuBLAS without tensor cores, and streaming through memory (with
#: them: `Gpu.reached`).
PLAIN_SHARE: Final = 0.90
MEMORY_SHARE: Final = 0.85
#: Seconds that a kernel takes beside its work. With it a matrix product reaches half of its share where the work lasts
#: as long: efficiency(work) = share * work / (work + START * peak * share), the usual curve of cuBLAS over size.
START: Final = 3e-6


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

    @classmethod
    def of(cls, card: Gpu, host_bytes_per_second: float) -> Self:
        """The speeds that kernels reach on a GPU."""
        names = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "float64")
        return cls(
            reached(card, "float32"),
            card.memory * MEMORY_SHARE,
            round(START * 1e9),
            {name: reached(card, name) for name in names},
            host_bytes_per_second,
        )

    def duration_ns(self, flops: Int64Array, moved: Int64Array) -> Int64Array:
        """Nanoseconds of kernels that do `flops` and move `moved` bytes (arrays of equal length)."""
        busy = np.maximum(flops / self.flops_per_second, moved / self.bytes_per_second)
        return np.asarray(np.rint(busy * 1e9), dtype=np.int64) + self.fixed_ns

    def kernel_ns(self, flops: int, moved: int, dtype: str, *, over: bool = False) -> int:
        """Nanoseconds of one operator on operands of a type; `over`: it copies between the host and the device."""
        if not flops and not moved:
            return 0
        busy = max(flops / self.by_dtype.get(dtype, self.flops_per_second), moved / self.bytes_per_second)
        if over and self.host_bytes_per_second:
            busy = moved // 2 / self.host_bytes_per_second
        return round(busy * 1e9) + self.fixed_ns

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


def reached(card: Gpu, dtype: str) -> float:
    """FLOP/s that large matrix products of `dtype` reach."""
    peak = card.flops(dtype)
    return peak * (card.reached if peak > card.single else PLAIN_SHARE)


def _dtypes(graph: StepGraph) -> Int64Array:
    """The type of each operator's first operand in memory (of its result, where it reads nothing); -1: none."""
    found = np.full(len(graph.operators), -1, dtype=np.int64)
    for accesses in (graph.writes, graph.reads):
        some = np.flatnonzero(np.diff(accesses.start) > 0)
        found[some] = graph.storages.dtype[accesses.storage[accesses.start[some]]]
    return found
