"""The events of the native trace format as JSON: rows for people, columns for tools, both with the same meaning.

`read_json` and `encode_json` are the two ends. Reading has a fast way, typed by msgspec, for what tools write, and a
slow one that is taken when something is wrong or rows have unknown fields: it finds the first event at fault and says
what to mend.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta, Raw

from traces.check import MAX_INT, REQUIRED, Finding, missing
from traces.errors import TraceError
from traces.forms.document import (
    DECODE_ERRORS,
    Unreadable,
    any_value,
    build,
    decode,
    encode,
    encode_document,
    fault,
    spaced,
)
from traces.model import (
    BOOL_FIELDS,
    DTYPES,
    FIELDS,
    FLOAT_FIELDS,
    INT_FIELDS,
    STRING_FIELDS,
    Column,
    Events,
    Op,
    OpArray,
    Strings,
    Trace,
)
from traces.text import quoted

Layout = Literal["rows", "columns"]

#: From so many events on, a trace is written as columns unless rows are asked for.
COLUMNS_FROM: Final = 1000

OP_CODES: Final[Mapping[str, int]] = {op.name.lower(): int(op) for op in Op}
OP_NAMES: Final[tuple[str, ...]] = tuple(op.name.lower() for op in Op)

_Natural = Annotated[int, Meta(ge=0, le=MAX_INT)]


def read_json(data: bytes) -> Trace:
    """The trace in a JSON text (rows or columns), checked.

    Raises TraceError, or EventError for the first event at fault, without the file's name.
    """
    return build(data.removeprefix(b"\xef\xbb\xbf"), _events)


def encode_json(trace: Trace, layout: Layout | None = None) -> Iterator[bytes]:
    """The pieces of a trace's JSON text, one event or one column a line.

    Without `layout`, a trace of fewer than `COLUMNS_FROM` events is written as rows, a longer one as columns.
    Raises TraceError where the trace's metadata or unknown fields hold what JSON cannot say.
    """
    if layout is None:
        layout = "columns" if sum(len(entry.events) for entry in trace.ranks) >= COLUMNS_FROM else "rows"
    write = _row_lines if layout == "rows" else _column_lines
    return encode_document(trace, lambda _, events: write(events))


# Events: from lists of values to arrays


def _explain(field: str, value: object) -> str:
    """Why `value` cannot stand in `field`; empty where it can."""
    if value is None:
        return ""
    if isinstance(value, Unreadable):
        return value.reason
    if field in INT_FIELDS:
        return _explain_int(value, 1 if field == "pool" else 0)
    if field in BOOL_FIELDS:
        return "" if isinstance(value, bool) else f"must be true or false, not {quoted(value)}"
    if field in FLOAT_FIELDS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number else f"must be a number, not {quoted(value)}"
    if field in STRING_FIELDS:
        return "" if isinstance(value, str) else f"must be text in quotes, not {quoted(value)}"
    return ""


def _explain_int(value: object, least: int) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return f"must be an integer, not {quoted(value)}"
    if isinstance(value, str):
        return f"must be an integer, not the text {quoted(value)}; leave out the quotes"
    if isinstance(value, float):
        return f"must be an integer, not {value!r}; write it without point and exponent"
    if value < least:
        return f"must be {least} or more, is {quoted(value)}"
    return "" if value <= MAX_INT else f"must be below 2^63, is {quoted(value)}"


#: By the type of a column: the msgspec type of a value, and what stands for an absent one (of an integer -1, whatever
#: its default).
_KINDS: Final[Mapping[Any, Any]] = {np.int64: _Natural, np.bool_: bool, np.float64: float, np.int32: str | None}
_ABSENT: Final[Mapping[Any, Any]] = {np.int64: -1, np.bool_: False, np.float64: np.nan, np.int32: None}
_COLUMN_TYPES: Final[Mapping[str, Any]] = {
    field: GenericAlias(list, _KINDS[dtype] | None) for field, dtype in DTYPES.items()
}


def _to_column(field: str, values: Sequence[Any]) -> Column:
    """The column of values that are right in kind."""
    if field in STRING_FIELDS:
        return Strings.encode(values)
    absent = _ABSENT[DTYPES[field]]
    column: Column = np.array([absent if value is None else value for value in values], dtype=DTYPES[field])
    return column


def _settle(
    op: OpArray, columns: dict[str, Column], extra: Mapping[str, Mapping[int, Any]]
) -> tuple[Events, Finding | None]:
    """Give absent integers their defaults, and find the first event that lacks a field it needs."""
    absent = [_first_absent(op, columns, field) for field in ("bytes", "stream")]
    finding = min((found for found in absent if found), key=lambda found: found.event, default=None)
    settled: dict[str, Column] = {}
    for field, column in columns.items():
        if field not in INT_FIELDS:
            settled[field] = column
            continue
        assert isinstance(column, np.ndarray)
        if INT_FIELDS[field] != -1:
            empty = column < 0
            if field == "stream":
                empty &= op != Op.SYNCHRONIZE
            column[empty] = INT_FIELDS[field]
        settled[field] = column
    events = Events(op, settled, extra)
    return (events if finding is None else events.take(slice(finding.event))), finding


def _first_absent(op: OpArray, columns: Mapping[str, Column], field: str) -> Finding | None:
    """The first event without a needed `field` whose absence does not show once it has its default."""
    needs = np.array([field in REQUIRED.get(each, ()) for each in Op])
    mask = needs[op]
    if field in columns:
        mask &= cast(Any, columns[field]) < 0
    index = int(mask.argmax()) if len(mask) else 0
    return Finding(index, field, missing(int(op[index]), field)) if len(mask) and mask[index] else None


def _from_lists(ops: Sequence[Any], lists: Mapping[str, Sequence[Any]]) -> tuple[Events, Finding | None]:
    """Events from lists of any values: the slow way, that finds the first value at fault."""
    findings = list(_bad_ops(ops))
    for field, values in lists.items():
        findings += _bad_values(field, values)
    finding = min(findings, key=lambda found: found.event, default=None)
    stop = len(ops) if finding is None else finding.event
    op = np.array([OP_CODES[name] for name in ops[:stop]], dtype=np.uint8)
    columns = {field: _to_column(field, lists[field][:stop]) for field in FIELDS if field in lists}
    extra = {}
    for field, values in lists.items():
        if field not in FIELDS:
            known = {i: value for i, value in enumerate(values[:stop]) if value is not None}
            if known:
                extra[field] = known
    events, lacking = _settle(op, columns, extra)
    return events, lacking or finding


def _bad_ops(ops: Sequence[Any]) -> Iterator[Finding]:
    for index, name in enumerate(ops):
        if isinstance(name, str) and name in OP_CODES:
            continue
        if name is None:
            reason = "missing; every event needs an op"
        elif isinstance(name, Unreadable):
            reason = name.reason
        else:
            reason = f"{quoted(name)} is not an op; {_nearest(name)}"
        yield Finding(index, "op", reason)
        return


def _nearest(name: object) -> str:
    near = difflib.get_close_matches(name[:40].lower(), OP_NAMES, n=1) if isinstance(name, str) else []
    return f"did you mean '{near[0]}'?" if near else "traces/schema.json lists them"


def _bad_values(field: str, values: Sequence[Any]) -> Iterator[Finding]:
    if field in FIELDS:
        try:
            msgspec.convert(values, _COLUMN_TYPES[field])
            return
        except msgspec.ValidationError:
            pass
    for index, value in enumerate(values):
        if reason := _explain(field, value):
            yield Finding(index, field, reason)
            return


# Events as rows


def _row_type(fields: Iterable[str]) -> Any:
    """The type of an event with these fields, none of which it must have."""
    declared = [(field, _KINDS[DTYPES[field]], _ABSENT[DTYPES[field]]) for field in fields]
    return msgspec.defstruct("Row", [("op", str), *declared], gc=False, forbid_unknown_fields=True)


#: An event with the fields that most traces have, and with any field of the format.
_Row: Final = _row_type(("id", "bytes", "stream", "address", "step", "category", "name"))
_FullRow: Final = _row_type(FIELDS)


def _rows(raw: Raw) -> tuple[Events, Finding | None]:
    for kind in (_Row, _FullRow):
        try:
            rows: Sequence[Any] = msgspec.json.decode(raw, type=GenericAlias(list, kind))
            op = _op_column([row.op for row in rows])
        except (*DECODE_ERRORS, KeyError):
            continue
        columns = {field: _row_column(field, rows) for field in FIELDS if field in kind.__struct_fields__}
        return _settle(op, {field: column for field, column in columns.items() if not _is_empty(column)}, {})
    return _rows_slowly(raw)


def _is_empty(column: Column) -> bool:
    """Whether no event has the field."""
    if isinstance(column, Strings):
        return not column.table
    if column.dtype == np.bool_:
        return not column.any()
    return bool(np.isnan(column).all() if column.dtype == np.float64 else (column < 0).all())


def _op_column(names: Sequence[str]) -> OpArray:
    """The op codes; KeyError on an unknown name."""
    return np.fromiter(map(OP_CODES.__getitem__, names), dtype=np.uint8, count=len(names))


def _row_column(field: str, rows: Sequence[Any]) -> Column:
    values = map(attrgetter(field), rows)
    if field in STRING_FIELDS:
        return Strings.encode(list(values))
    column: Column = np.fromiter(values, dtype=DTYPES[field], count=len(rows))
    return column


def _rows_slowly(raw: Raw) -> tuple[Events, Finding | None]:
    """Rows that have unknown fields, nulls or a fault."""
    rows = _any_rows(raw)
    wrong = next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        events, finding = _transpose(rows[:wrong])
        return events, finding or Finding(wrong, "op", f"an event must be an object, not {_words(rows[wrong])}")
    return _transpose(rows)


def _words(value: object) -> str:
    return value.reason if isinstance(value, Unreadable) else quoted(value)


def _any_rows(raw: Raw) -> list[Any]:
    try:
        return cast(list[Any], msgspec.json.decode(raw))
    except DECODE_ERRORS:
        return [_any_row(row) for row in decode(raw, list[Raw], "events")]


def _any_row(raw: Raw) -> Any:
    try:
        return {key: any_value(value) for key, value in msgspec.json.decode(raw, type=dict[str, Raw]).items()}
    except DECODE_ERRORS:
        return any_value(raw)


def _transpose(rows: Sequence[Mapping[str, Any]]) -> tuple[Events, Finding | None]:
    lists: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        for field, value in row.items():
            values = lists.get(field)
            if values is None:
                values = lists[field] = [None] * len(rows)
            values[index] = value
    ops = lists.pop("op", [None] * len(rows))
    return _from_lists(ops, lists)


# Events as columns


def _columns(raw: Raw, place: str) -> tuple[Events, Finding | None]:
    raws = decode(raw, dict[str, Raw], f"{place}: field 'events'")
    raws = {field: each for field, each in raws.items() if bytes(memoryview(each)[:4]) != b"null"}
    if "op" not in raws:
        if raws:
            raise TraceError(f"{place}: the columns of 'events' lack 'op'")
        return Events(np.zeros(0, dtype=np.uint8)), None
    try:
        op = _op_column(msgspec.json.decode(raws["op"], type=list[str]))
        columns: dict[str, Column] = {}
        for field in FIELDS:
            if field in raws:
                columns[field] = _to_column(field, msgspec.json.decode(raws[field], type=_COLUMN_TYPES[field]))
    except (*DECODE_ERRORS, KeyError):
        return _columns_slowly(raws, place)
    extra: dict[str, dict[int, Any]] = {}
    lengths = {field: len(column) for field, column in columns.items()}
    for field in raws.keys() - FIELDS - {"op"}:
        values = _any_list(raws[field], field, place)
        if any(isinstance(value, Unreadable) for value in values):
            return _columns_slowly(raws, place)
        lengths[field] = len(values)
        extra[field] = {i: value for i, value in enumerate(values) if value is not None}
    _same_length(len(op), lengths, place)
    return _settle(op, columns, {field: values for field, values in extra.items() if values})


def _columns_slowly(raws: Mapping[str, Raw], place: str) -> tuple[Events, Finding | None]:
    lists = {field: _any_list(raw, field, place) for field, raw in raws.items()}
    _same_length(len(lists["op"]), {field: len(values) for field, values in lists.items()}, place)
    return _from_lists(lists.pop("op"), lists)


def _any_list(raw: Raw, field: str, place: str) -> list[Any]:
    """The values of a column, whatever they are."""
    value = any_value(raw)
    if isinstance(value, Unreadable):
        try:
            return [any_value(each) for each in msgspec.json.decode(raw, type=list[Raw])]
        except DECODE_ERRORS as error:
            raise TraceError(f"{place}: column {quoted(field)}: {fault(error)}") from None
    if not isinstance(value, list):
        raise TraceError(f"{place}: column {quoted(field)} must be a list, not {quoted(value)}")
    return value


def _same_length(count: int, lengths: Mapping[str, int], place: str) -> None:
    for field, length in lengths.items():
        if length != count:
            raise TraceError(f"{place}: column {quoted(field)} has {length} values, 'op' has {count}; make them equal")


def _events(_: int, place: str, raw: Raw) -> tuple[Events, Finding | None]:
    """Events in either form, by the first character."""
    first = bytes(memoryview(raw)[:1])
    if first == b"[":
        return _rows(raw)
    if first == b"{":
        return _columns(raw, place)
    raise TraceError(f"{place}: field 'events' must be a list of events or an object of columns")


# Writing events


def _needs(op: OpArray, field: str) -> Any:
    """A mask of the events whose op cannot do without `field`."""
    return np.array([field in REQUIRED.get(each, ()) for each in Op])[op]


def _is_default(events: Events, field: str) -> Any:
    """A mask of the events that need not say `field`."""
    plain = Events(events.op)
    if field in STRING_FIELDS:
        mask = events.strings(field).codes < 0
    elif field in FLOAT_FIELDS:
        mask = np.isnan(events.floats(field))
    elif field in BOOL_FIELDS:
        mask = ~events.bools(field) & ((events.op != Op.HOLD_EVENTS) | (field != "hold"))
    else:
        mask = events.ints(field) == plain.ints(field)
    return mask & ~_needs(events.op, field)


def said_fields(events: Events) -> list[str]:
    """The fields that some event has to say, in the format's order."""
    names = [field for field in FIELDS if field in events.columns or _needs(events.op, field).any()]
    return [field for field in names if not _is_default(events, field).all()]


