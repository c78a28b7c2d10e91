"""Options that several commands share: the files that a replay writes, and what lies outside the allocator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from simulator.reports.outputs import Outputs

Command = Callable[..., Any]

_FILES: Final = ("events", "calls", "timeline", "snapshot", "html")
_JSON_OPTION: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
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
    click.option("--force", is_flag=True, help="Replace files that exist."),
    click.option("-q", "--quiet", is_flag=True, help="No notes and no progress on stderr."),
)
_CONTEXT_OPTION: Final = click.option(
    "--context",
    metavar="SIZE|auto",
    default="auto",
    show_default=True,
    help="Memory of each GPU that is not PyTorch's; auto: measured on such GPUs, as a range; 0: none.",
)


def file_options(command: Command) -> Command:
    """Add `--json`, and what `output_options` adds."""
    return _JSON_OPTION(output_options(command))


def output_options(command: Command) -> Command:
    """Add the options of the files that a replay writes, and `--quiet`.

    The command gets the files as `written`, with its own option `output` (the trace), where it has one.
    """

    @functools.wraps(command)
    def collected(*, force: bool, output: str | None = None, **options: Any) -> Any:
        files = {name: options.pop(name) for name in _FILES}
        return command(written=Outputs(**files, force=force, output=output), **options)

    return added(_FILE_OPTIONS, collected)


def context_option(command: Command) -> Command:
    """Add `--context` of an estimate, which `context_size` understands."""
    return _CONTEXT_OPTION(command)


def added(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    """`command` with options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command
