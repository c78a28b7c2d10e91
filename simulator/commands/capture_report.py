"""The tables of `capture`: a pure function of the summary of a step graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from simulator.reports.terminal import add_row, print_parts, table_of
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from graph.summary import Summary

#: Rows of the tables that may be long.
MOST: Final = 10
MOST_PHASES: Final = 12


def render_summary(summary: Summary, console: Console | None = None) -> None:
    """Print a summary: plain text where stdout is no terminal; 80 columns are enough."""
    print_parts(_parts(summary), console)


def _parts(summary: Summary) -> Iterable[RenderableType]:
    from rich.text import Text

    gpu, release = (str(summary.environment.get(name, "?")) for name in ("gpu", "release"))
    model = one_line(str(summary.case.get("model", "?")))
    yield Text.assemble((f"captured: {model}", "bold"), f", as on {one_line(gpu)} under PyTorch {one_line(release)}")
    yield _figures(summary)
    yield ""
    yield from _phases(summary)
    yield ""
    yield _categories(summary)
    if summary.saved:
        yield ""
        yield from _saved(summary)
    yield ""
    yield _largest(summary)
    if summary.assumptions:
        yield ""
        yield Text("Assumed", "bold")
        for text in summary.assumptions:
            yield Text(f"  {one_line(text)}")


def _figures(summary: Summary) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    own, found = summary.parameters, summary.peak
    trained = (
        "all trained"
        if own.trained_elements == own.elements
        else f"{format_count(own.trained_elements)} of them trained"
    )
    where = f"{found.phase or 'before the first phase'}" + (f" {found.step}" if found.step >= 0 else "")
    saved = format_bytes(summary.saved_bytes)
    for row in (
        ("parameters", format_count(own.elements), format_bytes(own.bytes), trained),
        ("operators", f"{summary.operators:,}", "", f"{summary.storages:,} tensors, {summary.events:,} events"),
        (
            "last step",
            f"{format_count(summary.step_flops)}FLOP",
            format_bytes(summary.step_moved),
            "computed, and read and written",
        ),
        (
            "critical path",
            f"{format_count(summary.path_flops)}FLOP",
            "",
            f"of {format_count(summary.flops)}FLOP in all steps",
        ),
        ("kept for backward", saved, f"{summary.saved_bytes:,} B", "when the last backward begins"),
        ("peak requested", format_bytes(found.bytes), f"{found.bytes:,} B", f"{where}, for a perfect allocator"),
    ):
        add_row(table, *row)
    return table


def _phases(summary: Summary) -> Iterable[RenderableType]:
    chosen = summary.phases
    if len(chosen) > MOST_PHASES:
        order = sorted(range(len(chosen)), key=lambda place: (-chosen[place].peak, place))
        chosen = tuple(chosen[place] for place in sorted(order[:MOST_PHASES]))
    work = {(total.name, total.step): total for total in summary.totals}
    table = table_of(
        "By phase", "phase", "step", "peak", "left", "operators", "FLOP", "read+written", right=range(1, 7)
    )
    for phase in chosen:
        total = work.get((phase.name, phase.step))
        step = str(phase.step) if phase.step >= 0 else ""
        counts = (f"{total.operators:,}", format_count(total.flops), format_bytes(total.moved)) if total else ("0",) * 3
        add_row(table, one_line(phase.name), step, format_bytes(phase.peak), format_bytes(phase.left), *counts)
    yield table
    if len(summary.phases) > len(chosen):
        yield f"and {len(summary.phases) - len(chosen)} more phases with smaller peaks"


def _categories(summary: Summary) -> Table:
    table = table_of("Alive at the peak, by category", "category", "bytes", "share", right=(1, 2))
    for category, size in summary.peak.by_category.items():
        add_row(table, category, format_bytes(size), _share(size, summary.peak.bytes))
    return table


def _saved(summary: Summary) -> Iterable[RenderableType]:
    rows = summary.saved_by_class()
    table = table_of(
        "Kept for backward, by class of module",
        "class",
        "tensors",
        "bytes",
        "share",
        "read by backward",
        right=(1, 2, 3, 4),
    )
    for name, count, size, read in rows[:MOST]:
        add_row(
            table,
            one_line(name),
            f"{count:,}",
            format_bytes(size),
            _share(size, summary.saved_bytes),
            format_bytes(read),
        )
    yield table
    if len(rows) > MOST:
        rest = sum(size for _, _, size, _ in rows[MOST:])
        yield f"and {len(rows) - MOST} more classes, together {format_bytes(rest)}"


def _largest(summary: Summary) -> Table:
    table = table_of("Largest tensors alive at the peak", "bytes", "category", "tensor", "module", right=(0,))
    for tensor in summary.peak.tensors[:MOST]:
        name = one_line(tensor.name or f"storage {tensor.storage}")
        module = one_line(tensor.module or "")
        add_row(
            table,
            format_bytes(tensor.bytes),
            tensor.category or "unknown",
            name.removeprefix("aten.").removesuffix(".default"),
            "" if name.startswith(f"{module}.") else module,
        )
    return table


def format_count(count: int) -> str:
    """`count` with a decimal prefix: `950 `, `1.50 M`, `826.70 G`."""
    value, prefix = float(count), ""
    for larger in ("k", "M", "G", "T", "P"):
        if round(value, 2) < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{value:,.2f} {prefix}" if prefix else f"{count} "


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
