"""How long a training step of a candidate takes: the replay's clocks, with the speeds of the slowest card.

Kernels last as `strategies.timing` says (a roofline over their operations and bytes moved), collectives as a ring or a
tree does. What overlaps is what the method lets overlap: its streams and their waits decide, as they do on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.case import Case
    from strategies.single import Speed
    from strategies.timing import Clock
    from traces.model import Trace

#: Memory of the devices while time is told: enough for all that fits anywhere.
_AMPLE: Final = 1 << 42


def speed_of(case: Case, clock: Clock) -> Speed:
    """The speed of the kernels of a case."""
    return clock.speed()


def step_seconds(trace: Trace, case: Case, clocks: Sequence[Clock]) -> float:
    """Seconds of the last training step of a trace whose kernels have durations; the slowest rank decides.

    The first of `clocks` tells how long collectives take. Raises ConfigError for a trace without steps.
    """
    from simulator.steptime import step_time
    from strategies.timing import timed

    ample = tuple(replace(device, total_bytes=_AMPLE, context_bytes=0) for device in trace.devices)
    found = step_time(timed(replace(trace, devices=ample), clocks[0]))
    if found is None:
        raise ConfigError("the trace has no training steps to be timed")
    return found / 1e9
