"""Starts the process in which a program runs, waits for it, and reads what it left."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import traces
from simulator.recording.request import FACTS, TRACE, Request
from traces.errors import ConfigError, LLMemError
from traces.model import Trace
from traces.text import path_text, quoted

_ROOT: Final = str(Path(__file__).resolve().parents[2])
#: Our folder comes first until our own modules are there: the program's may have their names.
_START: Final = (
    "import sys; sys.path[0] = {root!r}; from simulator.recording.process import main; sys.exit(main({text!r}))"
)


class RecordError(LLMemError):
    """Nothing was recorded of a program."""


@dataclass(frozen=True)
class Recorded:
    """What a program did: its exit code, the optimizer's steps, what was assumed of values, and the trace of rank 0."""

    exit_code: int
    steps: int
    assumptions: tuple[str, ...]
    trace: Trace


def command_of(words: Sequence[str], module: str | None) -> tuple[str, tuple[str, ...]]:
    """`script` or `module`, and the program with its arguments, of what stands behind `record`'s options.

    `python train.py ...` and `python -m package.module ...` mean what they say. ConfigError for what is no program.
    """
    program = tuple(words)
    if module is not None:
        return "module", (module, *program)
    if program and Path(program[0]).name.startswith("python"):
        program = program[1:]
        if program[:1] == ("-m",):
            return command_of(program[2:], program[1] if len(program) > 1 else "")
    if not program:
        raise ConfigError("no program is given: llmem record [OPTIONS] train.py ARGS...")
    if not Path(program[0]).is_file():
        what = "is not a file" if program[0].endswith(".py") else "is not a Python program (launchers are not followed)"
        raise ConfigError(f"{path_text(program[0])}: {what}: llmem record [OPTIONS] train.py ARGS...")
    return "script", program


def record(request: Request) -> Recorded:
    """Run the program of a request (its folder is chosen here) to its end, with this process's streams.

    RecordError where its process ended before it could leave anything.
    """
    with tempfile.TemporaryDirectory(prefix="llmem-record-") as folder:
        code = _run(replace(request, folder=folder))
        facts = Path(folder) / FACTS
        if not facts.exists():
            name = quoted(request.program[0])
            end = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RecordError(f"the process of {name} {end} before anything was recorded")
        found = json.loads(facts.read_text())
        trace = traces.read(Path(folder) / TRACE)
    return Recorded(found["exit_code"], found["steps"], tuple(found["assumptions"]), trace)


def _run(request: Request) -> int:
    """The exit code of the process; Ctrl-C reaches it as well, and is waited for."""
    process = subprocess.Popen([sys.executable, "-c", _START.format(root=_ROOT, text=request.text())])
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
