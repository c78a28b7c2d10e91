"""`fit CASE` and `fit PROGRAM`: the cheapest changes that make a run fit its GPU, each plan proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from graph.case import KEYS
from simulator.options.case import CaseCommand, case_of, case_options, given_keys, models_like
from simulator.options.common import announce, context_size, show, working
from simulator.options.program import PROGRAM_OPTIONS, Programs, begins_program, program_options, request_of
from simulator.options.shared import context_option, form_options, page_options
from simulator.reports.outputs import check_output
from traces.errors import Interrupted
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.fit.plans import Fitting

_EPILOG = (
    "Changes that leave the results as they are come first, the cheapest in time before others; then those after which "
    "rounding, the method, the inputs or the hardware are others. Time is a model, not a measurement. The exit code is "
    "3 where nothing that was tried makes it fit. Ctrl-C keeps what is finished. A program is recorded, as `llmem "
    "record` does it: options stand before it, and what follows it is its own."
)
#: Keys of a case that a program's GPU has as well.
_SHARED: Final = ("gpu", "memory", "alloc_conf", "release")


class _Command(Programs, CaseCommand):
    """A case with its options, or options and a program."""

    begins = staticmethod(begins_program)


@click.command("fit", cls=_Command, epilog=_EPILOG)
@click.argument("words", metavar="CASE|PROGRAM ARGS...", nargs=-1, type=click.UNPROCESSED, shell_complete=models_like)
@click.option("--gpus", metavar="N", type=click.IntRange(1, 1024), help="GPUs that may share the work.")
@click.option("--keep", metavar="KEY,...", help="What no plan changes: keys of the case (batch,seq,dtype), arguments.")
@click.option("--seconds", metavar="N", type=float, help="Seconds to search (default: 45; for a program 300).")
@program_options
@context_option
@click.option("--jobs", metavar="N", type=click.IntRange(1, 4096), help="Worker processes (default: one a core).")
@form_options
@page_options(" with the plans")
@case_options
def command(
    words: tuple[str, ...],
    gpus: int | None,
    keep: str | None,
    seconds: float | None,
    context: str,
    jobs: int | None,
    as_json: bool,
    as_markdown: bool,
    html: str | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Find the cheapest changes that make a run fit its GPU: CASE, which is a model with its options, or a file with a
    case; or PROGRAM, a script or what starts one."""
    how: dict[str, Any] = {"keep": _words(keep), "gpus": gpus, "context": context_size(context), "jobs": jobs}
    if seconds is not None:
        how["seconds"] = seconds
    search = _search(words, options, how)
    if html is not None:
        check_output(html, force=force)

    from simulator.reports import fit as report

    found, interrupted = _fitted(search, quiet)
    show(report, found, as_json, as_markdown)
    if html is not None:
        from simulator.reports.html import page

        page.write(report.document_of(found), html, force=force)
    announce((*found.notes, *([f"wrote {path_text(html)}"] if html is not None else [])), quiet)
    if interrupted:
        return 130
    return 0 if found.fits else 3


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip().replace("-", "_") for word in (text or "").split(",") if word.strip())


def _search(
    words: tuple[str, ...], options: Mapping[str, Any], how: Mapping[str, Any]
) -> Callable[[Callable[[str], object]], Fitting]:
    """What finds plans for what is to fit, and is told of each try's options."""
    program = {name: value for name, value in options.items() if name in PROGRAM_OPTIONS}
    of_program = [name for name, value in program.items() if value != PROGRAM_OPTIONS[name] and name not in KEYS]
    if program["module"] is None and not (words and (begins_program(words[0]) or len(words) > 1)):
        if len(words) != 1:
            raise click.UsageError("give a case (a model, or a file with a case) or a program")
        if of_program:
            raise click.UsageError(f"--{of_program[0].replace('_', '-')} is for a program, and {words[0]} is a case")
        case = case_of(words[0], options)

        def fit_case(trying: Callable[[str], object]) -> Fitting:
            from simulator.fit.fit import fit

            return fit(case, trying=trying, **how)

        return fit_case
    given = given_keys(options)
    if "world" in given:  # --nproc-per-node is one of its names
        program["nproc_per_node"] = given.pop("world")
    for name in given.keys() - {*_SHARED, *program}:
        raise click.UsageError(f"--{name.replace('_', '-')} is a case's: a program's own arguments stand behind it")
    given = {"gpu": KEYS["gpu"].default, "release": KEYS["release"].default, **given}
    request, ranks = request_of(words, **{**given, **program})

    def fit_it(trying: Callable[[str], object]) -> Fitting:
        from simulator.fit.program import fit_program
        from simulator.recording.launchers import StartedError

        chosen = program["ranks"] != "all"
        try:
            return fit_program(request, ranks if chosen else None, trying=trying, **how)
        except StartedError as start:
            started, own = request_of(start.program, **{**given, **program})
            return fit_program(started, own if chosen else None, trying=trying, **how)

    return fit_it


def _fitted(search: Callable[[Callable[[str], object]], Fitting], quiet: bool) -> tuple[Fitting, bool]:
    """What was found, and whether that was interrupted."""
    with working("capturing", quiet, compiles=True) as say:
        try:
            return search(lambda change: say(f"trying {change}")), False
        except Interrupted as error:
            return error.found, True
