"""Tables and charts side by side: methods, settings, ranks or runs, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from simulator.reports.html.pieces import card, colour, key, size, stacked, table, text
from traces.units import format_bytes

#: Rows that a chart or a table shows; the rest is counted.
MAX_ROWS: Final = 400


@dataclass(frozen=True, slots=True)
class Size:
    """A cell of a table that is a number of bytes."""

    bytes: int


Cell = str | int | float | Size | None


@dataclass(frozen=True)
class Bar:
    """A row of a chart: parts (what, size) from left to right, a line at `mark` (a limit), words at the end.

    `alarm` are words at the very end that say what is wrong.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    mark: float | None = None
    remark: str = ""
    alarm: str = ""


@dataclass(frozen=True)
class Chart:
    """Horizontal bars on one scale; parts of one name have one colour. `mark` says what the marks of the bars are."""

    title: str
    bars: tuple[Bar, ...]
    unit: Literal["bytes", "number"] = "bytes"
    caption: str = ""
    mark: str = "limit"


@dataclass(frozen=True)
class Dots:
    """Rows of dots on one scale of bytes: a label, words at the end, and what, bytes and wrongness of every dot."""

    title: str
    rows: tuple[tuple[str, str, tuple[tuple[str, int, bool], ...]], ...]


@dataclass(frozen=True)
class Grid:
    """A table: the first `texts` columns and those that hold words are set left, numbers right.

    The rows numbered in `strong` are bold.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: int = 1
    strong: tuple[int, ...] = ()
    caption: str = ""


Part = Chart | Dots | Grid


def chart(given: Chart) -> str:
    """The chart as a card over the whole width; every bar's numbers stand beside it."""
    shown = given.bars[:MAX_ROWS]
    whole = max((_end(bar) for bar in shown), default=0.0)
    names = list(dict.fromkeys(what for bar in shown for what, _ in bar.parts))
    kinds = {name: colour(name, place) for place, name in enumerate(names)}
    rows = "".join(_bar(bar, whole, kinds, given.unit) for bar in shown)
    meaning = [(kinds[name], name.replace("_", " ")) for name in names]
    if any(bar.mark is not None for bar in shown):
        meaning.append(("mark", given.mark))
    body = (key(meaning) if len(meaning) > 1 else "") + f"<div class=bars role=list>{rows}</div>"
    return card(text(given.title), body + _rest(len(given.bars)) + _caption(given.caption), kind="wide")


def _end(bar: Bar) -> float:
    return max(sum(value for _, value in bar.parts), bar.mark or 0.0)


def _bar(bar: Bar, whole: float, kinds: dict[str, str], unit: str) -> str:
    words = _number(sum(value for _, value in bar.parts), unit)
    each = ", ".join(f"{what} {_number(value, unit)}" for what, value in bar.parts if value)
    parts = [(kinds[what], value) for what, value in bar.parts]
    remark = f" <small>{text(bar.remark)}</small>" if bar.remark else ""
    remark += f" <span class=bad>{text(bar.alarm)}</span>" if bar.alarm else ""
    return (
        f'<div role=listitem title="{text(each, 600)}"><span class=what>{text(bar.label, 80)}</span>'
        f"{stacked(parts, whole, mark=bar.mark)}<span class=n>{words}{remark}</span></div>"
    )


def dots(given: Dots) -> str:
    """The rows of dots as a card over the whole width."""
    values = [value for _, _, row in given.rows for _, value, _ in row]
    low, high = min(values, default=0), max(values, default=0)
    scale = 96 / max(1, high - low)
    rows = ""
    for label, remark, row in given.rows[:MAX_ROWS]:
        drawn = "".join(
            f'<circle{" class=bad" if bad else ""} cx="{2 + scale * (value - low):.2f}%" cy=8 r=5>'
            f"<title>{text(what)}: {format_bytes(value)}</title></circle>"
            for what, value, bad in row
        )
        line = '<rect class=track y=7 width="100%" height=2 />'
        rows += (
            f"<div role=listitem><span class=what>{text(label, 80)}</span>"
            f"<svg class=dots aria-hidden=true>{line}{drawn}</svg><span class=n>{text(remark)}</span></div>"
        )
    scope = _caption(f"From {format_bytes(low)} to {format_bytes(high)}; a dot is a replay.")
    return card(text(given.title), f"<div class=bars role=list>{rows}</div>{scope}", kind="wide")


def grid(given: Grid) -> str:
    """The table as a card over the whole width."""
    rows = [
        [f"<b>{_cell(cell)}</b>" if place in given.strong else _cell(cell) for cell in row]
        for place, row in enumerate(given.rows[:MAX_ROWS])
    ]
    words = [column for column in range(len(given.head)) if any(_is_word(row[column]) for row in given.rows)]
    inner = table([text(name) for name in given.head], rows, texts=given.texts, words=words)
    body = f'<div class=scroll tabindex=0 role=region aria-label="{text(given.title)}">{inner}</div>'
    return card(text(given.title), body + _rest(len(given.rows)) + _caption(given.caption), kind="wide")


def _is_word(cell: Cell) -> bool:
    """Whether a cell is text that does not begin as a number does."""
    return isinstance(cell, str) and cell[:1].isalpha()


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Size):
        return size(cell.bytes)
    return text(cell, 300) if isinstance(cell, str) else _number(cell, "number")


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _rest(count: int) -> str:
    return f"<p class=caption>and {count - MAX_ROWS:,} more</p>" if count > MAX_ROWS else ""


def _caption(words: str) -> str:
    return f"<p class=caption>{text(words, 600)}</p>" if words else ""


def parts(given: Sequence[Part]) -> str:
    """Charts and tables, one below the other."""
    return "".join(
        chart(one) if isinstance(one, Chart) else dots(one) if isinstance(one, Dots) else grid(one) for one in given
    )
