"""What the commands share: notes and progress on stderr, JSON on stdout, sizes of options."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from traces.errors import ConfigError, Interrupted, LLMemError
from traces.text import one_line
from traces.units import parse_size

if TYPE_CHECKING:
    from simulator.estimator.outside import Context
    from simulator.fit.plans import Plans

#: Seconds of work before a spinner appears.
PATIENCE: Final = 0.5
#: Characters of a note: ours are whole, those of other libraries may have no end.
_LONGEST: Final = 1000
#: With more ranks than this, JSON comes on one line: breaking lines takes ten times as long.
MANY_RANKS: Final = 64


def announce(notes: Iterable[str], quiet: bool) -> None:
    """Print each note once, as a line on stderr."""
    if not quiet:
        for note in dict.fromkeys(notes):
            print(f"note: {one_line(note, _LONGEST)}", file=sys.stderr)


@contextlib.contextmanager
def working(what: str, quiet: bool, *, compiles: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on stderr that `what` goes on inside: by a spinner on a terminal, once it takes long, which then goes.

    With `compiles` a line says so when kernels are compiled inside (and numba is loaded, for that). `quiet`: nothing.
    Gives a function that changes the text.
    """
    with contextlib.ExitStack() as stack:
        said = _ignored if quiet else stack.enter_context(_spinner(what))
        if compiles and not quiet:
            stack.enter_context(_announced_compilation())
        yield said


def _ignored(_: str) -> None:
    """Nobody watches."""


@contextlib.contextmanager
def _spinner(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the elapsed time on stderr, after a moment, where stderr is a terminal that can show it."""
    if not shows_progress():
        yield _ignored
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
    task = progress.add_task(what, total=None)
    timer = threading.Timer(PATIENCE, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: progress.update(task, description=text)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


@contextlib.contextmanager
def progress_bar(what: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, where that is a terminal: gives a function of what is done, the total, and words."""
    if quiet or not shows_progress():
        yield lambda done, total, text=what: None
        return
    from rich import progress as bars
    from rich.console import Console

    words = bars.TextColumn("{task.description}", markup=False)
    elapsed, left = bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
    columns = (words, bars.BarColumn(), bars.MofNCompleteColumn(), elapsed, bars.TextColumn("left"), left)
    console = Console(stderr=True)
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total, text=what: progress.update(task, completed=done, total=total, description=text)


def shows_progress() -> bool:
    """Whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextlib.contextmanager
def _announced_compilation() -> Iterator[None]:
    """Say so, once, when kernels are compiled: what was compiled before comes from a cache, within a second."""
    from numba.core import event

    class Announcer(event.Listener):
        said = False

        def on_start(self, _: object) -> None:
            if not self.said:
                self.said = True
                print("compiling kernels: this takes up to a minute, once ...", file=sys.stderr, flush=True)

        def on_end(self, _: object) -> None:
            pass

    with event.install_listener("numba:compile", Announcer()):
        yield


def remedied(case: Mapping[str, Any], context: Context, what: str, quiet: bool) -> tuple[Plans | None, bool]:
    """What would make a case fit, each change tried, and whether that was interrupted; meanwhile it says `what`."""
    from simulator.estimator.estimate import estimate

    with working(f"{what}; trying changes", quiet) as say:

        def trying(change: str) -> None:
            say(f"{what}; trying {change}")

        try:
            found = estimate(case, context=context, analyse=False, remedies=True, trying=trying)
        except Interrupted as error:
            return error.found.remedies, True
    return found.remedies, False


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document, and nothing else, on stdout: with line breaks, unless it has very many ranks."""
    few = len(document.get("ranks", ())) <= MANY_RANKS
    sys.stdout.write(json.dumps(document, indent=1 if few else None, default=str) + "\n")


def show(report: ModuleType, found: object, as_json: bool, as_markdown: bool = False) -> None:
    """Print a result on stdout, as JSON, Markdown or tables, as the module of `simulator.reports` for it has them."""
    if as_json:
        print_json(report.render_json(found))
    elif as_markdown:
        print(report.render_markdown(found))
    else:
        from simulator.reports import terminal

        terminal.render(report.document_of(found))


def sizes(memory: str | None, context: str | None) -> tuple[int | None, int | None]:
    """The bytes of --memory and --context; ConfigError if one is malformed, or `auto`: traces have none."""
    if context is not None and context.strip().lower() == "auto":
        raise ConfigError(
            "--context auto is not available for traces: what a GPU holds besides PyTorch's memory depends on the "
            "libraries used, so give it as a size, such as --context 500MiB"
        )
    return size_option("--memory", memory), size_option("--context", context)


def context_size(text: str | None) -> Context:
    """The bytes of --context for an estimate, or `auto`, the default; ConfigError if it is malformed."""
    size = None if text is None or text.strip().lower() == "auto" else size_option("--context", text)
    return "auto" if size is None else size


def size_option(option: str, text: str | None) -> int | None:
    """The bytes that an option says, if it is given; ConfigError, which names the option, if it is malformed."""
    if text is None:
        return None
    try:
        size = parse_size(text)
    except LLMemError as error:
        raise ConfigError(f"{option}: {error}") from None
    if option == "--memory" and size == 0:
        raise ConfigError("--memory: a GPU without memory cannot be simulated")
    return size
