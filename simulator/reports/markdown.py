"""Documents as Markdown, for pull requests: the first table of each section at once, all others folded."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.reports.document import Cell, Document, Lines, Table
from traces.text import one_line


def body(document: Document) -> str:
    """What stands under the heading: the tables of every section."""
    return "\n".join(_lines(document))


def _lines(document: Document) -> Iterator[str]:
    name = one_line(document.subject).replace("`", "'")
    for section in document.sections:
        tables = [block for block in section.blocks if isinstance(block, Table)]
        if tables:
            yield from (f"`{name}`{f', {escaped(section.title)}' if section.title else ''}", "")
        for place, table in enumerate(tables):
            if place:
                yield from (f"<details><summary>{escaped(table.title)}</summary>", "", *_table(table), "</details>", "")
            else:
                yield from _table(table)
        for block in section.blocks:
            if isinstance(block, Lines):
                yield from (*map(escaped, block.lines), "")


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(table.head)} |"
    yield f"| {' | '.join('---:' if table.numeric(place) else '---' for place in range(len(table.head)))} |"
    yield from ("| " + " | ".join(map(_cell, row)) + " |" for row in table.rows)
    yield from ("", *([escaped(table.more), ""] if table.more else []))


def _cell(cell: Cell) -> str:
    return "" if cell is None else escaped(str(cell))


def escaped(text: str) -> str:
    """Text that is nothing but text in a table of Markdown."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join("\\" + letter if letter in "\\|`*_[]" else letter for letter in text)
