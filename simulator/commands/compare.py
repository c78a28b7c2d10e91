"""`compare A B`: two traces, snapshots or results side by side; what grew, and where."""

from __future__ import annotations

import click

from simulator.allocator.releases import parse_release
from simulator.options.common import announce, show, working
from simulator.options.shared import form_options, page_options
from simulator.reports.outputs import check_output

_EPILOG = (
    "A and B are traces or torch snapshots (which are replayed), results (of run or estimate with --json), or answers "
    "of a sweep. With --fail-over the exit code is 4 when peak allocated or reserved of any rank grew by more."
)


@click.command("compare", epilog=_EPILOG)
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--fail-over", metavar="2%|SIZE", help="Growth of a peak above which the exit code is 4.")
@click.option("--release", metavar="R", help="PyTorch release to imitate, over the traces'.")
@form_options
@page_options(" with both side by side")
def command(
    before: str,
    after: str,
    fail_over: str | None,
    release: str | None,
    as_json: bool,
    as_markdown: bool,
    html: str | None,
    force: bool,
    quiet: bool,
) -> int:
    """Compare A with B: figures, phases, and which categories, modules and tensors grew."""
    from simulator.comparison.compare import Limit, compare, load
    from simulator.reports import compare as report

    limit = None if fail_over is None else Limit.parse(fail_over)
    if release is not None:
        parse_release(release)
    if html is not None:
        check_output(html, force=force)
    with working("replaying", quiet, compiles=True):
        one, two = (load(path, release=release, picture=html is not None) for path in (before, after))
        found = compare(one, two, limit)
    if html is not None:
        from simulator.reports.html import page

        page.write(report.document_of(found), html, force=force)
    announce((*found.before.notes, *found.after.notes), quiet)
    show(report, found, as_json, as_markdown)
    return 4 if found.regressions() else 0
