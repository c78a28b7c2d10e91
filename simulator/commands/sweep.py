"""`sweep CASES.jsonl`: many estimates, in parallel, resumable."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from simulator.sweeping import Summary

_EPILOG = (
    "A line of CASES.jsonl is a case: a JSON object with the names of estimate's options as keys (- becomes _) and "
    '"model". The exit code is 0 when every case has an answer, and 1 when all of them failed. A sweep that was '
    "interrupted is finished by the same command."
)


@click.command("sweep", epilog=_EPILOG)
@click.argument("cases", metavar="CASES.jsonl")
@click.option("-o", "--output", "results", metavar="RESULTS.jsonl", required=True, help="Where answers are appended.")
@click.option("--jobs", metavar="N", type=click.IntRange(1, 4096), help="Worker processes (default: one a core).")
@click.option("--executor", metavar="MODULE:NAME", help="An executor as of concurrent.futures, or what makes one.")
@click.option("--dask", metavar="ADDRESS", help="Let the workers of a Dask cluster do it, as tcp://host:8786.")
@click.option("--context", metavar="SIZE|auto", help="Memory of each GPU that is not PyTorch's; auto: a known card's.")
@click.option("--min-memory", is_flag=True, help="Also find the smallest GPU of every case.")
@click.option("--retry", is_flag=True, help="Estimate cases again whose answer is an error.")
@click.option("--force", is_flag=True, help="Begin RESULTS.jsonl anew.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a line.")
@click.option("-q", "--quiet", is_flag=True, help="No notes and no progress on stderr.")
def command(
    cases: str,
    results: str,
    jobs: int | None,
    executor: str | None,
    dask: str | None,
    context: str | None,
    min_memory: bool,
    retry: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Estimate every case of CASES.jsonl and append its answer to RESULTS.jsonl.

    Cases that RESULTS.jsonl answers already are not estimated again.
    """
    from simulator.commands.common import announce, context_size, print_json
    from simulator.dispatching import dask_executor, named_executor
    from simulator.results_file import read_cases
    from simulator.sweeping import sweep
    from traces.errors import OutputError
    from traces.text import path_text

    if executor is not None and dask is not None:
        raise click.UsageError("--executor and --dask exclude each other")
    outside = context_size(context)
    if cases != "-" and os.path.realpath(cases) == os.path.realpath(results):
        raise OutputError(f"{path_text(results)}: is the input itself; choose another name")
    given = read_cases(cases)
    with contextlib.ExitStack() as stack:
        chosen = None if executor is None else named_executor(executor)
        if dask is not None:
            chosen, slots = stack.enter_context(dask_executor(dask))
            jobs = jobs or 2 * slots
        stack.enter_context(_told(path_text(results), quiet))
        say = stack.enter_context(_bar(len(given), quiet))
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
    if as_json:
        print_json(_document(summary))
    else:
        click.echo(_line(summary))
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


def _document(summary: Summary) -> dict[str, object]:
    names = ("total", "kept", "fits", "oom", "failed")
    counts = {name: getattr(summary, name) for name in names}
    return {"schema_version": 1, **counts, "seconds": round(summary.seconds, 3)}


def _line(summary: Summary) -> str:
    kept = f", {summary.kept} of them known before" if summary.kept else ""
    return (
        f"{summary.total} cases: {summary.fits} fit, {summary.oom} out of memory, {summary.failed} failed{kept}; "
        f"{summary.seconds:.1f} s"
    )


@contextlib.contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Callable[[Summary], None]]:
    """A progress bar on stderr, where that is a terminal."""
    from simulator.commands.common import shows_progress

    if quiet or not shows_progress():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("estimating", total=total)

        def say(summary: Summary) -> None:
            progress.update(task, completed=summary.done, description=f"{summary.oom} oom, {summary.failed} failed")

        yield say
