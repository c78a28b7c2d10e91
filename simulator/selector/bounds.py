"""What a method cannot be faster than, so that one that cannot win needs no exact answer.

By a roofline a kernel's time is the longest of straight lines in the micro-batch, none of which begins below zero; so
is that of a step, by whatever hinders it. Hence tokens per second never fall as the micro-batch grows, and the slope
between two micro-batches is the least that a sample costs at any. Whatever the method, the GPUs together do the
model's kernels for every sample: pipelines idle while they fill and drain besides, and tensor parallelism waits for
its collectives. What else a method does (optimizer, gathering, launches, the host) only makes it slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.estimator.step_time import of_last_step
from strategies.strategy import Axis
from traces.model import Op

if TYPE_CHECKING:
    from simulator.selector.candidates import Candidate
    from strategies.timing.clock import Clock
    from traces.model import Trace


@dataclass(frozen=True, slots=True)
class Work:
    """What one sample more costs: seconds of kernels, on all GPUs that share it together; bytes of the all-reduces in
    which `tensor` of them meet (0 where they do not split layers).
    """

    seconds: float
    bytes: float = 0.0
    tensor: int = 1


def work_between(trace: Trace, batch: int, other: Trace, other_batch: int, tensor: int = 1) -> Work:
    """The work of a sample, from the last steps of two timed traces of a method at two micro-batches."""
    kernels, moved = (
        (after - before) / (batch - other_batch)
        for before, after in zip(_totals(other, tensor), _totals(trace, tensor), strict=True)
    )
    return Work(max(kernels, 0.0) * tensor / 1e9, max(moved, 0.0) if tensor > 1 else 0.0, tensor)


def _totals(trace: Trace, tensor: int) -> tuple[int, int]:
    """Nanoseconds of kernels and bytes of all-reduces in the last step of a trace's first rank."""
    events = of_last_step(trace.ranks[0].events)
    kernels = int(events.ints("duration_ns")[events.op == Op.KERNEL].sum())
    if tensor == 1:
        return kernels, 0
    kinds = events.strings("kind")
    reduces = (events.op == Op.COLLECTIVE) & np.asarray([*(one == "all_reduce" for one in kinds.table), False])[
        kinds.codes
    ]
    return kernels, int(events.ints("bytes")[reduces].sum())


def most_tokens(candidate: Candidate, micro: int, seq: int, known: Sequence[Work], clock: Clock) -> float:
    """Tokens per second that a candidate cannot exceed with `micro` micro-batches in its pipeline, if it has one.

    `known` are the works of methods that were searched: the least of whole models counts, and bytes of one that splits
    layers, which hold for any number of ranks. Infinite where no work is known.
    """
    whole = [one.seconds for one in known if one.tensor == 1]
    if not whole or not min(whole):
        return math.inf
    stages, tensor = candidate.size(Axis.STAGES), candidate.size(Axis.TENSOR)
    sent = min((one.bytes for one in known if one.tensor > 1), default=0.0)
    waiting = 2 * (tensor - 1) * sent * clock.topology.inside.beta
    filled = micro / (micro + stages - 1)
    return seq * int(candidate.keys["world"]) * filled / (min(whole) + waiting)
