"""Strategies: how a step graph becomes the memory events of every rank, one module for each way to train.

`lower` makes a trace of a graph; which module does it is the case's `strategy` (table in `strategies.lowering`).
This package imports `graph` and `traces`, and never the simulator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.lowering import lower as lower
    from strategies.single import Speed as Speed

_HOMES = {"Speed": "single", "lower": "lowering"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
