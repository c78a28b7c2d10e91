"""`convert IN OUT`: between trace formats, torch snapshots and timelines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

import traces
from simulator.allocator.releases import parse_release
from simulator.options.common import announce, working
from simulator.options.shared import quiet_option
from simulator.reports.outputs import check_output, check_parquet, write_snapshots
from traces.errors import ConfigError, OutputError
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.engine.result import Result
    from traces.model import Trace

#: What `--to` accepts.
FORMATS: Final = {
    "json": "the trace: rows for a few events, else columns",
    "json-rows": "the trace, an object for each event",
    "json-columns": "the trace, a list for each field",
    "npz": "the trace, binary columns",
    "snapshot": "a torch memory snapshot for memory_viz",
    "chrome": "memory over time for Perfetto and chrome://tracing",
    "timeline-csv": "memory over time",
    "timeline-npz": "memory over time",
    "timeline-parquet": "memory over time",
}

#: Which format an ending means without `--to`.
ENDINGS: Final = {
    ".json": "json",
    ".json.gz": "json",
    ".npz": "npz",
    ".pickle": "snapshot",
    ".pkl": "snapshot",
    ".pickle.gz": "snapshot",
    ".pkl.gz": "snapshot",
    ".csv": "timeline-csv",
    ".csv.gz": "timeline-csv",
    ".parquet": "timeline-parquet",
}


@click.command("convert")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option("--to", "to", type=click.Choice(list(FORMATS)), help="Format of OUT, where its ending does not say it.")
@click.option("--release", metavar="R", help="PyTorch release to imitate, 2.0 to 2.15, over the input's.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@quiet_option
def command(source: str, target: str, to: str | None, release: str | None, force: bool, quiet: bool) -> int:
    """Convert IN (found out by its content) to OUT (by its ending, or --to).

    A snapshot, chrome or timeline file holds what the allocator did, so IN is replayed for it.
    """
    form = to or format_of(target)
    if form == "timeline-parquet":
        check_parquet(target)
    if release is not None:
        release = parse_release(release).text
    check_output(target, force=force)
    _check_distinct(source, target)

    from simulator.snapshots.reader import read

    with working(f"reading {path_text(os.path.basename(source))}", quiet):
        trace = read(source, release=release)
    notes = trace.notes
    if form in ("json", "json-rows", "json-columns", "npz"):
        with working("writing", quiet):
            traces.write(trace, target, to=form, force=force)
    else:
        notes = _write_replay(trace, target, form, force, quiet)
    announce(notes, quiet)
    return 0


def format_of(path: str) -> str:
    """The format that the ending of `path` means; ConfigError if it means none."""
    name = path.lower()
    for ending, form in ENDINGS.items():
        if name.endswith(ending):
            return form
    raise ConfigError(f"{path_text(path)}: its ending says no format; end it in {', '.join(ENDINGS)}, or give --to")


def _check_distinct(source: str, target: str) -> None:
    if os.path.realpath(source) == os.path.realpath(target) and os.path.isfile(source):
        raise OutputError(f"{path_text(target)}: is the input itself; choose another name")


def _write_replay(trace: Trace, path: str, form: str, force: bool, quiet: bool) -> tuple[str, ...]:
    """Replay a trace and write what the allocator did; the notes of the replay, the trace's own among them."""
    from simulator.engine.replay import replay

    with working("replaying", quiet, compiles=True):
        result = replay(trace, snapshot=form == "snapshot", analyse=False)
    with working("writing", quiet):
        _write_result(result, path, form, force)
    return result.notes


def _write_result(result: Result, path: str, form: str, force: bool) -> None:
    if form == "snapshot":
        write_snapshots(result, path, force=force)
        return
    timelines = [rank.timeline for rank in result.ranks]
    if form == "chrome":
        from traces.timelines.chrome import write_chrome

        write_chrome(timelines, path, force=force)
    else:
        from traces.timelines.files import write_timeline

        write_timeline(timelines, path, to=form.removeprefix("timeline-"), force=force)
