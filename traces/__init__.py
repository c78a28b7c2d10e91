"""The language of the project: memory traces, their file forms, readers and writers.

`read` takes a trace in any form, by its content; `write` writes the native forms. The trace in memory
is `traces.model.Trace`; the format is described in `schema.json` and shown in `samples/`. Nothing heavy is loaded
before it is needed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.model import Device, Events, Initial, InitialBlock, InitialSegment, Op, RankEvents, Strings, Trace

__all__ = [
    "Device",
    "Events",
    "Initial",
    "InitialBlock",
    "InitialSegment",
    "Op",
    "RankEvents",
    "Strings",
    "Trace",
    "read",
    "write",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from traces import model

        return getattr(model, name)
    raise AttributeError(f"module 'traces' has no attribute '{name}'")


def read(path: str | os.PathLike[str], *, release: str | None = None) -> Trace:
    """Read and check a trace: native JSON (rows or columns) or `.npz`; gzipped or not.

    What a file holds is told by its content, never by its name. `release` ("2.11") overrides what the file says.
    Memory snapshots of torch are read by `simulator.read`. Raises TraceError, with the file's name, where it cannot be
    used; EventError, which names rank, event index and field, where one event is wrong.
    """
    from traces.reading import read_trace

    return read_trace(Path(path), release=release)


def write(trace: Trace, path: str | os.PathLike[str], *, to: str | None = None, force: bool = False) -> None:
    """Check a trace and write it in a native form: `json`, `rows`, `columns` or `npz`.

    Without `to` the path's ending decides (`.json`, `.json.gz`, `.npz`); `json` takes rows for fewer than 1000 events
    and columns for more. JSON is gzipped where the path ends in `.gz`. `-` is standard output. Nothing appears under
    the path before all is written. Raises OutputError where the file exists and `force` is not given, or cannot be
    written; TraceError where the trace is not a valid one.
    """
    from traces.writing import write_trace

    write_trace(trace, path, to=to, force=force)
