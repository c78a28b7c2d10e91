"""The report of `verify`: its JSON and its document, both pure functions of the `VerifyReport`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from simulator.reports.document import Document, Lines, Size, Table
from simulator.snapshots.verify import SCHEMA_VERSION, VerifyReport
from traces.text import one_line


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


def document_of(report: VerifyReport) -> Document:
    """One row a device, and below the first difference of each that has one."""
    rows = tuple(
        (str(rank.rank), str(rank.entries), str(rank.compared), Size(rank.peak_allocated), Size(rank.peak_reserved))
        for rank in report.ranks
    )
    table = Table("", ("device", "entries", "compared", "peak allocated", "peak reserved"), rows, right=range(5))
    found = tuple(
        f"device {rank.rank}, entry {rank.divergence.entry}: {one_line(rank.divergence.text)}"
        for rank in report.ranks
        if rank.divergence is not None
    )
    return Document(
        subject="",
        says="no divergence" if report.ok else "diverges",
        badge="fits" if report.ok else "oom",
        lead=f"PyTorch {report.release}, {one_line(report.conf) or 'default allocator settings'}",
        head=(table, Lines(found, style="bad")),
    )
