"""`explain [FILE|-]`: why memory ran out, from a log, a pasted text or a torch memory snapshot."""

from __future__ import annotations

import sys
from io import BufferedReader
from typing import cast

import click

from simulator.commands.common import show
from simulator.options.shared import form_options
from traces.errors import TraceError
from traces.text import path_text


@click.command("explain")
@click.argument("file", metavar="[FILE]", default="-")
@form_options
@click.option("-q", "--quiet", is_flag=True, help="No notes and no progress on stderr.")
def command(file: str, as_json: bool, as_markdown: bool, quiet: bool) -> int:
    """Say why memory ran out: the cause, the arithmetic behind it, and what to try first.

    FILE is a log (also of many ranks), or a torch memory snapshot; without one, or with -, the text is read from
    standard input.
    """
    from simulator.explain.explain import explain
    from simulator.reports import explain as reports

    found = explain(_read(file, quiet), "the text" if file == "-" else path_text(file))
    show(reports, found, as_json, as_markdown)
    return 0


def _read(file: str, quiet: bool) -> bytes:
    """The bytes of a file, or of standard input; TraceError where they cannot be read."""
    from traces.files import read_bytes, read_stream

    if file != "-":
        return read_bytes(file)
    if sys.stdin is None:
        raise TraceError("there is no standard input: name a file")
    if sys.stdin.isatty() and not quiet:
        print("paste the error, then Ctrl-D:", file=sys.stderr)
    return read_stream(cast(BufferedReader, sys.stdin.buffer), "the text")
