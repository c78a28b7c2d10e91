"""Chunk storage: how Colossal-AI's Gemini packs parameters into equal chunks, and what each rank keeps of them.

Sizes are counts of elements, also where Colossal-AI's names say bytes or megabytes: its "32 MB" is 32 x 2^20 elements.
A chunk of fp16 parameters is paired with an fp32 chunk of the same layout, and Adam's two fp32 states exist for the
real elements of a rank's shard only, so that everything about memory follows from the layout made here.

Written from Colossal-AI v0.3.0+72 (d4fb7bfd): colossalai/zero/gemini/chunk/search_utils.py, manager.py, chunk.py and
zero/gemini/gemini_optimizer.py, with the one change of LLMem's tree (see `search`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

import numpy as np

from traces.errors import ConfigError
from traces.model import Int64Array

#: Colossal-AI's defaults, in elements: smallest chunk, how far above it is searched, and in which steps.
MINIMUM: Final = 32 * 2**20
SPAN: Final = 32 * 2**20
INTERVAL: Final = 1024
#: Bytes an element: the parameter (or, after its backward, its gradient), the master copy, and Adam's two states.
HALF: Final = 2
MASTER: Final = 4


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter on one rank: `elements` after tensor parallelism; `degree` ranks share it as data parallel."""

    name: str
    elements: int
    degree: int = 1


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """The chunk size of one group of parameters (those of one data-parallel degree); `gathered`: never sharded."""

    elements: int
    gathered: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies in its chunk: elements `start` to `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of `elements` that `degree` ranks share. `private`: it holds one parameter larger than the chunk size."""

    degree: int
    index: int
    elements: int
    gathered: bool
    private: bool
    slots: tuple[Slot, ...]

    @property
    def used(self) -> int:
        """Elements that hold a parameter; the rest is waste at the end."""
        return self.slots[-1].end if self.slots else 0

    @property
    def held(self) -> int:
        """Elements that a rank keeps between steps: the whole chunk where it is kept gathered, else its shard."""
        return self.elements if self.gathered else self.elements // self.degree

    def bounds(self, rank: int) -> tuple[int, int]:
        """First and last element that `rank` (0 to degree - 1) keeps."""
        if not 0 <= rank < self.degree:
            raise ValueError(f"rank {rank} is not one of the {self.degree} that share the chunk")
        return (0, self.elements) if self.gathered else (rank * self.held, (rank + 1) * self.held)

    def valid(self, rank: int) -> int:
        """Elements of what `rank` keeps that hold a parameter (chunk.py: valid_end): the overflow check reads them."""
        start, end = self.bounds(rank)
        return max(0, min(end, self.used) - start)

    def pieces(self, rank: int) -> tuple[Slot, ...]:
        """The parameters' parts in what `rank` keeps, in chunk order, cut to it; parameters without a part left out."""
        start, end = self.bounds(rank)
        cut = (Slot(slot.name, max(slot.start, start), min(slot.end, end)) for slot in self.slots)
        return tuple(slot for slot in cut if slot.end > slot.start)


def local_elements(name: str, shape: Sequence[int], tensor: int) -> int:
    """Elements of a parameter on one rank of LLMem's tensor parallelism over `tensor` ranks.

    Every linear layer is split on its input dimension and every embedding on its hidden one, which is the last
    dimension of a matrix in both; vectors (norms, biases) are on every rank.

    Raises ConfigError where the last dimension of a matrix is not a multiple of `tensor`.
    """
    elements = int(np.prod(shape, dtype=np.int64))
    if tensor == 1 or len(shape) < 2:
        return elements
    if shape[-1] % tensor:
        raise ConfigError(f"tp={tensor}: the last dimension of {name}, {shape[-1]}, is not a multiple of it")
    return elements // tensor


def local_parameters(shapes: Sequence[tuple[str, Sequence[int]]], *, data: int = 1, tensor: int = 1) -> list[Parameter]:
    """The parameters of one rank in LLMem's settings, in the order given (`model.parameters()`, tied ones once).

    `data` and `tensor` are the sizes of the two axes. A parameter that tensor parallelism splits belongs to the group
    of degree `data`; one that it replicates belongs to the whole world, of degree `data * tensor`.
    """
    found = []
    for name, shape in shapes:
        split = tensor > 1 and len(shape) >= 2
        found.append(Parameter(name, local_elements(name, shape, tensor), data if split else data * tensor))
    return found


def search(
    parameters: Sequence[Parameter],
    *,
    minimum: int = MINIMUM,
    span: int = SPAN,
    interval: int = INTERVAL,
    filter_large: bool = True,
    gather_single: bool = True,
) -> dict[int, ChunkConfig]:
    """The chunk size of each group of parameters, by data-parallel degree (search_utils.search_chunk_configuration).

    A group below `minimum` elements in all becomes one chunk that every rank keeps whole. For the others one size is
    chosen: of start, start + interval, ... start + span, the smallest with the least waste over all of them, where
    start is the larger of `minimum` and the largest parameter, rounded up to `interval`; sizes above mean + 3 standard
    deviations are left out of the search (`filter_large`). It is then rounded up to a multiple of every degree.

    `gather_single`: LLMem's change to Colossal-AI: a group of degree 1 is kept gathered.

    Raises ConfigError where there are no parameters or a bound is not positive.
    """
    if not parameters:
        raise ConfigError("no parameters: nothing to put into chunks")
    if minimum < 1 or span < 0 or interval < 1:
        raise ConfigError(f"chunk search: minimum {minimum}, span {span}, interval {interval}: not all are positive")
    groups: dict[int, list[int]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.degree, []).append(parameter.elements)
    found = {degree: ChunkConfig(sum(sizes), True) for degree, sizes in groups.items() if sum(sizes) < minimum}
    searched = [np.array(sizes, dtype=np.int64) for degree, sizes in groups.items() if degree not in found]
    if filter_large and searched:
        every = np.concatenate(searched)
        limit = np.mean(every) + 3 * np.std(every)
        searched = [sizes[sizes <= limit] for sizes in searched]
    largest = max([minimum, *(int(sizes.max()) for sizes in searched if len(sizes))])
    start = -(-largest // interval) * interval
    candidates = np.arange(start, start + span + 1, interval, dtype=np.int64)
    waste = np.sum([unused(sizes, candidates) for sizes in searched], axis=0) if searched else np.zeros(1, np.int64)
    best = int(candidates[np.argmin(waste)])
    best += -best % lcm(*groups)
    for degree in groups:
        if degree not in found:
            found[degree] = ChunkConfig(best, gather_single and degree == 1)
    return found


def unused(sizes: Int64Array, candidates: Int64Array) -> Int64Array:
    """Elements wasted by packing `sizes` in order into chunks of each candidate size, the tail of the last included."""
    left = np.zeros_like(candidates)
    lost = np.zeros_like(candidates)
    for size in sizes:
        full = size > left
        lost += np.where(full, left, 0)
        left = np.where(full, candidates, left) - size
    return lost + left


def pack(parameters: Sequence[Parameter], configs: Mapping[int, ChunkConfig]) -> tuple[Chunk, ...]:
    """The chunks, in the order in which they are opened, each group packed in the order of its parameters.

    A parameter goes to the end of its group's last chunk if it fits there, else it opens a new one: of the group's
    size, or where it is larger than that, a private one of its own size rounded up to a multiple of the degree.
    """
    opened: list[tuple[int, int, int, bool, list[Slot]]] = []  # degree, index, elements, private, slots
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    for parameter in parameters:
        degree = parameter.degree
        config = configs[degree]
        at = last.get(degree)
        filled = 0 if at is None or not opened[at][4] else opened[at][4][-1].end
        if at is None or filled + parameter.elements > opened[at][2]:
            private = parameter.elements > config.elements
            size = -(-parameter.elements // degree) * degree if private else config.elements
            index = count.get(degree, 0)
            count[degree] = index + 1
            opened.append((degree, index, size, private, []))
            at = last[degree] = len(opened) - 1
            filled = 0
        opened[at][4].append(Slot(parameter.name, filled, filled + parameter.elements))
    return tuple(
        Chunk(degree, index, size, configs[degree].gathered, private, tuple(slots))
        for degree, index, size, private, slots in opened
    )


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """All chunks of one rank's model."""

    configs: Mapping[int, ChunkConfig]
    chunks: tuple[Chunk, ...]
    data: int = 1
    tensor: int = 1

    def place(self, chunk: Chunk, rank: int) -> int:
        """The number of world rank `rank` among the ranks that share `chunk`.

        Ranks of one tensor-parallel group are neighbours: rank = data index x tensor + tensor index.
        """
        return rank // self.tensor if chunk.degree == self.data else rank


def layout(
    shapes: Sequence[tuple[str, Sequence[int]]],
    *,
    data: int = 1,
    tensor: int = 1,
    minimum: int = MINIMUM,
    span: int = SPAN,
    interval: int = INTERVAL,
    gather_single: bool = True,
) -> ChunkLayout:
    """The chunks of a model on `data` x `tensor` ranks: `local_parameters`, `search` and `pack` in one.

    Raises ConfigError as these do.
    """
    parameters = local_parameters(shapes, data=data, tensor=tensor)
    configs = search(parameters, minimum=minimum, span=span, interval=interval, gather_single=gather_single)
    return ChunkLayout(configs, pack(parameters, configs), data, tensor)
