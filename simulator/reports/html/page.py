"""The page of a result: memory over time by category, the allocator's blocks at chosen moments, and the tables.

`render_html` is a pure function of the result. The tables are plain HTML and can be read without JavaScript;
`static/page.js` draws memory over time with uPlot (MIT, vendored in `static/`), `static/blocks.js` the blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from simulator.engine.result import OutOfMemory, PhasePeak, RankResult, Result
from simulator.reports.html.charts import Bar, Chart, chart
from simulator.reports.html.document import assemble, write_page
from simulator.reports.html.moments import Room, categories_over_time, moments, tree
from simulator.reports.html.pieces import badge, capital, card, shares, size, table, text
from simulator.reports.html.series import Series, series, shorten
from simulator.reports.terminal import CAUSES, distinct_phases, format_time, no_remedy, range_and_source
from simulator.reports.verdict import WORDS, label_of, summary
from traces.units import format_bytes

#: Events drawn for one rank and in a whole page (at about 8 characters each, 20 with categories).
POINTS_PER_RANK: Final = 50_000
POINTS_PER_PAGE: Final = 200_000
#: Characters of a page: what takes more is drawn more coarsely.
MAX_PAGE: Final = 4_500_000
MAX_RANKS: Final = 64
MAX_PHASE_ROWS: Final = 40
MAX_NOTES: Final = 40


def write_html(result: Result, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the page of `result` to `path` (UTF-8); the file appears whole or not at all.

    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    write_page(render_html(result), path, force=force)


def render_html(result: Result) -> str:
    """The page of `result` as text: the worst `MAX_RANKS` event sequences."""
    shown = [(label_of(rank.ranks), rank) for rank in result.ranks[:MAX_RANKS]]
    return bounded(_title(result), _header(result), side_by_side(shown), shown, _notes(result))


def bounded(
    title: str,
    header: str,
    before: str,
    ranks: Sequence[tuple[str, RankResult]],
    notes: str,
    chooser: str = "Rank, worst first",
) -> str:
    """A page of HTML parts and labelled ranks, with as much of each as keeps it below `MAX_PAGE` characters."""
    budget = 1.0
    while True:
        sections, data = _sections(ranks, budget)
        page = assemble(title, header, before, sections, notes, {"chooser": chooser, "ranks": data})
        if len(page) <= MAX_PAGE or budget < 0.001:
            return page
        budget /= 2


def _sections(ranks: Sequence[tuple[str, RankResult]], budget: float) -> tuple[str, list[Mapping[str, Any]]]:
    """The sections of labelled ranks, and what the scripts draw in them."""
    many = max(1, len(ranks))
    share = max(1, round(budget * min(POINTS_PER_RANK, POINTS_PER_PAGE // many)))
    room = Room.of(many, budget)
    drawn = [_series(rank, share) for _, rank in ranks]
    data = [_data(label, rank, packed, room) for (label, rank), packed in zip(ranks, drawn, strict=True)]
    html = (
        _rank(place, label, rank, packed, room)
        for place, ((label, rank), packed) in enumerate(zip(ranks, drawn, strict=True))
    )
    return "".join(html), data


def _series(rank: RankResult, max_points: int) -> Series:
    places = () if rank.picture is None else tuple(moment.event for moment in rank.picture.moments)
    return series(rank.timeline, (rank.peak.event, rank.fragmentation.event, *places), max_points)


def side_by_side(ranks: Sequence[tuple[str, RankResult]]) -> str:
    """Labelled ranks as bars on one scale: what was alive at the peak, what was reserved beside it, the limit."""
    if len(ranks) < 2:
        return ""
    near = any(3 * rank.peak_reserved >= rank.timeline.limit_bytes for _, rank in ranks)  # else it dwarfs all bars
    bars = []
    for label, rank in ranks:
        parts = [*rank.peak.by_category.items(), ("free", max(0, rank.peak_reserved - rank.peak.allocated))]
        remark = "out of memory" if rank.oom else f"of {format_bytes(rank.timeline.limit_bytes)}"
        bars.append(Bar(label, tuple(parts), mark=rank.timeline.limit_bytes if near else None, remark=remark))
    caption = "Allocated bytes by category at their peak, and what reserved bytes have beyond them at theirs (free)."
    return f"<div class=side>{chart(Chart('Side by side', tuple(bars), caption=caption))}</div>"


def _data(label: str, rank: RankResult, packed: Series, room: Room) -> Mapping[str, Any]:
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
        "moments": None if picture is None else moments(picture, room),
    }


# The header and the notes ---------------------------------------------------------------------------------------------


def _name(result: Result) -> str | None:
    """What the trace calls itself."""
    for key in ("name", "title", "model", "producer"):
        value = result.metadata.get(key)
        if isinstance(value, str) and value.strip():
            return shorten(value.strip(), 80)
    return None


def _title(result: Result) -> str:
    verdict = WORDS[result.verdict]
    name = _name(result)
    return f"Memory: {verdict}" if name is None else f"{name}: {verdict}"


def _header(result: Result) -> str:
    """The verdict in one line, and what was replayed."""
    world = sum(len(rank.ranks) for rank in result.ranks)
    name = _name(result)
    case = result.metadata.get("case")
    facts = [
        *([_words(case)] if isinstance(case, Mapping) else []),
        f"{world:,} rank{'s' * (world != 1)}",
        f"PyTorch {result.release}",
        f"allocator settings: {result.conf or 'default'}",
    ]
    return (
        f"<h1>{badge(result.verdict, WORDS[result.verdict])}{text(name) if name else 'Memory over time'}</h1>"
        f"<p class=lead>{capital(text(summary(result), 600))}.</p>"
        f"<p class=facts>{' · '.join(text(fact, 400) for fact in facts)}</p>"
    )


def _notes(result: Result) -> str:
    """Notes of the replay, ranks that are not drawn, and the trace's own metadata."""
    notes = list(result.notes[:MAX_NOTES])
    if len(result.notes) > MAX_NOTES:
        notes.append(f"{len(result.notes) - MAX_NOTES:,} further notes are left out.")
    if len(result.ranks) > MAX_RANKS:
        notes.append(f"The {MAX_RANKS} worst of {len(result.ranks):,} distinct ranks are drawn; the others peak lower.")
    metadata = [(key, words) for key, value in result.metadata.items() if (words := _words(value))][:20]
    html = ""
    if notes:
        html += f"<h2>Notes</h2><ul>{''.join(f'<li>{text(note, 600)}</li>' for note in notes)}</ul>"
    if metadata:
        rows = "".join(f"<dt>{text(str(key))}</dt><dd>{text(value, 600)}</dd>" for key, value in metadata)
        html += f"<h2>Trace</h2><dl class=metadata>{rows}</dl>"
    return html


