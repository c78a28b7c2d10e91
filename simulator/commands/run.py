"""`run TRACE`: replay a trace and report the memory of every rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from simulator.allocator.releases import parse_release
from simulator.options.common import announce, show, sizes, working
from simulator.options.shared import file_options
from simulator.reports.outputs import Outputs
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.engine.replay import AfterOom

_EPILOG = (
    "Sizes: 80GB is 80 x 10^9 bytes, 80GiB is 80 x 2^30, a plain number is bytes. Exit codes: 0 it fits, or is tight "
    "(the allocator has to give memory back and try again); 3 out of memory."
)


@click.command("run", epilog=_EPILOG)
@click.argument("trace", metavar="TRACE")
@click.option("--allocator", metavar="CONF", help="Allocator settings, as in PYTORCH_ALLOC_CONF, over the trace's.")
@click.option("--allocator-from-env", is_flag=True, help="Take the allocator settings from the environment.")
@click.option("--release", metavar="R", help="PyTorch release to imitate, 2.0 to 2.15, over the trace's.")
@click.option("--memory", metavar="SIZE", help="Total memory of each GPU, over the trace's.")
@click.option("--context", metavar="SIZE", help="Memory of each GPU that is not PyTorch's (default: the trace's).")
@click.option("--ranks", metavar="0,3-5", help="Ranks to report, in the table and in files. All are replayed.")
@click.option(
    "--after-oom",
    type=click.Choice(["stop", "continue"]),
    default="stop",
    show_default=True,
    help="After its first out-of-memory error a rank stops, as a program does; or go on, as if it caught every error.",
)
@file_options
def command(
    trace: str,
    allocator: str | None,
    allocator_from_env: bool,
    release: str | None,
    memory: str | None,
    context: str | None,
    ranks: str | None,
    after_oom: AfterOom,
    as_json: bool,
    as_markdown: bool,
    written: Outputs,
    quiet: bool,
) -> int:
    """Replay TRACE (a trace, or a torch memory snapshot) and report the memory of every rank."""
    from simulator.allocator.conf import conf_from_environment, parse_conf
    from traces.release import DEFAULT_RELEASE

    if allocator is not None and allocator_from_env:
        raise click.UsageError("--allocator and --allocator-from-env exclude each other")
    total, outside = sizes(memory, context)
    written.check(trace)
    from simulator.snapshots.reader import read

    with working(f"reading {path_text(os.path.basename(trace))}", quiet):
        source = read(trace, release=release, conf="" if allocator_from_env else allocator)
    behaviour = parse_release(source.release or DEFAULT_RELEASE)
    if allocator_from_env:
        allocator = conf_from_environment(os.environ, behaviour)
    parse_conf(source.conf if allocator is None else allocator, behaviour)

    from simulator.engine.ranks import only_ranks, parse_ranks

    chosen = None if ranks is None else parse_ranks(ranks, (rank for group in source.ranks for rank in group.ranks))

    from simulator.engine.replay import replay
    from simulator.reports import run as report
    from simulator.reports.verdict import WORDS, exit_code

    with working("replaying", quiet, compiles=True):
        result = replay(
            source,
            conf=allocator,
            release=release,
            memory=total,
            context=outside,
            after_oom=after_oom,
            **written.kept,
        )
    shown = result if chosen is None else only_ranks(result, chosen)
    with working("writing", quiet):
        written.write(shown, source)
    announce(result.notes, quiet)  # those of reading the trace among them
    if shown.verdict != result.verdict:
        announce((f"the verdict of a rank that is not shown: {WORDS[result.verdict]}",), quiet)
    show(report, shown, as_json, as_markdown)
    return exit_code(result.verdict)
