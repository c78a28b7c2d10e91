"""`sweep CASES.jsonl`: many estimates, in parallel, resumable."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from simulator.options.common import announce, context_size, print_json, progress_bar, remedied
from simulator.options.shared import (
    check_workers,
    context_option,
    json_option,
    quiet_option,
    remedies_option,
    worker_options,
    workers,
)
from traces.errors import OutputError
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.estimator.sweep import Summary
    from simulator.fit.plans import Plans

_EPILOG = (
    "A line of CASES.jsonl is a case: a JSON object with the names of estimate's options as keys (- becomes _) and "
    '"model". The exit code is 0 when every case has an answer, and 1 when all of them failed. A sweep that was '
    "interrupted is finished by the same command."
)


@click.command("sweep", epilog=_EPILOG)
@click.argument("cases", metavar="CASES.jsonl")
@click.option("-o", "--output", "results", metavar="RESULTS.jsonl", required=True, help="Where answers are appended.")
@worker_options
@context_option
@remedies_option
@click.option("--min-memory", is_flag=True, help="Also find the smallest GPU of every case.")
@click.option("--retry", is_flag=True, help="Estimate cases again whose answer is an error.")
@click.option("--force", is_flag=True, help="Begin RESULTS.jsonl anew.")
@json_option
@quiet_option
def command(
    cases: str,
    results: str,
    jobs: int | None,
    executor: str | None,
    dask: str | None,
    context: str,
    remedies: bool,
    min_memory: bool,
    retry: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Estimate every case of CASES.jsonl and append its answer to RESULTS.jsonl.

    Cases that RESULTS.jsonl answers already are not estimated again.
    """
    from simulator.estimator.results_file import case_of, read_cases
    from simulator.estimator.sweep import sweep

    check_workers(executor, dask)
    outside = context_size(context)
    if cases != "-" and os.path.realpath(cases) == os.path.realpath(results):
        raise OutputError(f"{path_text(results)}: is the input itself; choose another name")
    given = read_cases(cases)
    with contextlib.ExitStack() as stack:
        jobs, chosen = stack.enter_context(workers(jobs, executor, dask))
        stack.enter_context(_told(path_text(results), quiet))
        bar = stack.enter_context(progress_bar("estimating", quiet))

        def say(summary: Summary) -> None:
            bar(summary.done, len(given), f"{summary.oom} oom, {summary.failed} failed")

        summary = sweep(
            given,
            results,
            jobs=jobs,
            executor=chosen,
            context=outside,
            min_memory=min_memory,
            retry=retry,
            force=force,
            progress=say,
        )
    announce(summary.notes, quiet)
    if summary.failed:
        announce((f"{summary.failed} of {summary.total} cases failed: see 'error' in {path_text(results)}",), quiet)
    near = None if summary.fits or summary.tight else summary.nearest
    found, interrupted = None, False
    if near is not None and remedies:
        found, interrupted = remedied(case_of(near), outside, "no case fits", quiet)
    if as_json:
        print_json(_document(summary, near, found))
    else:
        click.echo("\n".join([_line(summary), *_nearest(near, found)]))
    if interrupted:
        return 130
    return 1 if summary.failed == summary.total else 0


@contextlib.contextmanager
def _told(name: str, quiet: bool) -> Iterator[None]:
    """Say how to go on, when an interruption ends what is done inside."""
    try:
        yield
    except KeyboardInterrupt:
        if not quiet:
            print(f"note: what is finished is in {name}; the same command goes on from there", file=sys.stderr)
        raise


def _nearest(near: Mapping[str, Any] | None, found: Plans | None) -> Iterator[str]:
    """Of the case that lacks least, what it needs and what would fit."""
    from simulator.estimator.results_file import case_of
    from simulator.reports.estimate import case_line, ways_out

    if near is not None:
        yield f"nearest: {case_line(case_of(near))}: {near.get('summary', 'out of memory')}"
    if found is not None:
        yield f"nearest: {ways_out(found)}"


def _document(summary: Summary, near: Mapping[str, Any] | None, found: Plans | None) -> dict[str, object]:
    from simulator.estimator.sweep import SCHEMA_VERSION

    tried = {} if found is None else {"remedies": found.document()}
    names = ("total", "kept", "fits", "tight", "oom", "failed")
    counts = {name: getattr(summary, name) for name in names}
    return {
        "schema_version": SCHEMA_VERSION,
        **counts,
        "seconds": round(summary.seconds, 3),
        "nearest": near and {**near, **tried},
    }


def _line(summary: Summary) -> str:
    kept = f", {summary.kept} of them known before" if summary.kept else ""
    return (
        f"{summary.total} cases: {summary.fits} fit, {summary.tight} tight, {summary.oom} out of memory, "
        f"{summary.failed} failed{kept}; {summary.seconds:.1f} s"
    )
