"""The command line: finds the command, and turns every error into one line and an exit code.

With LLMEM_TRACEBACK=1 in the environment an error shows its traceback, with all that led to it.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import click

from traces.collecting import hurried
from traces.errors import LLMemError

#: Commands and the one line that `--help` shows of each; their modules are imported when they run.
COMMANDS: Final = {
    "record": "Run a program unmodified, without a GPU, and report its memory.",
    "run": "Replay a trace or snapshot and report the memory of every rank.",
    "capture": "Run a model's training step without a GPU and keep it as a graph.",
    "graph": "Ask a captured graph what waits for what, and what to recompute.",
    "estimate": "Work out what a run of a model needs of its GPU, without one.",
    "fit": "Find the cheapest changes that make a run fit its GPU.",
    "select": "Find the method and micro-batch for a model on given GPUs.",
    "sweep": "Estimate many cases, on all cores, resumable.",
    "stress": "Replay a trace under many settings, and say which one helps.",
    "compare": "Compare two traces, snapshots or results: what grew, and where.",
    "check": "Hold a run against a memory budget and a baseline, for CI.",
    "explain": "Say why memory ran out: a log, a pasted error, a snapshot.",
    "verify": "Replay a torch snapshot's causes and compare every consequence.",
    "models": "List the models that are known, with their parameters and names.",
    "gpus": "List the GPUs that are known, with their memory and names.",
    "mcp": "Serve these answers to AI assistants, by their protocol.",
    "convert": "Convert between trace formats, snapshots and timelines.",
}

INTERRUPTED: Final = 130
EXIT_CODES: Final = {
    0: "done and it fits, or is tight",
    1: "bad input or the run failed; one line on standard error says why",
    2: "usage",
    3: "predicted out of memory, or over the budget",
    4: "regression over the threshold",
    INTERRUPTED: "interrupted",
}


def command_of(name: str) -> click.Command:
    """One of `COMMANDS`, imported."""
    room = "integrations" if name == "mcp" else "commands"
    command = importlib.import_module(f"simulator.{room}.{name}").command
    assert isinstance(command, click.Command)
    return command


class _Commands(click.Group):
    """The group of all commands, loaded one by one, with the exit codes of the project."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return command_of(name) if name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise click.UsageError(error.message + hint, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run the command line and exit with its code."""
        hurried()
        options["standalone_mode"] = False
        with contextlib.suppress(AttributeError, OSError):  # names from traces may not fit the terminal's encoding
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
            sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
        sys.exit(_guarded(lambda: super(_Commands, self).main(args, *rest, **options)))


def _guarded(run: Any) -> int:
    """The exit code of `run`, with every exception told in one line on stderr."""
    try:
        code = run()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except LLMemError as error:
        if os.environ.get("LLMEM_TRACEBACK") == "1":
            sys.excepthook(type(error), error, error.__traceback__)
        return _say(str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except SystemExit as exit_:
        _silence_stdout()  # click met a closed pipe
        return exit_.code if isinstance(exit_.code, int) else 1
    except MemoryError:
        return _say("not enough memory on this machine for the job", 1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _silence_stdout()
            return _say("the output cannot be written: no space left on device", 1)
        if os.environ.get("LLMEM_TRACEBACK") == "1":
            raise
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _say(f"internal error: {detail} (please report it, with the output of LLMEM_TRACEBACK=1)", 1)


def _say(text: str, code: int) -> int:
    """Print `error: text` as one line on stderr."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    prefix = "" if line.startswith("internal error") else "error: "
    with contextlib.suppress(OSError):
        print(f"{prefix}{line}", file=sys.stderr, flush=True)
    return code


def _silence_stdout() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"vramsim {version('vramsim')}")
    except PackageNotFoundError:
        click.echo("vramsim, not installed")
    ctx.exit()


_HELP: Final = "Predict the GPU memory of PyTorch programs without a GPU.\n\nExit codes: "


@click.group(
    cls=_Commands,
    help=_HELP + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def main() -> None:
    """The command line."""
