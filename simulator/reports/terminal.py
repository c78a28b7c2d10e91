"""Reports of a replay: tables for a terminal and a JSON document, both pure functions of the `Result`.

Sizes on screen are GiB and MiB (1024s), with the exact bytes beside the main figures; in JSON they are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from simulator.engine.ranks import format_ranks
from simulator.reports.verdict import WORDS, summary
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from simulator.engine.result import (
        Fragmentation,
        LiveTensor,
        OutOfMemory,
        OutsideTerm,
        PhasePeak,
        RankResult,
        Report,
        Result,
        Verdict,
    )

#: Distinct ranks that the tables show; how many more there are is said.
MOST_RANKS: Final = 8
#: Rows of a table of phases; the ones with the largest peaks are kept, in their order.
MOST_PHASES: Final = 16
#: Rows of a table of free pieces.
MOST_PIECES: Final = 8

#: What the causes of fragmentation mean, in the order of the table.
CAUSES: Final[Mapping[str, str]] = {
    "requested": "asked for by tensors alive",
    "rounding": "added by rounding sizes up",
    "unsplit_remainder": "rest of blocks that were not split",
    "pending": "freed, waiting for another stream",
    "stranded": "free blocks in segments in use",
    "cached_segments": "segments wholly free",
}

#: Colours of the verdicts.
_STYLES: Final[Mapping[Verdict, str]] = {"fits": "bold green", "tight": "bold yellow", "oom": "bold red"}

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
            _fields(phase, "name", "step", "peak", "left", "peak_reserved") for phase in distinct_phases(rank.phases)
        ],
        "peak": {
            **_fields(rank.peak, "event", "phase", "allocated", "reserved"),
            "by_category": dict(rank.peak.by_category),
            "largest": [_tensor_json(tensor) for tensor in rank.peak.largest],
        },
        "fragmentation": _fields(rank.fragmentation, "event", "reserved", *CAUSES),
        "outside": [_fields(term, "name", "bytes", "low", "high", "source") for term in rank.outside],
        "oom_with": rank.oom_with,
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
    }


# --------------------------------------------------------------------------------------------------------- tables


def render_table(result: Result, console: Console | None = None) -> None:
    """Print the tables of `run`: all ranks worst first (equal ones as one row), then each of the worst in detail.

    Plain text where stdout is no terminal or NO_COLOR is set; 80 columns are enough.
    """
    print_parts(_report(result), console)


def print_parts(parts: Iterable[RenderableType], console: Console | None = None) -> None:
    """Print one part below the other, without blanks at the ends of lines."""
    from rich.console import Console

    console = console or Console()
    with console.capture() as capture:
        for part in parts:
            console.print(part, markup=False, highlight=False, emoji=False)
    console.file.write("\n".join(line.rstrip() for line in capture.get().split("\n")))
    console.file.flush()


def _report(result: Result) -> Iterable[RenderableType]:
    shown, hidden = result.ranks[:MOST_RANKS], result.ranks[MOST_RANKS:]
    yield _headline(result)
    yield _setting(result)
    if not result.ranks:
        return
    yield _summary(shown)
    if hidden:
        ranks = sum(len(group.ranks) for group in hidden)
        yield f"and {ranks} more ranks ({len(hidden)} different ones), none of them worse"
    for group in shown:
        yield ""
        yield from _details(group)


def _headline(result: Result) -> RenderableType:
    from rich.text import Text

    return Text.assemble((WORDS[result.verdict], _STYLES[result.verdict]), f": {summary(result)}")


def _setting(result: Result) -> str:
    ranks = sum(len(group.ranks) for group in result.ranks)
    conf = f", {one_line(result.conf)}" if result.conf else ", default allocator settings"
    many = f"{ranks} ranks" if ranks != 1 else "1 rank"
    return f"{many}, PyTorch {result.release}{conf}"


def table_of(title: str, *columns: str, right: Sequence[int] = ()) -> Table:
    """A table in the one style of all; the columns numbered in `right` hold numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heading = Text(title, "bold") if title else None
    table = Table(
        title=heading,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        min_width=len(title) or None,  # a title is not broken, however narrow the columns are
    )
    for place, name in enumerate(columns):
        number = place in right
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """A row of plain text: nothing in a cell is markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells), style=style)


def _summary(groups: Sequence[RankResult]) -> Table:
    table = table_of(
        "", "rank", "allocated", "reserved", "device total", "of GPU", "retries", "OOMs", right=range(1, 7)
    )
    for group in groups:
        stats = group.memory_stats
        add_row(
            table,
            format_ranks(group.ranks, 20),
            format_bytes(group.peak_allocated),
            format_bytes(group.peak_reserved),
            format_bytes(group.device_total),
            _share(group.device_total, group.device.total_bytes),
            str(stats.get("num_alloc_retries", 0)),
            str(stats.get("num_ooms", 0)),
            style="red" if group.oom else "",
        )
    return table


def _details(group: RankResult) -> Iterable[RenderableType]:
    from rich.rule import Rule
    from rich.text import Text

    many = "ranks" if len(group.ranks) > 1 else "rank"
    device = f"{one_line(group.device.name)[:24]}, {format_bytes(group.device.total_bytes)}"
    yield Rule(Text(f"{many} {format_ranks(group.ranks)} on {device}", "bold"), align="left", characters="-")
    if group.oom is not None:
        yield from _oom(group.oom)
    yield _figures(group)
    yield from _sources(group.outside)
    yield ""
    yield _fragmentation(group.fragmentation)
    if group.phases:
        yield ""
        yield from _phases(distinct_phases(group.phases))
    if group.peak.by_category:
        yield ""
        yield _categories(group)
    if group.peak.largest:
        yield ""
        yield _largest(group.peak.largest)
    yield from _reports(group.reports)


def _figures(group: RankResult) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    where = f"event {group.peak.event}" + (f", {one_line(group.peak.phase)}" if group.peak.phase else "")
    _figure(table, "peak allocated", group.peak_allocated, f"at {where}")
    _figure(table, "peak reserved", group.peak_reserved, f"at event {group.fragmentation.event}")
    for term in group.outside:
        _figure(table, f"+ {one_line(term.name)}", term.bytes, range_of(term) or one_line(term.source))
    _figure(table, "device total", group.device_total, f"{_share(group.device_total, group.device.total_bytes)} of GPU")
    bound = group.memory_stats.get("requested_bytes.all.peak")
    if bound is not None:
        _figure(table, "peak requested", bound, "for a perfect allocator")
    if group.duration_ns is not None:
        add_row(
            table, "simulated time", format_time(group.duration_ns), f"{group.duration_ns:,} ns", "host and streams"
        )
    retries, ooms = (group.memory_stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms"))
    add_row(table, "retries, OOM events", f"{retries}, {ooms}", "", f"in {group.events} events")
    return table


def range_of(term: OutsideTerm) -> str:
    """The range of a term outside the allocator; empty where it is certain."""
    if term.low is None or term.high is None:
        return ""
    return f"{format_bytes(term.low)} to {format_bytes(term.high)}"


def range_and_source(term: OutsideTerm) -> str:
    """The range of a term outside the allocator, where it has one, and its source."""
    return "; ".join(part for part in (range_of(term), one_line(term.source)) if part)


def _sources(terms: Sequence[OutsideTerm]) -> Iterable[RenderableType]:
    """Where uncertain terms come from."""
    uncertain = [term for term in terms if range_of(term)]
    if uncertain:
        table = table_of("Outside the allocator", "term", "source")
        for term in uncertain:
            add_row(table, one_line(term.name), one_line(term.source))
        yield ""
        yield table


def _figure(table: Table, name: str, size: int, remark: str) -> None:
    add_row(table, name, format_bytes(size), f"{size:,} B", remark)


def _fragmentation(causes: Fragmentation) -> Table:
    table = table_of("Reserved memory at its peak, by cause", "cause", "bytes", "share", "", right=(1, 2))
    for name, meaning in CAUSES.items():
        size = getattr(causes, name)
        add_row(table, name.replace("_", " "), format_bytes(size), _share(size, causes.reserved), meaning)
    return table


def _phases(phases: Sequence[PhasePeak]) -> Iterable[RenderableType]:
    largest = sorted(range(len(phases)), key=lambda place: (-phases[place].peak, place))[:MOST_PHASES]
    table = table_of("Peak by phase", "phase", "step", "allocated", "reserved", "left", right=range(1, 5))
    for place in sorted(largest):
        phase = phases[place]
        step = "" if phase.step is None else str(phase.step)
        sizes = (format_bytes(size) for size in (phase.peak, phase.peak_reserved, phase.left))
        add_row(table, _cut(phase.name, 24), step, *sizes)
    yield table
    if len(phases) > MOST_PHASES:
        yield f"and {len(phases) - MOST_PHASES} more phases with smaller peaks"


def _categories(group: RankResult) -> Table:
    table = table_of("Alive at the peak, by category", "category", "bytes", "share", right=(1, 2))
    by_size = sorted(group.peak.by_category.items(), key=lambda item: (-item[1], item[0]))
    for category, size in by_size:
        if size:
            add_row(table, _cut(category, 24), format_bytes(size), _share(size, group.peak.allocated))
    return table


def _largest(tensors: Sequence[LiveTensor]) -> Table:
    table = table_of("Largest tensors alive at the peak", "bytes", "block", "category", "tensor", "since", right=(0, 1))
    for tensor in tensors:
        since = f"event {tensor.event}" + (f", {_cut(tensor.phase, 12)}" if tensor.phase else "")
        name = _cut(tensor.name, 60) if tensor.name else f"id {tensor.id}"
        add_row(
            table, format_bytes(tensor.bytes), format_bytes(tensor.block_bytes), _cut(tensor.category, 15), name, since
        )
    return table


def _oom(oom: OutOfMemory) -> Iterable[RenderableType]:
    from rich.text import Text

    what = f"id {oom.id}" + (f" ({_cut(oom.name, 60)})" if oom.name else "")
    when = f"event {oom.event}" + (f" ({_cut(oom.phase, 24)})" if oom.phase else "")
    yield Text(f"Out of memory at {when}", "bold red")
    rounded = "" if oom.rounded == oom.requested else f", rounded to {oom.rounded:,} B"
    asked = f"{format_bytes(oom.requested)} ({oom.requested:,} B{rounded})"
    yield Text(f"  asked: {asked} on stream {oom.stream}, for {what}")
    yield Text(f"  had: {format_bytes(oom.allocated)} allocated, {format_bytes(oom.reserved)} reserved")
    yield Text(
        f"  before: peaks of {format_bytes(oom.peak_allocated_before)} allocated, "
        f"{format_bytes(oom.peak_reserved_before)} reserved"
    )
    free = f"  free: {format_bytes(oom.device_free)} on the GPU, {format_bytes(oom.free_in_segments)} in segments"
    yield Text(free + (f", the largest piece {format_bytes(oom.largest_free)}" if oom.pieces else ""))
    if oom.pieces:
        yield ""
        yield from _pieces(oom)
    yield ""
    yield Text(_remedies(oom))
    yield ""


def _pieces(oom: OutOfMemory) -> Iterable[RenderableType]:
    pieces = sorted(oom.pieces, key=lambda piece: -piece.bytes)
    table = table_of("Free pieces in segments", "pool", "stream", "pieces", "bytes", "largest", right=range(1, 5))
    for piece in pieces[:MOST_PIECES]:
        sizes = (format_bytes(piece.bytes), format_bytes(piece.largest))
        add_row(table, _cut(piece.pool, 24), str(piece.stream), str(piece.count), *sizes)
    yield table
    if len(pieces) > MOST_PIECES:
        rest = pieces[MOST_PIECES:]
        count, size = sum(piece.count for piece in rest), sum(piece.bytes for piece in rest)
        yield f"and {count} more pieces, together {format_bytes(size)}"


def _remedies(oom: OutOfMemory) -> str:
    if not oom.remedies:
        return no_remedy(oom)
    lines = ["The same events run without running out of memory under:"]
    lines += [f"  {one_line(conf)} (peak reserved {format_bytes(peak)})" for conf, peak in oom.remedies]
    return "\n".join(lines)


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


def _reports(reports: Sequence[Report]) -> Iterable[RenderableType]:
    if reports:
        kinds = "; ".join(f"{report.kind} at event {report.event}" for report in reports[:4])
        more = f"; and {len(reports) - 4} more" if len(reports) > 4 else ""
        yield ""
        yield f"Reports asked for by the trace ({kinds}{more}) are in the JSON document (--json)."


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _cut(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters, cut in the middle: names differ at their ends."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    if len(line) <= limit:
        return line
    half = (limit - 3) // 2
    return f"{line[:half]}...{line[len(line) - (limit - 3 - half) :]}"
