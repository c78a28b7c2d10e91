"""Mutated traces: whatever is done to a file, one clear line or a valid trace comes out, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import traces
from tests.support.strategies import as_trace, documents, json_values, same_trace
from tests.traces.forms.test_native import BASE, in_columns, npz_bytes
from traces.check import check
from traces.errors import LLMemError

FORMS = ("rows", "columns", "npz", "gzip")

_NUMBERS: list[Any] = [
    0,
    1,
    -1,
    22,
    23,
    255,
    256,
    1 << 31,
    1 << 60,
    (1 << 62) - 512,
    1 << 62,
    1 << 63,
    1 << 64,
    1 << 200,
]
_OTHERS: list[Any] = [True, False, None, 0.5, 1.0, -0.0, 1e308, "", "alloc", "\x00", "\ud7ff", [], {}, [[]], "x" * 5000]
EDGES = st.sampled_from(_NUMBERS + _OTHERS)
PIECES = st.sampled_from([b"null", b"-1", b"1e999", b"[[[", b'"', b"NaN"])


def encoded(document: dict[str, Any], form: str) -> bytes:
    """A valid trace as the bytes of a file."""
    if form == "npz":
        return npz_bytes(as_trace(document))
    text = json.dumps(in_columns(document) if form == "columns" else document).encode()
    return gzip.compress(text, mtime=0) if form == "gzip" else text


def survives(data: bytes) -> None:
    """Read `data`; where that works, what was read can be written in every form and is the same again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").write_bytes(data)
        try:
            trace = traces.read(folder / "in")
        except LLMemError as error:
            text = str(error)
            assert "\n" not in text
            assert text.isprintable()
            assert len(text) < 400
            assert [path.name for path in folder.iterdir()] == ["in"]
            return
        check(trace)
        for ending in ("json", "npz"):
            traces.write(trace, folder / f"out.{ending}")
            assert same_trace(traces.read(folder / f"out.{ending}"), trace)
        assert sorted(path.name for path in folder.iterdir()) == ["in", "out.json", "out.npz"]


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """A valid file with a few bytes changed, cut out, doubled or put in."""
    data = bytearray(encoded(draw(documents()), draw(st.sampled_from(FORMS))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 20))
        kind = draw(st.sampled_from(["change", "cut", "double", "insert", "end"]))
        if kind == "change" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + length]
        elif kind == "insert":
            data[at:at] = draw(
                st.binary(max_size=8) | st.sampled_from([b"null", b"-1", b"1e999", b"[[[", b'"', b"NaN"])
            )
        elif kind == "end":
            del data[at:]
    return bytes(data)


@given(mutated_bytes())
def test_mutated_bytes(data: bytes) -> None:
    survives(data)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found = []
    for key in keys:
        found.append((value, key))
        found += _places(value[key])
    return found


@st.composite
def mutated_documents(draw: st.DrawFn) -> dict[str, Any]:
    """A valid document with some values replaced, removed, moved or repeated."""
    document = copy.deepcopy(draw(documents() | st.just(BASE)))
    if draw(st.booleans()):
        document = in_columns(document)
    for _ in range(draw(st.integers(1, 4))):
        places = _places(document)
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["edge", "edge", "edge", "any", "remove", "swap", "repeat", "rename"]))
        if kind == "edge":
            holder[key] = copy.deepcopy(draw(EDGES))  # what is put in may be changed in turn
        elif kind == "any":
            holder[key] = draw(json_values)
        elif kind == "remove":
            del holder[key]
        elif kind == "swap":
            other, place = draw(st.sampled_from(places))
            with contextlib.suppress(KeyError, IndexError):  # one place may lie in another
                holder[key] = copy.deepcopy(other[place])
        elif kind == "repeat" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["id", "op", "bytes", "stream", "extra", "ranks", "x"]))] = holder.pop(key)
        if not document:
            break
    return document


@given(mutated_documents())
def test_mutated_documents(document: dict[str, Any]) -> None:
    survives(json.dumps(document).encode())


@given(st.binary(max_size=200), st.sampled_from([b"", b"{", b"PK\x03\x04", b"\x1f\x8b\x08", b"\x93NUMPY", b"[" * 99]))
def test_random_bytes(data: bytes, start: bytes) -> None:
    survives(start + data)


@pytest.mark.parametrize("form", FORMS)
def test_files_cut_at_every_place(form: str) -> None:
    data = encoded(BASE, form)
    for length in range(0, len(data), 1 if len(data) < 3000 else 13):
        survives(data[:length])
