"""Reports of `stress`: tables and bars for a terminal and a JSON document, both pure functions of a `Stress`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from simulator.reports.terminal import add_row, print_parts, table_of
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from simulator.what_if.stress import Outcome, Row, Stress
    from simulator.what_if.variants import Variant

SCHEMA_VERSION: Final = 1
#: Rows of a table; the best ones are kept, and the trace's own.
MOST_ROWS: Final = 24
#: Characters of a bar.
WIDE: Final = 36

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


def shown(stress: Stress) -> tuple[list[Row], int]:
    """The rows to show, and how many there are besides: the best ones, and that of the trace's own settings."""
    rows = ordered(stress)
    base = stress.baseline()
    kept = rows[:MOST_ROWS]
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


# --------------------------------------------------------------------------------------------------------- tables


def render_table(stress: Stress, console: Console | None = None) -> None:
    """Print the best setting, a row for each, bars of peak reserved, and how variants of the events differ."""
    print_parts(_parts(stress), console)


def _parts(stress: Stress) -> Iterable[RenderableType]:
    yield verdict(stress)
    rows, hidden = shown(stress)
    if not rows:
        yield from _failed(stress)
        return
    best = stress.best()
    count = sum(len(row.outcomes) for row in stress.rows())
    yield (
        f"{count:,} {'replay' if count == 1 else 'replays'} of {stress.events:,} events, PyTorch {stress.release}, "
        f"{format_bytes(stress.device_bytes)} GPU; * as traced"
    )
    yield ""
    yield _figures(stress, rows, best)
    if hidden:
        yield f"and {hidden} more, none of them better (--json has all)"
    yield ""
    yield _bars(stress, rows)
    variants = {one.scenario.variant for row in rows for one in row.good}
    if len(variants) > 1:
        yield ""
        yield _variants(stress)
    yield from _failed(stress)


def _failed(stress: Stress) -> Iterable[RenderableType]:
    """The settings without figures, and why there are none."""
    failed = [row for row in stress.rows() if row.error is not None]
    if failed:
        table = table_of("Without a result", "setting", "reason")
        for row in failed[:MOST_ROWS]:
            add_row(table, name_of(row, stress), row.error or "")
        yield ""
        yield table


def _figures(stress: Stress, rows: Sequence[Row], best: Row | None) -> Table:
    sized = any(row.min_fit is not None for row in rows)
    names = ("setting", "reserved", "unasked", "retries", "OOMs", "calls", *(("smallest",) if sized else ()))
    table = table_of("", *names, right=range(1, 7))
    for row in rows:
        reserved = row.most("peak_reserved")
        cells = [
            name_of(row, stress) + (" *" if row.conf == stress.conf and row.memory is None else ""),
            format_bytes(reserved),
            f"{100 * row.worst.fragmented / reserved:.1f}%" if reserved else "-",
            *(str(row.most(name)) for name in ("num_alloc_retries", "num_ooms", "device_calls")),
        ]
        if sized:
            cells.append(format_bytes(row.min_fit) if row.min_fit is not None else "-")
        add_row(table, *cells, style="red" if not row.fits else "bold green" if row == best else "")
    return table


def _bars(stress: Stress, rows: Sequence[Row]) -> Table:
    table = table_of("Peak reserved: # asked for by tensors, - not", "setting", "")
    top = max(row.most("peak_reserved") for row in rows) or 1
    for row in rows:
        asked = round(WIDE * row.worst["requested"] / top)
        whole = round(WIDE * row.most("peak_reserved") / top)
        end = "" if row.fits else " OOM"
        add_row(table, name_of(row, stress), "#" * asked + "-" * max(whole - asked, 0) + end)
    return table


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
    table = table_of("Peak reserved by variant of the events", *_VARIANTS, right=range(2, 6))
    rows = {row.conf: row for row in (stress.baseline(), stress.best()) if row is not None}
    for row in rows.values():
        for kind, outcomes in by_kind(row).items():
            peaks = sorted(int(one["peak_reserved"]) for one in outcomes)
            sizes = (peaks[0], peaks[len(peaks) // 2], peaks[-1])
            ooms = sum(one["num_ooms"] > 0 for one in outcomes)
            add_row(table, short(row.conf), kind, *map(format_bytes, sizes), f"{ooms} of {len(outcomes)}")
    return table


_VARIANTS: Final = ("setting", "events", "least", "median", "most", "out of memory")
