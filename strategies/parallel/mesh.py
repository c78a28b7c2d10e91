"""The mesh of ranks: named axes with sizes, and who is in which group.

Ranks are numbered as torch's DeviceMesh numbers them: the last axis changes fastest.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from traces.errors import ConfigError

#: More ranks than any machine has; a typing slip, not a wish.
LIMIT: Final = 2**20


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes and their sizes, outermost first. An empty mesh is one rank."""

    axes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int], known: Sequence[str] = ()) -> Mesh:
        """A mesh of these axes in this order; an axis of size 1 is kept.

        Raises ConfigError for a name that is not one of `known` (none: all are) and for a size that is not a positive
        whole number.
        """
        for name, size in sizes.items():
            if known and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                mend = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"mesh: there is no axis {name!r}; {mend}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"mesh: {name}={size}: the size of an axis is a whole number from 1")
        mesh = cls(tuple(sizes.items()))
        if mesh.world > LIMIT:
            raise ConfigError(f"mesh: {mesh} has {mesh.world} ranks; the most is {LIMIT}")
        return mesh

    @classmethod
    def parse(cls, text: str, known: Sequence[str] = ()) -> Mesh:
        """A mesh from text such as `dp=2,tp=2`, outermost axis first. Raises ConfigError as `of` does."""
        sizes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = (word.strip() for word in part.partition("="))
            if not equals or not name:
                raise ConfigError(f"mesh: {part!r} in {text!r} is not of the form axis=size, as in dp=2,tp=2")
            if name in sizes:
                raise ConfigError(f"mesh: {text!r} names the axis {name} twice")
            if not size.isascii() or not size.isdigit():
                raise ConfigError(f"mesh: {name}={size}: the size of an axis is a whole number from 1")
            sizes[name] = int(size)
        if not sizes:
            raise ConfigError(f"mesh: {text!r} names no axis; write it as in dp=2,tp=2")
        return cls.of(sizes, known)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 for an axis that the mesh lacks."""
        return dict(self.axes).get(axis, 1)

    def check_world(self, world: int) -> None:
        """Raises ConfigError unless the axes multiply to `world` ranks."""
        if self.world != world:
            raise ConfigError(f"mesh: {self} has {self.world} ranks, but world is {world}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each axis. Raises ConfigError for a rank outside the mesh."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"mesh: rank {rank} is outside {self}, whose last rank is {self.world - 1}")
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.axes}

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis, disjoint and together the world, by their first rank."""
        size, stride = self.size(axis), 1
        for name, other in reversed(self.axes):
            if name == axis:
                break
            stride *= other
        firsts = (rank for rank in range(self.world) if rank // stride % size == 0)
        return tuple(tuple(range(first, first + size * stride, stride)) for first in firsts)
