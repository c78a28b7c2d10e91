"""The page of a comparison: two runs side by side, by category, by phase, and in tables."""

from __future__ import annotations

from simulator.comparison.compare import Comparison, Figures, Pair
from simulator.engine.ranks import format_ranks
from simulator.engine.result import Result
from simulator.reports.compare import shown, tables, verdict
from simulator.reports.html.sheet import Bar, Chart, Grid, Part, Sheet, render_sheet


def render_compare(found: Comparison) -> str:
    """The page as text: a pure function of the comparison."""
    return render_sheet(sheet_of(found))


def sheet_of(found: Comparison) -> Sheet:
    """What the page of a comparison shows: for each pair of ranks two bars, peaks by phase, and every table."""
    pairs, hidden = shown(found)
    parts: list[Part] = []
    for pair in pairs:
        where = f"rank {format_ranks(pair.after.ranks)}: " if len(found.pairs) > 1 else ""
        parts += [chart for chart in (_memory(pair, where), _phases(pair, where)) if chart is not None]
        for title, first, rows in tables(pair):
            head = (first, "before", "after", "change", "%")
            parts.append(Grid(f"{where}{title or 'Figures'}", head, tuple(rows)))
    rest = (f"{hidden} more ranks are not shown; they grew less.",) if hidden else ()
    said = verdict(found)
    return Sheet(
        title=f"{found.before.name} and {found.after.name}",
        lead=f"{said[:1].upper()}{said[1:]}.",
        badge="regression" if found.regressions() and found.after.verdict != "oom" else found.after.verdict,
        facts=(f"before: {found.before.kind}", f"after: {found.after.kind}"),
        parts=tuple(parts),
        results=_results(found),
        notes=(*rest, *found.before.notes, *found.after.notes),
    )


def _results(found: Comparison) -> tuple[tuple[str, Result], ...]:
    """The replays of both sides, as far as there are any: a result or an answer has no memory over time."""
    sides = ((found.before, "before"), (found.after, "after"))
    return tuple((f"{words}: {side.name}", side.result) for side, words in sides if side.result is not None)


def _memory(pair: Pair, where: str) -> Chart | None:
    """What was alive at the peak of both, by category."""
    if not pair.before.categories or not pair.after.categories:
        return None
    bars = (Bar("before", _parts(pair.before)), Bar("after", _parts(pair.after)))
    return Chart(f"{where}Alive at the peak, by category", bars)


def _parts(side: Figures) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(side.categories.items()))  # in one order on both sides


def _phases(pair: Pair, where: str) -> Chart | None:
    """Peak allocated of both, phase by phase."""
    bars = [
        Bar(f"{name}, {side}", ((side, value),))
        for name, peak, _ in pair.phases()
        for side, value in (("before", peak.before or 0), ("after", peak.after or 0))
    ]
    return Chart(f"{where}Peak allocated by phase", tuple(bars)) if bars else None
