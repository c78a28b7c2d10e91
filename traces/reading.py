"""Reading any trace file: what it holds is told by its content."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from traces.errors import TraceError
from traces.files import MAX_BYTES, Content, open_maybe_gzip, read_stream, sniff
from traces.forms.columnar import read_npz
from traces.forms.json_events import read_json
from traces.model import Trace
from traces.text import path_text

HEAD: Final = 64


def content(path: str | os.PathLike[str]) -> Content:
    """What a file holds ("json", "npz", "pickle", "empty" or "unknown"), inside its gzip layer if it has one."""
    with open_maybe_gzip(path) as stream:
        return sniff(stream.peek(HEAD)[:HEAD])


def read_trace(path: Path, *, release: str | None = None, snapshot: Callable[[bytes], Trace] | None = None) -> Trace:
    """As `traces.read`; `snapshot` makes a trace of the bytes of a torch memory snapshot."""
    with open_maybe_gzip(path) as stream:
        kind = sniff(stream.peek(HEAD)[:HEAD])
        try:
            if kind == "pickle":
                if snapshot is None:
                    raise TraceError("a torch memory snapshot, not a trace: simulator.read takes it")
                return snapshot(read_stream(stream, path))
            trace = _read_native(stream, path, kind)
        except TraceError as error:
            raise in_file(error, path) from None
    return trace if release is None else replace(trace, release=release)


def in_file(error: TraceError, path: str | os.PathLike[str]) -> TraceError:
    """`error` with the file's name in front, where it does not have it yet."""
    text, name = str(error), path_text(path)
    if not text.startswith(f"{name}: "):
        error.args = (f"{name}: {text}",)
    return error


def _read_native(stream: io.BufferedReader, path: Path, kind: Content) -> Trace:
    if kind == "json":
        return read_json(read_stream(stream, path))
    if kind == "npz":
        # A plain file is read member by member; what cannot be sought in is read whole.
        plain = stream.seekable() and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        return read_npz(stream if plain else io.BytesIO(read_stream(stream, path)), limit=MAX_BYTES)
    if kind == "empty":
        raise TraceError("the file is empty")
    raise TraceError("neither a trace (JSON or .npz) nor a torch memory snapshot (pickle)")
