"""Options of the commands that share work out: how many jobs, and who does them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from simulator.commands.shared_options import Command, added
from simulator.estimator.jobs import dask_executor, named_executor

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from simulator.estimator.jobs import MakeExecutor

_WORKER_OPTIONS: Final = (
    click.option("--jobs", metavar="N", type=click.IntRange(1, 4096), help="Worker processes (default: one a core)."),
    click.option("--executor", metavar="MODULE:NAME", help="An executor as of concurrent.futures, or what makes one."),
    click.option("--dask", metavar="ADDRESS", help="Let the workers of a Dask cluster do it, as tcp://host:8786."),
)


def worker_options(command: Command) -> Command:
    """Add `--jobs`, `--executor` and `--dask`, which `workers` understands."""
    return added(_WORKER_OPTIONS, command)


@contextlib.contextmanager
def workers(
    jobs: int | None, executor: str | None, dask: str | None
) -> Iterator[tuple[int | None, Executor | MakeExecutor | None]]:
    """How many jobs run at once and the executor that runs them, as `--jobs`, `--executor` and `--dask` say.

    ConfigError where there is no such executor or cluster.
    """
    if dask is not None:
        with dask_executor(dask) as (cluster, slots):
            yield jobs or 2 * slots, cluster
    else:
        yield jobs, None if executor is None else named_executor(executor)


def check_workers(executor: str | None, dask: str | None) -> None:
    """UsageError where both say who does the work."""
    if executor is not None and dask is not None:
        raise click.UsageError("--executor and --dask exclude each other")
