"""Writing a trace in the native forms: JSON as rows or columns, gzipped or not, and `.npz`."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from typing import IO, Any, Final, cast

from traces.check import check
from traces.errors import OutputError
from traces.files import write_atomically
from traces.forms.json_events import Layout, encode_json
from traces.model import Trace
from traces.text import path_text, quoted

#: Forms that `write` knows by name, and the layout of their JSON (None: by the number of events).
FORMS: Final[Mapping[str, str | None]] = {
    "json": None,
    "json-rows": "rows",
    "rows": "rows",
    "json-columns": "columns",
    "columns": "columns",
    "npz": None,
}


def write_trace(trace: Trace, path: str | os.PathLike[str], *, to: str | None = None, force: bool = False) -> None:
    """As `traces.write`."""
    form = _form(path) if to is None else to
    if form not in FORMS:
        raise OutputError(f"there is no form {quoted(form)}; one of {', '.join(FORMS)}")
    check(trace)
    with write_atomically(path, force=force) as file:
        if form == "npz":
            from traces.forms.columnar import write_npz

            write_npz(trace, file)
        else:
            _write_json(trace, file, cast("Layout | None", FORMS[form]), os.fspath(path).endswith(".gz"))


def _form(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path).lower()
    if name.endswith((".json", ".json.gz")) or name == "-":
        return "json"
    if name.endswith(".npz"):
        return "npz"
    raise OutputError(f"{path_text(path)}: the ending does not say the form; end it in .json, .json.gz or .npz")


def _write_json(trace: Trace, file: IO[Any], layout: Layout | None, zipped: bool) -> None:
    if not zipped:
        file.writelines(encode_json(trace, layout))
        return
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
        for piece in encode_json(trace, layout):
            packed.write(piece)
