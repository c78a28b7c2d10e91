"""Reports of `stress`: a document with bars of every setting, and JSON, both pure functions of a `Stress`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from simulator.allocator.releases import parse_release
from simulator.reports.document import (
    Bar,
    Block,
    Cell,
    Chart,
    Document,
    Dots,
    Lines,
    Section,
    Share,
    Size,
    Style,
    Table,
)
from simulator.reports.run import CAUSES
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from simulator.engine.result import Result
    from simulator.what_if.stress import Outcome, Row, Stress
    from simulator.what_if.variants import Variant
    from traces.model import Trace

    Drawn = tuple[tuple[str, Result], ...]

SCHEMA_VERSION: Final = 1
#: Rows of a table; the best ones are kept, and the trace's own.
MOST_ROWS: Final = 24
MOST_ON_PAGE: Final = 200

_SHORT: Final = {
    "expandable_segments": "expandable",
    "max_split_size_mb": "split",
    "roundup_power2_divisions": "roundup",
    "garbage_collection_threshold": "gc",
    "per_process_memory_fraction": "limit",
    "large_segment_size_mb": "segments",
    "max_non_split_rounding_mb": "rounding",
}


def short(conf: str) -> str:
    """Allocator settings in few words: `expandable + roundup 8`; `default` where there are none."""
    parts = []
    depth, start = 0, 0
    for place, letter in enumerate(conf + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(conf[start:place])
            start = place + 1
    words = []
    for part in parts:
        key, _, value = part.partition(":")
        name = _SHORT.get(key.strip(), key.strip())
        words.append(name if (name, value) == ("expandable", "True") else f"{name} {value}".strip())
    return one_line(" + ".join(words)) or "default"


def name_of(row: Row, stress: Stress) -> str:
    """A row's setting in few words, with its release and device where they are not the trace's."""
    parts = [short(row.conf)]
    if row.release != stress.release:
        parts.append(f"PyTorch {row.release}")
    if row.memory is not None:
        parts.append(f"on {format_bytes(row.memory)}")
    return ", ".join(parts)


def ordered(stress: Stress) -> list[Row]:
    """The rows with figures, best first, those of the trace's own release and device before the others."""
    rows = [row for row in stress.rows() if row.good]
    return sorted(rows, key=lambda row: (row.release != stress.release, -(row.memory or 1 << 62), row.rank()))


def shown(stress: Stress, most: int) -> tuple[list[Row], int]:
    """The rows to show, and how many there are besides: the best ones, and that of the trace's own settings."""
    rows = ordered(stress)
    base = stress.baseline()
    kept = rows[:most]
    if base is not None and base not in kept and base in rows:
        kept = [*kept[:-1], base]
    return kept, len(rows) - len(kept)


def verdict(stress: Stress) -> str:
    """The best setting and what it saves, in one sentence."""
    best, base = stress.best(), stress.baseline()
    if best is None:
        return "No scenario has a result."
    peak = best.most("peak_reserved")
    text = f"best: {one_line(best.conf) or 'default settings'}, peak reserved {format_bytes(peak)}"
    if not best.fits:
        return f"{text}: none of the settings runs through"
    if base is None or base.conf == best.conf:
        return f"{text}: these are the trace's own settings" if base is not None else text
    own = short(base.conf) + " settings"
    if not base.fits:
        return f"{text}: it runs through, and {own} run out of memory"
    saved = base.most("peak_reserved") - peak
    if saved <= 0:
        return f"{text}: as much as {own}, with fewer calls of the device"
    return f"{text}: {format_bytes(saved)} ({100 * saved / base.most('peak_reserved'):.1f}%) less than {own}"


# ----------------------------------------------------------------------------------------------------------- JSON


def render_json(stress: Stress) -> dict[str, Any]:
    """The document of `stress --json`: every outcome, a row for each setting, the best one and what it saves."""
    best, base, saved = stress.best(), stress.baseline(), stress.saved()
    return {
        "schema_version": SCHEMA_VERSION,
        "release": stress.release,
        "conf": stress.conf,
        "device_bytes": stress.device_bytes,
        "events": stress.events,
        "scenarios": stress.total,
        "finished": len(stress.outcomes),
        "seconds": round(stress.seconds, 3),
        "notes": list(stress.notes),
        "best": None if best is None else {**_row(best), "saves": saved},
        "own": None if base is None else _row(base),
        "settings": [_row(row) for row in stress.rows()],
        "outcomes": [{**one.scenario.document, **one.figures} for one in stress.outcomes],
    }


def _row(row: Row) -> dict[str, Any]:
    where = {"conf": row.conf, "release": row.release, "memory": row.memory, "replays": len(row.outcomes)}
    if row.error is not None:
        return {**where, "error": row.error}
    names = ("peak_reserved", "peak_allocated", "num_alloc_retries", "num_ooms", "device_calls")
    figures = {name: row.most(name) for name in names}
    return {**where, "fits": row.fits, **figures, "fragmented": row.worst.fragmented, "min_fit": row.min_fit}


# ------------------------------------------------------------------------------------------------------- document


