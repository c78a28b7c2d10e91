"""The report of a replay: its JSON, and its document of every rank, both pure functions of the `Result`.

Sizes on screen are GiB and MiB (1024s), with the exact bytes beside the main figures; in JSON they are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from simulator.engine.ranks import format_ranks
from simulator.reports import markdown, terminal
from simulator.reports.document import (
    Bar,
    Block,
    Chart,
    Document,
    Figure,
    Figures,
    Lines,
    Name,
    Section,
    Share,
    Size,
    Table,
    cut,
)
from simulator.reports.verdict import WORDS, failure, label_of, summary
from traces.text import first_of, one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.engine.result import LiveTensor, OutOfMemory, OutsideTerm, Peak, PhasePeak, RankResult, Result

#: Distinct ranks that a terminal shows; how many more there are is said.
MOST_RANKS: Final = 8
#: Rows of a table of phases; the ones with the largest peaks are kept, in their order.
MOST_PHASES: Final = 16
#: Rows of a table of free pieces, and notes.
MOST_PIECES: Final = 8
MOST_NOTES: Final = 40

#: What the causes of fragmentation mean, in the order of the table.
CAUSES: Final[Mapping[str, str]] = {
    "requested": "asked for by tensors alive",
    "rounding": "added by rounding sizes up",
    "unsplit_remainder": "rest of blocks that were not split",
    "pending": "freed, waiting for another stream",
    "stranded": "free blocks in segments in use",
    "cached_segments": "segments wholly free",
}


# ----------------------------------------------------------------------------------------------------------- JSON


def render_json(result: Result) -> dict[str, Any]:
    """The document of `run --json`: one entry a rank, in ascending order; bytes throughout.

    `ranks[i].memory_stats` has the flat keys of `torch.cuda.memory_stats`. Its schema is `result_schema.json`.
    """
    groups = sorted(((rank, group) for group in result.ranks for rank in group.ranks), key=lambda pair: pair[0])
    documents = {id(group): _rank_json(group) for group in result.ranks}
    return {
        "schema_version": result.schema_version,
        "verdict": result.verdict,
        "summary": summary(result),
        "release": result.release,
        "conf": result.conf,
        "metadata": dict(result.metadata),
        "notes": list(result.notes),
        "worst_rank": result.ranks[0].ranks[0] if result.ranks else None,
        "ranks": [{"rank": rank, "same_as": group.ranks[0], **documents[id(group)]} for rank, group in groups],
    }


def _rank_json(rank: RankResult) -> dict[str, Any]:
    return {
        "verdict": rank.verdict,
        "device": {
            "name": rank.device.name,
            "total_bytes": rank.device.total_bytes,
            "context_bytes": rank.device.context_bytes,
        },
        "events": rank.events,
        "duration_ns": rank.duration_ns,
        "peak_allocated": rank.peak_allocated,
        "peak_reserved": rank.peak_reserved,
        "device_total": rank.device_total,
        "lower_bound": rank.memory_stats.get("requested_bytes.all.peak"),
        "memory_stats": {name: int(value) for name, value in rank.memory_stats.items()},
        "oom": None if rank.oom is None else _oom_json(rank.oom),
        "phases": _phases_json(rank.phases),
        "all_phases": [
            {**_fields(phase, "name", "step", "peak", "left", "peak_reserved"), "keys": _keys_of(phase, rank.phases)}
            for phase in distinct_phases(rank.phases)
        ],
        "peak": _peak_json(rank.peak),
        "fragmentation": _fields(rank.fragmentation, "event", "reserved", *CAUSES),
        "outside": [_fields(term, "name", "bytes", "low", "high", "source") for term in rank.outside],
        "oom_with": rank.oom_with,
        "on_gpu": rank.on_gpu and rank.on_gpu.document(),
        "reports": [_fields(report, "event", "kind", "data") for report in rank.reports],
    }


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _phases_json(phases: Iterable[PhasePeak]) -> dict[str, Any]:
    """Peaks by the keys that the trace's phases have; a key that comes twice keeps its first phase."""
    found: dict[str, Any] = {}
    for phase in phases:
        if phase.key:
            found.setdefault(phase.key, {"peak": phase.peak, "left": phase.left})
    return found


def distinct_phases(phases: Iterable[PhasePeak]) -> list[PhasePeak]:
    """Every (name, step) once: that of the only step stands under two keys, as the first and as the last."""
    found: dict[tuple[str, int | None], PhasePeak] = {}
    for phase in phases:
        found.setdefault((phase.name, phase.step), phase)
    return list(found.values())


def _peak_json(peak: Peak) -> dict[str, Any]:
    return {
        **_fields(peak, "event", "phase", "allocated", "reserved"),
        "by_category": dict(peak.by_category),
        "largest": [_tensor_json(tensor) for tensor in peak.largest],
    }


