"""What templates ask of plain values: text made safe, sizes and shares, and the arithmetic of bars."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Final

import jinja2
from markupsafe import Markup

from simulator.reports.document import Bar, Cell, Chart, Differences, Dots, Share, Size, Table
from simulator.reports.html.series import shorten
from traces.model import CATEGORIES
from traces.units import format_bytes

#: After which letters of escaped text a line may break: not within a number.
_BREAKS: Final = re.compile(r"(\.(?!\d)|_)")
#: The colours of runs side by side: those of the overlay.
_SIDES: Final = {"before": "k-0", "after": "k-1"}
#: Rows that a chart or a table shows; the rest is counted.
MAX_ROWS: Final = 400


@functools.cache
def templates() -> jinja2.Environment:
    """The templates of pages, and the functions here as their filters."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("simulator.reports.html"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["most"] = MAX_ROWS
    own = (amount, begin, cell, colour, colours, column, largest, scale, size, span, stack, stacked, told, total)
    found.filters |= {one.__name__: one for one in own}
    found.filters |= {"said": text, "short": shorten, "kind": lambda block: type(block).__name__}
    return found


def text(value: str, length: int = 160) -> Markup:
    """Text of the trace: shortened, escaped, and kept from turning the direction of what stands around it."""
    short = shorten(value, length)
    return Markup("{}" if short.isascii() else "<bdi>{}</bdi>").format(short)


def begin(words: str) -> str:
    """Words that begin a line."""
    return words[:1].upper() + words[1:]


def size(count: int) -> Markup:
    """A size for people, with the exact number on hover."""
    return Markup('<span class=n title="{:,} bytes">{}</span>').format(count, format_bytes(count))


def cell(value: Cell) -> Markup:
    """A cell of a table."""
    if isinstance(value, Size):
        return size(value.bytes)
    if isinstance(value, Share):
        width = 100 * value.part / value.whole if value.whole else 0.0
        kind = Markup(" class={}").format(colour(value.category)) if value.category else ""
        bar = Markup('<svg class=bar aria-hidden=true><rect{} width="{:.2f}%" height="100%"/></svg>')
        return text(str(value)) + bar.format(kind, width)
    if isinstance(value, int | float):
        return text(amount(value, "number"))
    return Markup(_BREAKS.sub(r"\1<wbr>", str(text(value or "", 300))))  # of Markup, what is put in would be escaped


def column(table: Table, place: int) -> Markup:
    """The class of a column's cells."""
    return Markup(" class=num" if table.numeric(place) else " class=long" if place == 0 else "")


def colour(name: str, place: int = 0) -> str:
    """The CSS class of a category, `free` or a side of a comparison, the same everywhere; else one of 8, by `place`."""
    if name in _SIDES:
        return _SIDES[name]
    return f"c-{name}" if name in (*CATEGORIES, "free") else f"c-{place % 8}"


def colours(chart: Chart) -> dict[str, str]:
    """The colour of every part of a chart."""
    names = dict.fromkeys(what for bar in chart.bars[:MAX_ROWS] for what, _ in bar.parts)
    return {name: colour(name, place) for place, name in enumerate(names)}


def total(bar: Bar) -> float:
    """All parts of a bar together."""
    return sum(value for _, value in bar.parts)


def scale(chart: Chart) -> float:
    """Where the scale of a chart ends."""
    return max((max(total(bar), bar.mark or 0.0) for bar in chart.bars[:MAX_ROWS]), default=0.0)


def span(dots: Dots) -> tuple[int, int]:
    """The least and the largest value of all dots."""
    values = [value for _, _, row in dots.rows for _, value, _ in row]
    return min(values, default=0), max(values, default=0)


def largest(differences: Differences) -> int:
    """The largest change of all rows."""
    return max((abs(after - before) for _, before, after in differences.rows), default=0) or 1


def told(bar: Bar, unit: str) -> str:
    """The parts of a bar in words."""
    return ", ".join(f"{what} {amount(value, unit)}" for what, value in bar.parts if value)


def amount(value: float, unit: str) -> str:
    """A number of bytes, or of something else."""
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def stack(bar: Bar, kinds: Mapping[str, str], whole: float) -> Markup:
    """A bar of a chart."""
    return stacked([(kinds[what], value) for what, value in bar.parts], whole, mark=bar.mark)


def stacked(parts: Sequence[tuple[str, float]], whole: float, *, mark: float | None = None) -> Markup:
    """A horizontal bar of parts on a scale that ends at `whole`: (CSS class, size) each; `mark` is a line across."""
    ratio = 100 / whole if whole > 0 else 0.0
    at, drawn = 0.0, []
    for kind, value in parts:
        width = max(0.0, value) * ratio
        if width > 0:
            drawn.append(f'<rect class="{kind}" x="{at:.2f}%" width="{width:.2f}%" height="100%"/>')
        at += width
    if mark is not None and 0 <= mark * ratio <= 100:
        drawn.append(f'<line class=mark x1="{mark * ratio:.2f}%" x2="{mark * ratio:.2f}%" y1="0" y2="100%"/>')
    return Markup(f"<svg class=stack aria-hidden=true>{''.join(drawn)}</svg>")
