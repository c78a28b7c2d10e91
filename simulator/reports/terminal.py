"""Documents in a terminal, by rich: plain text where stdout is none or NO_COLOR is set; 80 columns are enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from simulator.reports.document import Block, Cell, Chart, Document, Figures, Lines, Name, Section, Size, Table, cut

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as Grid
    from rich.text import Text

#: Columns where the output is no terminal, and COLUMNS does not say: names stay whole.
PIPED: Final = 160
#: Characters of a name.
LONG: Final = 60
#: Characters of a bar.
WIDE: Final = 36
#: Colours of verdicts, and of rows and lines that stand out.
_STYLES: Final = {
    "fits": "bold green",
    "tight": "bold yellow",
    "oom": "bold red",
    "good": "bold green",
    "bad": "red",
}


def render(document: Document, console: Console | None = None) -> None:
    """Print a document, one part below the other, without blanks at the ends of lines."""
    console = console or _console()
    with console.capture() as capture:
        for part in _parts(document):
            console.print(part, markup=False, highlight=False, emoji=False)
    console.file.write("\n".join(line.rstrip() for line in capture.get().split("\n")))
    console.file.flush()


def _console() -> Console:
    from rich.console import Console

    whole = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED) if whole else Console()


def _parts(document: Document) -> Iterator[RenderableType]:
    from rich.text import Text

    if document.subject:
        yield _text(document.subject)
    lead = _text(document.lead)
    yield (
        Text.assemble(_text(document.says, _STYLES.get(document.badge, "bold")), ": ", lead) if document.says else lead
    )
    if document.facts:
        yield _text(", ".join(document.facts))
    for block in document.head:
        yield from _block(block)
    for section in document.sections:
        yield ""
        yield from _section(section)


def _text(words: str, style: str = "") -> Text:
    """Plain text on one line: nothing in it is markup, or moves the cursor."""
    from rich.text import Text

    return Text("".join(letter if letter.isprintable() else "?" for letter in " ".join(words.split())), style)


def _section(section: Section) -> Iterator[RenderableType]:
    from rich.rule import Rule

    if section.title:
        yield Rule(_text(section.title, "bold"), align="left", characters="-")
    first = True
    for block in section.blocks:
        parts = list(_block(block))
        if parts and not first:
            yield ""
        yield from parts
        first = first and not parts


def _block(block: Block) -> Iterator[RenderableType]:
    match block:
        case Lines():
            yield from _lines(block)
        case Chart():
            yield from _chart(block)
        case Figures():
            yield _figures(block)
        case Table():
            yield from _table(block)


def _lines(block: Lines) -> Iterator[RenderableType]:
    if block.title:
        yield _text(block.title, "bold red" if block.style == "bad" else "bold")
    for line in block.lines:
        text = _text(line, _STYLES[block.style] if block.style and not block.title else "")
        text.pad_left(2 if block.title else 0)
        yield text


def _chart(block: Chart) -> Iterator[RenderableType]:
    if not block.plain:
        return
    top = max(sum(size for _, size in bar.parts) for bar in block.bars) or 1
    rows = []
    for bar in block.bars:
        first = round(WIDE * bar.parts[0][1] / top)
        whole = round(WIDE * sum(size for _, size in bar.parts) / top)
        end = f" {bar.alarm}" if bar.alarm else ""
        rows.append((bar.label, "#" * first + "-" * max(whole - first, 0) + end))
    yield from _table(Table(block.plain, ("setting", ""), tuple(rows)))


def _figures(block: Figures) -> Grid:
    from rich.table import Table as Grid

    table = Grid(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in block.rows:
        exact = f"{row.value.bytes:,} B" if isinstance(row.value, Size) and not row.exact else row.exact
        table.add_row(*map(_text, (row.name, str(row.value), exact, row.remark)))
    return table


def _table(block: Table) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table as Grid

    table = Grid(
        title=_text(block.title, "bold") if block.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        min_width=len(block.title) or None,  # a title is not broken, however narrow the columns are
    )
    for place, name in enumerate(block.head):
        number = block.numeric(place)
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for place, row in enumerate(block.rows):
        table.add_row(*(_text(_cell(cell)) for cell in row), style=_STYLES.get(block.styles.get(place, ""), ""))
    yield table
    if block.more:
        yield _text(block.more)


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Name):
        return cut(cell, LONG)
    return f"{cell:,}" if isinstance(cell, int | float) else str(cell)
