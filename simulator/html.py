"""The plain picture: a result as one self-contained HTML page that needs no network.

`render_html` is a pure function of the result. The tables are plain HTML and can be read without JavaScript;
`static/page.js` draws memory over time with uPlot (MIT, vendored in `static/`). Whatever a trace says is text: it is
escaped in the tables, kept in a JSON block that no markup can leave, and the page's content security policy runs
the page's own scripts only (by their hashes) and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

from simulator.html_series import Series, series, shorten
from simulator.ranks import format_ranks
from simulator.report import CAUSES, distinct_phases, format_time, no_remedy, range_and_source
from simulator.result import OutOfMemory, PhasePeak, RankResult, Result
from simulator.settings import format_bytes
from traces.files import write_atomically

#: Events drawn for one rank and in a whole page (at about 8 characters each), and event sequences drawn.
POINTS_PER_RANK: Final = 50_000
POINTS_PER_PAGE: Final = 200_000
MAX_RANKS: Final = 64
MAX_PHASE_ROWS: Final = 40
MAX_NOTES: Final = 40

_SCRIPTS: Final = ("uPlot.iife.min.js", "page.js")
_STYLES: Final = ("uPlot.min.css", "page.css")


def write_html(result: Result, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the page of `result` to `path` (UTF-8); the file appears whole or not at all.

    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    page = render_html(result).encode("utf-8", "backslashreplace")
    with write_atomically(path, force=force) as file:
        file.write(page)


def render_html(result: Result) -> str:
    """The page of `result` as text: the worst `MAX_RANKS` event sequences, `POINTS_PER_PAGE` events in all."""
    shown = result.ranks[:MAX_RANKS]
    share = max(1, min(POINTS_PER_RANK, POINTS_PER_PAGE // max(1, len(shown))))
    drawn = [_series(rank, share) for rank in shown]
    data = {"ranks": [_data(rank, packed) for rank, packed in zip(shown, drawn, strict=True)]}
    parts = {
        "title": escape(_title(result)),
        "policy": _policy(),
        "styles": "".join(f"<style>{_static(name)}</style>" for name in _STYLES),
        "header": _header(result),
        "ranks": "".join(
            _rank(place, rank, packed) for place, (rank, packed) in enumerate(zip(shown, drawn, strict=True))
        ),
        "notes": _notes(result),
        "data": _json(data),
        "scripts": "".join(f"<script>{_static(name)}</script>" for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _static("page.html"))


def _series(rank: RankResult, max_points: int) -> Series:
    return series(rank.timeline, (rank.peak.event, rank.fragmentation.event), max_points)


def _label(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def _data(rank: RankResult, packed: Series) -> Mapping[str, Any]:
    """What page.js needs of one rank."""
    return {
        **packed.document,
        "label": _label(rank.ranks),
        "device": shorten(rank.device.name, 60),
        "peak": {"event": rank.peak.event, "bytes": rank.peak_allocated, "text": format_bytes(rank.peak_allocated)},
        "peakReserved": {
            "event": rank.fragmentation.event,
            "bytes": rank.peak_reserved,
            "text": format_bytes(rank.peak_reserved),
        },
        "oom": rank.oom is not None,
    }


# The frame of the page ------------------------------------------------------------------------------------------------


def _static(name: str) -> str:
    return (files("simulator") / "static" / name).read_text("utf-8")


def _policy() -> str:
    """The content security policy: this page's scripts by hash, its styles, and nothing from anywhere."""
    hashes = (hashlib.sha256(_static(name).encode()).digest() for name in _SCRIPTS)
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _json(data: Mapping[str, Any]) -> str:
    """JSON for a script element: pure ASCII without `<`, `>` and `&`, so that no markup can end it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _name(result: Result) -> str | None:
    """What the trace calls itself."""
    for key in ("name", "title", "model", "producer"):
        value = result.metadata.get(key)
        if isinstance(value, str) and value.strip():
            return shorten(value.strip(), 80)
    return None


def _title(result: Result) -> str:
    verdict = "fits" if result.verdict == "fits" else "out of memory"
    name = _name(result)
    return f"Memory: {verdict}" if name is None else f"{name}: {verdict}"


def _header(result: Result) -> str:
    """The verdict in one line, and what was replayed."""
    fits = result.verdict == "fits"
    badge = '<span class="badge fits">Fits</span>' if fits else '<span class="badge oom">Out of memory</span>'
    world = sum(len(rank.ranks) for rank in result.ranks)
    name = _name(result)
    facts = [
        f"{world:,} rank{'s' * (world != 1)}",
        f"PyTorch {result.release}",
        f"allocator settings: {result.conf or 'default'}",
    ]
    return (
        f"<h1>{badge} {_text(name) if name else 'Memory over time'}</h1>"
        f"<p class=lead>{_lead(result)}</p>"
        f"<p class=facts>{' · '.join(_text(fact) for fact in facts)}</p>"
    )


def _lead(result: Result) -> str:
    """One sentence that says what the verdict rests on."""
    if not result.ranks:
        return "The trace has no ranks."
    for rank in result.ranks:
        if rank.oom is not None:
            return (
                f"{_label(rank.ranks).capitalize()} asked for {_bytes(rank.oom.requested)} at event"
                f" {rank.oom.event:,} with {_bytes(rank.oom.device_free)} left on the device."
            )
    worst = result.ranks[0]
    where = f" ({_label(worst.ranks)})" if len(result.ranks) > 1 else ""
    limit = worst.timeline.limit_bytes
    return f"At most {_bytes(worst.peak_reserved)} reserved of {_bytes(limit)} on {_text(worst.device.name)}{where}."


def _notes(result: Result) -> str:
    """Notes of the replay, ranks that are not drawn, and the trace's own metadata."""
    notes = list(result.notes[:MAX_NOTES])
    if len(result.notes) > MAX_NOTES:
        notes.append(f"{len(result.notes) - MAX_NOTES:,} further notes are left out.")
    if len(result.ranks) > MAX_RANKS:
        notes.append(f"The {MAX_RANKS} worst of {len(result.ranks):,} distinct ranks are drawn; the others peak lower.")
    metadata = [(key, value) for key, value in result.metadata.items() if isinstance(value, (str, int, float))][:20]
    html = ""
    if notes:
        html += f"<h2>Notes</h2><ul>{''.join(f'<li>{_text(note, 600)}</li>' for note in notes)}</ul>"
    if metadata:
        rows = "".join(f"<dt>{_text(str(key))}</dt><dd>{_text(str(value), 300)}</dd>" for key, value in metadata)
        html += f"<h2>Trace</h2><dl class=metadata>{rows}</dl>"
    return html