def values_of(events: Events, field: str) -> list[Any]:
    """The values of a field as plain Python, None where it has none; a default of 0 or false is said."""
    if field in STRING_FIELDS:
        column = events.strings(field)
        return list(map((*column.table, None).__getitem__, column.codes.tolist()))
    if field in BOOL_FIELDS:
        return cast(list[Any], events.bools(field).tolist())
    if field in FLOAT_FIELDS:
        return [None if value != value else value for value in events.floats(field).tolist()]
    return [None if value == -1 else value for value in events.ints(field).tolist()]


def _row_lines(events: Events) -> Iterator[bytes]:
    rows: list[dict[str, Any]] = [{"op": OP_NAMES[op]} for op in events.op.tolist()]
    for field in said_fields(events):
        values = values_of(events, field)
        for index in np.flatnonzero(~_is_default(events, field)).tolist():
            rows[index][field] = values[index]
    for field, known in events.extra.items():
        for index, value in known.items():
            rows[index][field] = value
    yield b"["
    for index, row in enumerate(rows):
        yield (b",\n    " if index else b"\n    ") + spaced(row)
    yield b"]"


def _column_lines(events: Events) -> Iterator[bytes]:
    yield b'{\n    "op": ' + encode([OP_NAMES[op] for op in events.op.tolist()])
    for field in said_fields(events):
        yield b",\n    " + encode(field) + b": " + encode(values_of(events, field))
    for field, known in events.extra.items():
        yield b",\n    " + encode(field) + b": " + encode([known.get(i) for i in range(len(events))])
    yield b"}"
