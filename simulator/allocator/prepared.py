"""Importing this module makes the replay's kernels ready: a fork server does so once, for all workers of a sweep."""

from __future__ import annotations

import contextlib

import numpy as np

from simulator.engine.replay import replay
from traces.model import Events, Op, RankEvents, Trace


def warm_up() -> None:
    """Replay one allocation, so that the kernels are loaded (or compiled) in this process."""
    columns = {"id": np.zeros(2, np.int64), "bytes": np.asarray([512, 0], np.int64)}
    events = Events(np.asarray([Op.ALLOC, Op.FREE], np.uint8), columns)
    replay(Trace((RankEvents((0,), events),), release="2.13"))


with contextlib.suppress(Exception):  # a worker meets and reports what is wrong
    warm_up()