# One rank -------------------------------------------------------------------------------------------------------------


def _rank(place: int, rank: RankResult, packed: Series) -> str:
    """The section of one rank: figures, the plot's place, and the tables."""
    label = _label(rank.ranks)
    cards = (
        _out_of_memory(rank.oom),
        _phases(distinct_phases(rank.phases)),
        _categories(rank),
        _largest(rank),
        _fragmentation(rank),
        _outside(rank),
    )
    return (
        f'<section class=rank data-rank="{place}" aria-label="{label}">'
        f"<h2>{label.capitalize()} <small>{_text(rank.device.name)}</small></h2>"
        f"{_figures(rank)}<div class=plot></div>{_caption(rank, packed)}"
        f"<div class=cards>{''.join(cards)}</div></section>"
    )


def _figures(rank: RankResult) -> str:
    """The numbers that matter most, large."""
    stats = rank.memory_stats
    requested = stats.get("requested_bytes.all.peak")
    figures = [
        ("peak_allocated", "peak allocated", rank.peak_allocated),
        ("peak_reserved", "peak reserved", rank.peak_reserved),
        ("device_total", "device total", rank.device_total),
        ("limit", "allocator's limit", rank.timeline.limit_bytes),
    ]
    if requested is not None:
        figures.append(("requested", "peak requested (lower bound)", requested))
    cells = [
        f'<div><dt>{name}</dt><dd data-key="{key}" data-bytes="{count}">{_bytes(count)}</dd></div>'
        for key, name, count in figures
    ]
    if rank.duration_ns is not None:
        cells.append(
            f'<div><dt>simulated time</dt><dd data-key="duration_ns">{format_time(rank.duration_ns)}</dd></div>'
        )
    for key, name in (("num_alloc_retries", "allocation retries"), ("num_ooms", "out-of-memory events")):
        if key in stats:
            cells.append(f'<div><dt>{name}</dt><dd data-key="{key}">{stats[key]:,}</dd></div>')
    return f"<dl class=figures>{''.join(cells)}</dl>"


def _caption(rank: RankResult, packed: Series) -> str:
    """What the plot shows, and how much of it."""
    count = len(rank.timeline)
    text = f"Memory after each of {count:,} events."
    if packed.points < count:
        text += f" {packed.points:,} of them are drawn: the lows and highs of every stretch, so that no peak is lost."
    if left_out := packed.document["phasesLeftOut"]:
        text += f" {left_out:,} phases are too many to draw."
    return f"<p class=caption>{text}</p>"