def document_of(stress: Stress, results: Drawn = (), most: int = MOST_ROWS) -> Document:
    """The best setting, a row for each of the `most` best, bars of peak reserved, how variants of the events differ."""
    rows, hidden = shown(stress, most)
    best = stress.best()
    count = sum(len(row.outcomes) for row in stress.rows())
    sections: list[Block] = [*_failed(stress)]
    if rows:
        variants = {one.scenario.variant for row in rows for one in row.good}
        table = replace(_figures(stress, rows, best), more=_MORE.format(hidden) if hidden else "")
        more: list[Block] = [_spread(stress, rows), _variants(stress)] if len(variants) > 1 else []
        sections = [table, _peaks(stress, rows), *more, *sections]
    facts = (
        f"{count:,} {'replay' if count == 1 else 'replays'} of {stress.events:,} events",
        f"PyTorch {stress.release}",
        f"{format_bytes(stress.device_bytes)} GPU; * as traced",
    )
    return Document(
        subject="",
        title="Memory under other settings",
        lead=verdict(stress),
        badge="fits" if best is not None and best.fits else "oom",
        facts=facts if rows else (),
        head=() if best is None or not best.conf else (Lines((_copyable(best),)),),
        sections=(Section("", tuple(sections)),) if sections else (),
        notes=stress.notes,
        results=results,
    )


def _copyable(row: Row) -> str:
    """The line for a shell that gives a program of the row's release its setting."""
    variable = parse_release(row.release).alloc_conf_variable
    quote = "" if re.fullmatch(r"[\w:.,-]+", row.conf) else "'"
    return f"export {variable}={quote}{row.conf}{quote}"


_MORE: Final = "and {} more, none of them better (--json has all)"


def drawn(stress: Stress, trace: Trace, context: int | None = None) -> Drawn:
    """The trace as it is under its own settings and under the best ones, replayed with what a page draws of it."""
    from simulator.engine.replay import prepare, replay

    rows = [("own", stress.baseline()), ("best", stress.best())]
    asked = {row.conf: (f"{what}: {name_of(row, stress)}", row) for what, row in rows if row is not None}
    made = prepare(trace)
    options: dict[str, Any] = {"context": context, "picture": True, "analyse": False, "after_oom": "continue"}
    return tuple(
        (label, replay(made, conf=row.conf, release=row.release, memory=row.memory, **options))
        for label, row in asked.values()
    )


def _failed(stress: Stress) -> Iterator[Table]:
    """The settings without figures, and why there are none."""
    rows = tuple((name_of(row, stress), row.error) for row in stress.rows() if row.error is not None)
    if rows:
        yield Table("Without a result", ("setting", "reason"), rows[:MOST_ROWS])


def _label(row: Row, stress: Stress) -> str:
    return name_of(row, stress) + (" *" if row.conf == stress.conf and row.memory is None else "")


def _figures(stress: Stress, rows: Sequence[Row], best: Row | None) -> Table:
    sized = any(row.min_fit is not None for row in rows)
    names = ("setting", "reserved", "unasked", "retries", "OOMs", "calls", *(("smallest",) if sized else ()))
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        reserved = row.most("peak_reserved")
        smallest = "-" if row.min_fit is None else Size(row.min_fit)
        counts = (str(row.most(name)) for name in ("num_alloc_retries", "num_ooms", "device_calls"))
        unasked = Share(row.worst.fragmented, reserved)
        cells.append((_label(row, stress), Size(reserved), unasked, *counts, *((smallest,) if sized else ())))
    styles: dict[int, Style] = {
        place: "bad" if not row.fits else "good" for place, row in enumerate(rows) if not row.fits or row == best
    }
    return Table("", names, tuple(cells), right=range(1, 7), styles=styles)


def _peaks(stress: Stress, rows: Sequence[Row]) -> Chart:
    """A bar for each setting: reserved bytes at their peak, by cause."""
    rows = [row for row in rows if row.memory is None] or rows
    used = [cause for cause in CAUSES if cause == "requested" or any(row.worst[cause] for row in rows)]
    bars = tuple(
        Bar(
            name_of(row, stress),
            tuple((CAUSES[cause], int(row.worst[cause])) for cause in used),
            mark=row.min_fit,
            alarm="" if row.fits else "OOM",
        )
        for row in rows
    )
    plain = "Peak reserved: # asked for by tensors, - not"
    return Chart("Peak reserved, by cause", bars, mark="smallest GPU on which it runs", plain=plain)


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


def kind_of(variant: Variant) -> str:
    """What is changed in the events, in words."""
    if variant.order is not None:
        return "other orders of steps"
    if variant.lengths is not None:
        return "mixes of lengths"
    return {"recorded": "as it is", "prompt": "frees prompt", "late": "frees late"}[variant.deferred]


def by_kind(row: Row) -> dict[str, list[Outcome]]:
    """The outcomes of a row by what is changed in the events."""
    found: dict[str, list[Outcome]] = {}
    for one in row.good:
        found.setdefault(kind_of(one.scenario.variant), []).append(one)
    return found


def _variants(stress: Stress) -> Table:
    cells: list[tuple[Cell, ...]] = []
    rows = {row.conf: row for row in (stress.baseline(), stress.best()) if row is not None}
    for row in rows.values():
        for kind, outcomes in by_kind(row).items():
            peaks = sorted(int(one["peak_reserved"]) for one in outcomes)
            sizes = (Size(peaks[0]), Size(peaks[len(peaks) // 2]), Size(peaks[-1]))
            ooms = sum(one["num_ooms"] > 0 for one in outcomes)
            cells.append((short(row.conf), kind, *sizes, f"{ooms} of {len(outcomes)}"))
    head = ("setting", "events", "least", "median", "most", "out of memory")
    return Table("Peak reserved by variant of the events", head, tuple(cells), right=range(2, 6))
