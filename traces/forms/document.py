"""The head of a trace (all but the events) as JSON: shared by the JSON and the `.npz` form.

`build` reads a document whose events another function reads; `encode_document` writes one. Unknown fields of the top
level, of `metadata`, `allocator`, devices and ranks are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Raw

from traces.check import Finding, as_error, check
from traces.errors import TraceError
from traces.model import (
    DEFAULT_DEVICE,
    FORMAT,
    VERSION,
    Device,
    Events,
    Initial,
    InitialBlock,
    InitialSegment,
    RankEvents,
    Trace,
)
from traces.text import one_line, quoted

_T = TypeVar("_T")

#: A reader of the `events` of one rank, given the entry's index, how to name its place, and the JSON: what it could
#: read, and the first event at fault (that event and the rest are left out).
EventsReader = Callable[[int, str, Raw], tuple[Events, Finding | None]]

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


# JSON, with one-line reasons


def fault(error: Exception) -> str:
    """Why decoding failed, in a few words."""
    text = str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if "out of range" in text:
        return "a number is out of range"
    if "truncated" in text:
        return "the JSON ends early; is the file complete?"
    return one_line(text)


def decode(data: bytes | Raw, type_: type[_T], place: str) -> _T:
    """Decode a part of a file that must be of `type_`."""
    try:
        return msgspec.json.decode(data, type=type_)
    except DECODE_ERRORS as error:
        raise TraceError(f"{place}: {fault(error)}") from None


class Unreadable:
    """Stands for a JSON value that Python cannot hold (1e400, broken UTF-8)."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def any_value(raw: Raw) -> Any:
    """A JSON value, or what is wrong with it as `Unreadable`."""
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS as error:
        return Unreadable(fault(error))


# Reading


