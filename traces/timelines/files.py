"""Timelines as tables: CSV, npz, and Parquet where pyarrow is installed.

Long form, one row an event of a rank: rank, event (its index), time_ns (the simulated host's clock; absent where the
trace has order only), phase, step, allocated_bytes, active_bytes, reserved_bytes. Ranks that share a timeline appear
once, under the first of them.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np

from traces.errors import OutputError
from traces.files import write_atomically
from traces.model import Int64Array
from traces.text import path_text
from traces.timelines.downsampling import downsample
from traces.timelines.timeline import Timeline

COLUMNS: Final = (
    "rank",
    "event",
    "time_ns",
    "phase",
    "step",
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
)
ENDINGS: Final = (".csv", ".csv.gz", ".npz", ".parquet")
_CHUNK: Final = 100_000  # rows of CSV, or of a Parquet row group, at a time

__all__ = ["COLUMNS", "downsample", "write_timeline"]


@dataclass(frozen=True)
class _Rows:
    """Rows of one rank. `time_ns` is None where there is no clock; `phase` has codes into `names`, -1 for none."""

    rank: int
    event: Int64Array
    time_ns: Int64Array | None
    phase: Int64Array
    names: tuple[str, ...]
    step: Int64Array
    allocated: Int64Array
    active: Int64Array
    reserved: Int64Array


def write_timeline(
    timelines: Sequence[Timeline],
    path: str | os.PathLike[str],
    *,
    max_points: int | None = None,
    to: str | None = None,
    force: bool = False,
) -> None:
    """Write timelines as a table: `csv`, `npz` or `parquet`, by the path's ending or `to`. CSV is gzipped for `.gz`.

    `max_points` keeps about so many rows of each rank, with every peak (see `downsample`); by default all are kept. In
    an `.npz`, `time_ns` and `step` are -1 where absent and `phase` holds codes into `phase_names`. Nothing appears
    under the path before all is written. Raises OutputError where the file exists and `force` is not given, cannot be
    written, has another ending, or is Parquet without pyarrow.
    """
    form = to or _form(path)
    parquet = _pyarrow(path) if form == "parquet" else None
    rows = [_rows(timeline, max_points) for timeline in timelines]
    with write_atomically(path, force=force) as file:
        if parquet is not None:
            _write_parquet(rows, file, *parquet)
        elif form == "npz":
            _write_npz(rows, file)
        else:
            _write_csv(rows, file, compress=os.fspath(path).lower().endswith(".gz"))


def _form(path: str | os.PathLike[str]) -> str:
    """The form that the path's ending says."""
    name = path_text(path).lower()
    if not name.endswith(ENDINGS):
        raise OutputError(
            f"{path_text(path)}: timelines are written as {', '.join(ENDINGS)}; choose one of these endings"
        )
    return name.removesuffix(".gz").rpartition(".")[2]


def _rows(timeline: Timeline, max_points: int | None) -> _Rows:
    count = len(timeline)
    kept = np.arange(count, dtype=np.int64) if max_points is None else downsample(timeline, max_points)
    phase = np.full(count, -1, dtype=np.int64)
    step = np.full(count, -1, dtype=np.int64)
    names: dict[str, int] = {}
    for span in timeline.phases:
        phase[span.start : span.stop] = names.setdefault(span.name, len(names))
        step[span.start : span.stop] = -1 if span.step is None else span.step
    return _Rows(
        rank=min(timeline.ranks),
        event=kept,
        time_ns=None if timeline.time_ns is None else timeline.time_ns[kept],
        phase=phase[kept],
        names=tuple(names),
        step=step[kept],
        allocated=timeline.allocated[kept],
        active=timeline.active[kept],
        reserved=timeline.reserved[kept],
    )


# CSV


def _write_csv(rows: list[_Rows], file: IO[bytes], *, compress: bool) -> None:
    with ExitStack() as stack:
        binary: Any = file
        if compress:
            binary = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0))
        text = io.TextIOWrapper(binary, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for part in rows:
            for start in range(0, len(part.event), _CHUNK):
                writer.writerows(_csv_rows(part, slice(start, start + _CHUNK)))
        text.flush()
        text.detach()


def _csv_rows(part: _Rows, chunk: slice) -> Iterator[tuple[Any, ...]]:
    """Rows as text; what is absent is empty."""
    events = part.event[chunk].tolist()
    times = [""] * len(events) if part.time_ns is None else part.time_ns[chunk].tolist()
    phases = ["" if code < 0 else part.names[code] for code in part.phase[chunk].tolist()]
    steps = ["" if step < 0 else step for step in part.step[chunk].tolist()]
    sizes = (part.allocated[chunk].tolist(), part.active[chunk].tolist(), part.reserved[chunk].tolist())
    ranks = [part.rank] * len(events)
    return zip(ranks, events, times, phases, steps, *sizes, strict=True)


# npz


def _write_npz(rows: list[_Rows], file: IO[bytes]) -> None:
    names = list(dict.fromkeys(name for part in rows for name in part.names))
    phases = [_recode(part, names) for part in rows]
    absent = [np.full(len(part.event), -1, dtype=np.int64) for part in rows]
    arrays: dict[str, Any] = {
        "rank": _joined([np.full(len(part.event), part.rank, dtype=np.int64) for part in rows]),
        "event": _joined([part.event for part in rows]),
        "time_ns": _joined(
            [none if part.time_ns is None else part.time_ns for part, none in zip(rows, absent, strict=True)]
        ),
        "phase": _joined(phases),
        "step": _joined([part.step for part in rows]),
        "allocated_bytes": _joined([part.allocated for part in rows]),
        "active_bytes": _joined([part.active for part in rows]),
        "reserved_bytes": _joined([part.reserved for part in rows]),
        "phase_names": np.array(names, dtype=np.str_),
    }
    np.savez_compressed(file, **arrays)


def _recode(part: _Rows, names: list[str]) -> Int64Array:
    """Phase codes into the names of all ranks."""
    codes = np.array([names.index(name) for name in part.names] + [-1], dtype=np.int64)
    return codes[part.phase]


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


# Parquet


def _pyarrow(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """pyarrow and its Parquet writer."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise OutputError(
            f"{path_text(path)}: Parquet needs pyarrow: pip install 'vramsim[parquet]' (or write .csv or .npz)"
        ) from None
    return pyarrow, pyarrow.parquet


def _write_parquet(rows: list[_Rows], file: IO[bytes], pyarrow: Any, parquet: Any) -> None:
    kinds = {"phase": pyarrow.string()}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in COLUMNS])
    with parquet.ParquetWriter(file, schema) as writer:
        for part in rows:
            writer.write_table(_table(part, schema, pyarrow), row_group_size=_CHUNK)


def _table(part: _Rows, schema: Any, pyarrow: Any) -> Any:
    """A rank's rows as an Arrow table; what is absent is null."""
    count = len(part.event)
    names = np.array([*part.names, None], dtype=object)
    columns = [
        pyarrow.array(np.full(count, part.rank, dtype=np.int64)),
        pyarrow.array(part.event),
        pyarrow.nulls(count, pyarrow.int64()) if part.time_ns is None else pyarrow.array(part.time_ns),
        pyarrow.array(names[part.phase], type=pyarrow.string()),
        pyarrow.array(part.step, mask=part.step < 0),
        pyarrow.array(part.allocated),
        pyarrow.array(part.active),
        pyarrow.array(part.reserved),
    ]
    return pyarrow.Table.from_arrays(columns, schema=schema)
