"""A page that sets several things side by side: methods, allocator settings, or two runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from simulator.engine.result import Result, Verdict
from simulator.reports.html.charts import Bar, Chart, Dots, Grid, Part, Size, parts
from simulator.reports.html.document import write_page
from simulator.reports.html.overlay import overlay
from simulator.reports.html.page import MAX_NOTES, MAX_RANKS, bounded
from simulator.reports.html.pieces import badge, text
from simulator.reports.verdict import WORDS, label_of

__all__ = ["Bar", "Chart", "Dots", "Grid", "Part", "Sheet", "Size", "render_sheet", "write_sheet"]


@dataclass(frozen=True)
class Sheet:
    """What the page holds: plain text throughout. `results` are drawn together (their worst ranks, on one axis), and
    one by one, with memory over time and tables.

    Where a result was made with its picture (`replay(..., picture=True)`), categories and blocks are drawn as well.
    """

    title: str
    lead: str
    badge: Verdict | Literal["regression", ""] = ""
    facts: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    results: tuple[tuple[str, Result], ...] = ()
    notes: tuple[str, ...] = ()


def write_sheet(sheet: Sheet, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the page of `sheet` to `path` (UTF-8); the file appears whole or not at all.

    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    write_page(render_sheet(sheet), path, force=force)


def render_sheet(sheet: Sheet) -> str:
    """The page as text, of at most about 4.5 million characters."""
    mark = badge(sheet.badge, WORDS.get(sheet.badge, sheet.badge)) if sheet.badge else ""
    facts = " · ".join(text(fact, 300) for fact in sheet.facts)
    header = f"<h1>{mark}{text(sheet.title)}</h1><p class=lead>{text(sheet.lead, 600)}</p><p class=facts>{facts}</p>"
    most = MAX_RANKS // max(1, len(sheet.results))
    ranks = [
        (label if len(result.ranks) == 1 else f"{label}: {label_of(rank.ranks)}", rank)
        for label, result in sheet.results
        for rank in result.ranks[:most]
    ]
    left_out = sum(max(0, len(result.ranks) - most) for _, result in sheet.results)
    if ranks and sheet.parts:
        header += "<p class=facts><a href=#one>Memory over time, blocks and modules, one by one</a></p>"
    together = overlay([(label, result.ranks[0]) for label, result in sheet.results if result.ranks])
    notes = list(sheet.notes[:MAX_NOTES])
    if len(sheet.notes) > MAX_NOTES:
        notes.append(f"{len(sheet.notes) - MAX_NOTES:,} further notes are left out.")
    if left_out:
        notes.append(f"The {most} worst event sequences of each are drawn; {left_out:,} others peak lower.")
    lines = "".join(f"<li>{text(note, 600)}</li>" for note in notes)
    return bounded(
        sheet.title,
        header,
        f"<div class=side>{together}{parts(sheet.parts)}</div><a id=one></a>",
        ranks,
        f"<h2>Notes</h2><ul>{lines}</ul>" if notes else "",
        chooser="Shown",
    )
