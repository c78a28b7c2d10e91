"""What a `Picture` says of one moment, found the slow way: every block and segment that lives then."""

from __future__ import annotations

import numpy as np

from simulator.engine.result import Blocks, Picture, Segments
from traces.model import Int64Array


def alive(held: Blocks | Segments, event: int) -> Int64Array:
    """Places of what lives after an event, by address."""
    return np.flatnonzero((held.born <= event) & (held.died > event))


def sums(picture: Picture, event: int) -> tuple[int, int, int]:
    """Allocated, active and reserved bytes after an event."""
    blocks, segments = picture.blocks, picture.segments
    used = alive(blocks, event)
    active = blocks.bytes[used]
    allocated = active[blocks.freed[used] > event]
    return int(allocated.sum()), int(active.sum()), int(segments.bytes[alive(segments, event)].sum())


def event_of(picture: Picture, label: str) -> int:
    """The event of the moment that has a label."""
    return next(moment.event for moment in picture.moments if label in moment.labels)
