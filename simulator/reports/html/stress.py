"""The page of `stress`: settings side by side; memory over time and blocks under the trace's own and the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simulator.engine.result import Result
from simulator.reports.html.sheet import Bar, Chart, Dots, Grid, Part, Sheet, Size, render_sheet
from simulator.reports.stress import by_kind, name_of, ordered, verdict
from simulator.what_if.stress import Row, Stress
from traces.model import Trace
from traces.units import format_bytes

#: Rows drawn at most; the best ones.
MOST_ROWS: Final = 200
#: The parts of reserved memory at its peak, from the left, and what they are called.
PARTS: Final = (
    ("requested", "asked for by tensors"),
    ("rounding", "rounding"),
    ("unsplit_remainder", "rest of unsplit blocks"),
    ("pending", "waiting for another stream"),
    ("stranded", "free in segments in use"),
    ("cached_segments", "segments wholly free"),
)

Drawn = tuple[tuple[str, Result], ...]


def render_html(stress: Stress, results: Drawn = ()) -> str:
    """The page as text, with replays that are drawn over time (`drawn`): a pure function of both."""
    return render_sheet(sheet_of(stress, results))


def drawn(stress: Stress, trace: Trace, context: int | None = None) -> Drawn:
    """The trace as it is under its own settings and under the best ones, replayed with what a page draws of it."""
    from simulator.engine.replay import prepare, replay

    rows = [("own", stress.baseline()), ("best", stress.best())]
    shown = {row.conf: (f"{what}: {name_of(row, stress)}", row) for what, row in rows if row is not None}
    made = prepare(trace)
    return tuple(
        (
            label,
            replay(
                made,
                conf=row.conf,
                release=row.release,
                memory=row.memory,
                context=context,
                picture=True,
                analyse=False,
            ),
        )
        for label, row in shown.values()
    )


def sheet_of(stress: Stress, results: Drawn = ()) -> Sheet:
    """What the page shows: reserved bytes by cause, how variants of the events differ, figures, other devices."""
    rows = [row for row in ordered(stress) if row.memory is None][:MOST_ROWS]
    sized = [row for row in ordered(stress) if row.memory is not None][:MOST_ROWS]
    best = stress.best()
    said = verdict(stress)
    parts: list[Part] = []
    if rows:
        parts.append(_peaks(stress, rows))
        if any(len(row.good) > 1 for row in rows):
            parts.append(_spread(stress, rows))
        parts.append(_figures(stress, rows))
    if sized:
        parts.append(_sizes(rows, sized))
    failed = (f"{row.conf or 'default'}: {row.error}" for row in stress.rows() if row.error is not None)
    return Sheet(
        title="Memory under other settings",
        lead=f"{said[0].upper()}{said[1:].rstrip('.')}.",
        badge="fits" if best is not None and best.fits else "oom",
        facts=(
            f"{len(stress.outcomes):,} of {stress.total:,} replays of {stress.events:,} events",
            f"PyTorch {stress.release}",
            f"{format_bytes(stress.device_bytes)} GPU",
            f"own settings: {stress.conf or 'default'}",
        ),
        parts=tuple(parts),
        results=results,
        notes=(*stress.notes, *failed),
    )


def _label(row: Row, stress: Stress) -> str:
    own = row.conf == stress.conf and row.memory is None and row.release == stress.release
    return name_of(row, stress) + (" (own)" if own else "")


def _peaks(stress: Stress, rows: Sequence[Row]) -> Chart:
    """A bar for each setting: reserved bytes at their peak, by cause."""
    used = [(key, words) for key, words in PARTS if any(row.worst[key] for row in rows)]
    bars = tuple(
        Bar(
            _label(row, stress),
            tuple((words, int(row.worst[key])) for key, words in used),
            mark=row.min_fit,
            alarm="" if row.fits else "OOM",
        )
        for row in rows
    )
    return Chart("Peak reserved, by cause", bars, mark="smallest GPU on which it runs")


def _spread(stress: Stress, rows: Sequence[Row]) -> Dots:
    """A dot for each variant of the events, on one line a setting."""
    lines = []
    for row in rows:
        ooms = sum(one["num_ooms"] > 0 for one in row.good)
        said = f"{ooms} of {len(row.good)} OOM" if ooms else f"{len(row.good)} replays"
        marks = tuple(
            (kind, int(one["peak_reserved"]), one["num_ooms"] > 0)
            for kind, outcomes in by_kind(row).items()
            for one in outcomes
        )
        lines.append((_label(row, stress), said, marks))
    return Dots("Peak reserved of every variant of the events", tuple(lines))


def _figures(stress: Stress, rows: Sequence[Row]) -> Grid:
    """All figures as a table."""
    cells = []
    for row in rows:
        peak = row.most("peak_reserved")
        release = "" if row.release == stress.release else f", PyTorch {row.release}"
        cells.append(
            (
                (row.conf or "default") + release,
                Size(peak),
                f"{100 * row.worst.fragmented / peak:.1f} %" if peak else None,
                *(row.most(name) for name in ("num_alloc_retries", "num_ooms", "device_calls")),
                None if row.min_fit is None else Size(row.min_fit),
            )
        )
    head = (
        "setting",
        "peak reserved",
        "not asked for",
        "retries",
        "out of memory",
        "calls of the device",
        "smallest GPU",
    )
    return Grid("Figures", head, tuple(cells))


def _sizes(rows: Sequence[Row], sized: Sequence[Row]) -> Grid:
    """Whether each setting runs on each size of the GPU, with its retries."""
    memories = sorted({row.memory for row in sized if row.memory is not None})
    known: Mapping[tuple[str, str, int | None], Row] = {(row.conf, row.release, row.memory): row for row in sized}
    cells = []
    for conf, release in dict.fromkeys((row.conf, row.release) for row in (*rows, *sized)):
        found = [known.get((conf, release, memory)) for memory in memories]
        if any(found):
            cells.append((conf or "default", *(None if row is None else _ending(row) for row in found)))
    return Grid("On other sizes of the GPU", ("setting", *map(format_bytes, memories)), tuple(cells))


def _ending(row: Row) -> str:
    if not row.fits:
        return f"out of memory ({row.most('num_ooms')})"
    retries = row.most("num_alloc_retries")
    return f"runs, {retries} {'retry' if retries == 1 else 'retries'}" if retries else "runs"
