"""Reports of `compare` and `check`: the document of a comparison, its Markdown and JSON; all pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from simulator.comparison.compare import COUNTS, Change, Comparison, Figures, Pair, growth
from simulator.engine.ranks import format_ranks
from simulator.reports.document import Bar, Block, Chart, Differences, Document, Lines, Section, Table
from simulator.reports.estimate import ways_out, what_fits
from simulator.reports.markdown import blocks, body, escaped
from simulator.reports.verdict import WORDS
from traces.text import first_of, one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from simulator.comparison.check import Check

SCHEMA_VERSION: Final = 1
#: Rows of a table of categories, modules or tensors, and pairs of ranks shown.
MOST_ROWS: Final = 12
MOST_PAIRS: Final = 8
#: Regressions told in one line.
MOST_TOLD: Final = 3

#: Figures whose names would say less to people.
_WORDS: Final = {"num_alloc_retries": "retries", "num_ooms": "out of memory"}

_What = Literal["categories", "modules", "tensors"]
_TITLES: Final[Mapping[_What, str]] = {
    "categories": "Alive at the peak, by category",
    "modules": "Alive at the peak, by module",
    "tensors": "Alive at the peak, by tensor",
}
_ONE_SIDED: Final = (
    "What lies outside the allocator, such as the CUDA context, is counted on one side alone: the device's totals are "
    "not compared."
)
_SINGULAR: Final[Mapping[_What, str]] = {"categories": "category", "modules": "module", "tensors": "tensor"}


def _value(change: Change, value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if change.name in COUNTS else format_bytes(value)


def _difference(change: Change) -> str:
    """The growth with its sign, in bytes for people or as a count."""
    if change.difference is None:
        return "-"
    if change.name in COUNTS:
        return f"{change.difference:+,}"
    sign = "+" if change.difference > 0 else "-" if change.difference < 0 else ""
    return sign + format_bytes(abs(change.difference))


def _percent(change: Change) -> str:
    return "-" if change.share is None or change.name in COUNTS else growth(change)


def _cells(change: Change, name: str | None = None) -> tuple[str, ...]:
    before, after = _value(change, change.before), _value(change, change.after)
    return (
        one_line(name or _WORDS.get(change.name, change.name.replace("_", " "))),
        before,
        after,
        _difference(change),
        _percent(change),
    )


def verdict(comparison: Comparison) -> str:
    """What came of the comparison, in one sentence."""
    grown = comparison.regressions()
    if comparison.limit is None:
        change = Change(
            "peak_reserved", comparison.before.most("peak_reserved"), comparison.after.most("peak_reserved")
        )
        return f"peak reserved {growth(change)}"
    if not grown:
        return f"no regression over {comparison.limit}"
    return f"regression over {comparison.limit}: {first_of(grown, MOST_TOLD)}"


def shown(comparison: Comparison) -> tuple[list[Pair], int]:
    """The pairs of ranks to show, those whose reserved memory grew most first, and how many there are besides."""

    def grown(pair: Pair) -> int:
        return next((c.difference or 0 for c in pair.figures() if c.name == "peak_reserved"), 0)

    pairs = sorted(comparison.pairs, key=grown, reverse=True)
    return pairs[:MOST_PAIRS], max(len(pairs) - MOST_PAIRS, 0)


def document_of(comparison: Comparison) -> Document:
    """For each pair of ranks its figures, phases, and what grew; a page has bars of both sides as well."""
    pairs, hidden = shown(comparison)
    before, after = comparison.before, comparison.after
    several = len(comparison.pairs) > 1
    grown = bool(comparison.regressions()) and after.verdict != "oom"
    rest = f"and {hidden} more pairs of ranks, which grew less"
    return Document(
        subject=f"{before.name} to {after.name}",
        lead=verdict(comparison),
        badge="regression" if grown else "oom" if after.verdict == "oom" else "comparison",
        facts=tuple(
            f"{words}: {side.kind}, {WORDS[side.verdict]}" for words, side in (("before", before), ("after", after))
        ),
        sections=(
            *(
                Section(f"rank {format_ranks(pair.after.ranks, 40)}" if several else "", tuple(_blocks(pair)))
                for pair in pairs
            ),
            *([Section("", (Lines((rest,)),))] if hidden else []),
        ),
        notes=(*before.notes, *after.notes),
        results=tuple(
            (f"{words}: {side.name}", side.result)
            for side, words in ((before, "before"), (after, "after"))
            if side.result is not None
        ),
    )


def _blocks(pair: Pair) -> Iterator[Block]:
    yield _table("", "figure", [_cells(change) for change in pair.figures()])
    if pair.one_sided:
        yield Lines((_ONE_SIDED,))
    if pair.before.categories and pair.after.categories:
        bars = (Bar(words, _parts(side)) for words, side in (("before", pair.before), ("after", pair.after)))
        yield Chart(_TITLES["categories"], tuple(bars))
    phases = pair.phases()
    if phases:
        bars = (
            Bar(f"{pair.phase_name(name)}, {side}", ((side, value),))
            for name, peak, _ in phases
            for side, value in (("before", peak.before or 0), ("after", peak.after or 0))
        )
        yield Chart("Peak allocated by phase", tuple(bars))
        yield _table(
            "Peak allocated by phase", "phase", [_cells(peak, pair.phase_name(name)) for name, peak, _ in phases]
        )
        moved = [_cells(left, pair.phase_name(name)) for name, _, left in phases if left.difference]
        if moved:
            yield _table("Left allocated at the end of a phase", "phase", moved)
    for what, title in _TITLES.items():
        changes = pair.changes(what)
        if changes:
            part = "" if what == "categories" or (pair.before.whole and pair.after.whole) else ", of the largest"
            shown = changes[:MOST_ROWS]
            rows = (
                (one_line(change.name.replace("_", " ")), change.before or 0, change.after or 0) for change in shown
            )
            yield Differences(f"{title}{part}: what changed", tuple(rows))
            yield _table(title + part, _SINGULAR[what], [_cells(change, change.name) for change in shown])


def _parts(side: Figures) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(side.categories.items()))  # in one order on both sides


def _table(title: str, first: str, rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(title, (first, "before", "after", "change", ""), tuple(rows), right=range(1, 5))


# ----------------------------------------------------------------------------------------------------------- JSON


def render_json(comparison: Comparison) -> dict[str, Any]:
    """The document of `compare --json`: both sides, and every change of every pair of ranks; bytes and counts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "before": _side(comparison.before.name, comparison.before.kind, comparison.before.verdict),
        "after": _side(comparison.after.name, comparison.after.kind, comparison.after.verdict),
        "limit": None if comparison.limit is None else str(comparison.limit),
        "regressions": comparison.regressions(),
        "ranks": [_pair(pair) for pair in comparison.pairs],
    }


