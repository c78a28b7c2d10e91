"""`stress TRACE`: one trace under many allocator settings, devices, releases, orders, lengths; which setting helps."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from simulator.allocator.releases import parse_release
from simulator.options.common import announce, progress_bar, show, sizes, working
from simulator.options.shared import check_workers, json_option, page_options, worker_options, workers
from simulator.reports.outputs import check_ending, check_output
from traces.errors import Interrupted
from traces.files import write_atomically
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.what_if.stress import Stress

_EPILOG = (
    "Without --allocator and --vary some twenty settings are tried. The exit code is 3 when no setting runs through "
    "without out of memory. Ctrl-C keeps and prints what is finished; with -o FILE.jsonl the same command goes on."
)


@click.command("stress", epilog=_EPILOG)
@click.argument("trace", metavar="TRACE")
@click.option("--allocator", "confs", metavar="CONF", multiple=True, help="A setting to try; can be given many times.")
@click.option("--vary", metavar="OPTION=V/V/...", multiple=True, help="Values of an option to combine; none: left out.")
@click.option("--memory", metavar="SIZE,...", help="Other sizes of the GPU.")
@click.option("--release", metavar="R,...", help="PyTorch releases to imitate.")
@click.option("--deferred", metavar="prompt,late", help="When memory that another stream used comes back.")
@click.option("--orders", metavar="N", type=click.IntRange(0), default=0, help="Draws of another order of the steps.")
@click.option("--lengths", metavar="N", type=click.IntRange(0), default=0, help="Draws of steps with shorter batches.")
@click.option("--seed", metavar="N", type=click.IntRange(0), default=0, help="Seed of the draws.")
@click.option("--smallest/--no-smallest", default=True, help="Also find the smallest GPU for every setting (default).")
@click.option("--context", metavar="SIZE", help="Memory of each GPU that is not PyTorch's.")
@worker_options
@click.option("-o", "--output", metavar="FILE", help="Keep outcomes: .jsonl as they come, resumable; .json at the end.")
@json_option
@page_options(" with pictures")
def command(
    trace: str,
    confs: Sequence[str],
    vary: Sequence[str],
    memory: str | None,
    release: str | None,
    deferred: str | None,
    orders: int,
    lengths: int,
    seed: int,
    smallest: bool,
    context: str | None,
    jobs: int | None,
    executor: str | None,
    dask: str | None,
    output: str | None,
    html: str | None,
    as_json: bool,
    force: bool,
    quiet: bool,
) -> int:
    """Replay TRACE (a trace, or a torch memory snapshot) under many circumstances, and say which setting helps."""
    from simulator.reports import stress as report
    from simulator.what_if.stress import Axes, grid, stress

    check_workers(executor, dask)
    _, outside = sizes(None, context)
    axes = Axes(
        settings=confs,
        combined=grid(_varied(vary)) if vary else (),
        releases=_releases(release),
        memories=[size for text in _parts(memory) if (size := sizes(text, None)[0]) is not None],
        deferred=_deferred(deferred),  # type: ignore[arg-type]
        orders=orders,
        lengths=lengths,
        seed=seed,
    )
    if output is not None:
        check_ending("--output", output, (".jsonl", ".json"))
    appended = output if output is not None and output.endswith(".jsonl") else None
    written = output if appended is None else None
    for path in (html, written):
        if path is not None:
            check_output(path, force=force)

    from simulator.snapshots.reader import read

    with working(f"reading {path_text(os.path.basename(trace))}", quiet):
        source = read(trace)
    interrupted = False
    with contextlib.ExitStack() as stack:
        jobs, chosen = stack.enter_context(workers(jobs, executor, dask))
        say = stack.enter_context(progress_bar("replaying", quiet))
        try:
            found = stress(
                source,
                axes,
                smallest=smallest,
                context=outside,
                jobs=jobs,
                executor=chosen,
                results=appended,
                force=force,
                progress=say,
            )
        except Interrupted as error:
            found = error.found
            interrupted = True
    announce(found.notes, quiet)
    if interrupted and not quiet:
        rest = f"{len(found.outcomes)} of {found.total} scenarios are finished"
        go_on = f"; the same command goes on from {path_text(appended)}" if appended is not None else ""
        print(f"note: interrupted: {rest}{go_on}", file=sys.stderr)
    if html is not None:
        from simulator.reports.html import page

        with working("drawing", quiet):
            shown = report.document_of(found, report.drawn(found, source, outside), report.MOST_ON_PAGE)
            page.write(shown, html, force=force)
    if written is not None:
        _write(found, written, force)
    show(report, found, as_json)
    if interrupted:
        return 130
    best = found.best()
    if best is None:
        return 1
    return 0 if best.fits else 3


def _write(found: Stress, path: str, force: bool) -> None:
    """Write the JSON document."""
    from simulator.reports.stress import render_json

    with write_atomically(path, force=force) as file:
        file.write(json.dumps(render_json(found), indent=1).encode() + b"\n")


def _parts(text: str | None) -> list[str]:
    """The parts between commas."""
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _varied(given: Sequence[str]) -> dict[str, list[str]]:
    """`OPTION=V/V/...`, each an option's values; UsageError if malformed."""
    varied: dict[str, list[str]] = {}
    for text in given:
        option, equals, values = text.partition("=")
        if not equals or not option.strip() or not all(part.strip() for part in values.split("/")):
            raise click.UsageError(
                f"--vary {text!r}: write an option and its values, as in max_split_size_mb=none/64/128"
            )
        varied[option.strip()] = [part.strip() for part in values.split("/")]
    return varied


def _releases(text: str | None) -> list[str]:
    return [parse_release(part).text for part in _parts(text)]


def _deferred(text: str | None) -> list[str]:
    parts = _parts(text)
    for part in parts:
        if part not in ("prompt", "late", "recorded"):
            raise click.UsageError(f"--deferred {part!r}: is prompt, late or recorded")
    return parts
