"""Strategies: how a step graph becomes the memory events of every rank, one module for each way to train.

`lower` makes a trace of a graph; which module does it is the case's `strategy` (table in `strategies.lowering`).
This package imports `graph` and `traces`, and never the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.lazy import lazy

if TYPE_CHECKING:
    from strategies.lowering import lower as lower
    from strategies.single import Speed as Speed

__all__ = lazy(__name__, {"Speed": "single", "lower": "lowering"})
