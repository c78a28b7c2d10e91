"""Timelines as Chrome trace events (JSON), for Perfetto and chrome://tracing.

Every rank is a process with two counters, `allocated` and `reserved` (one counter of several values would stack
them), its phases and regions as slices, and its peaks and out-of-memory errors as instants. Times are the simulated
host's microseconds, or the index of the event where a trace has order only.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Final, TextIO

from traces.files import write_atomically
from traces.model import Int64Array
from traces.text import path_text
from traces.timelines.downsampling import downsample
from traces.timelines.timeline import Timeline

MAX_POINTS: Final = 100_000  #: points of a counter at most; browsers hold little more


def write_chrome(timelines: Sequence[Timeline], path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write timelines as one Chrome trace; gzipped where the path ends in `.gz`.

    A counter has at most `MAX_POINTS` points, chosen so that no peak is lost. Nothing appears under the path before
    all is written. Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    with write_atomically(path, force=force) as file, ExitStack() as stack:
        binary: Any = file
        if path_text(path).endswith(".gz"):
            binary = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0))
        text = io.TextIOWrapper(binary, encoding="utf-8", newline="\n", write_through=False)
        _write(timelines, text)
        text.flush()
        text.detach()


def _write(timelines: Sequence[Timeline], text: TextIO) -> None:
    text.write('{"displayTimeUnit":"ms","traceEvents":[')
    separator = "\n"
    for timeline in timelines:
        for event in _events(timeline):
            text.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
    text.write("\n]}\n")


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 0", "ranks 0-3, 6"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """All trace events of one timeline."""
    pid = min(timeline.ranks)
    name = ranks_text(timeline.ranks)
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": "phases"}}
    if not len(timeline):
        return
    time = _clock(timeline)
    for phase in timeline.phases:
        begin, end = time(phase.start), time(min(phase.stop, len(timeline) - 1))
        args = {} if phase.step is None else {"step": phase.step}
        yield {"ph": "X", "name": phase.name, "pid": pid, "tid": 0, "ts": begin, "dur": end - begin, "args": args}
    for region in timeline.regions:
        begin, end = time(region.start), time(min(region.stop, len(timeline) - 1))
        yield {"ph": "X", "name": region.name, "pid": pid, "tid": 1 + region.depth, "ts": begin, "dur": end - begin}
    indices = downsample(timeline, MAX_POINTS)
    yield from _counter("allocated", timeline.allocated, indices, time, pid)
    yield from _counter("reserved", timeline.reserved, indices, time, pid)
    for title, column in (("peak allocated", timeline.allocated), ("peak reserved", timeline.reserved)):
        at = int(column.argmax())
        yield _instant(title, time(at), pid, {"bytes": int(column[at]), "event": at})
    for at in timeline.ooms:
        yield _instant("out of memory", time(at), pid, {"event": at})


def _clock(timeline: Timeline) -> Callable[[int], float]:
    """Microseconds of an event."""
    clock = timeline.time_ns
    if clock is None:
        return float
    return lambda index: int(clock[index]) / 1000


def _counter(
    name: str, values: Int64Array, indices: Int64Array, time: Callable[[int], float], pid: int
) -> Iterator[dict[str, Any]]:
    """The points of a counter at which it changes, and the last."""
    last = None
    for index in indices.tolist():
        value = int(values[index])
        if value != last or index == len(values) - 1:
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time(index), "args": {name: value}}
            last = value


def _instant(name: str, ts: float, pid: int, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": args}
