"""Pieces of HTML that the pages are made of: text made safe, sizes, tables, cards, and stacked bars."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from simulator.reports.html.series import shorten
from traces.model import CATEGORIES
from traces.units import format_bytes


def text(value: str, length: int = 160) -> str:
    """Text of the trace: shortened, escaped, and kept from turning the direction of what stands around it."""
    return f"<bdi>{escape(shorten(value, length))}</bdi>" if not value.isascii() else escape(shorten(value, length))


def badge(kind: str, words: str) -> str:
    """The verdict as a badge, in the colours of its kind."""
    return f'<span class="badge {kind}">{capital(words)}</span> '


def capital(words: str) -> str:
    """Words that begin a line."""
    return words[:1].upper() + words[1:]


def size(count: int) -> str:
    """A size for people, with the exact number on hover."""
    return f'<span class=n title="{count:,} bytes">{format_bytes(count)}</span>'


def card(title: str, body: str, *, kind: str = "") -> str:
    """A box with a heading (ready HTML, both)."""
    return f'<div class="card {kind}"><h3>{title}</h3>{body}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1, words: Collection[int] = ()) -> str:
    """A table of ready HTML cells; the first `texts` columns and those in `words` hold words, the others numbers."""
    kinds = [
        " class=long" if column == 0 else "" if column < texts or column in words else " class=num"
        for column in range(len(head))
    ]
    top = "".join(f"<th scope=col{kind}>{name}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def shares(head: Sequence[str], rows: Sequence[tuple[str, int]], whole: int, *, coloured: bool = False) -> str:
    """A table of parts of `whole`, each with a bar (`coloured`: in the colour of its category)."""
    cells = []
    for name, count in rows:
        share = 100 * count / whole if whole else 0.0
        kind = f" class={colour(name)}" if coloured else ""
        bar = f'<svg class=bar aria-hidden=true><rect{kind} width="{share:.2f}%" height="100%"/></svg>'
        cells.append((text(name.replace("_", " ") if coloured else name), size(count), f"{share:.1f} %{bar}"))
    return table(head, cells)


def colour(name: str, place: int = 0) -> str:
    """The CSS class that colours a category or `free`, the same everywhere; for other parts one of 8, by `place`."""
    return f"c-{name}" if name in (*CATEGORIES, "free") else f"c-{place % 8}"


def stacked(parts: Sequence[tuple[str, float]], whole: float, *, mark: float | None = None) -> str:
    """A horizontal bar of parts on a scale that ends at `whole`: (CSS class, size) each; `mark` is a line across."""
    scale = 100 / whole if whole > 0 else 0.0
    at, drawn = 0.0, []
    for kind, value in parts:
        width = max(0.0, value) * scale
        if width > 0:
            drawn.append(f'<rect class="{kind}" x="{at:.2f}%" width="{width:.2f}%" height="100%"/>')
        at += width
    if mark is not None and 0 <= mark * scale <= 100:
        drawn.append(f'<line class=mark x1="{mark * scale:.2f}%" x2="{mark * scale:.2f}%" y1="0" y2="100%"/>')
    return f"<svg class=stack aria-hidden=true>{''.join(drawn)}</svg>"


def key(parts: Sequence[tuple[str, str]]) -> str:
    """What the colours mean: (CSS class, word) each."""
    items = "".join(f'<li><i class="swatch {kind}"></i>{text(word)}</li>' for kind, word in parts)
    return f"<ul class=legend>{items}</ul>"
