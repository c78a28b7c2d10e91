"""The columnar binary form of a trace: numpy's `.npz`, for traces of millions of events.

An archive holds `trace.npy`, the JSON of the native format as bytes, and one array a column. In that JSON the
`events` of a rank are `{"length": n, "strings": {field: [text, ...]}, "extra": {field: [[event, value], ...]}}`; the
columns of the rank at index i are `i.op.npy` (uint8, values of `traces.model.Op`), `i.id.npy` and so on: int64,
bool, float64, or for text int32 codes into the table under `strings`, -1 where absent.

Arrays are read here rather than by `numpy.load`: sizes, kinds and shapes are checked before memory is taken, and
nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

import numpy as np
from msgspec import Raw
from numpy.lib import format as npy

from traces.check import REQUIRED, Finding, missing
from traces.errors import TraceError
from traces.files import MAX_BYTES
from traces.forms.document import build, decode, encode, encode_document
from traces.forms.json_events import said_fields
from traces.model import (
    DTYPES,
    FIELDS,
    STRING_FIELDS,
    Column,
    Events,
    Strings,
    Trace,
)
from traces.text import one_line, quoted

_ARCHIVE_ERRORS: Final = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    SyntaxError,
    TypeError,
    OverflowError,
    NotImplementedError,
    RuntimeError,  # encrypted members
    tokenize.TokenError,
)
_DOCUMENT: Final = "trace"
_MAX_HEADER: Final = 10_000
_CHUNK: Final = 1 << 24


# Reading


def read_npz(source: str | os.PathLike[str] | IO[bytes], *, limit: int = MAX_BYTES) -> Trace:
    """The trace in an `.npz` file, checked; at most `limit` bytes of arrays are read.

    Raises TraceError, or EventError for the first event at fault, without the file's name.
    """
    with _faults_of("archive"):
        archive = zipfile.ZipFile(source)
    with archive:
        members = _members(archive, limit)
        document = _array(archive, members, _DOCUMENT, np.uint8).tobytes()
        return build(document, lambda index, place, raw: _read_events(archive, members, index, place, raw))


@contextlib.contextmanager
def _faults_of(what: str) -> Iterator[None]:
    """What zipfile, zlib and numpy raise on damaged data, as a TraceError."""
    try:
        yield
    except MemoryError:
        raise TraceError(f"damaged .npz {what}: does not fit in this machine's memory") from None
    except _ARCHIVE_ERRORS as error:
        raise TraceError(f"damaged .npz {what}: {one_line(error) or type(error).__name__}") from None


def _members(archive: zipfile.ZipFile, limit: int) -> Mapping[str, zipfile.ZipInfo]:
    """The arrays of an archive by name."""
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if _DOCUMENT not in members:
        raise TraceError(f"not a memory trace: the archive has no '{_DOCUMENT}.npy'")
    if sum(info.file_size for info in members.values()) > limit:
        raise TraceError(f"the archive unpacks to more than {limit} bytes; refused")
    return members


def _array(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str, kind: Any) -> Any:
    """One array of `kind` (integers: any that fit); its declared size must be that of the member."""
    info = members[name]
    with _faults_of(f"array '{name}'"), archive.open(info) as member:
        dtype, count = _header(member, name)
        if dtype.kind != np.dtype(kind).kind and not (dtype.kind in "iu" and np.dtype(kind).kind in "iu"):
            raise TraceError(f"array '{name}': must be of {np.dtype(kind).name}, is of {one_line(dtype)}")
        if count * dtype.itemsize != info.file_size - member.tell():
            raise TraceError(f"array '{name}': its shape does not agree with its size")
        data = np.empty(count * dtype.itemsize, dtype=np.uint8)
        _fill(member, data, name)
        member.read(1)  # at the end the checksum is compared
    return _fitting(data, dtype, name, kind)


def _fill(member: IO[bytes], data: Any, name: str) -> None:
    """Read as many bytes as `data` has room for."""
    done = 0
    while done < len(data):
        piece = member.read(min(_CHUNK, len(data) - done))
        if not piece:
            raise TraceError(f"array '{name}': truncated")
        data[done : done + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        done += len(piece)


def _header(member: IO[bytes], name: str) -> tuple[np.dtype[Any], int]:
    """The kind and length of a one-dimensional array of plain numbers."""
    version = npy.read_magic(member)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise TraceError(f"array '{name}': .npy version {version} is not known")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        shape, _, dtype = read(member, max_header_size=_MAX_HEADER)
    if dtype.hasobject or dtype.kind not in "iubf" or not dtype.isnative or len(shape) != 1 or shape[0] < 0:
        raise TraceError(f"array '{name}': must be a list of numbers, is {one_line(dtype)} of shape {one_line(shape)}")
    return dtype, int(shape[0])


def _fitting(data: Any, dtype: np.dtype[Any], name: str, kind: Any) -> Any:
    """The array in `data` as `kind`, where every value fits."""
    if kind is np.bool_ and len(data) and data.max() > 1:
        raise TraceError(f"array '{name}': has values other than true and false")
    array = data.view(dtype)
    if array.dtype == kind:
        return array
    if array.dtype.kind in "iu" and len(array):
        limits = np.iinfo(kind)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise TraceError(f"array '{name}': has values outside {limits.min} to {limits.max}")
    return array.astype(kind)


def _read_events(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], index: int, place: str, raw: Raw
) -> tuple[Events, Finding | None]:
    """The columns of the rank at `index`."""
    said = decode(raw, dict[str, Any], f"{place}: field 'events'")
    if f"{index}.op" not in members:
        raise TraceError(f"{place}: the archive has no '{index}.op.npy'")
    op = _array(archive, members, f"{index}.op", np.uint8)
    if said.get("length", len(op)) != len(op):
        raise TraceError(f"{place}: 'length' is {quoted(said['length'])}, the columns have {len(op)} values")
    columns: dict[str, Column] = {}
    for field in FIELDS:
        name = f"{index}.{field}"
        if name in members:
            array = _array(archive, members, name, DTYPES[field])
            if len(array) != len(op):
                raise TraceError(f"{place}: column '{field}' has {len(array)} values, 'op' has {len(op)}")
            columns[field] = Strings(array, _table(said, field, place)) if field in STRING_FIELDS else array
    events = Events(op, columns, _read_extra(said, place, len(op)))
    finding = _first_lacking(events)
    return (events if finding is None else events.take(slice(finding.event))), finding


def _first_lacking(events: Events) -> Finding | None:
    """The first op without a column that it needs; of columns that are there, `check` sees absent values."""
    findings = []
    for op, fields in REQUIRED.items():
        for field in fields:
            if field not in events.columns and (events.op == op).any():
                findings.append(Finding(int((events.op == op).argmax()), field, missing(op, field)))
    return min(findings, key=lambda found: found.event, default=None)


def _table(said: Mapping[str, Any], field: str, place: str) -> tuple[str, ...]:
    strings = said.get("strings")
    table = strings.get(field) if isinstance(strings, dict) else None
    if not isinstance(table, list) or not all(isinstance(text, str) for text in table):
        raise TraceError(f"{place}: the table of texts of column '{field}' is missing or not a list of texts")
    return tuple(table)


def _read_extra(said: Mapping[str, Any], place: str, count: int) -> dict[str, dict[int, Any]]:
    """Unknown fields, kept as [event, value] pairs."""
    extra = said.get("extra", {})
    if not isinstance(extra, dict):
        raise TraceError(f"{place}: 'extra' must be an object")
    kept: dict[str, dict[int, Any]] = {}
    for field, pairs in extra.items():
        if not isinstance(pairs, list) or not all(_is_pair(pair, count) for pair in pairs):
            raise TraceError(f"{place}: unknown field {quoted(field)} must be a list of [event, value] pairs")
        kept[field] = dict(pairs)
    return kept


def _is_pair(pair: object, count: int) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], int)
        and not isinstance(pair[0], bool)
        and 0 <= pair[0] < count
    )


# Writing


def write_npz(trace: Trace, file: IO[bytes], *, compressed: bool = False) -> None:
    """Write the `.npz` form to an open file; not compressed by default, so that it loads at the speed of the disk.

    Raises TraceError where metadata or unknown fields hold what JSON cannot say.
    """
    fields = [said_fields(entry.events) for entry in trace.ranks]
    arrays: dict[str, Any] = {}
    for index, entry in enumerate(trace.ranks):
        arrays[f"{index}.op"] = entry.events.op
        for field in fields[index]:
            column = entry.events.column(field)
            arrays[f"{index}.{field}"] = column.codes if isinstance(column, Strings) else column
    pieces = encode_document(trace, lambda index, events: [encode(_said(events, fields[index]))])
    document = b"".join(pieces)
    save: Any = np.savez_compressed if compressed else np.savez
    target = file if file.seekable() else io.BytesIO()
    save(target, **{_DOCUMENT: np.frombuffer(document, dtype=np.uint8)}, **arrays)
    if isinstance(target, io.BytesIO) and target is not file:
        file.write(target.getbuffer())


def _said(events: Events, fields: Sequence[str]) -> dict[str, Any]:
    """What the JSON says of a rank's events."""
    said: dict[str, Any] = {"length": len(events)}
    strings = {field: events.strings(field).table for field in fields if field in STRING_FIELDS}
    if strings:
        said["strings"] = strings
    if events.extra:
        said["extra"] = {field: list(known.items()) for field, known in events.extra.items()}
    return said
