"""QLoRA on a Tesla T4 as fitcheck-llm measured it, by its own program, run by `record`.

    python -m tests.accuracy fitcheck --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/fitcheck.csv` is a cell of its notebook and what the cell printed, in whole MiB:
torch's own counters after loading, at the peaks of forward, backward and optimizer step, and allocated and reserved
memory over all. ROOT is fitcheck-llm 0.2.0's source distribution (PyPI), whose `scripts/measure.py` is what the cells
ran and what runs here; ours is what it prints under `record`. PATH is the Python of an environment with PyTorch 2.10.0
and the libraries of that time (README there): with another PyTorch temporary tensors of eager attention differ. WORD:
only rows whose id has it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final

from graph.models import catalogue
from tests.accuracy import checkpoints
from tests.accuracy.sft import FOLDER, Judged, keeping, of_kept, of_root, output, read, spread

TABLE: Final = FOLDER / "fitcheck.csv"
#: What our runs of the table's rows printed (README there).
KEPT: Final = FOLDER / "fitcheck_runs.csv"
#: The names of their models on Hugging Face's hub.
HUB: Final = {
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
}
#: How the program's lines begin that have the figures.
_LINES: Final = {
    "loaded": "allocated after load",
    "forward": "forward ",
    "backward": "backward ",
    "optimizer": "optimizer step ",
    "allocated": "peak allocated",
    "reserved": "peak reserved",
}
#: The notebook's card: what its driver leaves to programs.
_CARD: Final = ("--gpu", "T4-16GB", "--memory", "14912MiB", "--context", "0", "--on-gpu")


@dataclass(frozen=True)
class Printed:
    """What the program printed, in MiB: None where it failed (`failure`)."""

    loaded: int | None = None
    forward: int | None = None
    backward: int | None = None
    optimizer: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    failure: str = ""


known: Final = keeping(Printed)
FIGURES: Final = tuple(field.name for field in fields(Printed) if field.name != "failure")


@dataclass(frozen=True)
class Compared(Judged[Printed]):
    """A row, and our run of it, by torch's own counter."""

    column = "allocated"

    @property
    def ours(self) -> int | None:
        """Our peak in MiB."""
        return self.run.allocated

    @property
    def equal(self) -> int:
        """How many of the figures are theirs."""
        return sum(str(ours) == self.row[name] for name, ours in zip(FIGURES, astuple(self.run), strict=False))

    @property
    def reserved_error(self) -> float | None:
        """Relative error of reserved memory, signed; None where our run failed."""
        return self.run.reserved / int(self.row["reserved"]) - 1 if self.run.reserved else None

    def __str__(self) -> str:
        if self.error is None or self.reserved_error is None:
            return f"{self.row['id']:30} FAILED: {self.run.failure[:160]}"
        return (
            f"{self.row['id']:30} {self.run.allocated:6,} for {int(self.row['allocated']):6,} MiB {self.error:+.2%}, "
            f"{self.run.reserved:6,} reserved for {int(self.row['reserved']):6,} {self.reserved_error:+.2%}; "
            f"{self.equal} of {len(FIGURES)} figures equal"
        )


def printed(text: str) -> Printed:
    """The figures of what the program printed. Raises ValueError where one is not there."""
    found: dict[str, Any] = {}
    for name, begins in _LINES.items():
        line = re.search(rf"^ *{begins}.*? ([\d,]+) MiB$", text, re.MULTILINE)
        if line is None:
            raise ValueError(f"no line {begins.strip()!r}")
        found[name] = int(line[1].replace(",", ""))
    return Printed(**found)


def command(row: Mapping[str, str], root: Path) -> list[str]:
    """What the row's cell ran."""
    model, batch, sequence, attention = row["id"].split("/")
    # Its --flash-attn is for fitcheck's own prediction, which is printed beside: on a T4 SDPA has no such kernel.
    sdpa = ["--flash-attn", "--attn-impl", "sdpa"] if attention == "sdpa" else []
    return [
        *(str(root / "scripts" / "measure.py"), HUB[model], "--qlora", "--precision", "fp16", "--lora-r", "32"),
        *("--batch-size", batch, "--seq-len", sequence, "--gpu", "t4", *sdpa),
    ]


def prepare(model: str, cache: Path) -> None:
    """Put a model, whose weights are holes, into a cache of the hub."""
    settings, commit = {**catalogue.configuration(model), "dtype": "bfloat16"}, 40 * "0"
    place = cache / "hub" / f"models--{HUB[model].replace('/', '--')}"
    (snapshot := place / "snapshots" / commit).mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps(settings))
    checkpoints.write(snapshot / "model.safetensors", checkpoints.llama(settings))


def ran(row: Mapping[str, str], root: Path, python: str) -> Printed:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(row["id"].partition("/")[0], folder)
        words = [*_CARD, "--steps", "all", *command(row, root)]
        text, failure = output(words, folder, python, root, HF_HOME=name)
    try:
        return printed(text)
    except ValueError as missing:
        return Printed(failure=failure or str(missing))


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, how far off they are, and how many figures are equal."""
    ran = [one for one in found if one.error is not None]
    equal = f"{sum(one.equal for one in ran)} of {len(FIGURES) * len(ran)} figures equal to the MiB"
    reserved = spread(one.reserved_error for one in ran)
    return f"{len(ran)} of {len(found)} rows ran{spread(one.error for one in ran)}; reserved{reserved}; {equal}"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    told = summary(of_kept(read(TABLE), known(KEPT), Compared))
    return [f"fitcheck-llm's QLoRA on a T4, by torch's counters; runs kept in {KEPT.name}:", f"    {told}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    print(summary(of_root("fitcheck", arguments, read(TABLE), known, ran, Compared)))
