"""`explain [FILE|-]`: why memory ran out, from a log, a pasted text or a torch memory snapshot; with a case or a
program beside it, the tensors and the plans that make it fit."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from io import BufferedReader
from typing import TYPE_CHECKING, cast

import click

from graph.case import KEYS
from simulator.options.case import case_of
from simulator.options.common import show, working
from simulator.options.program import request_of
from simulator.options.shared import form_options, quiet_option
from traces.errors import TraceError
from traces.text import path_text

if TYPE_CHECKING:
    from graph.case import Case
    from simulator.explain.explain import Beside
    from simulator.recording.request import Request


@click.command("explain")
@click.argument("file", metavar="[FILE]", default="-")
@click.option("--case", metavar="CASE.json", help="The case that ran: also its tensors, and what would make it fit.")
@click.option("--program", metavar="'COMMAND'", help="The program that ran, in quotes: the same (`llmem fit`).")
@click.option("--gpu", metavar="GPU", help="The program's GPU (default: A100-80GB); its memory is the message's.")
@form_options
@quiet_option
def command(
    file: str, case: str | None, program: str | None, gpu: str | None, as_json: bool, as_markdown: bool, quiet: bool
) -> int:
    """Say why memory ran out: the cause, the arithmetic behind it, and what to try first.

    FILE is a log (also of many ranks), or a torch memory snapshot; without one, or with -, the text is read from
    standard input.
    """
    from simulator.explain.explain import explain
    from simulator.reports import explain as reports

    if case is not None and program is not None:
        raise click.UsageError("--case and --program exclude each other")
    if gpu is not None and program is None:
        raise click.UsageError("--gpu is of --program")
    told = None if case is None else case_of(case, {})
    found = explain(_read(file, quiet), "the text" if file == "-" else path_text(file))
    if told is not None:
        with working("trying changes of the case", quiet, compiles=True):
            found = replace(found, beside=_beside(told))
    if program is not None:
        total = next((message.total for message, _ in found.messages if message.total), None)
        request, _ = request_of(
            tuple(shlex.split(program)), gpu=gpu or KEYS["gpu"].default, memory=total, release=KEYS["release"].default
        )
        with working("recording, with changes of the program", quiet, compiles=True):
            found = replace(found, beside=_program(request))
    show(reports, found, as_json, as_markdown)
    return 0


def _beside(case: Case) -> Beside:
    from simulator.estimator.estimate import estimate
    from simulator.explain.explain import Beside
    from simulator.fit.fit import fit

    return Beside(fit(case), estimate(case).worst)


def _program(request: Request) -> Beside:
    from simulator.explain.explain import Beside
    from simulator.fit.program import fit_program

    found = fit_program(request)
    return Beside(found, found.rank)


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
