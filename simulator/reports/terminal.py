"""Documents in a terminal, by rich: plain text where stdout is none or NO_COLOR is set; 80 columns are enough.

No word is broken: names leave out their middle where the terminal is narrow, and are whole where there is none, so that
`grep` finds them. A table that does not fit is wider than the terminal rather than cut; texts for which its columns are
far too narrow stand below their row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from simulator.reports.document import Block, Cell, Chart, Document, Figures, Lines, Name, Section, Size, Table, cut

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as Grid
    from rich.text import Text

#: Columns where the output is no terminal, and COLUMNS does not say: every line stays whole.
PIPED: Final = 4096
#: Columns of a line between parts in a pipe.
RULE: Final = 80
#: Characters of a name: at most in a terminal, in a pipe, and at least where there is no room.
LONG: Final = 60
WHOLE: Final = 1000
SHORT: Final = 24
#: Columns to which a column of texts is wrapped, at least.
NARROW: Final = 12
#: Lines of a cell, at most.
TALL: Final = 4
#: Columns between those of a table.
GAP: Final = 3
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
        for part in _parts(document, console):
            console.print(part, markup=False, highlight=False, emoji=False, crop=False)
    console.file.write("\n".join(line.rstrip() for line in capture.get().split("\n")))
    console.file.flush()


def _console() -> Console:
    from rich.console import Console

    whole = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED) if whole else Console()


def _parts(document: Document, console: Console) -> Iterator[RenderableType]:
    from rich.text import Text

    if document.subject:
        yield _text(document.subject)
    lead = _text(document.lead)
    yield (
        Text.assemble(_text(document.says, _STYLES.get(document.badge, "bold")), ": ", lead) if document.says else lead
    )
    if document.facts:
        yield _text(", ".join(document.facts))
    apart = False
    for block in document.head:
        apart = apart or (isinstance(block, Table) and bool(block.title))
        if apart and isinstance(block, Table):
            yield ""
        yield from _block(block, console)
    for section in document.sections:
        yield ""
        yield from _section(section, console)


def _text(words: str, style: str = "") -> Text:
    """Plain text on one line: nothing in it is markup, or moves the cursor."""
    from rich.text import Text

    return Text("".join(letter if letter.isprintable() else "?" for letter in " ".join(words.split())), style)


def _section(section: Section, console: Console) -> Iterator[RenderableType]:
    if section.title:
        title = _text(section.title, "bold")
        yield title.append(" " + "-" * ((RULE if console.width == PIPED else console.width) - len(title) - 1), "green")
    first = True
    for block in section.blocks:
        parts = list(_block(block, console))
        if parts and not first:
            yield ""
        yield from parts
        first = first and not parts


def _block(block: Block, console: Console) -> Iterator[RenderableType]:
    match block:
        case Lines():
            yield from _lines(block)
        case Chart():
            yield from _chart(block, console)
        case Figures():
            yield _figures(block)
        case Table():
            yield from _table(block, console)


def _lines(block: Lines) -> Iterator[RenderableType]:
    if block.title:
        yield _text(block.title, "bold red" if block.style == "bad" else "bold")
    for line in block.lines:
        text = _text(line, _STYLES[block.style] if block.style and not block.title else "")
        text.pad_left(2 if block.title else 0)
        yield text


def _chart(block: Chart, console: Console) -> Iterator[RenderableType]:
    if not block.plain:
        return
    top = max(sum(size for _, size in bar.parts) for bar in block.bars) or 1
    rows = []
    for bar in block.bars:
        first = round(WIDE * bar.parts[0][1] / top)
        whole = round(WIDE * sum(size for _, size in bar.parts) / top)
        end = f" {bar.alarm}" if bar.alarm else ""
        rows.append((bar.label, "#" * first + "-" * max(whole - first, 0) + end))
    yield from _table(Table(block.plain, ("setting", ""), tuple(rows)), console)


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


def _table(block: Table, console: Console) -> Iterator[RenderableType]:
    if block.title:
        yield _text(block.title, "bold")
    rows, widths = _fitted(block, console)
    long = [place for place, width in enumerate(widths) if any(len(row[place]) > TALL * width for row in rows)]
    if 0 < len(long) < len(widths):
        yield from _with_texts_below(block, console, long)
    else:
        table = _grid(block, widths, console)
        for place, row in enumerate(rows):
            table.add_row(*row, style=_STYLES.get(block.styles.get(place, ""), ""))
        yield table
    if block.more:
        yield _text(block.more)


def _grid(block: Table, widths: Sequence[int], console: Console) -> Grid:
    """A table with a head, without title and rows."""
    from rich import box
    from rich.table import Table as Grid

    table = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, (name, width) in enumerate(zip(block.head, widths, strict=True)):
        number = block.numeric(place)
        table.add_column(name, justify="right" if number else "left", overflow="fold", width=width)
    whole = sum(widths) + GAP * (len(widths) - 1)
    table.width = whole if whole > console.width else None
    return table


def _with_texts_below(block: Table, console: Console, long: Sequence[int]) -> Iterator[RenderableType]:
    """A table in which every row is followed by its texts of the columns `long`, over the whole width."""
    from rich.padding import Padding

    short = [place for place in range(len(block.head)) if place not in long]
    kept = replace(
        block,
        head=tuple(block.head[place] for place in short),
        rows=tuple(tuple(row[place] for place in short) for row in block.rows),
        right=[new for new, place in enumerate(short) if block.numeric(place)],
    )
    rows, widths = _fitted(kept, console)
    for number, row in enumerate(rows):
        table = _grid(kept, widths, console)
        table.show_header = number == 0
        table.add_row(*row, style=_STYLES.get(block.styles.get(number, ""), ""))
        yield table
        for place in long:
            yield Padding(_text(_cell(block.rows[number][place], LONG)), (0, 0, 0, 2))


def _fitted(block: Table, console: Console) -> tuple[list[list[Text]], list[int]]:
    """The cells and the widths of their columns: names lose their middle first, then texts are wrapped at blanks."""
    room = console.width - GAP * (len(block.head) - 1)
    most = WHOLE if console.width == PIPED else LONG
    longest = min(most, max((len(cell) for row in block.rows for cell in row if isinstance(cell, Name)), default=0))
    rows, wide, least = _measured(block, console, most)
    if sum(least) > room and longest > SHORT:
        rows, wide, least = _measured(block, console, max(SHORT, longest - (sum(least) - room)))
    while (excess := sum(wide) - room) > 0 and wide != least:
        place = max(range(len(wide)), key=lambda one: wide[one] - least[one])
        wide[place] = max(least[place], wide[place] - excess)
    return rows, wide


def _measured(block: Table, console: Console, longest: int) -> tuple[list[list[Text]], list[int], list[int]]:
    """The cells with names of at most `longest` characters, and what their columns take whole and at the least."""
    rows = [[_text(_cell(cell, longest)) for cell in row] for row in block.rows]
    wide, least = [], []
    for place, cells in enumerate(zip(map(_text, block.head), *rows, strict=True)):
        sizes = [cell.__rich_measure__(console, console.options) for cell in cells]
        wide.append(max(size.maximum for size in sizes))
        words = max(min(wide[-1], NARROW), *(size.minimum for size in sizes))
        least.append(wide[-1] if block.numeric(place) else min(words, LONG))
    return rows, wide, least


def _cell(cell: Cell, longest: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Name):
        return cut(cell, longest)
    return f"{cell:,}" if isinstance(cell, int | float) else str(cell)
