"""Hugging Face's guide "Efficient Training on a Single GPU" on a V100 of 16 GB, by its Trainer, run by `record`.

    python -m tests.accuracy guide [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/guide.csv` is an experiment of the guide (transformers' documentation, v4.20 to v4.28;
January 2022, PyTorch 1.10) with BERT large and what NVML said the whole card held after it, in MiB. It becomes a run of
`tests/data/published/programs/guide.py`. Ours is what the allocator reserved, and what the guide itself found before
any of it: 1,343 MiB with one tiny tensor. PATH is the Python of an environment with transformers 4.28.1 (README there).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.accuracy.sft import FOLDER, MIB, Judged, Run, arguments_of, compared, known, of_kept, read, recorded
from tests.accuracy.trainers import summary

TABLE: Final = FOLDER / "guide.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "guide_runs.csv"
#: What the card held beside the allocator, in MiB: the guide's figure less the segment of its tiny tensor.
OUTSIDE: Final = 1343 - 2
#: bert-large-uncased.
MODEL: Final = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 512, "vocab_size": 30522,
}  # fmt: skip
#: Of the optimizer, that are run.
_STEPS: Final = 4


@dataclass(frozen=True)
class Compared(Judged[Run]):
    """A row, and our run of it."""

    column = "mib"

    @property
    def ours(self) -> float | None:
        """Ours of the whole card in MiB; None where the run failed."""
        return None if self.run.reserved is None else self.run.reserved / MIB + OUTSIDE

    def __str__(self) -> str:
        if self.ours is None:
            return f"{self.row['id']:20} FAILED: {self.run.failure[:160]}"
        return f"{self.row['id']:20} {self.ours:>9,.0f} for {float(self.row['mib']):>9,.0f} MiB {self.error:+.2%}"


def ran(row: Mapping[str, str], python: str) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bert").mkdir()
        (folder / "bert" / "config.json").write_text(json.dumps(MODEL))
        program = [str(FOLDER / "programs" / "guide.py"), str(folder / "bert"), row["id"]]
        options = ["--gpu", "V100-16GB", "--context", f"{OUTSIDE}MiB", "--steps", str(_STEPS)]
        rank, failure = recorded([*options, *program], folder, python)
        if rank is None or failure:
            return Run(failure=failure)
        return Run(rank["peak_allocated"], rank["peak_reserved"])


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    told = summary(of_kept(read(TABLE), known(KEPT), Compared))
    return [f"Hugging Face's guide for one GPU, the whole card by NVML; runs kept in {KEPT.name}:", f"    {told}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    options = arguments_of("guide").parse_args(arguments)
    print(summary(compared(read(TABLE), options, known, lambda row: ran(row, options.python), Compared)))
