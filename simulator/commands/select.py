"""`select MODEL`: which method and which micro-batch on given GPUs, and the configuration files for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.commands.case_options import case_options

if TYPE_CHECKING:
    from simulator.selection import Selection

_EPILOG = (
    "--gpu may name a GPU for each rank, as in --gpu A100-80GB,A100-40GB. --policy llmem is LLMem's Algorithm 1 in its "
    "own setting (Gemini, fp16, PyTorch 2.0). The exit code is 3 when no method fits."
)


@click.command("select", epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@click.option("--gpus", metavar="N", type=click.IntRange(1, 1024), help="Number of GPUs (default: as many as --gpu).")
@click.option("--policy", type=click.Choice(["throughput", "llmem"]), default="throughput", help="How to rank.")
@click.option("--global-batch", metavar="N", type=click.IntRange(1), help="Samples of an optimizer step, of all GPUs.")
@click.option("--margin", metavar="SHARE", type=float, default=0.02, help="Share of each GPU to stay free (0.02).")
@click.option("--config", metavar="FOLDER", help="Write configuration files for the winner.")
@click.option("--jobs", metavar="N", type=click.IntRange(1, 4096), help="Worker processes (default: one a core).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option("--html", metavar="FILE", help="Write a page with the table.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@case_options
def command(
    model: str,
    gpus: int | None,
    policy: str,
    global_batch: int | None,
    margin: float,
    config: str | None,
    jobs: int | None,
    as_json: bool,
    html: str | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Find the fastest method and its largest micro-batch for MODEL on these GPUs."""
    from simulator.commands.case_options import case_from
    from simulator.selection import Asked, select

    names = [part.strip() for part in (options.pop("gpu", None) or "A100-80GB").split(",")]
    cards = _cards(names, gpus)
    for key in ("batch", "strategy", "world", "mesh", "accum"):
        if options.pop(key, None) is not None:
            raise click.UsageError(f"--{key} is what select finds; leave it out")
    case = case_from(model, {**options, "gpu": cards[0]})
    targets = _targets(html, config)
    _check_files(targets, force)
    asked = Asked(case.document(), cards, policy, global_batch, margin)

    def show(found: Selection) -> None:
        _show(found, as_json)

    with _bar(quiet) as say:
        found = select(asked, jobs=jobs, progress=say, partial=show)
    show(found)
    if html is not None:
        from simulator.report_select import render_html

        Path(html).write_text(render_html(found), "utf-8")
    if config is not None and found.winner is not None:
        _configure(found, Path(config), quiet)
    return 0 if found.winner is not None else 3


def _cards(names: list[str], gpus: int | None) -> tuple[str, ...]:
    from simulator.devices import device

    cards = [device(name).name for name in names]
    if len(cards) == 1:
        return tuple(cards * (gpus or 1))
    if gpus not in (None, len(cards)):
        raise click.UsageError(f"--gpus {gpus} and {len(cards)} names in --gpu: give one name, or one for each GPU")
    return tuple(cards)


def _targets(html: str | None, config: str | None) -> list[Path]:
    from simulator.configuration import FILES

    pages = [] if html is None else [Path(html)]
    return pages if config is None else [*pages, *(Path(config) / name for name in FILES)]


def _check_files(targets: list[Path], force: bool) -> None:
    from traces.errors import OutputError
    from traces.text import path_text

    for path in targets:
        if path.exists() and not force:
            raise OutputError(f"{path_text(str(path))}: exists already; choose another name or add --force")


def _show(found: Selection, as_json: bool) -> None:
    from simulator.commands.common import print_json
    from simulator.report_select import render_json, render_table

    if as_json:
        print_json(render_json(found))
    else:
        render_table(found)


def _configure(found: Selection, folder: Path, quiet: bool) -> None:
    from simulator.commands.common import announce
    from simulator.configuration import files
    from traces.errors import OutputError
    from traces.text import path_text

    assert found.winner is not None
    written = files(found.winner.case)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"{path_text(str(folder))}: {error.strerror}") from None
    announce((f"wrote {', '.join(written)} to {path_text(str(folder))}",), quiet)


@contextlib.contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, where that is a terminal."""
    from simulator.commands.common import shows_progress

    if quiet or not shows_progress():
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("methods", total=None)
        yield lambda done, total, name: progress.update(task, completed=done, total=total, description=name)
