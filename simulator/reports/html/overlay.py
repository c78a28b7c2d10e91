"""Memory over time of several runs on one axis, as SVG: methods, allocator settings, or what was before and after.

Runs with the same phases are aligned phase by phase, others by their share of the whole. It needs no scripts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from simulator.engine.result import RankResult
from simulator.reports.html.pieces import templates
from traces.model import Int64Array
from traces.timelines.timeline import Timeline
from traces.units import format_bytes

#: Columns and lines of the drawing; every column keeps its lows and highs.
COLUMNS: Final = 800
LINES: Final = 1000
#: Runs drawn at most, and phases that still have a band each.
MOST_RUNS: Final = 4
MOST_PHASES: Final = 60

Run = tuple[str, RankResult]


def overlay(runs: Sequence[Run]) -> str:
    """The runs (a label and a rank each) as a card: reserved bytes are lines, allocated ones areas. Nothing for one."""
    shown = [(label, rank) for label, rank in runs if len(rank.timeline)][:MOST_RUNS]
    if len(shown) < 2:
        return ""
    lines = [rank.timeline for _, rank in shown]
    most = max(int(line.reserved.max()) for line in lines) or 1
    limit = max(line.limit_bytes for line in lines)
    top = max(most, limit if 3 * most >= limit else 0) * 1.04
    targets = _targets(lines)
    same = len({len(line) for line in lines}) == 1
    return (
        templates()
        .get_template("overlay.html.j2")
        .render(
            runs=[
                {"words": f"{label}: {format_bytes(rank.peak_reserved)} reserved at most", **_paths(line, targets, top)}
                for (label, rank), line in zip(shown, lines, strict=True)
            ],
            ticks=[(tick / top, format_bytes(round(tick)).replace(".00", "")) for tick in _ticks(top)],
            phases=_phases(lines[0], targets),
            limit=limit,
            top=top,
            columns=COLUMNS,
            lines=LINES,
            how="phase by phase"
            if targets is not None
            else "event by event"
            if same
            else "by their share of all events",
        )
    )


# Where an event stands ------------------------------------------------------------------------------------------------


def _targets(lines: Sequence[Timeline]) -> Int64Array | None:
    """Where the edges of the phases stand for all runs, if they have the same ones: as many events as the longest."""
    keys = [[(span.name, span.step) for span in line.phases] for line in lines]
    if not keys[0] or any(one != keys[0] for one in keys):
        return None
    widths = np.max([np.diff(_edges(line)) for line in lines], axis=0)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def _edges(line: Timeline) -> Int64Array:
    """The first event, those with which phases begin, and the end."""
    return np.array([0, *(span.start for span in line.phases), len(line)], dtype=np.int64)


def _places(line: Timeline, targets: Int64Array | None) -> Int64Array:
    """The column of every event."""
    events = np.arange(len(line))
    if targets is None:
        return events * COLUMNS // max(1, len(line))
    where = np.interp(events, _edges(line), targets) * (COLUMNS / max(1, int(targets[-1])))
    return np.minimum(where.astype(np.int64), COLUMNS - 1)


# Pieces of the picture ------------------------------------------------------------------------------------------------


def _paths(line: Timeline, targets: Int64Array | None, top: float) -> dict[str, str]:
    """The area of allocated bytes and the line of reserved ones."""
    places = _places(line, targets)
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    steps = [_steps(column, places[starts], starts, top) for column in (line.allocated, line.reserved)]
    area, top_line = (f"M0 {LINES}{one}H{COLUMNS}" for one in steps)
    return {"area": f"{area}V{LINES}Z", "line": top_line}


def _steps(column: Int64Array, places: Int64Array, starts: Int64Array, top: float) -> str:
    """For each column of the drawing its highest, lowest and last value, as steps of a path."""
    ends = np.append(starts[1:], len(column)) - 1
    values = (np.maximum.reduceat(column, starts), np.minimum.reduceat(column, starts), column[ends])
    heights = [np.round(LINES * (1 - value / top)).astype(np.int64).tolist() for value in values]
    drawn, last = [], None
    for place, high, low, end in zip(places.tolist(), *heights, strict=True):
        if not high == low == end == last:
            drawn.append(f"H{place}V{high}" + (f"V{low}" if low != high else "") + (f"V{end}" if end != low else ""))
        last = end
    return "".join(drawn)


def _phases(line: Timeline, targets: Int64Array | None) -> list[tuple[str, float, float]]:
    """Name, left edge and width of the phases, as shares of the whole; none where they are too many."""
    if targets is None or len(targets) > MOST_PHASES:
        return []
    edges = (targets[1:] / max(1, int(targets[-1]))).tolist()
    names = (span.name if span.step is None else f"{span.name} {span.step}" for span in line.phases)
    return [(name, left, end - left) for name, (left, end) in zip(names, itertools.pairwise(edges), strict=True)]


def _ticks(top: float) -> list[float]:
    step = 1.0
    while top / step > 5:
        step *= 2
    return [step * number for number in range(int(top / step) + 1)]
