"""Documents as Markdown, for pull requests: tables of sections that have a title are folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from simulator.reports.document import Block, Cell, Document, Lines, Table
from traces.text import one_line

#: Marks of what a document's badge says.
_MARKS: Final[Mapping[str, str]] = {"fits": "✅ ", "tight": "⚠️ ", "oom": "❌ "}


def render(document: Document) -> str:
    """The whole document: the answer as a heading, what it is about, and the tables."""
    says = f"{document.says}: " if document.says else ""
    facts = escaped(", ".join(document.facts))
    return f"### {_MARKS.get(document.badge, '')}{escaped(says + document.lead)}\n\n{facts}\n\n{body(document)}"


def body(document: Document) -> str:
    """What stands under the heading: what the document says first, and the tables of every section."""
    return "\n".join(_lines(document))


def blocks(some: Iterable[Block]) -> str:
    """Tables and sentences one below the other, none folded."""
    return "\n".join(line for block in some for line in _block(block))


def _lines(document: Document) -> Iterator[str]:
    name = [f"`{subject}`"] if (subject := one_line(document.subject).replace("`", "'")) else []
    if document.head:
        yield from (*name, "", blocks(document.head))
        name = []
    for section in document.sections:
        tables = [block for block in section.blocks if isinstance(block, Table)]
        if tables and (title := [*name, *filter(None, [escaped(section.title)])]):
            yield from (", ".join(title), "")
        for table in tables:
            if table.title:
                yield from (f"<details><summary>{escaped(table.title)}</summary>", "", *_table(table), "</details>", "")
            else:
                yield from _table(table)
        for block in section.blocks:
            if isinstance(block, Lines):
                yield from _sentences(block)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Lines):
        yield from _sentences(block)
    elif isinstance(block, Table):
        yield from (*([f"**{escaped(block.title)}**", ""] if block.title else []), *_table(block))


def _sentences(block: Lines) -> Iterator[str]:
    if block.title:
        yield from (f"**{escaped(block.title)}**", "")
    for line in block.lines:
        yield from (escaped(line), "")


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
