"""Options that several commands share: files that a replay writes, who does the work, what is outside the allocator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from simulator.reports.outputs import Outputs

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from simulator.estimator.jobs import MakeExecutor

Command = Callable[..., Any]

_FILES: Final = ("events", "calls", "timeline", "snapshot", "html")


def _either(ctx: click.Context, _: click.Parameter, given: bool) -> bool:
    """Refuse the second of two forms."""
    if given and any(ctx.params.get(name) for name in ("as_json", "as_markdown")):
        raise click.UsageError("--json and --markdown exclude each other", ctx)
    return given


_FORCE_OPTION: Final = click.option("--force", is_flag=True, help="Replace files that exist.")
_QUIET_OPTION: Final = click.option("-q", "--quiet", is_flag=True, help="No notes and no progress on stderr.")
_JSON_OPTION: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
_FORM_OPTIONS: Final = (
    click.option(
        "--json", "as_json", is_flag=True, callback=_either, help="Print one JSON document instead of tables."
    ),
    click.option(
        "--markdown", "as_markdown", is_flag=True, callback=_either, help="Print Markdown, for a pull request."
    ),
)
_FILE_OPTIONS: Final = (
    click.option("--events", metavar="FILE", help="Write what stood after every event (CSV, or .csv.gz)."),
    click.option("--calls", metavar="FILE", help="Write the allocator's calls of the device (CSV, or .csv.gz)."),
    click.option(
        "--timeline", metavar="FILE", help="Write memory over time (.csv, .npz, .parquet; .json for Perfetto)."
    ),
    click.option("--snapshot", metavar="FILE", help="Write a snapshot for PyTorch's memory_viz."),
    click.option(
        "--html", metavar="FILE", help="Write a page: memory over time, what was alive, the allocator's blocks."
    ),
    _FORCE_OPTION,
    _QUIET_OPTION,
)
_CONTEXT_OPTION: Final = click.option(
    "--context",
    metavar="SIZE|auto",
    default="auto",
    show_default=True,
    help="Memory of each GPU that is not PyTorch's; auto: measured on such GPUs, as a range; 0: none.",
)
_REMEDIES_OPTION: Final = click.option(
    "--remedies/--no-remedies",
    default=True,
    help="Where it does not fit, also try what would: changes of the case, each captured and replayed (default).",
)
_WORKER_OPTIONS: Final = (
    click.option("--jobs", metavar="N", type=click.IntRange(1, 4096), help="Worker processes (default: one a core)."),
    click.option("--executor", metavar="MODULE:NAME", help="An executor as of concurrent.futures, or what makes one."),
    click.option("--dask", metavar="ADDRESS", help="Let the workers of a Dask cluster do it, as tcp://host:8786."),
)


def file_options(command: Command) -> Command:
    """Add what `form_options` and `output_options` add."""
    return form_options(output_options(command))


def form_options(command: Command) -> Command:
    """Add `--json` and `--markdown`, of which one may be given."""
    return _added(_FORM_OPTIONS, command)


def json_option(command: Command) -> Command:
    """Add `--json` alone."""
    return _JSON_OPTION(command)


def quiet_option(command: Command) -> Command:
    """Add `--quiet`."""
    return _QUIET_OPTION(command)


def page_options(shown: str) -> Callable[[Command], Command]:
    """Add `--html`, a page on which this is shown, `--force` and `--quiet`."""
    page = click.option("--html", metavar="FILE", help=f"Write a page{shown}.")
    return functools.partial(_added, (page, _FORCE_OPTION, _QUIET_OPTION))


def remedies_option(command: Command) -> Command:
    """Add `--no-remedies`."""
    return _REMEDIES_OPTION(command)


def output_options(command: Command) -> Command:
    """Add the options of the files that a replay writes, and `--quiet`.

    The command gets the files as `written`, with its own options `output` (the trace) and `markdown` (the report),
    where it has them.
    """

    @functools.wraps(command)
    def collected(*, force: bool, output: str | None = None, markdown: str | None = None, **options: Any) -> Any:
        files = {name: options.pop(name) for name in _FILES}
        return command(written=Outputs(**files, force=force, output=output, markdown=markdown), **options)

    return _added(_FILE_OPTIONS, collected)


def context_option(command: Command) -> Command:
    """Add `--context` of an estimate, which `context_size` understands."""
    return _CONTEXT_OPTION(command)


def worker_options(command: Command) -> Command:
    """Add `--jobs`, `--executor` and `--dask`, which `workers` understands."""
    return _added(_WORKER_OPTIONS, command)


def _added(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@contextlib.contextmanager
def workers(
    jobs: int | None, executor: str | None, dask: str | None
) -> Iterator[tuple[int | None, Executor | MakeExecutor | None]]:
    """How many jobs run at once and the executor that runs them, as `--jobs`, `--executor` and `--dask` say.

    ConfigError where there is no such executor or cluster.
    """
    from simulator.estimator.jobs import dask_executor, named_executor  # brings multiprocessing

    if dask is not None:
        with dask_executor(dask) as (cluster, slots):
            yield jobs or 2 * slots, cluster
    else:
        yield jobs, None if executor is None else named_executor(executor)


def check_workers(executor: str | None, dask: str | None) -> None:
    """UsageError where both say who does the work."""
    if executor is not None and dask is not None:
        raise click.UsageError("--executor and --dask exclude each other")
