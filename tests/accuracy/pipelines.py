"""Pictures and films that others made on real GPUs by pipelines of diffusers, by the same programs, run by `record`.

    python -m tests.accuracy pipelines --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/pipelines.csv` is a peak of allocated memory, in GiB as diffusers-torchao's benchmark
printed it (FLUX.1-dev, CogVideoX 2B and 5B, eager and compiled, with and without fused projections, on one A100 or
H100), and the options of its run. ROOT is its repository at commit 9b9f238; PATH the Python of an environment with
PyTorch and the libraries of that time (README there). Weights are made up, and so are the tokenizers: texts are padded.

Autoencoders are made of convolutions, and cuDNN's workspaces are not in our figure: beside it stands what `record` says
that they are likely to add.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.accuracy.sft import FOLDER, of_kept, of_root, read, record

TABLE: Final = FOLDER / "pipelines.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "pipelines_runs.csv"
#: Configurations of the pipelines, by the path of each file in a folder.
CONFIGURATIONS: Final = FOLDER / "programs" / "pipelines.json"
#: Folders of tokenizers that are of sentencepiece, with as many pieces and a text to find them in.
_T5: Final = (
    "black-forest-labs/FLUX.1-dev/tokenizer_2",
    "THUDM/CogVideoX-2b/tokenizer",
    "THUDM/CogVideoX-5b/tokenizer",
)
_CLIP: Final = "black-forest-labs/FLUX.1-dev/tokenizer"
_PIECES: Final = 1000
#: The benchmark ends by deleting what is the user's below /tmp.
_KEEPS: Final = "\n\ndef cleanup_tmp_directory():\n    pass\n"
_MORE: Final = re.compile(r"on a GPU the peak may be ([0-9.]+) (MiB|GiB) higher: cuDNN")


@dataclass(frozen=True)
class Run:
    """What a run of a row's program printed, in GiB, and what cuDNN is likely to add; `failure` where it failed."""

    gib: float | None = None
    likely: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Compared:
    """A row, and our run of it."""

    row: Mapping[str, str]
    run: Run

    def error(self, likely: bool) -> float | None:
        """Relative error, signed, with what is likely or without; None where ours failed."""
        if self.run.gib is None:
            return None
        return (self.run.gib + self.run.likely * likely) / float(self.row["gib"]) - 1

    def __str__(self) -> str:
        if self.run.gib is None:
            return f"{self.row['id']:50} FAILED: {self.run.failure[:160]}"
        both = f"{self.run.gib:7.3f} (likely {self.run.gib + self.run.likely:7.3f})"
        errors = f"{self.error(False):+.2%} ({self.error(True):+.2%})"
        return f"{self.row['id']:50} {both} for {float(self.row['gib']):7.3f} GiB {errors}"


def prepare(folder: Path, source: str) -> None:
    """Put pipelines without weights into a folder; `source` is a text of which the tokenizers know the words."""
    for path, document in json.loads(CONFIGURATIONS.read_text()).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(document))
    letters = [chr(letter) for letter in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / _CLIP / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / _CLIP / "merges.txt").write_text("#version: 0.2\n")
    for place in _T5:
        _pieces(folder / place / "spiece.model", source)


def _pieces(file: Path, text: str) -> None:
    sentencepiece: Any = importlib.import_module("sentencepiece")
    lines = (line for line in text.splitlines() if line.strip())
    with file.open("wb") as written:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=written, vocab_size=_PIECES, hard_vocab_limit=False, minloglevel=2,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        )  # fmt: skip


def command(row: Mapping[str, str]) -> list[str]:
    """What was typed."""
    return [f"benchmark_{row['program']}.py", *row["words"].split()]


def ran(row: Mapping[str, str], root: Path, python: str) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "inference"
        shutil.copytree(root / "inference", folder)
        with (folder / "utils.py").open("a") as file:
            file.write(_KEEPS)
        prepare(folder, (root / "README.md").read_text())
        before = set(folder.glob("*.json"))
        options = ["--gpu", row["gpu"], "--steps", "all", "--json", "answer.json"]
        done = record([*options, *command(row)], folder, python)
        printed = [json.loads(file.read_text()) for file in set(folder.glob("*.json")) - before]
        gib = next((float(one["inference_memory"]) for one in printed if "inference_memory" in one), None)
        if gib is None:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            return Run(failure=errors[-1] if errors else f"exit code {done.returncode}")
        answer = json.loads((folder / "answer.json").read_text())
        return Run(gib, round(sum(_likely(answer["notices"])), 3))


def _likely(notices: Sequence[str]) -> Iterator[float]:
    """GiB."""
    for text in notices:
        if found := _MORE.search(text):
            yield float(found[1]) / (1024 if found[2] == "MiB" else 1)


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, and how far off they are with likely workspaces, and without."""
    ran = [one for one in found if one.run.gib is not None]
    if not ran:
        return f"0 of {len(found)} rows ran"
    with_them, without = (np.abs([one.error(likely) or 0.0 for one in ran]) for likely in (True, False))
    return (
        f"{len(ran)} of {len(found)} rows ran: median {np.median(with_them):.2%}, worst {with_them.max():.2%} "
        f"(without cuDNN's likely workspaces {np.median(without):.2%}, {without.max():.2%})"
    )


def known(results: Path) -> dict[str, Run]:
    """Runs that a file keeps, by the id of their row."""
    return {
        row["id"]: Run(float(row["gib"]) if row["gib"] else None, float(row["likely"]), row["failure"])
        for row in read(results)
    }


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    return [f"pipelines of diffusers; runs kept in {KEPT.name}:", f"    {summary(found)}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    found = of_root("pipelines", arguments, read(TABLE), known, ran, Compared)
    print(summary(found))