def _out_of_memory(oom: OutOfMemory | None) -> str:
    """The first allocation that failed, what was free then, and what would have helped."""
    if oom is None:
        return ""
    what = f" ({_text(oom.name)})" if oom.name else ""
    phase = f" in {_text(oom.phase)}" if oom.phase else ""
    rows = [
        (_text(f"{piece.pool}, stream {piece.stream}"), f"{piece.count:,}", _bytes(piece.bytes), _bytes(piece.largest))
        for piece in oom.pieces[:20]
    ]
    remedies = "".join(
        f"<li><code>{_text(conf)}</code>: peak {_bytes(peak)} reserved</li>" for conf, peak in oom.remedies
    )
    return _card(
        "Out of memory",
        f"<p>Event {oom.event:,}{phase} asked for {_bytes(oom.requested)}{what} on stream {oom.stream}, a block of"
        f" {_bytes(oom.rounded)}. The device had {_bytes(oom.device_free)} left. The allocator held"
        f" {_bytes(oom.reserved)}, {_bytes(oom.free_in_segments)} of it free, in pieces of at most"
        f" {_bytes(oom.largest_free)}.</p>"
        f"<p>Until then: {_bytes(oom.peak_allocated_before)} allocated and {_bytes(oom.peak_reserved_before)}"
        " reserved at most.</p>"
        + (_table(("free pieces", "count", "bytes", "largest"), rows) if rows else "")
        + (
            f"<p>Settings under which the same trace runs:</p><ul>{remedies}</ul>"
            if remedies
            else f"<p>{_text(no_remedy(oom), 600)}</p>"
        ),
        kind="wide alarm",
    )


def _phases(phases: Sequence[PhasePeak]) -> str:
    """Peaks by phase, in order; the highest ones only where they are many."""
    if not phases:
        return ""
    title, shown = "Peak by phase", list(phases)
    if len(phases) > MAX_PHASE_ROWS:
        keep = sorted(range(len(phases)), key=lambda place: -phases[place].peak)[:MAX_PHASE_ROWS]
        title, shown = f"The {MAX_PHASE_ROWS} highest of {len(phases):,} phases", [phases[i] for i in sorted(keep)]
    rows = [
        (
            _text(phase.name),
            "" if phase.step is None else str(phase.step),
            _bytes(phase.peak),
            _bytes(phase.left),
            _bytes(phase.peak_reserved),
        )
        for phase in shown
    ]
    return _card(title, _table(("phase", "step", "peak allocated", "left at its end", "peak reserved"), rows, texts=2))


def _categories(rank: RankResult) -> str:
    """What was alive at the peak, by category."""
    peak = rank.peak
    phase = f", {_text(peak.phase)}" if peak.phase else ""
    rows = sorted(peak.by_category.items(), key=lambda item: -item[1])
    return _card(
        f"Alive at the peak <small>event {peak.event:,}{phase}</small>",
        _shares(("category", "bytes", "share"), rows, peak.allocated),
    )


def _largest(rank: RankResult) -> str:
    """The largest tensors at the peak."""
    if not rank.peak.largest:
        return ""
    rows = [
        (
            _text(tensor.name if tensor.name else f"id {tensor.id}"),
            _text(tensor.category),
            _bytes(tensor.bytes),
            f"{tensor.event:,}",
        )
        for tensor in rank.peak.largest
    ]
    head = ("tensor", "category", "bytes", "born at event")
    return _card("Largest tensors at the peak", _table(head, rows, texts=2))


def _fragmentation(rank: RankResult) -> str:
    """Where reserved bytes were at their peak; the rows sum to it."""
    cause = rank.fragmentation
    rows = [(words, int(getattr(cause, name))) for name, words in CAUSES.items()]
    return _card(
        f"Reserved at its peak, by cause <small>event {cause.event:,}</small>",
        _shares(("cause", "bytes", "share"), rows, cause.reserved),
    )


def _outside(rank: RankResult) -> str:
    """The device total, term by term."""
    rows = [("reserved by the allocator, at its peak", "", _bytes(rank.peak_reserved))]
    rows += [(_text(term.name), _text(range_and_source(term), 300), _bytes(term.bytes)) for term in rank.outside]
    rows.append(("<b>device total</b>", "", f"<b>{_bytes(rank.device_total)}</b>"))
    return _card("As nvidia-smi would show it", _table(("term", "source", "bytes"), rows, texts=2))


# Pieces of HTML -------------------------------------------------------------------------------------------------------


def _text(value: str, length: int = 160) -> str:
    """Text of the trace: shortened, escaped, and kept from turning the direction of what stands around it."""
    return f"<bdi>{escape(shorten(value, length))}</bdi>" if not value.isascii() else escape(shorten(value, length))


def _bytes(count: int) -> str:
    """A size for people, with the exact number on hover."""
    return f'<span class=n title="{count:,} bytes">{format_bytes(count)}</span>'


def _card(title: str, body: str, *, kind: str = "") -> str:
    return f'<div class="card {kind}"><h3>{title}</h3>{body}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A table of ready HTML cells; the first `texts` columns hold words, the others numbers."""
    kinds = [" class=long" if column == 0 else "" if column < texts else " class=num" for column in range(len(head))]
    top = "".join(f"<th scope=col{kind}>{name}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _shares(head: Sequence[str], rows: Sequence[tuple[str, int]], whole: int) -> str:
    """A table of parts of `whole`, each with a bar."""
    cells = []
    for name, count in rows:
        share = 100 * count / whole if whole else 0.0
        bar = f'<svg class=bar aria-hidden=true><rect width="{share:.2f}%" height="100%"/></svg>'
        cells.append((_text(name), _bytes(count), f"{share:.1f} %{bar}"))
    return _table(head, cells)
