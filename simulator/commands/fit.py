"""`fit CASE`: the cheapest changes that make a run fit its GPU, each plan proved by a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from simulator.options.case import CaseCommand, case_of, case_options, models_like
from simulator.options.common import announce, context_size, show, working
from simulator.options.shared import context_option, form_options, page_options
from simulator.reports.outputs import check_output
from traces.errors import Interrupted
from traces.text import path_text

if TYPE_CHECKING:
    from graph.case import Case
    from simulator.fit.fit import Fitted

_EPILOG = (
    "Changes that leave the results as they are come first, the cheapest in time before others; then those after which "
    "rounding, the method, the inputs or the hardware are others. Time is a model, not a measurement. The exit code is "
    "3 where nothing that was tried makes it fit. Ctrl-C keeps what is finished."
)


@click.command("fit", cls=CaseCommand, epilog=_EPILOG)
@click.argument("model", metavar="CASE", shell_complete=models_like)
@click.option("--gpus", metavar="N", type=click.IntRange(1, 1024), help="GPUs that may share the work.")
@click.option("--keep", metavar="KEY,...", help="Keys of the case that no plan changes, such as batch,seq,dtype.")
@click.option("--seconds", metavar="N", type=float, default=45.0, show_default=True, help="Seconds to search.")
@context_option
@click.option("--jobs", metavar="N", type=click.IntRange(1, 4096), help="Worker processes (default: one a core).")
@form_options
@page_options(" with the plans")
@case_options
def command(
    model: str,
    gpus: int | None,
    keep: str | None,
    seconds: float,
    context: str,
    jobs: int | None,
    as_json: bool,
    as_markdown: bool,
    html: str | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Find the cheapest changes that make CASE fit its GPU: a model with its options, or a file with a case."""
    outside = context_size(context)
    case = case_of(model, options)
    if html is not None:
        check_output(html, force=force)

    from simulator.reports import fit as report

    found, interrupted = _fitted(case, quiet, keep=_words(keep), gpus=gpus, context=outside, seconds=seconds, jobs=jobs)
    show(report, found, as_json, as_markdown)
    if html is not None:
        from simulator.reports.html import page

        page.write(report.document_of(found), html, force=force)
    announce((f"wrote {path_text(html)}",) if html is not None else (), quiet)
    if interrupted:
        return 130
    return 0 if found.fits else 3


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip().replace("-", "_") for word in (text or "").split(",") if word.strip())


def _fitted(case: Case, quiet: bool, **how: Any) -> tuple[Fitted, bool]:
    """What was found, and whether that was interrupted."""
    from simulator.fit.fit import fit

    with working("capturing", quiet, compiles=True) as say:
        try:
            return fit(case, trying=lambda change: say(f"trying {change}"), **how), False
        except Interrupted as error:
            return error.found, True
