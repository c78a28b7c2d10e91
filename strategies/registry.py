"""All distributed methods by name. `register` adds one from anywhere; a module named here brings its own."""

from __future__ import annotations

import difflib
import importlib
from typing import Final

from graph.case import Case
from strategies.strategy import Strategy
from traces.errors import ConfigError

#: Modules that hold the records of methods, each in a tuple `STRATEGIES`, in the order in which help lists them.
_MODULES: Final = (
    "strategies.one_gpu",
    "strategies.parallel.meshes",
    "strategies.megatron.megatron",
    "strategies.parallel.deepspeed",
    "strategies.gemini.record",
)
#: The module of the method that a case's `mesh` describes, `MESH`.
_MESH: Final = "strategies.parallel.meshes"

_known: dict[str, Strategy] = {}


def register(strategy: Strategy) -> None:
    """Make a method known under its name. Raises ConfigError where another has it."""
    if strategy.name in known():
        raise ConfigError(f"strategy {strategy.name!r} is registered already; give yours another name")
    _known[strategy.name] = strategy


def known() -> dict[str, Strategy]:
    """All methods by name."""
    _load()
    return dict(_known)


def _load() -> None:
    if not _known:
        found = [one for name in _MODULES for one in importlib.import_module(name).STRATEGIES]
        _known.update({one.name: one for one in found})


def named(name: str) -> Strategy:
    """The method of a name. Raises ConfigError, with the nearest one, where there is none."""
    _load()
    if name not in _known:
        near = difflib.get_close_matches(name[:60], list(_known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"strategy {name[:60]!r} is not available; {hint}there are: {', '.join(_known)}")
    return _known[name]


def find(case: Case) -> Strategy:
    """The method of a case: that of its mesh, where it has one, else its strategy."""
    strategy = named(case.strategy)
    if not case.mesh or strategy.own_mesh:
        return strategy
    mesh: Strategy = importlib.import_module(_MESH).MESH
    return mesh