def _keys_of(phase: PhasePeak, phases: Iterable[PhasePeak]) -> list[str]:
    """The keys under which `phases` of the document has a phase."""
    return [one.key for one in phases if one.key and (one.name, one.step) == (phase.name, phase.step)]


def _tensor_json(tensor: LiveTensor) -> dict[str, Any]:
    return _fields(tensor, "id", "name", "category", "bytes", "block_bytes", "event", "phase")


def _oom_json(oom: OutOfMemory) -> dict[str, Any]:
    names = ("event", "id", "name", "phase", "requested", "rounded", "stream", "device_free", "reserved", "allocated")
    return {
        **_fields(oom, *names),
        **_fields(oom, "free_in_segments", "largest_free", "peak_allocated_before", "peak_reserved_before"),
        "pieces": [_fields(piece, "pool", "stream", "count", "bytes", "largest") for piece in oom.pieces],
        "remedies": [{"conf": conf, "peak_reserved": peak} for conf, peak in oom.remedies],
        "tried": list(oom.tried),
        "needed": oom.needed,
        "line": oom.line,
        "alive": None if oom.alive is None else _peak_json(oom.alive),
    }


# ------------------------------------------------------------------------------------------------------- document


def render_markdown(result: Result) -> str:
    """The document of `run --markdown`."""
    return markdown.render(document_of(result))


def render_table(result: Result, console: Console | None = None) -> None:
    """Print the tables of `run`: all ranks worst first (equal ones as one row), then each of the worst in detail."""
    terminal.render(document_of(result), console)


def document_of(result: Result, ranks: int = MOST_RANKS, phases: int = MOST_PHASES) -> Document:
    """The document of a result: the worst `ranks` distinct ranks, each with its `phases` highest phases."""
    count = sum(len(group.ranks) for group in result.ranks)
    shown = result.ranks[:ranks]
    name = next((one for key in _NAMES if isinstance(one := result.metadata.get(key), str) and one.strip()), "")
    case = result.metadata.get("case")
    properties = ((str(key), words) for key, value in result.metadata.items() if (words := _words(value)))
    return Document(
        subject=_words(case) if isinstance(case, Mapping) else "",
        title=name.strip() or "Memory over time",
        says=WORDS[result.verdict],
        badge=result.verdict,
        lead=summary(result),
        facts=(
            f"{count} ranks" if count != 1 else "1 rank",
            f"PyTorch {result.release}",
            one_line(result.conf) or "default allocator settings",
        ),
        head=(*_failure(result), _summary(shown, result.ranks[ranks:])) if shown else (),
        sections=tuple(section_of(group, label_of(group.ranks), phases) for group in shown),
        notes=_notes(result, ranks),
        properties=tuple(properties)[:20],
    )


def _failure(result: Result) -> Iterator[Lines]:
    """Where it runs out of memory."""
    if result.decisive.oom is not None:
        yield Lines((failure(result.decisive),), style="bad")


#: What a trace may call itself.
_NAMES: Final = ("name", "title", "model", "producer")


