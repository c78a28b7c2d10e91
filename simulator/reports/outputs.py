"""The files that a replay writes on request: checked before the long work begins, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from traces.errors import ConfigError, OutputError, ReplayError
from traces.files import write_atomically
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.engine.result import Result
    from simulator.reports.document import Document
    from traces.model import Trace

#: Most ranks that one snapshot file holds (each is a device of it).
MAX_SNAPSHOT_DEVICES: Final = 256

TRACE_ENDINGS: Final = (".json", ".json.gz", ".npz")
CHROME_ENDINGS: Final = (".json", ".json.gz")
TIMELINE_ENDINGS: Final = (".csv", ".csv.gz", ".npz", ".parquet", *CHROME_ENDINGS)


class Kept(TypedDict):
    """Arguments of `simulator.replay` and `simulator.estimate`: what is kept for files that are to be written."""

    events: bool
    log: bool
    snapshot: bool
    picture: bool


@dataclass(frozen=True, slots=True)
class Outputs:
    """Paths of the files to write; None for those that nobody asked for. `force` replaces existing ones.

    `output` is the trace itself, as it was replayed; `markdown` the report.
    """

    events: str | None = None
    calls: str | None = None
    timeline: str | None = None
    snapshot: str | None = None
    html: str | None = None
    force: bool = False
    output: str | None = None
    markdown: str | None = None

    @property
    def kept(self) -> Kept:
        """What a replay must keep for them."""
        return {
            "events": self.events is not None,
            "log": self.calls is not None,
            "snapshot": self.snapshot is not None,
            "picture": self.html is not None,
        }

    @property
    def paths(self) -> Mapping[str, str]:
        """The paths asked for, by the name of their option."""
        names = ("output", "events", "calls", "timeline", "snapshot", "html", "markdown")
        return {name: path for name in names if (path := getattr(self, name)) is not None}

    def check(self, source: str) -> None:
        """OutputError if a file could not be written later: exists, has no folder, is the input, is named twice."""
        taken = {os.path.realpath(source): "the input"}
        for name, path in self.paths.items():
            check_output(path, force=self.force)
            real = os.path.realpath(path)
            if real in taken and not _is_special(real):
                raise OutputError(f"{path_text(path)}: --{name} would replace {taken[real]}; choose another name")
            taken[real] = f"the file of --{name}"
        if self.output is not None:
            check_ending("--output", self.output, TRACE_ENDINGS)
        if self.timeline is not None:
            check_ending("--timeline", self.timeline, TIMELINE_ENDINGS)
            if self.timeline.lower().endswith(".parquet"):
                check_parquet(self.timeline)

    def write(self, result: Result, trace: Trace, more: Callable[[Document], Document] = lambda found: found) -> None:
        """Write every file asked for, out of a replay that kept what they need; `more` makes of the replay's document
        the one that its page and report show."""
        if self.output is not None:
            import traces

            traces.write(trace, self.output, force=self.force)
        if self.events is not None:
            from simulator.engine.tables import write_events

            write_events(result, trace, self.events, force=self.force)
        if self.calls is not None:
            from simulator.engine.tables import write_calls

            write_calls(result, self.calls, force=self.force)
        if self.timeline is not None:
            write_timelines(result, self.timeline, force=self.force)
        if self.snapshot is not None:
            write_snapshots(result, self.snapshot, force=self.force)
        if self.html is not None:
            from simulator.reports.html import page as pages

            pages.write(more(pages.document_of(result)), self.html, force=self.force)
        if self.markdown is not None:
            from simulator.reports import markdown, run

            with write_atomically(self.markdown, force=self.force) as file:
                file.write(markdown.render(more(run.document_of(result))).encode())


def check_output(path: str, *, force: bool) -> None:
    """OutputError if `path` cannot be written: it exists (without `force`), is a folder, or its folder is amiss."""
    name = path_text(path)
    if path in ("", "-"):
        raise OutputError("standard output is taken by the report: give a file's name")
    try:
        target = Path(os.path.realpath(path))
        exists, special = target.exists(), _is_special(str(target))
        if target.is_dir():
            raise OutputError(f"{name}: cannot be written: is a directory")
        if exists and not special and not force:
            raise OutputError(f"{name}: exists already; give --force to replace it")
        if not target.parent.is_dir():
            raise OutputError(f"{name}: cannot be written: there is no folder {path_text(target.parent)}")
        if not os.access(target if special else target.parent, os.W_OK):
            raise OutputError(f"{name}: cannot be written: permission denied")
    except OSError as error:
        raise OutputError(f"{name}: cannot be written: {(error.strerror or 'not a file name').lower()}") from None
    except ValueError:  # a zero byte in the path
        raise OutputError(f"{name}: cannot be written: not a file name") from None


def _is_special(path: str) -> bool:
    """Whether `path` is a pipe or a device, written in place."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_ending(option: str, path: str, endings: tuple[str, ...]) -> None:
    """ConfigError if the name of a file says no format of `endings`."""
    if not path.lower().endswith(endings):
        raise ConfigError(f"{option} {path_text(path)}: the name must end in one of {', '.join(endings)}")


def check_parquet(path: str) -> None:
    """ConfigError if pyarrow, an extra, is not installed, which `path` needs: it is to be a Parquet file."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{path_text(path)}: Parquet needs pyarrow; install it, or write .csv or .npz")


def write_timelines(result: Result, path: str, *, force: bool = False) -> None:
    """Write memory over time of all ranks: CSV, npz, Parquet, or Chrome counters for `.json` and `.json.gz`."""
    timelines = [rank.timeline for rank in result.ranks]
    if path.lower().endswith(CHROME_ENDINGS):
        from traces.timelines.chrome import write_chrome

        write_chrome(timelines, path, force=force)
    else:
        from traces.timelines.files import write_timeline

        write_timeline(timelines, path, force=force)


def write_snapshots(result: Result, path: str, *, force: bool = False) -> None:
    """Write one torch snapshot with every rank of `result` as a device, in ascending order of ranks."""
    from traces.snapshot.writer import write_snapshot

    write_snapshot(merged_snapshot(result), path, force=force)


def merged_snapshot(result: Result) -> dict[str, Any]:
    """The snapshots of all ranks as one, in torch's layout: the n-th rank in ascending order is device n.

    ConfigError for more than `MAX_SNAPSHOT_DEVICES` ranks; ReplayError if the replay kept no snapshots.
    """
    groups = {rank: group for group in result.ranks for rank in group.ranks}
    if len(groups) > MAX_SNAPSHOT_DEVICES:
        raise ConfigError(
            f"a snapshot of {len(groups)} ranks is more than a viewer can show: choose at most "
            f"{MAX_SNAPSHOT_DEVICES} with --ranks"
        )
    snapshots = [groups[rank].snapshot for rank in sorted(groups)]
    if not snapshots or any(snapshot is None for snapshot in snapshots):
        raise ReplayError("the replay kept no snapshot: call replay(..., snapshot=True)")
    parts = [dict(snapshot) for snapshot in snapshots if snapshot is not None]
    segments = chain.from_iterable(
        ({**segment, "device": device} for segment in part["segments"]) for device, part in enumerate(parts)
    )
    recorded: list[Any] = [next((trace for trace in part["device_traces"] if trace), []) for part in parts]
    annotations = [
        {**one, "device": device} for device, part in enumerate(parts) for one in part["external_annotations"]
    ]
    return {
        **parts[0],
        "segments": list(segments),
        "device_traces": recorded,
        "external_annotations": annotations,
    }
