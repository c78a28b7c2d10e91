"""Starts the process in which a program runs, waits for it, and reads what it left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import traces
from simulator.recording.request import FACTS, TRACE, Request
from simulator.recording.trace import together
from traces.errors import ConfigError, LLMemError
from traces.model import Trace
from traces.text import path_text, quoted

_ROOT: Final = str(Path(__file__).resolve().parents[2])
#: Our folder comes first until our own modules are there: the program's may have their names.
_START: Final = (
    "import sys; sys.path[0] = {root!r}; from simulator.recording.process import main; sys.exit(main({text!r}))"
)


#: Modules that start programs as torchrun does.
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")


class RecordError(LLMemError):
    """Nothing was recorded of a program."""


@dataclass(frozen=True)
class Recorded:
    """What a program did: its exit code, the optimizer's steps, what was assumed of values, what else there is to say
    of the run, and the trace."""

    exit_code: int
    steps: int
    assumptions: tuple[str, ...]
    notices: tuple[str, ...]
    trace: Trace


@dataclass(frozen=True)
class Program:
    """A script or a module (`kind`), its path or name with its arguments, and how many ranks its launcher starts."""

    kind: Literal["script", "module"]
    words: tuple[str, ...]
    world: int = 1


def program_of(words: Sequence[str], module: str | None) -> Program:
    """What stands behind `record`'s options: a program, `python` and a program, or `torchrun`, options and a program.

    ConfigError for what is none of these.
    """
    words = tuple(words)
    if module in _LAUNCHERS:
        return _launched(words)
    if module is not None:
        return Program("module", (module, *words))
    first = Path(words[0]).name if words else ""
    if first == "torchrun":
        return _launched(words[1:])
    if first.startswith("python"):
        words = words[1:]
        if words[:1] == ("-m",):
            return program_of(words[2:], words[1] if len(words) > 1 else "")
    if not words:
        raise ConfigError("no program is given: llmem record [OPTIONS] train.py ARGS...")
    if not Path(words[0]).is_file():
        what = "is not a file" if words[0].endswith(".py") else "is not a Python program, nor a launcher that is known"
        raise ConfigError(f"{path_text(words[0])}: {what}: llmem record [OPTIONS] train.py ARGS...")
    return Program("script", words)


def _launched(words: tuple[str, ...]) -> Program:
    """The program that `torchrun` would start, by its own parser; nodes are as many as it says, at most."""
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    given = get_args_parser().parse_args(list(words))
    if not given.nproc_per_node.isdecimal():
        raise ConfigError(f"--nproc-per-node {given.nproc_per_node}: give a number: there is no GPU to count")
    found = program_of((given.training_script, *given.training_script_args), None) if not given.module else None
    program = found or Program("module", (given.training_script, *given.training_script_args))
    return replace(program, world=int(given.nproc_per_node) * parse_min_max_nnodes(given.nnodes)[1])


def record(request: Request, ranks: Sequence[int] = (0,)) -> Recorded:
    """Run the program of a request (its folder is chosen here) to its end, as each of `ranks` of its world.

    A process each, one after another but for as many as there are cores, with this process's streams. RecordError
    where one ended before it could leave anything.
    """
    with ThreadPoolExecutor(max(1, min(len(ranks), os.cpu_count() or 1))) as pool:
        found = list(pool.map(lambda rank: _recorded(replace(request, rank=rank)), ranks))
    return Recorded(
        exit_code=next((one.exit_code for one in found if one.exit_code), 0),
        steps=found[0].steps,
        assumptions=tuple(dict.fromkeys(text for one in found for text in one.assumptions)),
        notices=tuple(dict.fromkeys(text for one in found for text in one.notices)),
        trace=together([one.trace for one in found]),
    )


def _recorded(request: Request) -> Recorded:
    """What one rank did."""
    with tempfile.TemporaryDirectory(prefix="llmem-record-") as folder:
        code = _run(replace(request, folder=folder))
        facts = Path(folder) / FACTS
        if not facts.exists():
            name = quoted(request.program[0])
            end = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RecordError(f"the process of {name} {end} before anything was recorded")
        found = json.loads(facts.read_text())
        trace = traces.read(Path(folder) / TRACE)
    return Recorded(found["exit_code"], found["steps"], tuple(found["assumptions"]), tuple(found["notices"]), trace)


def _run(request: Request) -> int:
    """The exit code of the process; Ctrl-C reaches it as well, and is waited for."""
    command = [sys.executable, "-c", _START.format(root=_ROOT, text=request.text())]
    process = subprocess.Popen(command, env=_environment(request))
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _environment(request: Request) -> dict[str, str]:
    """That of this process; of a job, with what launchers set, where each rank has a node and its GPU for itself."""
    if request.world == 1:
        return dict(os.environ)
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    places = dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), str(request.rank))
    worlds = dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(request.world))
    return {**os.environ, **alone, **places, **worlds, "TORCHELASTIC_RUN_ID": "none"}
