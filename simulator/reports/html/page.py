"""Documents as pages: one HTML file with its scripts, styles and data inside, and a policy that lets nothing out.

Tables are plain HTML and can be read without JavaScript; `static/page.js` draws memory over time with uPlot (MIT,
vendored in `static/`), `static/memory.js` knows what was alive after any event, and `blocks.js`, `flame.js` and
`alive.js` draw it. Whatever a trace says is text: the templates escape
it, data are a JSON block that no markup can leave, and the page's content security policy runs the page's own scripts
only (by their hashes) and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, Final

from markupsafe import Markup

from simulator.engine.result import RankResult, Result
from simulator.reports import run
from simulator.reports.document import Block, Document, Figure, Figures, Section, Size, Table
from simulator.reports.html.lives import categories_over_time, lives
from simulator.reports.html.overlay import overlay
from simulator.reports.html.pieces import templates
from simulator.reports.html.series import Series, series, shorten
from simulator.reports.verdict import WORDS, label_of
from traces.files import write_atomically
from traces.units import format_bytes

#: Events drawn for one rank and in a whole page (at about 8 characters each, 20 with categories).
POINTS_PER_RANK: Final = 50_000
POINTS_PER_PAGE: Final = 200_000
#: Characters of a page without the lives of blocks: what takes more is drawn more coarsely.
MAX_PAGE: Final = 4_500_000
#: Characters of the lives of blocks: ranks beyond are drawn without their blocks.
MAX_LIVES: Final = 24_000_000
MAX_RANKS: Final = 64
MAX_PHASE_ROWS: Final = 40

_SCRIPTS: Final = ("uPlot.iife.min.js", "memory.js", "blocks.js", "flame.js", "alive.js", "moment.js", "page.js")
_STYLES: Final = ("uPlot.min.css", "page.css")


def write_html(result: Result, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the page of `result` to `path` (UTF-8); the file appears whole or not at all.

    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    write(document_of(result), path, force=force)


def document_of(result: Result) -> Document:
    """What the page of a result says: the worst `MAX_RANKS` event sequences."""
    return run.document_of(result, MAX_RANKS, MAX_PHASE_ROWS)


def write(document: Document, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the page of a document, as `write_html` does."""
    with write_atomically(path, force=force) as file:
        file.write(render(document).encode("utf-8", "backslashreplace"))


def render(document: Document) -> str:
    """The page of a document as text: a pure function, with as much of each rank as keeps it below `MAX_PAGE`."""
    drawn = [section for section in document.sections if section.rank is not None]
    results, left_out = _of_results(document)
    notes = run.few(document.notes) + left_out
    shown = replace(document, notes=notes)
    context = {
        "document": shown,
        "title": shorten(document.title or document.subject, 80),
        "badge": WORDS.get(document.badge, document.badge),
        "together": Markup(overlay([(label, one.ranks[0]) for label, one in document.results if one.ranks])),
        "parts": list(_parts(document)),
        "policy": _policy(),
        "styles": [Markup(static(name)) for name in _STYLES],
        "scripts": [Markup(static(name)) for name in _SCRIPTS],
    }
    held = _lives([section.rank for section in (*drawn, *results) if section.rank is not None])
    budget = 1.0
    while True:
        sections, data = _sections([*drawn, *results], budget)
        chooser = "Shown" if results else "Rank, worst first"
        found = {"drawn": sections, "data": _json({"chooser": chooser, "ranks": data}), "lives": held}
        page = templates().get_template("page.html.j2").render(context, **found)
        if len(page) - sum(map(len, held)) <= MAX_PAGE or budget < 0.001:
            return page
        budget /= 2


def _lives(ranks: Sequence[RankResult]) -> list[str]:
    """The lives of all blocks of each rank, empty for those after which a page would be too large."""
    found, left = [], MAX_LIVES
    for rank in ranks:
        text = "" if rank.picture is None or left < 0 else lives(rank, rank.picture)
        left -= len(text)
        found.append(text if left >= 0 else "")
    return found