def _words(value: object) -> str:
    """A value of the trace's metadata as text; those of a mapping or a list one after the other."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words}" for key, one in value.items() if (words := _words(one)))
    if isinstance(value, list | tuple):
        return "; ".join(words for one in value[:20] if (words := _words(one)))
    return str(value) if isinstance(value, str | int | float) else ""


def _notes(result: Result, ranks: int) -> tuple[str, ...]:
    """Notes of the replay, and ranks that are not drawn."""
    notes = few(result.notes)
    if len(result.ranks) > ranks:
        notes += (f"The {ranks} worst of {len(result.ranks):,} distinct ranks are drawn; the others peak lower.",)
    return notes


def few(notes: Sequence[str]) -> tuple[str, ...]:
    """The first notes, and how many there are besides."""
    rest = len(notes) - MOST_NOTES
    return (*notes[:MOST_NOTES], *([f"{rest:,} further notes are left out."] if rest > 0 else []))


def _summary(shown: Sequence[RankResult], hidden: Sequence[RankResult]) -> Table:
    rows = tuple(
        (
            format_ranks(group.ranks, 20),
            Size(group.peak_allocated),
            Size(group.peak_reserved),
            Size(group.device_total),
            Share(group.device_total, group.device.total_bytes),
            str(group.memory_stats.get("num_alloc_retries", 0)),
            str(group.memory_stats.get("num_ooms", 0)),
        )
        for group in shown
    )
    count = sum(len(group.ranks) for group in hidden)
    return Table(
        "",
        ("rank", "allocated", "reserved", "device total", "of GPU", "retries", "OOMs"),
        rows,
        right=range(1, 7),
        more=f"and {count} more ranks ({len(hidden)} different ones), none of them worse" if hidden else "",
        styles={place: "bad" for place, group in enumerate(shown) if group.oom},
    )


def side_by_side(ranks: Sequence[tuple[str, RankResult]]) -> Chart:
    """Labelled ranks as bars on one scale: what was alive at the peak, what was reserved beside it, the limit."""
    near = any(3 * rank.peak_reserved >= rank.timeline.limit_bytes for _, rank in ranks)  # else it dwarfs all bars
    bars = []
    for label, rank in ranks:
        parts = [*rank.peak.by_category.items(), ("free", max(0, rank.peak_reserved - rank.peak.allocated))]
        remark = "out of memory" if rank.oom else f"of {format_bytes(rank.timeline.limit_bytes)}"
        bars.append(Bar(label, tuple(parts), mark=rank.timeline.limit_bytes if near else None, remark=remark))
    caption = "Allocated bytes by category at their peak, and what reserved bytes have beyond them at theirs (free)."
    return Chart("Side by side", tuple(bars), caption=caption)


def section_of(rank: RankResult, label: str, phases: int = MOST_PHASES) -> Section:
    """All that is said of one rank, which is called `label`."""
    blocks: list[Block] = [*_oom(rank.oom), _figures(rank)]
    if rank.phases:
        blocks.append(_phases(distinct_phases(rank.phases), phases))
    when = "at the peak" if rank.shown is rank.peak else "when it failed"
    if rank.shown.by_category:
        blocks.append(_categories(rank.shown, when))
    if rank.shown.largest:
        blocks.append(largest_table(rank.shown.largest, when))
    blocks.append(_fragmentation(rank))
    blocks += [*_reports(rank), *_sources(rank.outside)]
    title = f"{label} on {cut(rank.device.name, 40)}, {format_bytes(rank.device.total_bytes)}"
    return Section(title, tuple(blocks), rank, label)


def _figures(rank: RankResult) -> Figures:
    where = f"event {rank.peak.event}" + (f", {one_line(rank.peak.phase)}" if rank.peak.phase else "")
    rows = [
        Figure("peak allocated", Size(rank.peak_allocated), f"at {where}", key="peak_allocated"),
        Figure("peak reserved", Size(rank.peak_reserved), f"at event {rank.fragmentation.event}", key="peak_reserved"),
    ]
    if (there := rank.on_gpu) is not None:
        rows += [
            Figure("allocated on a GPU", Size(there.peak_allocated), "libraries allocate, too", key="gpu_allocated"),
            Figure("reserved on a GPU", Size(there.peak_reserved), "at the driver's addresses", key="gpu_reserved"),
        ]
    rows += [
        Figure(f"+ {one_line(term.name)}", Size(term.bytes), range_of(term) or one_line(term.source))
        for term in rank.outside
    ]
    share = Share(rank.device_total, rank.device.total_bytes)
    rows.append(Figure("device total", Size(rank.device_total), f"{share} of GPU", key="device_total"))
    bound = rank.memory_stats.get("requested_bytes.all.peak")
    if bound is not None:
        rows.append(Figure("peak requested", Size(bound), "for a perfect allocator", key="requested"))
    if rank.duration_ns is not None:
        time = format_time(rank.duration_ns)
        rows.append(Figure("simulated time", time, "host and streams", f"{rank.duration_ns:,} ns", "duration_ns"))
    retries, ooms = (rank.memory_stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms"))
    return Figures((*rows, Figure("retries, OOM events", f"{retries}, {ooms}", f"in {rank.events} events")))


def range_of(term: OutsideTerm) -> str:
    """The range of a term outside the allocator; empty where it is certain."""
    if term.low is None or term.high is None:
        return ""
    return f"{format_bytes(term.low)} to {format_bytes(term.high)}"


def _sources(terms: Sequence[OutsideTerm]) -> Iterator[Table]:
    """Where uncertain terms come from."""
    rows = tuple((one_line(term.name), one_line(term.source)) for term in terms if range_of(term))
    if rows:
        yield Table("Outside the allocator", ("term", "source"), rows)


def _fragmentation(rank: RankResult) -> Table:
    cause = rank.fragmentation
    rows = tuple(
        (name.replace("_", " "), Size(getattr(cause, name)), Share(getattr(cause, name), cause.reserved), meaning)
        for name, meaning in CAUSES.items()
    )
    return Table("Reserved memory at its peak, by cause", ("cause", "bytes", "share", ""), rows)


def _phases(phases: Sequence[PhasePeak], most: int) -> Table:
    largest = sorted(range(len(phases)), key=lambda place: (-phases[place].peak, place))[:most]
    rows = tuple(
        (
            Name(phase.name),
            "" if phase.step is None else str(phase.step),
            Size(phase.peak),
            Size(phase.peak_reserved),
            Size(phase.left),
        )
        for phase in (phases[place] for place in sorted(largest))
    )
    rest = len(phases) - len(rows)
    return Table(
        "Peak by phase",
        ("phase", "step", "allocated", "reserved", "left"),
        rows,
        right=range(1, 5),
        more=f"and {rest} more phases with smaller peaks" if rest else "",
    )


def _categories(peak: Peak, when: str) -> Table:
    by_size = sorted(peak.by_category.items(), key=lambda item: (-item[1], item[0]))
    rows = tuple((cut(name, 24), Size(size), Share(size, peak.allocated, name)) for name, size in by_size if size)
    return Table(f"Alive {when}, by category", ("category", "bytes", "share"), rows)


def largest_table(tensors: Sequence[LiveTensor], when: str) -> Table:
    """Tensors with their category and since when they live."""
    rows = tuple(
        (
            Size(tensor.bytes),
            Size(tensor.block_bytes),
            cut(tensor.category, 15),
            Name(tensor.name or f"id {tensor.id}"),
            f"event {tensor.event}" + (f", {cut(tensor.phase, 12)}" if tensor.phase else ""),
        )
        for tensor in tensors
    )
    return Table(f"Largest tensors alive {when}", ("bytes", "block", "category", "tensor", "since"), rows)


def _oom(oom: OutOfMemory | None) -> Iterator[Block]:
    """The first allocation that failed, what was free then, and what would have helped."""
    if oom is None:
        return
    what = f"id {oom.id}" + (f" ({cut(oom.name, 60)})" if oom.name else "")
    when = f"event {oom.event}" + (f" ({cut(oom.phase, 24)})" if oom.phase else "")
    rounded = "" if oom.rounded == oom.requested else f", rounded to {oom.rounded:,} B"
    free = f"free: {format_bytes(oom.device_free)} on the GPU, {format_bytes(oom.free_in_segments)} in segments"
    before = (format_bytes(size) for size in (oom.peak_allocated_before, oom.peak_reserved_before))
    lines = (
        f"asked: {format_bytes(oom.requested)} ({oom.requested:,} B{rounded}) on stream {oom.stream}, for {what}",
        f"had: {format_bytes(oom.allocated)} allocated, {format_bytes(oom.reserved)} reserved",
        "before: peaks of {} allocated, {} reserved".format(*before),
        free + (f", the largest piece {format_bytes(oom.largest_free)}" if oom.pieces else ""),
    )
    yield Lines(lines, f"Out of memory at {when}", "bad")
    if oom.pieces:
        yield _pieces(oom)
    if oom.remedies:
        remedies = (f"{one_line(conf)} (peak reserved {format_bytes(peak)})" for conf, peak in oom.remedies)
        yield Lines(tuple(remedies), "The same events run without running out of memory under:")
    else:
        yield Lines((no_remedy(oom),))


def _pieces(oom: OutOfMemory) -> Table:
    pieces = sorted(oom.pieces, key=lambda piece: -piece.bytes)
    rows = tuple(
        (cut(piece.pool, 24), str(piece.stream), piece.count, Size(piece.bytes), Size(piece.largest))
        for piece in pieces[:MOST_PIECES]
    )
    rest = pieces[MOST_PIECES:]
    count, size = sum(piece.count for piece in rest), sum(piece.bytes for piece in rest)
    return Table(
        "Free pieces in segments",
        ("pool", "stream", "pieces", "bytes", "largest"),
        rows,
        right=range(1, 5),
        more=f"and {count} more pieces, together {format_bytes(size)}" if rest else "",
    )


def no_remedy(oom: OutOfMemory) -> str:
    """The sentence for an out-of-memory without remedies: what was tried, or why nothing was."""
    if not oom.tried:
        return f"Other allocator settings were not tried: {oom.untried}."
    if len(oom.tried) == 1:
        return f"The one setting tried does not serve it ({oom.tried[0]})."
    return f"None of the {len(oom.tried)} settings tried serves it ({'; '.join(oom.tried)})."


def format_time(nanoseconds: int) -> str:
    """`nanoseconds` for people: `950 ns`, `1.50 ms`, `12.00 s`."""
    if nanoseconds < 1000:
        return f"{nanoseconds} ns"
    value = float(nanoseconds)
    for unit in ("us", "ms"):
        value /= 1000
        if round(value, 2) < 1000:
            return f"{value:.2f} {unit}"
    return f"{value / 1000:.2f} s"


def _reports(rank: RankResult) -> Iterator[Lines]:
    if reports := rank.reports:
        kinds = first_of([f"{report.kind} at event {report.event}" for report in reports], 4)
        yield Lines((f"Reports asked for by the trace ({kinds}) are in the JSON document (--json).",))
