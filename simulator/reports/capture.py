"""The report of `capture`: a pure function of the summary of a step graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.reports.document import (
    Block,
    Cell,
    Document,
    Figure,
    Figures,
    Lines,
    Section,
    Share,
    Size,
    Table,
)
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from graph.summary import Summary

#: Rows of the tables that may be long.
MOST: Final = 10
MOST_PHASES: Final = 12


def document_of(summary: Summary) -> Document:
    """The document of a summary."""
    gpu, release = (str(summary.environment.get(name, "?")) for name in ("gpu", "release"))
    blocks: list[Block] = [_phases(summary), _categories(summary)]
    if summary.saved:
        blocks.append(_saved(summary))
    blocks.append(_largest(summary))
    if summary.assumptions:
        blocks.append(Lines(tuple(summary.assumptions), "Assumed"))
    return Document(
        subject="",
        says="captured",
        lead=f"{one_line(str(summary.case.get('model', '?')))}, as on {gpu} under PyTorch {release}",
        head=(_figures(summary),),
        sections=(Section("", tuple(blocks)),),
    )


def _figures(summary: Summary) -> Figures:
    own, found = summary.parameters, summary.peak
    all_trained = own.trained_elements == own.elements
    trained = "all trained" if all_trained else f"{format_count(own.trained_elements)} of them trained"
    where = f"{found.phase or 'before the first phase'}" + (f" {found.step}" if found.step >= 0 else "")
    flops, path = (f"{format_count(count)}FLOP" for count in (summary.step_flops, summary.path_flops))
    everything = f"of {format_count(summary.flops)}FLOP in all steps"
    return Figures(
        (
            Figure("parameters", format_count(own.elements), trained, format_bytes(own.bytes)),
            Figure("operators", f"{summary.operators:,}", f"{summary.storages:,} tensors, {summary.events:,} events"),
            Figure("last step", flops, "computed, and read and written", format_bytes(summary.step_moved)),
            Figure("critical path", path, everything),
            Figure("kept for backward", Size(summary.saved_bytes), "when the last backward begins"),
            Figure("peak requested", Size(found.bytes), f"{where}, for a perfect allocator"),
        )
    )


def _phases(summary: Summary) -> Table:
    chosen = summary.phases
    if len(chosen) > MOST_PHASES:
        order = sorted(range(len(chosen)), key=lambda place: (-chosen[place].peak, place))
        chosen = tuple(chosen[place] for place in sorted(order[:MOST_PHASES]))
    work = {(total.name, total.step): total for total in summary.totals}
    rows: list[tuple[Cell, ...]] = []
    for phase in chosen:
        total = work.get((phase.name, phase.step))
        step = str(phase.step) if phase.step >= 0 else ""
        counts = (f"{total.operators:,}", format_count(total.flops), Size(total.moved)) if total else ("0",) * 3
        rows.append((one_line(phase.name), step, Size(phase.peak), Size(phase.left), *counts))
    rest = len(summary.phases) - len(chosen)
    return Table(
        "By phase",
        ("phase", "step", "peak", "left", "operators", "FLOP", "read+written"),
        tuple(rows),
        right=range(1, 7),
        more=f"and {rest} more phases with smaller peaks" if rest else "",
    )


def _categories(summary: Summary) -> Table:
    peak = summary.peak
    rows = tuple((name, Size(size), Share(size, peak.bytes, name)) for name, size in peak.by_category.items())
    return Table("Alive at the peak, by category", ("category", "bytes", "share"), rows)


def _saved(summary: Summary) -> Table:
    rows = summary.saved_by_class()
    cells = (
        (one_line(name), count, Size(size), Share(size, summary.saved_bytes), Size(read))
        for name, count, size, read in rows[:MOST]
    )
    rest = sum(size for _, _, size, _ in rows[MOST:])
    return Table(
        "Kept for backward, by class of module",
        ("class", "tensors", "bytes", "share", "read by backward"),
        tuple(cells),
        more=f"and {len(rows) - MOST} more classes, together {format_bytes(rest)}" if len(rows) > MOST else "",
    )


def _largest(summary: Summary) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for tensor in summary.peak.tensors[:MOST]:
        name = one_line(tensor.name or f"storage {tensor.storage}")
        module = one_line(tensor.module or "")
        short = name.removeprefix("aten.").removesuffix(".default")
        category = tensor.category or "unknown"
        rows.append((Size(tensor.bytes), category, short, "" if name.startswith(f"{module}.") else module))
    return Table("Largest tensors alive at the peak", ("bytes", "category", "tensor", "module"), tuple(rows))


def format_count(count: int) -> str:
    """`count` with a decimal prefix: `950 `, `1.50 M`, `826.70 G`."""
    value, prefix = float(count), ""
    for larger in ("k", "M", "G", "T", "P"):
        if round(value, 2) < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{value:,.2f} {prefix}" if prefix else f"{count} "
