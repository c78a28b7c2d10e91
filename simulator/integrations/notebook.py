"""`%load_ext vramsim` in a notebook: `%%llmem` runs a cell on a GPU that is not there, `%llmem` a command.

    %llmem estimate gpt2 --batch 8 --gpu RTX4090
    %%llmem --gpu RTX4090 --steps 3 --cells 1-3
    train(model)

A cell is a program of its own, run in the notebook's folder with the options of `llmem record`; `--cells` names earlier
cells that it needs, as `%history` does. What comes back is the replayed result, with `plot()` and `to_pandas()`.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simulator.cli import COMMANDS, command_of
from simulator.integrations.process import llmem

if TYPE_CHECKING:
    from simulator.engine.result import Result


class Shell(Protocol):
    """What is asked of IPython."""

    def register_magic_function(self, function: Callable[..., object], kind: str, name: str) -> None:
        """Give it a magic of this name."""

    def extract_input_lines(self, cells: str) -> str:
        """The text of earlier cells."""


def load(shell: Shell) -> None:
    """Give an IPython shell the magic."""
    shell.register_magic_function(lambda line, cell=None: magic(shell, line, cell), "line_cell", "llmem")


def magic(shell: Shell, line: str, cell: str | None) -> Result | None:
    """A command with its answer shown, or what a cell did; None where there is nothing to show."""
    words = shlex.split(line)
    if cell is None:
        _shown(words)
        return None
    if "--cells" in words:
        place = words.index("--cells")
        cell = f"{shell.extract_input_lines(' '.join(words[place + 1 : place + 2]))}\n{cell}"
        del words[place : place + 2]
    return _recorded(words, cell)


def _shown(words: list[str]) -> None:
    """Show what a command answers: as Markdown, if it has that form."""
    has = bool(words) and words[0] in COMMANDS
    form = ["--markdown"] if has and any("--markdown" in one.opts for one in command_of(words[0]).params) else []
    done = llmem([*words, *form])
    sys.stderr.write(done.stderr)
    if form and done.stdout:
        display: Any = importlib.import_module("IPython.display")
        display.display(display.Markdown(done.stdout))
    else:
        sys.stdout.write(done.stdout)


def _recorded(options: list[str], text: str) -> Result | None:
    """What a program of this text did, which says what it says."""
    import traces
    from simulator.engine.replay import replay

    with tempfile.TemporaryDirectory() as folder:
        program, trace = Path(folder) / "cell.py", Path(folder) / "trace.npz"
        program.write_text(text)
        done = llmem(["record", "-o", str(trace), *options, str(program)], environment={"PYTHONPATH": _path()})
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        return replay(traces.read(trace), after_oom="continue") if trace.exists() else None


def _path() -> str:
    """Where the notebook finds modules."""
    return os.pathsep.join(entry for entry in sys.path if entry)
