"""`explain [FILE|-]`: why memory ran out, from a log, a pasted text or a torch memory snapshot; with a case beside it,
the tensors and the plans that make it fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import BufferedReader
from typing import TYPE_CHECKING, cast

import click

from simulator.options.case import case_of
from simulator.options.common import show, working
from simulator.options.shared import form_options, quiet_option
from traces.errors import TraceError
from traces.text import path_text

if TYPE_CHECKING:
    from graph.case import Case
    from simulator.explain.explain import Beside


@click.command("explain")
@click.argument("file", metavar="[FILE]", default="-")
@click.option("--case", metavar="CASE.json", help="The case that ran: also its tensors, and what would make it fit.")
@form_options
@quiet_option
def command(file: str, case: str | None, as_json: bool, as_markdown: bool, quiet: bool) -> int:
    """Say why memory ran out: the cause, the arithmetic behind it, and what to try first.

    FILE is a log (also of many ranks), or a torch memory snapshot; without one, or with -, the text is read from
    standard input.
    """
    from simulator.explain.explain import explain
    from simulator.reports import explain as reports

    told = None if case is None else case_of(case, {})
    found = explain(_read(file, quiet), "the text" if file == "-" else path_text(file))
    if told is not None:
        with working("trying changes of the case", quiet, compiles=True):
            found = replace(found, beside=_beside(told))
    show(reports, found, as_json, as_markdown)
    return 0


def _beside(case: Case) -> Beside:
    from simulator.estimator.estimate import estimate
    from simulator.explain.explain import Beside
    from simulator.fit.fit import fit

    return Beside(estimate(case), fit(case))


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
