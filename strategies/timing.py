"""How long kernels and collectives take: the `duration_ns` of a trace's events.

Kernels follow a roofline: the longer of arithmetic and memory traffic at the share of the peak that is usually reached,
and a fixed time to start and drain the GPU, which is what makes small kernels slow. Collectives follow the alpha-beta
model of a ring or a double binary tree, whichever is faster, as NCCL chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from strategies.hardware import Gpu, Link, gpu, link
from traces.errors import ConfigError

NANO: Final = 1e9
#: The shares of the peak that large kernels reach: cuBLAS on tensor cores and without, and streaming through memory.
TENSOR_SHARE: Final = 0.75
PLAIN_SHARE: Final = 0.90
MEMORY_SHARE: Final = 0.85
#: Seconds that a kernel takes beside its work. With it a matrix product reaches half of its share where the work lasts
#: as long: efficiency(work) = share * work / (work + START * peak * share), the usual curve of cuBLAS over size.
START: Final = 3e-6
#: What NCCL takes to start a ring or a tree (baseLat of src/graph/tuning.cc, Simple protocol).
RING_START: Final = 8.4e-6
TREE_START: Final = 14.0e-6

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send", "receive")


@dataclass(frozen=True, slots=True)
class Topology:
    """How ranks are wired: `inside` a machine of `machine` GPUs, and `between` machines (for each GPU)."""

    inside: Link
    between: Link
    machine: int = 8

    @classmethod
    def of(cls, name: str, *, between: str = "infiniband-hdr", machine: int = 8) -> Topology:
        """The usual machine of a GPU: its own link inside. Raises ConfigError for unknown names or sizes below 1."""
        if machine < 1:
            raise ConfigError(f"a machine of {machine} GPUs: there must be at least 1")
        return cls(link(gpu(name).link), link(between), machine)

    def crossing(self, ranks: tuple[int, ...]) -> bool:
        """Whether a group of ranks spans machines (ranks fill machines in order)."""
        return len({rank // self.machine for rank in ranks}) > 1


def kernel_ns(card: Gpu, flops: int, moved: int, dtype: str = "float32") -> int:
    """Nanoseconds of a kernel with `flops` operations on `dtype` that moves `moved` bytes; 0 for no work at all."""
    if flops <= 0 and moved <= 0:
        return 0
    peak = card.flops(dtype)
    share = TENSOR_SHARE if peak > card.single else PLAIN_SHARE
    work = max(flops / (peak * share), moved / (card.memory * MEMORY_SHARE))
    return round((work + START) * NANO)


def collective_ns(kind: str, size: int, ranks: int, way: Link) -> int:
    """Nanoseconds of a collective among `ranks` over `way`; `size` is the bytes of the whole, gathered or unreduced.

    A ring moves (n - 1) / n of the bytes through every GPU for each pass (all-reduce: two), in n - 1 steps; a tree
    moves all of them up and down in log2(n) levels each. One rank takes no time.

    Raises ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"no collective {kind!r} is known; these are: {', '.join(KINDS)}")
    if ranks <= 1 or size <= 0:
        return 0
    steps = ranks - 1
    part = steps / ranks * size * way.beta
    if kind == "all_reduce":
        ring = RING_START + 2 * (steps * way.alpha + part)
        tree = TREE_START + 2 * (ceil(log2(ranks)) * way.alpha + size * way.beta)
        return round(min(ring, tree) * NANO)
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return round((RING_START + steps * way.alpha + part) * NANO)
    if kind in ("broadcast", "reduce"):
        return round((RING_START + steps * way.alpha + size * way.beta) * NANO)
    return round((RING_START + way.alpha + size * way.beta) * NANO)


@dataclass(frozen=True, slots=True)
class Clock:
    """The speeds of one run: a card and how its ranks are wired. Strategies ask it for every duration."""

    card: Gpu
    topology: Topology

    @classmethod
    def of(cls, name: str, *, between: str = "infiniband-hdr", machine: int = 8) -> Clock:
        """The clock of a GPU by its name in traces, in machines as `Topology.of` has them."""
        return cls(gpu(name), Topology.of(name, between=between, machine=machine))

    def kernel(self, flops: int, moved: int, dtype: str = "float32") -> int:
        """Nanoseconds of a kernel."""
        return kernel_ns(self.card, flops, moved, dtype)

    def collective(self, kind: str, size: int, ranks: tuple[int, ...]) -> int:
        """Nanoseconds of a collective among these ranks: over the slowest way that its ring takes."""
        way = self.topology.between if self.topology.crossing(ranks) else self.topology.inside
        return collective_ns(kind, size, len(ranks), way)