def _side(name: str, kind: str, verdict: str) -> dict[str, str]:
    return {"name": name, "kind": kind, "verdict": verdict}


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "before": list(pair.before.ranks),
        "after": list(pair.after.ranks),
        "figures": {change.name: _change(change) for change in pair.figures()},
        "phases": {name: {"peak": _change(peak), "left": _change(left)} for name, peak, left in pair.phases()},
        **{what: {change.name: _change(change) for change in pair.changes(what)} for what in _TITLES},
    }


def _change(change: Change) -> dict[str, Any]:
    return {"before": change.before, "after": change.after, "difference": change.difference, "share": change.share}


# ------------------------------------------------------------------------------------------------------- Markdown


def render_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown for a pull request: figures at once, all else folded."""
    mark = "" if comparison.limit is None else "❌ " if comparison.regressions() else "✅ "
    return f"### {mark}Memory: {escaped(verdict(comparison))}\n\n{body(document_of(comparison))}"


# ---------------------------------------------------------------------------------------------------------- check


def check_line(check: Check) -> str:
    """The verdict of `check` on one line, for the log of a CI run."""
    state = {0: "ok", 3: "over budget", 4: "regression"}[check.exit_code]
    if check.side.verdict == "oom":
        state = WORDS["oom"]
    elif check.exit_code == 0 and check.side.verdict == "tight":
        state = WORDS["tight"]
    needed = check.needed
    text = f"check: {state}: {one_line(check.side.name)}"
    if check.side.verdict == "oom":
        text += f" {check.side.summary or 'does not fit its GPU'}"
    elif needed is not None:
        text += f" needs {format_bytes(needed)}"
        if check.budget is not None:
            text += f" of {format_bytes(check.budget)} ({100 * needed / check.budget:.1f}%)"
    if check.comparison is not None:
        text += f"; against {one_line(check.comparison.before.name)}: {verdict(check.comparison)}"
    return text + (f"; {check.side.hint}" if check.exit_code == 3 and check.side.hint else "")


def check_lines(check: Check) -> str:
    """The verdict, and on a second line what would fit, where that was looked for."""
    tried = check.side.remedies
    return check_line(check) + (f"\ncheck: {ways_out(tried)}" if tried else "")


def check_json(check: Check) -> dict[str, Any]:
    """The document of `check --json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": check.exit_code,
        "name": check.side.name,
        "verdict": check.side.verdict,
        "summary": check.side.summary,
        "needed": check.needed,
        "budget": check.budget,
        "peak_allocated": check.side.most("peak_allocated"),
        "peak_reserved": check.side.most("peak_reserved"),
        "remedies": [] if check.side.remedies is None else check.side.remedies.document(),
        "comparison": None if check.comparison is None else render_json(check.comparison),
    }


def check_markdown(check: Check) -> str:
    """The check as Markdown for a pull request."""
    mark = "✅" if check.exit_code == 0 else "❌"
    text = f"### {mark} {escaped(check_line(check).removeprefix('check: '))}\n"
    if check.side.remedies is not None:
        text += f"\n{blocks(what_fits(check.side.remedies))}"
    if check.comparison is not None:
        text += "\n" + body(document_of(check.comparison))
    return text
