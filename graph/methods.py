"""What a case asks of the ways to share work among GPUs: their names, and the keys and defaults that each brings.

The records are above this package, in `strategies.registry`; they are looked up there, by name, when a case first names
a method. A case of one GPU needs none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

#: No method at all; the default.
ONE_GPU: Final = "single"
_REGISTRY: Final = "strategies.registry"


class Declared(Protocol):
    """The part of a method's record that concerns cases; `strategies.strategy.Strategy` says what each field means."""

    @property
    def takes(self) -> tuple[str, ...]:
        """Scopes of keys that mean something under it."""

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Axes of a mesh that bring what it takes."""

    @property
    def own_mesh(self) -> bool:
        """Whether the mesh of a case is the method's own."""

    @property
    def clones_dropout(self) -> bool:
        """Whether a dropout of probability 0 gives a copy under it."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names."""

    @property
    def usual(self) -> Mapping[str, Any]:
        """Keys with other defaults."""


def known() -> Mapping[str, Declared]:
    """All methods by name."""
    return cast("Mapping[str, Declared]", importlib.import_module(_REGISTRY).known())


def spellings() -> dict[str, str]:
    """The method that each name and alias stands for."""
    found = known()
    return {name: name for name in found} | {other: name for name, one in found.items() for other in one.aliases}


def usual(name: str) -> Mapping[str, Any]:
    """Keys that a method has other defaults for."""
    return {} if name == ONE_GPU else known()[name].usual


def has_own_mesh(name: str) -> bool:
    """Whether a case's `mesh` has axes of the method's own."""
    return name != ONE_GPU and known()[name].own_mesh


def clones_dropout(name: str) -> bool:
    """Whether a dropout of probability 0 gives a copy of its input, not the input itself."""
    return name != ONE_GPU and known()[name].clones_dropout


def taking(scope: str) -> tuple[str, ...]:
    """The methods for which the keys of a scope mean something."""
    return tuple(name for name, one in known().items() if scope in one.takes)


def axes_taking(scope: str) -> tuple[str, ...]:
    """The axes of a mesh for which they do."""
    return tuple(axis for one in known().values() if scope in one.takes for axis in one.mesh_axes)
