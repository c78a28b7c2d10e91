"""Reports of `compare` and `check`: tables for a terminal, Markdown for pull requests, JSON; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from simulator.comparison.compare import COUNTS, Change, Comparison, Pair, growth
from simulator.engine.ranks import format_ranks
from simulator.reports.terminal import add_row, print_parts, table_of
from simulator.reports.verdict import WORDS
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

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
    rest = f"; and {len(grown) - MOST_TOLD} more" if len(grown) > MOST_TOLD else ""
    return f"regression over {comparison.limit}: {'; '.join(grown[:MOST_TOLD])}{rest}"


def shown(comparison: Comparison) -> tuple[list[Pair], int]:
    """The pairs of ranks to show, those whose reserved memory grew most first, and how many there are besides."""

    def grown(pair: Pair) -> int:
        return next((c.difference or 0 for c in pair.figures() if c.name == "peak_reserved"), 0)

    pairs = sorted(comparison.pairs, key=grown, reverse=True)
    return pairs[:MOST_PAIRS], max(len(pairs) - MOST_PAIRS, 0)


def tables(pair: Pair) -> Iterable[tuple[str, str, list[tuple[str, ...]]]]:
    """Title, heading of the first column and rows of every table of a pair."""
    yield "", "figure", [_cells(change) for change in pair.figures()]
    phases = pair.phases()
    if phases:
        yield "Peak allocated by phase", "phase", [_cells(peak, name) for name, peak, _ in phases]
        moved = [_cells(left, name) for name, _, left in phases if left.difference]
        if moved:
            yield "Left allocated at the end of a phase", "phase", moved
    for what, title in _TITLES.items():
        changes = pair.changes(what)
        if changes:
            part = "" if what == "categories" or (pair.before.whole and pair.after.whole) else ", of the largest"
            yield title + part, _SINGULAR[what], [_cells(change, change.name) for change in changes[:MOST_ROWS]]


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


# --------------------------------------------------------------------------------------------------------- tables


def render_table(comparison: Comparison, console: Console | None = None) -> None:
    """Print what came of it, and for each pair of ranks its figures, phases, and what grew."""
    print_parts(_parts(comparison), console)


def _parts(comparison: Comparison) -> Iterable[RenderableType]:
    yield f"{one_line(comparison.before.name)} to {one_line(comparison.after.name)}: {verdict(comparison)}"
    pairs, hidden = shown(comparison)
    for pair in pairs:
        if len(comparison.pairs) > 1:
            yield f"\nrank {format_ranks(pair.after.ranks, 40)}"
        for title, first, rows in tables(pair):
            yield ""
            yield _table(title, first, rows)
    if hidden:
        yield f"and {hidden} more pairs of ranks, which grew less"


def _table(title: str, first: str, rows: Iterable[Sequence[str]]) -> Table:
    table = table_of(title, first, "before", "after", "change", "", right=range(1, 5))
    for row in rows:
        add_row(table, *row)
    return table


# ------------------------------------------------------------------------------------------------------- Markdown


def render_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown for a pull request: figures at once, all else folded."""
    mark = "" if comparison.limit is None else "❌ " if comparison.regressions() else "✅ "
    return f"### {mark}Memory: {_escaped(verdict(comparison))}\n\n{_body(comparison)}"


def _body(comparison: Comparison) -> str:
    """What stands under the heading."""
    lines: list[str] = []
    names = f"`{_code(comparison.before.name)}` to `{_code(comparison.after.name)}`"
    pairs, hidden = shown(comparison)
    for pair in pairs:
        rank = f", rank {format_ranks(pair.after.ranks, 40)}" if len(comparison.pairs) > 1 else ""
        lines += [names + rank, ""]
        for place, (title, first, rows) in enumerate(tables(pair)):
            if place == 0:
                lines += _markdown(first, rows)
            else:
                lines += [f"<details><summary>{title}</summary>", "", *_markdown(first, rows), "</details>", ""]
    if hidden:
        lines += [f"and {hidden} more pairs of ranks, which grew less", ""]
    return "\n".join(lines)


def _markdown(first: str, rows: Iterable[Sequence[str]]) -> list[str]:
    head = [f"| {first} | before | after | change | |", "| --- | ---: | ---: | ---: | ---: |"]
    return [*head, *("| " + " | ".join(map(_escaped, row)) + " |" for row in rows), ""]


def _escaped(text: str) -> str:
    """Text that is nothing but text in a table of Markdown."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join("\\" + letter if letter in "\\|`*_[]" else letter for letter in text)


def _code(text: str) -> str:
    return one_line(text).replace("`", "'")


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
        text += " does not fit its GPU"
    elif needed is not None:
        text += f" needs {format_bytes(needed)}"
        if check.budget is not None:
            text += f" of {format_bytes(check.budget)} ({100 * needed / check.budget:.1f}%)"
    if check.comparison is not None:
        text += f"; against {one_line(check.comparison.before.name)}: {verdict(check.comparison)}"
    return text


def check_json(check: Check) -> dict[str, Any]:
    """The document of `check --json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": check.exit_code,
        "name": check.side.name,
        "verdict": check.side.verdict,
        "needed": check.needed,
        "budget": check.budget,
        "peak_allocated": check.side.most("peak_allocated"),
        "peak_reserved": check.side.most("peak_reserved"),
        "comparison": None if check.comparison is None else render_json(check.comparison),
    }


def check_markdown(check: Check) -> str:
    """The check as Markdown for a pull request."""
    mark = "✅" if check.exit_code == 0 else "❌"
    text = f"### {mark} {_escaped(check_line(check).removeprefix('check: '))}\n"
    if check.comparison is not None:
        text += "\n" + _body(check.comparison)
    return text