def _of_results(document: Document) -> tuple[list[Section], tuple[str, ...]]:
    """The ranks of results that a document compares, and a note where they are too many."""
    most = MAX_RANKS // max(1, len(document.results))
    found = [
        run.section_of(rank, label if len(result.ranks) == 1 else f"{label}: {label_of(rank.ranks)}", MAX_PHASE_ROWS)
        for label, result in document.results
        for rank in result.ranks[:most]
    ]
    rest = sum(max(0, len(result.ranks) - most) for _, result in document.results)
    note = f"The {most} worst event sequences of each are drawn; {rest:,} others peak lower."
    return found, (note,) if rest else ()


def _parts(document: Document) -> Iterator[tuple[str, Block]]:
    """What stands above what is drawn over time, with the title of its section."""
    ranks = [(section.label, section.rank) for section in document.sections if section.rank is not None]
    if len(ranks) > 1:
        yield "", run.side_by_side(ranks)
    for block in document.head:
        if len(ranks) != 1 or not isinstance(block, Table) or block.title:  # one rank has its figures below
            yield "", block
    for section in document.sections:
        if section.rank is None:
            yield from ((f"{section.title}: " if section.title else "", block) for block in section.blocks)


def _sections(ranks: list[Section], budget: float) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """What the templates write of ranks, and what the scripts draw of them."""
    many = max(1, len(ranks))
    share = max(1, round(budget * min(POINTS_PER_RANK, POINTS_PER_PAGE // many)))
    sections: list[Mapping[str, Any]] = []
    data: list[Mapping[str, Any]] = []
    for section in ranks:
        assert section.rank is not None
        packed = _series(section.rank, share)
        sections.append(_section(section, section.rank, packed))
        data.append({**_data(section.label, section.rank, packed), "demand": _demand(section.rank, share)})
    return sections, data


def _series(rank: RankResult, max_points: int) -> Series:
    places = () if rank.picture is None else tuple(moment.event for moment in rank.picture.moments)
    return series(rank.timeline, (rank.peak.event, rank.fragmentation.event, *places), max_points)


def _section(section: Section, rank: RankResult, packed: Series) -> Mapping[str, Any]:
    """Figures, with the limit that the plot shows, stand above it, tables below."""
    place = next(place for place, block in enumerate(section.blocks) if isinstance(block, Figures))
    *before, figures = section.blocks[: place + 1]
    assert isinstance(figures, Figures)
    limit = Figure("allocator's limit", Size(rank.timeline.limit_bytes), key="limit")
    return {
        "title": section.title,
        "before": [*before, Figures((*figures.rows, limit))],
        "after": section.blocks[place + 1 :],
        "events": len(rank.timeline),
        "points": packed.points,
        "left_out": packed.document["phasesLeftOut"],
    }


def _data(label: str, rank: RankResult, packed: Series) -> Mapping[str, Any]:
    """What page.js needs of one rank."""
    picture = rank.picture
    return {
        **packed.document,
        "label": shorten(label, 80),
        "device": shorten(rank.device.name, 60),
        "peak": {"event": rank.peak.event, "bytes": rank.peak_allocated, "text": format_bytes(rank.peak_allocated)},
        "peakReserved": {
            "event": rank.fragmentation.event,
            "bytes": rank.peak_reserved,
            "text": format_bytes(rank.peak_reserved),
        },
        "oom": rank.oom is not None,
        "categories": [] if picture is None else categories_over_time(rank, picture, packed.index),
    }


def _demand(rank: RankResult, max_points: int) -> Mapping[str, Any] | None:
    """What a rank that runs out of memory would reserve on a device without end, where that is known."""
    demand = None if rank.oom is None else rank.oom.demand
    if demand is None:
        return None
    top = int(demand.reserved.argmax())
    peak = int(demand.reserved[top])
    packed = series(demand, (top,), max_points // 4)
    return {**packed.document, "categories": [], "peak": peak, "words": f"would reserve {format_bytes(peak)}"}


def static(name: str) -> str:
    """The text of a file in `static/`."""
    return (files("simulator.reports.html") / "static" / name).read_text("utf-8")


def _policy() -> Markup:
    """The content security policy: this page's scripts by hash, its styles, and nothing from anywhere."""
    hashes = (hashlib.sha256(static(name).encode()).digest() for name in _SCRIPTS)
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return Markup(
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _json(data: Mapping[str, Any]) -> Markup:
    """JSON for a script element: pure ASCII without `<`, `>` and `&`, so that no markup can end it."""
    document = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
