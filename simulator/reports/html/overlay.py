"""Memory over time of several runs on one axis, as SVG: methods, allocator settings, or what was before and after.

Runs with the same phases are aligned phase by phase, others by their share of the whole. It needs no scripts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from simulator.engine.result import RankResult
from simulator.reports.html.pieces import card, text
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
    paths = "".join(
        f"<g class=k-{place}>{_path(line, _places(line, targets), top)}</g>" for place, line in enumerate(lines)
    )
    words = [f"{label}: {format_bytes(rank.peak_reserved)} reserved at most" for label, rank in shown]
    keys = "".join(f"<li><i class='swatch k-{place}'></i>{text(word)}</li>" for place, word in enumerate(words))
    picture = (
        f'<svg viewBox="0 0 {COLUMNS} {LINES}" preserveAspectRatio=none role=img aria-label="{text("; ".join(words))}">'
        f"{_bands(targets)}{_rules(top)}{paths}{_limit(limit, top)}</svg>"
    )
    same = len({len(line) for line in lines}) == 1
    how = "phase by phase" if targets is not None else "event by event" if same else "by their share of all events"
    caption = f"Lines are reserved bytes, areas allocated ones{_said(limit, top)}; the runs are aligned {how}."
    body = f"<div class=over>{_scale(top)}<div>{_names(lines[0], targets)}{picture}</div></div>"
    legend = f"<ul class=legend>{keys}</ul>"
    return card("Memory over time, on one axis", f"{legend}{body}<p class=caption>{caption}</p>", kind="wide")


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


def _path(line: Timeline, places: Int64Array, top: float) -> str:
    """The area of allocated bytes and the line of reserved ones."""
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    steps = [_steps(column, places[starts], starts, top) for column in (line.allocated, line.reserved)]
    area, top_line = (f"M0 {LINES}{one}H{COLUMNS}" for one in steps)
    return f'<path class=area d="{area}V{LINES}Z"/><path class=line d="{top_line}"/>'


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


def _bands(targets: Int64Array | None) -> str:
    """Every second phase, shaded."""
    if targets is None or len(targets) > MOST_PHASES:
        return ""
    edges = (targets * (COLUMNS / max(1, int(targets[-1])))).tolist()
    pairs = list(itertools.pairwise(edges[1:]))
    return "".join(
        f'<rect class=band x="{left:.1f}" width="{right - left:.1f}" height="{LINES}"/>' for left, right in pairs[1::2]
    )


def _names(line: Timeline, targets: Int64Array | None) -> str:
    """The names of the phases above the picture, each as wide as its phase; none where they are too many."""
    if targets is None or len(targets) > MOST_PHASES:
        return ""
    shares = (targets * (100 / max(1, int(targets[-1])))).tolist()
    names = []
    for place, span in enumerate(line.phases):
        wide = shares[place + 2] - shares[place + 1]
        name = span.name if span.step is None else f"{span.name} {span.step}"
        if wide >= 3:
            style = f"left:{shares[place + 1]:.2f}%;width:{wide:.2f}%"
            names.append(f'<span style="{style}" title="{text(name, 60)}">{text(name, 60)}</span>')
    return f"<div class=phases aria-hidden=true>{''.join(names)}</div>"


def _ticks(top: float) -> list[float]:
    step = 1.0
    while top / step > 5:
        step *= 2
    return [step * number for number in range(int(top / step) + 1)]


def _rules(top: float) -> str:
    heights = (LINES * (1 - tick / top) for tick in _ticks(top))
    return "".join(f'<line class=rule x2="{COLUMNS}" y1="{y:.0f}" y2="{y:.0f}"/>' for y in heights)


def _scale(top: float) -> str:
    marks = (
        f'<span style="bottom:{100 * tick / top:.1f}%">{format_bytes(round(tick)).replace(".00", "")}</span>'
        for tick in _ticks(top)
    )
    return f"<div class=scale aria-hidden=true>{''.join(marks)}</div>"


def _limit(limit: int, top: float) -> str:
    y = LINES * (1 - limit / top)
    return f'<line class=limit x2="{COLUMNS}" y1="{y:.0f}" y2="{y:.0f}"/>' if limit <= top else ""


def _said(limit: int, top: float) -> str:
    return f", the dashed line is the limit of {format_bytes(limit)}" if limit <= top else ""
