"""Replays memory traces on a model of PyTorch's CUDA caching allocator, and reports what they need.

Names are imported when they are first used, so that `python -m simulator --help` and importing the package cost
nothing: `replay` and `verify` bring numba, the reporters bring rich.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator import neighbours as neighbours  # first: `traces` below is the one beside this package
from traces.lazy import lazy

if TYPE_CHECKING:
    from simulator.allocator.conf import AllocatorSettings as AllocatorSettings
    from simulator.allocator.conf import parse_conf as parse_conf
    from simulator.allocator.releases import Release as Release
    from simulator.allocator.releases import parse_release as parse_release
    from simulator.comparison.check import check as check
    from simulator.comparison.compare import compare as compare
    from simulator.comparison.compare import load as load
    from simulator.engine.min_memory import smallest_memory as smallest_memory
    from simulator.engine.replay import replay as replay
    from simulator.engine.result import Result as Result
    from simulator.engine.tables import write_calls as write_calls
    from simulator.engine.tables import write_events as write_events
    from simulator.estimator.devices import device as device
    from simulator.estimator.estimate import Estimate as Estimate
    from simulator.estimator.estimate import answer as answer
    from simulator.estimator.estimate import estimate as estimate
    from simulator.estimator.sweep import sweep as sweep
    from simulator.reports.html.page import write_html as write_html
    from simulator.reports.run import render_json as render_json
    from simulator.reports.run import render_table as render_table
    from simulator.reports.schemas import schema as schema
    from simulator.snapshots.reader import read as read
    from simulator.snapshots.verify import verify as verify
    from simulator.what_if.stress import stress as stress

__all__ = lazy(
    __name__,
    {
        "AllocatorSettings": "allocator.conf",
        "Estimate": "estimator.estimate",
        "Release": "allocator.releases",
        "Result": "engine.result",
        "answer": "estimator.estimate",
        "check": "comparison.check",
        "compare": "comparison.compare",
        "device": "estimator.devices",
        "estimate": "estimator.estimate",
        "load": "comparison.compare",
        "parse_conf": "allocator.conf",
        "parse_release": "allocator.releases",
        "read": "snapshots.reader",
        "render_json": "reports.run",
        "render_table": "reports.run",
        "replay": "engine.replay",
        "schema": "reports.schemas",
        "smallest_memory": "engine.min_memory",
        "stress": "what_if.stress",
        "sweep": "estimator.sweep",
        "verify": "snapshots.verify",
        "write_calls": "engine.tables",
        "write_events": "engine.tables",
        "write_html": "reports.html.page",
    },
)
