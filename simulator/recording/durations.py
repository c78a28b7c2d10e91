"""What the phases of a recorded program take in simulated time, and a step of it.

A phase takes from when all before it is done to when all of it is done. What an allocator retry costs is added to the
phase that has it, as to an estimate's step (`simulator.estimator.step_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from graph.recorder.phase_names import BACKWARD, FORWARD, OPTIMIZER, PHASES
from simulator.estimator.step_time import CALL_NS, SYNCHRONIZE_NS

if TYPE_CHECKING:
    from simulator.recording.allocator import Mark

#: The phases that a step of training has.
_TRAINING: Final = frozenset(PHASES[phase] for phase in (FORWARD, BACKWARD, OPTIMIZER))

#: Name and step (-1: none) of each phase, and its nanoseconds, in order of beginning.
Durations = tuple[tuple[str, int, int], ...]


def of_phases(marks: Sequence[Mark]) -> Durations:
    """The phases between marks; those of one name and step together."""
    found: dict[tuple[str, int], int] = {}
    for mark, after in pairwise(marks):
        key = PHASES[mark.phase], mark.step
        found[key] = found.get(key, 0) + after.done - mark.done + _stall(mark, after)
    return tuple((name, step, duration) for (name, step), duration in found.items())


def of_step(durations: Durations) -> dict[str, int]:
    """The phases of the last step that is whole, of those that train and do nothing else if there are any; or none."""
    last = max((step for _, step, _ in durations), default=-1)  # what follows the last optimizer step
    steps: dict[int, dict[str, int]] = {}
    for name, step, duration in durations:
        if 0 <= step < last:
            steps.setdefault(step, {})[name] = duration
    plain = [phases for phases in steps.values() if phases.keys() <= _TRAINING]
    return (plain or [*steps.values()] or [{}])[-1]


def _stall(mark: Mark, after: Mark) -> int:
    """Nanoseconds of the driver's calls, where a retry made some."""
    retries = after.retries - mark.retries
    return retries * SYNCHRONIZE_NS + (after.calls - mark.calls) * CALL_NS if retries else 0