def _words(value: Any) -> str:
    """A value of the trace's metadata as text; those of a mapping or a list one after the other."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words}" for key, one in value.items() if (words := _words(one)))
    if isinstance(value, list | tuple):
        return "; ".join(words for one in value[:20] if (words := _words(one)))
    return str(value) if isinstance(value, str | int | float) else ""


# One rank -------------------------------------------------------------------------------------------------------------


def _rank(place: int, label: str, rank: RankResult, packed: Series, room: Room) -> str:
    """The section of one rank: figures, the places of the plot and of the blocks, and the tables."""
    heading = text(label[:1].upper() + label[1:] if label.startswith("rank") else label, 80)
    cards = (
        _phases(distinct_phases(rank.phases)),
        _categories(rank),
        _largest(rank),
        _fragmentation(rank),
        _outside(rank),
    )
    return (
        f'<section class=rank data-rank="{place}" aria-labelledby="rank-{place}">'
        f'<h2 id="rank-{place}">{heading} <small>'
        f"{text(rank.device.name)}</small></h2>"
        f"{_figures(rank)}{_out_of_memory(rank.oom)}<div class=plot></div>{_caption(rank, packed)}"
        f"<div class=moments></div>{_modules(rank, room)}"
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
        f'<div><dt>{name}</dt><dd data-key="{key}" data-bytes="{count}">{size(count)}</dd></div>'
        for key, name, count in figures
    ]
    if rank.duration_ns:
        cells.append(
            f'<div><dt>simulated time</dt><dd data-key="duration_ns">{format_time(rank.duration_ns)}</dd></div>'
        )
    for key, name in (("num_alloc_retries", "allocation retries"), ("num_ooms", "out-of-memory events")):
        if key in stats:
            cells.append(f'<div><dt>{name}</dt><dd data-key="{key}">{stats[key]:,}</dd></div>')
    return f"<dl class=figures>{''.join(cells)}</dl>"


def _modules(rank: RankResult, room: Room) -> str:
    """What was alive at the peak by module path, collapsible."""
    nested = tree(rank, room)
    if not nested:
        return ""
    words = (
        "Bytes of blocks by module path; each bar is measured against the largest beside it, in the colours of the"
        " categories. Arrow keys open, close and move."
    )
    peak = rank.peak
    when = f"event {peak.event:,}{f', {text(peak.phase)}' if peak.phase else ''}"
    return card(f"Alive at the peak, by module <small>{when}</small>", f"<p class=caption>{words}</p>{nested}")


def _caption(rank: RankResult, packed: Series) -> str:
    """What the plot shows, and how much of it."""
    count = len(rank.timeline)
    words = f"Memory after each of {count:,} events."
    if packed.points < count:
        words += f" {packed.points:,} of them are drawn: the lows and highs of every stretch, so that no peak is lost."
    if left_out := packed.document["phasesLeftOut"]:
        words += f" {left_out:,} phases are too many to draw."
    return f"<p class=caption>{words}</p>"


def _out_of_memory(oom: OutOfMemory | None) -> str:
    """The first allocation that failed, what was free then, and what would have helped."""
    if oom is None:
        return ""
    what = f" ({text(oom.name)})" if oom.name else ""
    phase = f" in {text(oom.phase)}" if oom.phase else ""
    rows = [
        (text(f"{piece.pool}, stream {piece.stream}"), f"{piece.count:,}", size(piece.bytes), size(piece.largest))
        for piece in oom.pieces[:20]
    ]
    remedies = "".join(f"<li><code>{text(conf)}</code>: peak {size(peak)} reserved</li>" for conf, peak in oom.remedies)
    return card(
        "Out of memory",
        f"<p>Event {oom.event:,}{phase} asked for {size(oom.requested)}{what} on stream {oom.stream}, a block of"
        f" {size(oom.rounded)}. The device had {size(oom.device_free)} left. The allocator held"
        f" {size(oom.reserved)}, {size(oom.free_in_segments)} of it free, in pieces of at most"
        f" {size(oom.largest_free)}.</p>"
        f"<p>Until then: {size(oom.peak_allocated_before)} allocated and {size(oom.peak_reserved_before)}"
        " reserved at most.</p>"
        + (table(("free pieces", "count", "bytes", "largest"), rows) if rows else "")
        + (
            f"<p>Settings under which the same trace runs:</p><ul>{remedies}</ul>"
            if remedies
            else f"<p>{text(no_remedy(oom), 600)}</p>"
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
            text(phase.name),
            "" if phase.step is None else str(phase.step),
            size(phase.peak),
            size(phase.left),
            size(phase.peak_reserved),
        )
        for phase in shown
    ]
    return card(title, table(("phase", "step", "peak allocated", "left at its end", "peak reserved"), rows, texts=2))


def _categories(rank: RankResult) -> str:
    """What was alive at the peak, by category."""
    peak = rank.peak
    phase = f", {text(peak.phase)}" if peak.phase else ""
    rows = sorted(peak.by_category.items(), key=lambda item: -item[1])
    return card(
        f"Alive at the peak <small>event {peak.event:,}{phase}</small>",
        shares(("category", "bytes", "share"), rows, peak.allocated, coloured=True),
    )


def _largest(rank: RankResult) -> str:
    """The largest tensors at the peak."""
    if not rank.peak.largest:
        return ""
    rows = [
        (
            text(tensor.name if tensor.name else f"id {tensor.id}"),
            text(tensor.category),
            size(tensor.bytes),
            f"{tensor.event:,}",
        )
        for tensor in rank.peak.largest
    ]
    head = ("tensor", "category", "bytes", "born at event")
    return card("Largest tensors at the peak", table(head, rows, texts=2))


def _fragmentation(rank: RankResult) -> str:
    """Where reserved bytes were at their peak; the rows sum to it."""
    cause = rank.fragmentation
    rows = [(words, int(getattr(cause, name))) for name, words in CAUSES.items()]
    return card(
        f"Reserved at its peak, by cause <small>event {cause.event:,}</small>",
        shares(("cause", "bytes", "share"), rows, cause.reserved),
    )


def _outside(rank: RankResult) -> str:
    """The device total, term by term."""
    rows = [("reserved by the allocator, at its peak", "", size(rank.peak_reserved))]
    rows += [(text(term.name), text(range_and_source(term), 300), size(term.bytes)) for term in rank.outside]
    rows.append(("<b>device total</b>", "", f"<b>{size(rank.device_total)}</b>"))
    return card("As nvidia-smi would show it", table(("term", "source", "bytes"), rows, texts=2), kind="sources")
