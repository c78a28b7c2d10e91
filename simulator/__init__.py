"""Replays memory traces on a model of PyTorch's CUDA caching allocator, and reports what they need.

Names are imported when they are first used, so that `python -m simulator --help` and importing the package cost
nothing: `replay` and `verify` bring numba, the reporters bring rich.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.lazy import lazy

if TYPE_CHECKING:
    from simulator.checking import check as check
    from simulator.comparing import compare as compare
    from simulator.comparing import load as load
    from simulator.devices import device as device
    from simulator.estimation import Estimate as Estimate
    from simulator.estimation import answer as answer
    from simulator.estimation import estimate as estimate
    from simulator.fitting import smallest_memory as smallest_memory
    from simulator.html import write_html as write_html
    from simulator.replay import replay as replay
    from simulator.report import render_json as render_json
    from simulator.report import render_table as render_table
    from simulator.result import Result as Result
    from simulator.settings import AllocatorSettings as AllocatorSettings
    from simulator.settings import Release as Release
    from simulator.settings import parse_conf as parse_conf
    from simulator.settings import parse_release as parse_release
    from simulator.stressing import stress as stress
    from simulator.sweeping import sweep as sweep
    from simulator.tables import write_calls as write_calls
    from simulator.tables import write_events as write_events
    from simulator.verify import verify as verify

__all__ = lazy(
    __name__,
    {
        "AllocatorSettings": "settings",
        "Estimate": "estimation",
        "Release": "settings",
        "Result": "result",
        "answer": "estimation",
        "check": "checking",
        "compare": "comparing",
        "device": "devices",
        "estimate": "estimation",
        "load": "comparing",
        "parse_conf": "settings",
        "parse_release": "settings",
        "render_json": "report",
        "render_table": "report",
        "replay": "replay",
        "smallest_memory": "fitting",
        "stress": "stressing",
        "sweep": "sweeping",
        "verify": "verify",
        "write_calls": "tables",
        "write_events": "tables",
        "write_html": "html",
    },
)
