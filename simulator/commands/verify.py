"""`verify SNAPSHOT`: replay a torch snapshot's causes and compare every consequence with the recording."""

from __future__ import annotations

import os

import click

from simulator.allocator.releases import parse_release
from simulator.options.common import announce, show, working
from simulator.options.shared import json_option, quiet_option
from traces.text import path_text


@click.command("verify")
@click.argument("snapshot", metavar="SNAPSHOT")
@click.option("--release", metavar="R", help="PyTorch release that recorded it, 2.0 to 2.15 (else guessed).")
@json_option
@quiet_option
def command(snapshot: str, release: str | None, as_json: bool, quiet: bool) -> int:
    """Compare a simulated replay with SNAPSHOT, which torch recorded; name the first divergence.

    Exit code 1 if the replay differs anywhere.
    """
    if release is not None:
        parse_release(release)

    from simulator.reports import verify as reports
    from simulator.snapshots.verify import verify

    with working(f"verifying {path_text(os.path.basename(snapshot))}", quiet, compiles=True):
        report = verify(snapshot, release=release)
    announce(report.notes, quiet)
    show(reports, report, as_json)
    return 0 if report.ok else 1
