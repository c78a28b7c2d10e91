"""Strategies: how a step graph becomes the memory events of every rank, one record for each way to train.

`lower` makes the trace of a case, or of a captured graph; which record does it is the case's `strategy` and `mesh`.
`register` adds a method of one's own. This package imports `graph` and `traces`, and never the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.lazy import lazy

if TYPE_CHECKING:
    from strategies.lowering import lower as lower
    from strategies.registry import register as register
    from strategies.strategy import Strategy as Strategy
    from strategies.timing.roofline import Speed as Speed

__all__ = lazy(
    __name__,
    {"Speed": "timing.roofline", "Strategy": "strategy", "lower": "lowering", "register": "registry"},
)