def build(data: bytes, read_events: EventsReader) -> Trace:
    """The trace of a document whose events `read_events` reads; checked, errors as `read_json`.

    Where an event cannot be read, the events before it are checked first: the earliest fault is the one reported.
    """
    try:
        return _build(data, read_events)
    except (RecursionError, MemoryError, OverflowError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "too large for this machine"
        raise TraceError(reason) from None


def _build(data: bytes, read_events: EventsReader) -> Trace:
    document = _document(data)
    allocator = _object(document, "allocator", "")
    conf = _text(allocator.pop("conf", None), "allocator", "conf") or ""
    release = _text(allocator.pop("release", None), "allocator", "release")
    devices = tuple(_device(each, f"device {i}") for i, each in enumerate(_list(document, "devices", "")))
    groups = {name: _group(each, f"group {quoted(name)}") for name, each in _object(document, "groups", "").items()}
    metadata = _object(document, "metadata", "")
    entries, notes = [], set()
    wrong = None
    raws = document.pop("ranks")
    extra = {name: _value(each, name) for name, each in document.items()}
    if allocator:
        extra["allocator"] = allocator
    for index, raw in enumerate(decode(raws, list[Raw], "field 'ranks'")):
        entry, finding, dropped = _entry(index, raw, read_events)
        entries.append(entry)
        notes |= dropped
        if finding is not None:
            wrong = finding, entry
            break
    trace = Trace(tuple(entries), metadata, conf, release, devices, groups, extra, tuple(sorted(notes)))
    check(trace)
    if wrong is not None:
        raise as_error(*wrong)
    return trace


def _document(data: bytes) -> dict[str, Raw]:
    """The top level of a trace, its format and version checked and taken out."""
    if not data.strip():
        raise TraceError("the file is empty")
    try:
        document = msgspec.json.decode(data, type=dict[str, Raw])
    except msgspec.ValidationError:
        found = any_value(Raw(data))
        if isinstance(found, Unreadable):
            raise TraceError(f"not valid JSON: {found.reason}") from None
        raise TraceError(f"a trace is a JSON object, this file holds {quoted(found)}") from None
    except DECODE_ERRORS as error:
        raise TraceError(f"not valid JSON: {fault(error)}") from None
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if name not in document:
            raise TraceError(f"not a memory trace: field '{name}' is missing; write {_json(name)}: {_json(expected)}")
        found = _value(document.pop(name), name)
        if found != expected or isinstance(found, bool):
            raise TraceError(f"field '{name}': must be {_json(expected)}, not {quoted(found)}")
    if "ranks" not in document:
        raise TraceError("field 'ranks' is missing; it lists the ranks and their events")
    return document


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _place(place: str, field: str) -> str:
    return f"{place}: field '{field}'" if place else f"field '{field}'"


def _value(raw: Raw, field: str) -> Any:
    """A value of any kind, without its events."""
    value = any_value(raw)
    if isinstance(value, Unreadable):
        raise TraceError(f"field {quoted(field)}: {value.reason}")
    return value


def _kind(value: object, kind: type[_T], words: str, place: str, field: str) -> _T:
    """`value`, which must be of `kind`; null only where the caller has dealt with it."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TraceError(f"{_place(place, field)}: must be {words}, not {quoted(value)}")
    return value


def _int(value: object, place: str, field: str) -> int:
    return _kind(value, int, "an integer", place, field)


def _text(value: object, place: str, field: str) -> str | None:
    return None if value is None else _kind(value, str, "text in quotes", place, field)


def _object(holder: dict[str, Raw], field: str, place: str) -> dict[str, Any]:
    """Take an optional object out of its holder."""
    value = _value(holder.pop(field), field) if field in holder else None
    return {} if value is None else _kind(value, dict, "an object", place, field)


def _list(holder: dict[str, Raw], field: str, place: str) -> list[Any]:
    """Take an optional list out of its holder."""
    value = _value(holder.pop(field), field) if field in holder else None
    return [] if value is None else _kind(value, list, "a list", place, field)


def _device(value: object, place: str) -> Device:
    fields = {name: each for name, each in _kind(value, dict, "an object", place, "devices").items()}
    known: dict[str, Any] = {"name": _text(fields.pop("name", None), place, "name") or DEFAULT_DEVICE.name}
    if fields.get("total_bytes") is None:
        if known["name"] != DEFAULT_DEVICE.name:
            raise TraceError(f"{place}: field 'total_bytes' is missing; write what cudaMemGetInfo shows as total")
        fields["total_bytes"] = DEFAULT_DEVICE.total_bytes
    for name in ("total_bytes", "context_bytes", "va_base", "launch_ns"):
        number = fields.pop(name, None)
        if number is not None:
            known[name] = _int(number, place, name)
    placement = _text(fields.pop("placement", None), place, "placement")
    if placement is not None:
        known["placement"] = placement
    addresses = fields.pop("segment_addresses", None)
    if addresses is not None:
        addresses = _kind(addresses, list, "a list of integers", place, "segment_addresses")
        known["segment_addresses"] = tuple(_int(each, place, "segment_addresses") for each in addresses)
    return Device(**known, extra=fields)


def _group(value: object, place: str) -> tuple[tuple[int, ...], ...]:
    """A list of ranks, or a list of such lists."""
    ranks = _kind(value, list, "a list of ranks", place, "groups")
    parts = ranks if ranks and isinstance(ranks[0], list) else [ranks]
    words = "a list of ranks, or a list of lists of ranks"
    return tuple(
        tuple(_int(rank, place, "groups") for rank in _kind(part, list, words, place, "groups")) for part in parts
    )


def _entry(index: int, raw: Raw, read_events: EventsReader) -> tuple[RankEvents, Finding | None, set[str]]:
    """One entry of `ranks`, the first event at fault, and notes of what is not kept."""
    fields = decode(raw, dict[str, Raw], f"field 'ranks', entry {index}")
    ranks = _ranks(fields.pop("rank", None), index)
    place = f"rank {quoted(ranks[0])}" if ranks else f"field 'ranks', entry {index}"
    device = any_value(fields.pop("device")) if "device" in fields else None
    initial, dropped = _initial(any_value(fields.pop("initial")) if "initial" in fields else None, place)
    raw_events = fields.pop("events", Raw(b"[]"))
    extra = {name: _value(each, name) for name, each in fields.items()}
    events, finding = read_events(index, place, raw_events)
    number = 0 if device is None else _int(device, place, "device")
    return RankEvents(ranks, events, number, initial, extra), finding, dropped


def _ranks(raw: Raw | None, index: int) -> tuple[int, ...]:
    place = f"field 'ranks', entry {index}"
    value = None if raw is None else any_value(raw)
    if value is None:
        return (index,)
    if isinstance(value, list):
        return tuple(_int(rank, place, "rank") for rank in value)
    return (_kind(value, int, "an integer or a list of integers", place, "rank"),)


_SEGMENT_FIELDS: Final = (
    "address",
    "bytes",
    "stream",
    "pool",
    "expandable",
    "blocks",
    "va_address",
    "va_bytes",
    "pool_id",
)


def _initial(value: object, where: str) -> tuple[Initial | None, set[str]]:
    """The state at the start, and notes of fields that are not kept."""
    if value is None:
        return None, set()
    fields = _kind(value, dict, "an object", where, "initial")
    segments = _kind(fields.get("segments", []), list, "a list", where, "segments")
    unknown = {f"initial.{name}" for name in fields.keys() - {"segments"}}
    parsed = []
    for i, each in enumerate(segments):
        place = f"{where}, initial segment {i}"
        segment = _kind(each, dict, "an object", place, "segments")
        unknown |= {f"initial.segments.{name}" for name in segment.keys() - _SEGMENT_FIELDS}
        parsed.append(_segment(segment, place))
    return Initial(tuple(parsed)), {f"the unknown field {quoted(name)} is not kept" for name in unknown}


def _segment(fields: dict[str, Any], place: str) -> InitialSegment:
    for name in ("address", "bytes", "pool", "blocks"):
        if fields.get(name) is None:
            raise TraceError(f"{place}: field '{name}' is missing")
    known: dict[str, Any] = {}
    for name in ("address", "bytes", "stream", "va_address", "va_bytes", "pool_id"):
        if fields.get(name) is not None:
            known[name] = _int(fields[name], place, name)
    known.setdefault("stream", 0)
    expandable = fields.get("expandable")
    known["expandable"] = expandable is not None and _kind(expandable, bool, "true or false", place, "expandable")
    blocks = _kind(fields["blocks"], list, "a list", place, "blocks")
    pool = cast(Any, _text(fields["pool"], place, "pool"))
    return InitialSegment(
        **known, pool=pool, blocks=tuple(_block(b, f"{place}, block {j}") for j, b in enumerate(blocks))
    )


def _block(value: object, place: str) -> InitialBlock:
    if not isinstance(value, list) or len(value) != 4:
        raise TraceError(f"{place}: write [id or null, bytes, requested bytes, state]")
    number, size, requested, state = value
    return InitialBlock(
        None if number is None else _int(number, place, "id"),
        _int(size, place, "bytes"),
        _int(requested, place, "requested bytes"),
        cast(Any, _kind(state, str, "text in quotes", place, "state")),
    )


# Writing


def encode_document(trace: Trace, write_events: Callable[[int, Events], Iterable[bytes]]) -> Iterator[bytes]:
    """The pieces of a document whose events `write_events` writes (given the entry's index)."""
    yield b'{"format": ' + encode(FORMAT) + b', "version": ' + encode(VERSION)
    for name, value in _head_fields(trace).items():
        yield b",\n " + encode(name) + b": " + spaced(value)
    yield b',\n "ranks": ['
    for index, entry in enumerate(trace.ranks):
        yield b"\n  {" if index == 0 else b",\n  {"
        for name, value in _entry_fields(entry).items():
            yield encode(name) + b": " + spaced(value) + b",\n   "
        yield b'"events": '
        yield from write_events(index, entry.events)
        yield b"}"
    yield b"]}\n"


def encode(value: object) -> bytes:
    """A value as JSON on one line; TraceError where JSON cannot say it."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except RecursionError:
        raise TraceError("cannot be written as JSON: nested too deeply") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"cannot be written as JSON: {one_line(error)}") from None


def spaced(value: object) -> bytes:
    """As `encode`, with a blank after every comma and colon."""
    return msgspec.json.format(encode(value), indent=0)


def _plain(value: object) -> Any:
    """numpy's numbers and arrays as Python's."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"objects of type {type(value).__name__} are not JSON")


def _without(fields: Mapping[str, Any], reserved: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in set(reserved)}


def _head_fields(trace: Trace) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    extra = dict(trace.extra)
    beside = extra.pop("allocator", {})  # unknown fields of `allocator` are kept here
    allocator = dict(_without(beside, ("conf", "release"))) if isinstance(beside, Mapping) else {}
    if trace.conf:
        allocator["conf"] = trace.conf
    if trace.release is not None:
        allocator["release"] = trace.release
    if trace.metadata:
        fields["metadata"] = trace.metadata
    if allocator:
        fields["allocator"] = allocator
    if trace.devices:
        fields["devices"] = [_device_fields(device) for device in trace.devices]
    if trace.groups:
        fields["groups"] = {name: parts[0] if len(parts) == 1 else parts for name, parts in trace.groups.items()}
    return fields | _without(extra, ("format", "version", "ranks", "metadata", "devices", "groups"))


def _device_fields(device: Device) -> dict[str, Any]:
    plain = Device(device.name, device.total_bytes)
    fields: dict[str, Any] = {"name": device.name, "total_bytes": device.total_bytes}
    for name in ("context_bytes", "va_base", "placement", "segment_addresses", "launch_ns"):
        if getattr(device, name) != getattr(plain, name):
            fields[name] = getattr(device, name)
    return fields | _without(device.extra, Device.__dataclass_fields__)


def _entry_fields(entry: RankEvents) -> dict[str, Any]:
    fields: dict[str, Any] = {"rank": entry.ranks[0] if len(entry.ranks) == 1 else entry.ranks}
    if entry.device:
        fields["device"] = entry.device
    if entry.initial is not None:
        fields["initial"] = {"segments": [_segment_fields(segment) for segment in entry.initial.segments]}
    return fields | _without(entry.extra, ("rank", "device", "initial", "events"))


def _segment_fields(segment: InitialSegment) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "address": segment.address,
        "bytes": segment.bytes,
        "stream": segment.stream,
        "pool": segment.pool,
        "expandable": segment.expandable,
    }
    if segment.va_address is not None:
        fields |= {"va_address": segment.va_address, "va_bytes": segment.va_bytes}
    if segment.pool_id:
        fields["pool_id"] = segment.pool_id
    fields["blocks"] = [[block.id, block.bytes, block.requested, block.state] for block in segment.blocks]
    return fields
