"""Reports of `verify`: a table for a terminal and a JSON document, both pure functions of the `VerifyReport`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from simulator.reports.terminal import add_row, print_parts, table_of
from simulator.snapshots.verify import SCHEMA_VERSION, VerifyReport
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def render_json(report: VerifyReport) -> dict[str, Any]:
    """The document of `verify --json`; bytes throughout."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": "equal" if report.ok else "diverges",
        "release": report.release,
        "conf": report.conf,
        "notes": list(report.notes),
        "ranks": [asdict(rank) for rank in report.ranks],
    }


def render_table(report: VerifyReport, console: Console | None = None) -> None:
    """Print what `verify` found: one row a device, and below the first difference of each that has one."""
    print_parts(_report(report), console)


def _report(report: VerifyReport) -> Iterable[RenderableType]:
    from rich.text import Text

    verdict = Text("no divergence", "bold green") if report.ok else Text("diverges", "bold red")
    conf = one_line(report.conf) or "default allocator settings"
    yield Text.assemble(verdict, f": PyTorch {report.release}, {conf}")
    table = table_of("", "device", "entries", "compared", "peak allocated", "peak reserved", right=range(6))
    for rank in report.ranks:
        sizes = (format_bytes(rank.peak_allocated), format_bytes(rank.peak_reserved))
        add_row(table, str(rank.rank), str(rank.entries), str(rank.compared), *sizes)
    yield table
    for rank in report.ranks:
        if rank.divergence is not None:
            where = f"device {rank.rank}, entry {rank.divergence.entry}"
            yield Text(f"{where}: {one_line(rank.divergence.text)}", "red")
