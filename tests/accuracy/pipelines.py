"""Pictures and films that others made on real GPUs by pipelines of diffusers, by the same programs, run by `record`.

    python -m tests.accuracy pipelines --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/pipelines.csv` is a peak of allocated memory, in GiB as diffusers-torchao's benchmark
printed it (FLUX.1-dev, CogVideoX 2B and 5B, eager and compiled, with and without fused projections, on one A100 or
H100), and the options of its run. ROOT is its repository at commit 9b9f238; PATH the Python of an environment with
PyTorch and the libraries of that time (README there). Weights are made up, and so are the tokenizers: texts are padded.

Autoencoders are made of convolutions, for which cuDNN takes workspaces: the programs are served as a GPU would serve
them (`record --on-gpu`).
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.accuracy.sft import FOLDER, Judged, failure_of, keeping, of_kept, of_root, read, record, spread

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


@dataclass(frozen=True)
class Run:
    """What a run of a row's program printed, in GiB; `failure` where it failed."""

    gib: float | None = None
    failure: str = ""


known: Final = keeping(Run)


@dataclass(frozen=True)
class Compared(Judged[Run]):
    """A row, and our run of it."""

    column = "gib"

    @property
    def ours(self) -> float | None:
        """Our peak in GiB; None where the run failed."""
        return self.run.gib

    def __str__(self) -> str:
        if self.run.gib is None:
            return f"{self.row['id']:50} FAILED: {self.run.failure[:160]}"
        return f"{self.row['id']:50} {self.run.gib:7.3f} for {float(self.row['gib']):7.3f} GiB {self.error:+.2%}"


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
        done = record(["--gpu", row["gpu"], "--on-gpu", "--steps", "all", *command(row)], folder, python)
        printed = [json.loads(file.read_text()) for file in set(folder.glob("*.json")) - before]
        gib = next((float(one["inference_memory"]) for one in printed if "inference_memory" in one), None)
        if gib is None:
            return Run(failure=failure_of(done))
        return Run(gib)


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, and how far off they are."""
    ran = [one.error for one in found if one.run.gib is not None]
    return f"{len(ran)} of {len(found)} rows ran{spread(ran)}"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    return [f"pipelines of diffusers; runs kept in {KEPT.name}:", f"    {summary(found)}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    found = of_root("pipelines", arguments, read(TABLE), known, ran, Compared)
    print(summary(found))
