"""`run --events` and `run --calls`: what stood after every event, and the device calls, as CSV (gzipped for `.gz`).

Rows are built as arrays of characters, column by column, some hundred thousand rows at a time.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from simulator.engine.result import LOG_KINDS, EventLog, RankResult, Result
from traces.errors import ReplayError
from traces.files import write_atomically
from traces.model import Events, Int64Array, Op, Trace

EVENTS_HEADER: Final = (
    "rank,index,op,id,address,reserved_bytes,allocated_bytes,active_bytes,segments,num_alloc_retries,num_ooms"
)
CALLS_HEADER: Final = "rank,index,kind,address,bytes"

#: Kinds of a log entry that are calls of the device.
CALLS: Final = ("A", "X", "F", "R", "V", "M", "U", "Y")
#: Those of them that come page by page: neighbouring ranges in a row are one call.
PAGED: Final = ("M", "U")

_ROWS: Final = 1 << 17
_KEEP_ROWS: Final = 1 << 20
_WITH_ID: Final = np.isin(np.arange(256), [Op.ALLOC, Op.FREE, Op.RECORD_STREAM, Op.COMPLETE_FREE])

Chars = tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]


def write_events(result: Result, trace: Trace, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write one row an event of every rank of `result`: ranks in ascending order, equal ranks repeated.

    `result` comes of `replay(trace, events=True)`. The row of a free or record_stream has its block's address; address
    0 means none, -1 out of memory; `id` is empty where the op has none. Bytes throughout.
    OutputError if the file exists (without `force`) or cannot be written.
    """
    events = {rank: group.events for group in trace.ranks for rank in group.ranks}
    _write(result, path, force, EVENTS_HEADER, lambda group: _event_rows(group, events[group.ranks[0]]))


def write_calls(result: Result, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write one row a device call, in order: `index` is the event that caused it, `kind` one of `CALLS`.

    Calls that map (or unmap) one range after the other in one event are one row.
    `result` comes of `replay(trace, log=True)`. OutputError as `write_events`.
    """
    _write(result, path, force, CALLS_HEADER, _call_rows)


def _write(
    result: Result,
    path: str | os.PathLike[str],
    force: bool,
    header: str,
    rows: Callable[[RankResult], Iterator[bytes]],
) -> None:
    """Write the rows of every rank in ascending order, each with its rank before it."""
    groups = {rank: group for group in result.ranks for rank in group.ranks}
    kept: dict[int, list[bytes]] = {}
    with write_atomically(path, force=force, mode="wb") as file, _compressed(file, path) as stream:
        stream.write(f"{header}\n".encode())
        for rank in sorted(groups):
            group = groups[rank]
            chunks: Any = kept.get(id(group))
            if chunks is None:
                chunks = rows(group)
                if len(group.ranks) > 1 and group.events <= _KEEP_ROWS:
                    chunks = kept[id(group)] = list(chunks)
            prefix = b"%d," % rank
            for chunk in chunks:
                stream.write(prefix + chunk[:-1].replace(b"\n", b"\n" + prefix) + b"\n")


class _Plain:
    """A file that is left open at the end of a `with`, as `gzip.GzipFile` leaves its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write = file.write

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _compressed(file: IO[bytes], path: str | os.PathLike[str]) -> Any:
    if os.fspath(path).endswith(".gz"):
        return gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=file, mtime=0)
    return _Plain(file)


def _event_rows(group: RankResult, events: Events) -> Iterator[bytes]:
    columns = group.columns
    if columns is None:
        raise ReplayError("the replay kept no columns: call replay(..., events=True)")
    ids = events.ints("id")
    names = [op.name.lower() for op in Op]
    for part in _parts(len(columns.address)):
        op = events.op[part]
        yield _join(
            _digits(np.arange(part.start, part.stop, dtype=np.int64)),
            _names(op, names),
            _digits(ids[part], _WITH_ID[op]),
            _digits(columns.address[part]),
            _digits(columns.reserved[part]),
            _digits(columns.allocated[part]),
            _digits(columns.active[part]),
            _digits(columns.segments[part]),
            _digits(columns.num_alloc_retries[part]),
            _digits(columns.num_ooms[part]),
        )


