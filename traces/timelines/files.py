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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np

from traces.errors import OutputError
from traces.files import write_atomically
from traces.model import Int64Array
from traces.text import path_text
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


@dataclass(frozen=True)
class _Rows:
    """The rows of one rank, by column: -1 where there is no clock, phase or step; `phase` has codes into `names`."""

    columns: Mapping[str, Int64Array]
    names: tuple[str, ...]


def write_timeline(
    timelines: Sequence[Timeline],
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    force: bool = False,
) -> None:
    """Write timelines as a table: `csv`, `npz` or `parquet`, by the path's ending or `to`. CSV is gzipped for `.gz`.

    In an `.npz`, `time_ns` and `step` are -1 where absent and `phase` holds codes into `phase_names`. Nothing appears
    under the path before all is written. Raises OutputError where the file exists and `force` is not given, cannot be
    written, has another ending, or is Parquet without pyarrow.
    """
    form = to or _form(path)
    parquet = _pyarrow(path) if form == "parquet" else None
    rows = [_rows(timeline) for timeline in timelines]
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


def _rows(timeline: Timeline) -> _Rows:
    count = len(timeline)
    absent = np.full(count, -1, dtype=np.int64)
    phase, step = absent.copy(), absent.copy()
    names: dict[str, int] = {}
    for span in timeline.phases:
        phase[span.start : span.stop] = names.setdefault(span.name, len(names))
        step[span.start : span.stop] = -1 if span.step is None else span.step
    columns = (
        np.full(count, min(timeline.ranks), dtype=np.int64),
        np.arange(count, dtype=np.int64),
        absent if timeline.time_ns is None else timeline.time_ns,
        phase,
        step,
        timeline.allocated,
        timeline.active,
        timeline.reserved,
    )
    return _Rows(dict(zip(COLUMNS, columns, strict=True)), tuple(names))


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
            for start in range(0, len(part.columns["event"]), _CHUNK):
                writer.writerows(_csv_rows(part, slice(start, start + _CHUNK)))
        text.flush()
        text.detach()


def _csv_rows(part: _Rows, chunk: slice) -> Iterator[tuple[Any, ...]]:
    """Rows as text; what is absent is empty."""
    found: dict[str, list[Any]] = {name: column[chunk].tolist() for name, column in part.columns.items()}
    for name in ("time_ns", "step"):
        found[name] = ["" if value < 0 else value for value in found[name]]
    found["phase"] = ["" if code < 0 else part.names[code] for code in found["phase"]]
    return zip(*found.values(), strict=True)


# npz


def _write_npz(rows: list[_Rows], file: IO[bytes]) -> None:
    names = list(dict.fromkeys(name for part in rows for name in part.names))
    parts: list[dict[str, Int64Array]] = [{**part.columns, "phase": _recode(part, names)} for part in rows]
    nothing = np.empty(0, dtype=np.int64)
    arrays: dict[str, Any] = {name: np.concatenate([nothing, *(part[name] for part in parts)]) for name in COLUMNS}
    np.savez_compressed(file, **arrays, phase_names=np.array(names, dtype=np.str_))


def _recode(part: _Rows, names: list[str]) -> Int64Array:
    """Phase codes into the names of all ranks."""
    codes = np.array([names.index(name) for name in part.names] + [-1], dtype=np.int64)
    return codes[part.columns["phase"]]


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
    columns = {name: pyarrow.array(column, mask=column < 0) for name, column in part.columns.items()}
    names = np.array([*part.names, None], dtype=object)
    columns["phase"] = pyarrow.array(names[part.columns["phase"]], type=pyarrow.string())
    return pyarrow.Table.from_arrays(list(columns.values()), schema=schema)
