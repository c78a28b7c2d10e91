"""A server of the Model Context Protocol: `estimate`, `record`, `fit`, `explain` and `compare` as an assistant's tools.

Each runs the command of its name and answers in Markdown; options are those of the command, in one line, as a person
types them. A prediction of "out of memory" is an answer, a wrong option an error with the command's own words.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

import click
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from simulator.cli import COMMANDS, command_of, main
from simulator.integrations.process import llmem

_ABOUT: Final = (
    "Peak GPU memory of PyTorch training before it runs, without a GPU: bytes are exact where the program is. "
    "`options` of a tool are command-line options; ask `options` for those of a command."
)
#: Exit codes of answers: it fits, it does not, it grew.
_ANSWERS: Final = (0, 3, 4)


def server() -> MCPServer:
    """The server, to be run on a transport."""
    made: MCPServer = MCPServer("llmem", instructions=_ABOUT)
    for tool in (estimate, record, fit, explain, compare, options):
        made.tool(structured_output=False)(tool)
    return made


def estimate(model: str, options: str = "") -> str:
    """What a training run of a model needs of its GPU, and where the memory goes.

    `model`: a name, a hub id, a config.json or module:function. `options`: such as "--dtype bf16 --batch 2 --seq 2048
    --lora 16 --gpu RTX4090", "--strategy fsdp2 --world 8".
    """
    return _said(["estimate", model, *shlex.split(options), "--markdown"])


def record(program: str, options: str = "") -> str:
    """Run a training script unmodified on a GPU that is not there; peaks, or where it runs out of memory.

    `program`: "train.py ARGUMENTS", "-m package.module ARGUMENTS" or "-- torchrun --nproc-per-node 8 train.py". Its own
    code runs. `options`: such as "--gpu A100-80GB --steps 3 --ranks 0".
    """
    return _said(["record", *shlex.split(options), *shlex.split(program)], errors=True)


def fit(run: str, options: str = "") -> str:
    """The cheapest changes that make a run fit its GPU, each proved by a replay.

    `run`: a model as for `estimate`, or a program as for `record`, whose own code runs then. `options` as there; also
    "--keep batch,seq,dtype", "--gpus 2".
    """
    return _said(["fit", "--markdown", *shlex.split(options), *shlex.split(run)])


def explain(text: str, case: str = "", program: str = "") -> str:
    """Why memory ran out, from the text of an error or a log.

    With the run beside it also its tensors, and what would make it fit. `case`: a file with the case that ran;
    `program`: what ran, as for `record`.
    """
    beside = {"--case": case, "--program": program}
    words = [word for option, value in beside.items() if value for word in (option, value)]
    return _said(["explain", "--markdown", *words], given=text)


def compare(before: str, after: str, options: str = "") -> str:
    """What grew between two runs, and where: traces, snapshots or results of `--json`, by their paths."""
    return _said(["compare", before, after, *shlex.split(options), "--markdown"])


def options(command: str) -> str:
    """The options of a command (estimate, record, fit, explain, compare), with their values."""
    if command not in COMMANDS:
        raise ToolError(f"no command {command!r}; there are {', '.join(COMMANDS)}")
    parent = click.Context(main, info_name="llmem")
    found = command_of(command)
    return found.get_help(click.Context(found, parent=parent, info_name=command))


def _said(words: Sequence[str], *, given: str | None = None, errors: bool = False) -> str:
    """What a command says; `errors`: with what it says on standard error, where a program has the other one."""
    done = llmem(words, given=given)
    if done.returncode not in _ANSWERS and not (errors and "recorded " in done.stderr):
        raise ToolError(done.stderr.strip() or f"exit code {done.returncode}")
    return "\n".join(part for part in (done.stdout.strip(), done.stderr.strip() if errors else "") if part)
