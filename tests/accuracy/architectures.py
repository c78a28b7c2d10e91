"""Architectures of transformers and timm, each trained for two steps under `record`, beside what PyTorch recorded.

    python -m tests.accuracy architectures [--python PATH] [--program NAME] [--mode MODE] [WORD]...

Rows are tests/data/programs/architectures.csv (README there): peaks of allocated and reserved memory, the number of
allocations, and what is allocated at the end. Those of `image_models` need an environment with timm and the
torchvision of its PyTorch: PATH is its Python. WORD: only architectures whose name has it.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from tests.accuracy.sft import record
from tests.places import DATA

FOLDER: Final = DATA / "programs"
TABLE: Final = FOLDER / "architectures.csv"
FIGURES: Final = ("peak_allocated", "peak_reserved", "allocations", "end_allocated")
#: Architectures of one process: each begins with an empty allocator, but for cuBLAS's workspace.
TOGETHER: Final = 14


@dataclass(frozen=True)
class Row:
    """An architecture, and what was recorded, or ours of it: `FIGURES` (None: it raised, or was left out as large)."""

    program: str
    mode: str
    name: str
    figures: tuple[int, ...] | None


def rows() -> list[Row]:
    """What was recorded."""
    with TABLE.open(newline="") as file:
        return [
            Row(
                row["program"],
                row["mode"],
                row["name"],
                tuple(int(row[figure]) for figure in FIGURES) if row["allocations"] else None,
            )
            for row in csv.DictReader(file)
        ]


def measured(program: str, mode: str, names: Sequence[str], python: str) -> Iterator[Row]:
    """What `record` says of architectures, in one process, as the recorded ones were."""
    words = ["--gpu", "A100", "--steps", "all", str(FOLDER / f"{program}.py"), mode, ",".join(names)]
    with tempfile.TemporaryDirectory() as folder:
        done = record(words, Path(folder), python)
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("R ")]
    if not said:
        raise RuntimeError(done.stderr[-2000:])
    for _, name, _, *figures in said:
        yield Row(program, mode, name, tuple(map(int, figures)) if len(figures) == len(FIGURES) else None)


def compared(chosen: Sequence[Row], python: str) -> Iterator[tuple[Row, Row | None]]:
    """Each row beside ours."""
    for (program, mode), group in groupby(chosen, key=lambda row: (row.program, row.mode)):
        waiting = list(group)
        for start in range(0, len(waiting), TOGETHER):
            some = waiting[start : start + TOGETHER]
            ours = {row.name: row for row in measured(program, mode, [row.name for row in some], python)}
            yield from ((row, ours.get(row.name)) for row in some)


def summary(found: Sequence[tuple[Row, Row | None]]) -> str:
    """How many of each figure are equal, and the worst, by program and mode."""
    lines = []
    for (program, mode), group in groupby(found, key=lambda pair: (pair[0].program, pair[0].mode)):
        pairs = list(group)
        alike = sum(ours is not None and (ours.figures is None) == (theirs.figures is None) for theirs, ours in pairs)
        both = [(theirs.figures, ours.figures) for theirs, ours in pairs if ours and ours.figures and theirs.figures]
        lines.append(f"{program} {mode}: {len(pairs)} architectures, {alike} end as recorded, {len(both)} have figures")
        for place, figure in enumerate(FIGURES if both else ()):
            errors = [abs(ours[place] / max(theirs[place], 1) - 1) for theirs, ours in both]
            lines.append(f"  {figure}: {errors.count(0)} equal, worst {max(errors):.2%}")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Run the chosen rows, and print those that differ, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--program", default="language_models", choices=("language_models", "image_models"))
    parser.add_argument("--mode", default="")
    options = parser.parse_args(words)
    chosen = [row for row in rows() if row.program == options.program and options.mode in ("", row.mode)]
    chosen = [row for row in chosen if not options.words or any(word in row.name for word in options.words)]
    found = []
    for theirs, ours in compared(chosen, options.python):
        found.append((theirs, ours))
        if ours is None or ours.figures != theirs.figures:
            print(theirs.name, theirs.mode, "recorded", theirs.figures, "ours", ours and ours.figures, flush=True)
    print(summary(found) if found else "no rows")
