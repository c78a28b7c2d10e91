"""Fewer points of a timeline, without losing what matters: the peaks of every column, and the phase boundaries."""

from __future__ import annotations

from typing import Final

import numpy as np

from traces.model import Int64Array
from traces.timelines.timeline import Timeline

_PER_BUCKET: Final = 6  # least and greatest of three columns


def downsample(timeline: Timeline, max_points: int) -> Int64Array:
    """Indices of events that show a timeline in about `max_points` points, ascending and unique.

    Events are divided into equal buckets; of each the least and the greatest value of allocated, active and reserved
    bytes are kept, so that no peak is ever lost. The first and the last event, both ends of every phase and every
    out-of-memory are kept too, even where there are more of these than `max_points`. Raises ValueError for
    `max_points` below 1.
    """
    if max_points < 1:
        raise ValueError("max_points must be 1 or more")
    count = len(timeline)
    if count <= max_points:
        return np.arange(count, dtype=np.int64)
    fixed = _fixed(timeline)
    buckets = max(1, (max_points - len(fixed)) // _PER_BUCKET)
    size = -(-count // buckets)
    starts = np.arange(0, count, size, dtype=np.int64)
    kept = [fixed]
    for column in (timeline.allocated, timeline.active, timeline.reserved):
        padded = np.concatenate([column, np.full(len(starts) * size - count, column[-1], dtype=np.int64)])
        rows = padded.reshape(len(starts), size)
        kept += [starts + rows.argmax(axis=1), starts + rows.argmin(axis=1)]
    return np.unique(np.minimum(np.concatenate(kept), count - 1))


def _fixed(timeline: Timeline) -> Int64Array:
    """Events that are always kept."""
    count = len(timeline)
    ends = [end for phase in timeline.phases for end in (phase.start, phase.stop - 1)]
    inside = [index for index in (0, count - 1, *ends, *timeline.ooms) if 0 <= index < count]
    return np.unique(np.array(inside, dtype=np.int64))
