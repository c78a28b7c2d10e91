"""`select MODEL`: which method and which micro-batch on given GPUs, and the configuration files for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graph.case import KEYS
from simulator.launch.configuration import FILES, absent, files
from simulator.launch.training_script import Predicted
from simulator.options.case import CaseCommand, case_from, case_options, models_like
from simulator.options.common import announce, context_size, progress_bar, remedied, show, working
from simulator.options.shared import check_workers, context_option, json_option, page_options, worker_options, workers
from simulator.reports.outputs import check_output
from traces.errors import Interrupted, OutputError
from traces.files import write_atomically
from traces.text import path_text

if TYPE_CHECKING:
    from simulator.selector.select import Asked, Selection

_EPILOG = (
    "--gpu may name a GPU for each rank, as in --gpu A100-80GB,A100-40GB. --policy llmem is LLMem's Algorithm 1 in its "
    "own setting (Gemini, fp16, PyTorch 2.0). The exit code is 3 when no method fits. Ctrl-C keeps what is finished."
)


@click.command("select", cls=CaseCommand, epilog=_EPILOG)
@click.argument("model", metavar="MODEL", shell_complete=models_like)
@click.option(
    *("--gpus", "--world", "--nproc-per-node", "--num-processes", "gpus"),
    metavar="N",
    type=click.IntRange(1, 1024),
    help="Number of GPUs (default: as many as --gpu).",
)
@click.option("--policy", type=click.Choice(["throughput", "llmem"]), default="throughput", help="How to rank.")
@click.option("--global-batch", metavar="N", type=click.IntRange(1), help="Samples of an optimizer step, of all GPUs.")
@click.option("--margin", metavar="SHARE", type=float, default=0.02, help="Share of each GPU to stay free (0.02).")
@click.option(
    "--methods",
    metavar="NAME,...",
    multiple=True,
    help="Try these alone, each to the end: methods, meshes such as fsdp2=4,tp=2, or families (also --strategy, "
    "--mesh).",
)
@click.option(
    "--exclude", metavar="NAME,...", multiple=True, help="Leave these out; an axis such as pp with its meshes."
)
@click.option("--config", metavar="FOLDER", help="Write configuration files for the best method.")
@context_option
@worker_options
@json_option
@page_options(": methods side by side, the best two over time")
@case_options
def command(
    model: str,
    gpus: int | None,
    policy: str,
    global_batch: int | None,
    margin: float,
    methods: tuple[str, ...],
    exclude: tuple[str, ...],
    config: str | None,
    context: str,
    jobs: int | None,
    executor: str | None,
    dask: str | None,
    as_json: bool,
    html: str | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Find the method and micro-batch for MODEL on these GPUs: fast, plain, and without allocator retries."""
    from simulator.reports import select as report
    from simulator.selector.select import Asked

    check_workers(executor, dask)
    outside = context_size(context)
    names = [part.strip() for part in (options.pop("gpu", None) or "A100-80GB").split(",")]
    cards = _cards(names, gpus)
    methods += tuple(filter(None, (options.pop("strategy", None), options.pop("mesh", None))))
    for key in ("batch", "world", "accum"):
        given = [name for name in KEYS[key].names if options.pop(name, None) is not None]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} is what select finds; leave it out")
    case = case_from(model, {**options, "gpu": cards[0]}, any_strategy=True)
    _check_files(html, config, force)
    named, left_out = (tuple(_words(texts, len(cards))) for texts in (methods, exclude))
    document = case.document()
    asked = Asked(document, cards, policy, global_batch, margin, context=outside, methods=named, exclude=left_out)
    found, interrupted = _selected(asked, (jobs, executor, dask), quiet)
    if found.nearest is not None and policy == "throughput" and not interrupted:
        found, interrupted = _with_remedies(found, quiet)
    show(report, found, as_json)  # before files are drawn and written: this much is safe
    sys.stdout.flush()
    if html is not None:
        _draw(found, html, force, quiet)
    if config is not None and found.winner is not None:
        _configure(found, Path(config), force, quiet)
    if interrupted:
        return 130
    return 0 if found.winner is not None else 3


def _words(texts: Iterable[str], world: int) -> Iterator[str]:
    from simulator.selector.candidates import split_words

    for text in texts:
        yield from split_words(text, world)


def _cards(names: list[str], gpus: int | None) -> tuple[str, ...]:
    from simulator.estimator.devices import device

    cards = [device(name).name for name in names]
    if len(cards) == 1:
        return tuple(cards * (gpus or 1))
    if gpus not in (None, len(cards)):
        raise click.UsageError(f"--gpus {gpus} and {len(cards)} names in --gpu: give one name, or one for each GPU")
    return tuple(cards)


def _check_files(html: str | None, config: str | None, force: bool) -> None:
    """Refuse what could not be written, before the long work."""
    if html is not None:
        check_output(html, force=force)
    if config is None:
        return
    folder = Path(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path_text(config)}: cannot be written: {(error.strerror or '').lower()}") from None
    for name in FILES:
        check_output(str(folder / name), force=force)


def _selected(asked: Asked, who: tuple[int | None, str | None, str | None], quiet: bool) -> tuple[Selection, bool]:
    """The selection, and whether it was interrupted."""
    from simulator.selector.select import select

    with workers(*who) as (jobs, chosen), progress_bar("methods", quiet) as say:
        try:
            return select(asked, jobs=jobs, executor=chosen, progress=say), False
        except Interrupted as error:
            found = error.found
    if not quiet:
        done = len(found.outcomes) + len(found.spared)
        total = done + len(found.unfinished)
        print(f"note: interrupted: {done} of {total} methods are finished", file=sys.stderr)
    return found, True


def _with_remedies(found: Selection, quiet: bool) -> tuple[Selection, bool]:
    """What would make the method fit that lacks least, each change tried, and whether that was interrupted."""
    near = found.nearest
    assert near is not None
    tried, interrupted = remedied(near.case, found.asked.context, f"no method fits; {near.name}", quiet)
    fitting = () if tried is None else tried.fitting
    advice = f"{near.name} with {fitting[0].options}" if fitting else found.advice
    return replace(found, remedies=tried, advice=advice), interrupted


def _draw(found: Selection, html: str, force: bool, quiet: bool) -> None:
    from simulator.reports.html import page
    from simulator.reports.select import document_of, drawn

    with working("drawing", quiet):
        page.write(document_of(found, drawn(found)), html, force=force)


def _configure(found: Selection, folder: Path, force: bool, quiet: bool) -> None:
    winner = found.winner
    assert winner is not None
    case = winner.case
    written = files(case, Predicted(winner.worst[0], winner.peak_allocated, winner.peak_reserved))
    for name, text in written.items():
        with write_atomically(folder / name, force=force) as file:
            file.write(text.encode())
    missing = [f"no {name}: {reason}" for name, reason in absent(case).items()]
    announce((f"wrote {', '.join(written)} to {path_text(str(folder))}", *missing), quiet)