def _call_rows(group: RankResult) -> Iterator[bytes]:
    log = group.log
    if log is None:
        raise ReplayError("the replay kept no log: call replay(..., log=True)")
    kind, event, address, size = _joined_calls(log)
    for part in _parts(len(kind)):
        yield _join(
            _digits(event[part]),
            _names(kind[part], LOG_KINDS),
            _digits(address[part]),
            _digits(size[part]),
        )


def _joined_calls(log: EventLog) -> tuple[npt.NDArray[np.uint8], Int64Array, Int64Array, Int64Array]:
    """Kind, event, address and bytes of the device calls of a log, those of neighbouring pages in a row as one."""
    calls = np.flatnonzero(np.isin(log.kind, [LOG_KINDS.index(kind) for kind in CALLS]))
    kind, event, address, size = log.kind[calls], log.event[calls], log.address[calls], log.bytes[calls]
    goes_on = np.zeros(len(calls), dtype=np.bool_)
    goes_on[1:] = np.isin(kind[1:], [LOG_KINDS.index(name) for name in PAGED])
    goes_on[1:] &= (kind[1:] == kind[:-1]) & (event[1:] == event[:-1]) & (address[1:] == address[:-1] + size[:-1])
    firsts = np.flatnonzero(~goes_on)
    total = np.add.reduceat(size, firsts) if len(firsts) else size
    return kind[firsts], event[firsts], address[firsts], total


def _parts(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))


def _digits(values: Int64Array, shown: npt.NDArray[np.bool_] | None = None) -> Chars:
    """The decimal digits of `values`, right-aligned, and which characters count; nothing where not `shown`."""
    negative = values < 0
    rest = np.abs(values).astype(np.uint64)
    width = len(str(int(rest.max(initial=0))))
    chars = np.empty((len(values), width + 1), dtype=np.uint8)
    keep = np.empty((len(values), width + 1), dtype=np.bool_)
    ten = np.uint64(10)
    for place in range(width, 0, -1):
        keep[:, place] = rest > 0
        quotient = rest // ten
        chars[:, place] = (rest - quotient * ten).astype(np.uint8) + ord("0")
        rest = quotient
    keep[:, width] = True
    _put_signs(chars, keep, negative)
    if shown is not None:
        keep &= shown[:, None]
    return chars, keep


def _put_signs(chars: npt.NDArray[np.uint8], keep: npt.NDArray[np.bool_], negative: npt.NDArray[np.bool_]) -> None:
    """A minus sign before the first digit of every negative number (the character in front of it is never kept)."""
    chars[:, 0], keep[:, 0] = ord("-"), False
    rows = np.flatnonzero(negative)
    if len(rows):
        before = keep[rows].argmax(axis=1) - 1
        chars[rows, before], keep[rows, before] = ord("-"), True


def _names(codes: npt.NDArray[np.uint8], names: Sequence[str]) -> Chars:
    """The names that `codes` stand for, left-aligned, and which characters count."""
    table = np.array([name.encode() for name in names])
    chars = table.view(np.uint8).reshape(len(names), -1)[codes]
    return chars, chars != 0


def _join(*columns: Chars) -> bytes:
    """Rows of CSV out of columns of characters."""
    rows = len(columns[0][0])
    marks = [ord(",")] * (len(columns) - 1) + [ord("\n")]
    chars, keep = [], []
    for (column, kept), mark in zip(columns, marks, strict=True):
        chars += [column, np.full((rows, 1), mark, dtype=np.uint8)]
        keep += [kept, np.ones((rows, 1), dtype=np.bool_)]
    return np.hstack(chars)[np.hstack(keep)].tobytes()
