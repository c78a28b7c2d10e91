"""`check TRACE|CASE`: a run held against a memory budget and a baseline, for CI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.options.case import CaseCommand, case_options
from simulator.options.common import announce, context_size, print_json, size_option, sizes, working
from simulator.options.shared import form_options, quiet_option, remedies_option
from traces.errors import ConfigError
from traces.text import path_text, quoted

if TYPE_CHECKING:
    from simulator.comparison.compare import Side

_EPILOG = (
    "Prints one line, and where a model does not fit a second one, with what would. Exit codes: 3 out of memory or "
    "over the budget, 4 a peak grew by more than --fail-over against the baseline; 0 else, also where it is tight. "
    "What counts is peak reserved memory and what lies outside PyTorch."
)


@click.command("check", cls=CaseCommand, epilog=_EPILOG)
@click.argument("run", metavar="TRACE|CASE")
@click.option("--budget", metavar="SIZE", help="Memory that the run may take of each GPU.")
@click.option("--against", metavar="BASELINE", help="A trace, snapshot or result that it is compared with.")
@click.option("--fail-over", metavar="2%|SIZE", help="Growth of a peak against the baseline that is allowed.")
@click.option(
    "--context",
    metavar="SIZE|auto",
    help="Memory of each GPU that is not PyTorch's (default: auto for a case, what it says itself for a file).",
)
@remedies_option
@form_options
@quiet_option
@case_options
def command(
    run: str,
    budget: str | None,
    against: str | None,
    fail_over: str | None,
    context: str | None,
    remedies: bool,
    as_json: bool,
    as_markdown: bool,
    quiet: bool,
    **options: object,
) -> int:
    """Check TRACE|CASE against a budget and a baseline.

    It is a trace, a snapshot, a result, a file with a case (a JSON object with "model"), or a model with its options.
    """
    from simulator.comparison.check import check
    from simulator.comparison.compare import Limit, load
    from simulator.reports.compare import check_json, check_lines, check_markdown

    if budget is None and against is None:
        raise click.UsageError("give --budget, --against or both")
    if fail_over is not None and against is None:
        raise click.UsageError("--fail-over needs a baseline: give --against")
    size = size_option("--budget", budget)
    if size is not None and size < 1 << 20:
        raise ConfigError(f"--budget {quoted(budget)}: {size} bytes hold nothing; write a size such as 80GiB")
    limit = None if fail_over is None else Limit.parse(fail_over)
    with working("working", quiet, compiles=True) as say:
        base = None if against is None else load(against)
        side = _side(
            run, context, options, {"budget": size, "remedies": remedies, "trying": lambda one: say(f"trying {one}")}
        )
        found = check(side, budget=size, against=base, limit=limit)
    announce(side.notes, quiet)
    if as_json:
        print_json(check_json(found))
    elif as_markdown:
        click.echo(check_markdown(found))
    else:
        click.echo(check_lines(found))
    return found.exit_code


def _side(run: str, context: str | None, options: dict[str, Any], how: dict[str, Any]) -> Side:
    """What is checked, replayed or estimated; `how` are arguments of `estimate`."""
    from simulator.comparison.compare import read_document, side_of_document

    given = sorted(key for key, value in options.items() if value is not None)
    document = read_document(run) if Path(run).is_file() else None
    if not Path(run).is_file() or (document is not None and _is_config(document)):
        from simulator.options.case import case_from

        return _estimated(case_from(run, options), run, context, how)
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} belongs to a model; {path_text(run)} is a file")
    name = path_text(Path(run).name)
    if document is not None and "model" in document and not {"verdict", "error"} & document.keys():
        from graph.case import Case

        return _estimated(Case.of(document, name), name, context, how)
    if document is not None:
        return _answered(side_of_document(document, name), context)
    return _replayed(run, name, context)


def _is_config(document: Any) -> bool:
    """Whether it is a model's config.json."""
    return not {"model_type", "architectures", "_class_name"}.isdisjoint(document)


def _answered(side: Side, context: str | None) -> Side:
    """A result or an answer: what it has outside the allocator counts, or what --context says instead."""
    _, outside = sizes(None, context)
    if outside is None:
        return side

    def total(reserved: int | None) -> int | None:
        return None if reserved is None else reserved + outside

    ranks = (
        replace(rank, values={**rank.values, "device_total": total(rank.values["peak_reserved"])})
        for rank in side.ranks
    )
    return replace(side, ranks=tuple(ranks))


def _replayed(run: str, name: str, context: str | None) -> Side:
    from simulator.comparison.compare import side_of_replay
    from simulator.engine.replay import replay
    from simulator.snapshots.reader import read

    _, outside = sizes(None, context)
    trace = read(run)
    side = side_of_replay(replay(trace, context=outside, events=True, analyse=False, needs=True), trace, name)
    return replace(side, hint=f"`llmem stress {path_text(run)}` tries other allocator settings")


def _estimated(case: Any, name: str, context: str | None, how: dict[str, Any]) -> Side:
    """An estimate, which counts what lies outside the allocator, with what would fit where it does not."""
    from simulator.comparison.compare import side_of_replay
    from simulator.estimator.estimate import estimate

    found = estimate(case, context=context_size(context), events=True, analyse=False, **how)
    result = replace(found.result, notes=(*found.assumptions, *found.result.notes))
    return replace(side_of_replay(result, found.trace, name), remedies=found.remedies)
