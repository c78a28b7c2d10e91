"""Pretraining of Llama 3 8B on eight H100s that torchao measured by torchtitan, by torchtitan itself, run by `record`.

    python -m tests.accuracy torchtitan ROOT [--python PATH] [--results FILE] [WORD]...

ROOT is torchtitan's repository at commit b291ad662 (2025-02-28), PATH the Python of an environment with PyTorch 2.7,
its Triton, torchao 0.10 and what torchtitan requires. Each row of `tests/data/published/torchtitan.csv` is the peak of
reserved memory that torchtitan logs, in GiB with two decimals, and the options of its run; what they leave open is in
its `llama3_8b.toml`. Ours is rank 0 of 8 after eleven steps, with the workspace of autograd's own cuBLAS handle, which
every real GPU has. Tokens are made up: batches are full whatever they say. WORD: only rows whose id has it.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tests.accuracy.sft import FOLDER, Run, keep, known, read
from tests.places import ROOT

TABLE: Final = FOLDER / "torchtitan.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "torchtitan_runs.csv"
GIB: Final = 1 << 30
#: The cuBLAS workspace of an H100.
WORKSPACE: Final = 33_554_432
LIMIT: Final = 900
STEPS: Final = 11
#: Llama 3's tokens, without those that torchtitan adds.
TOKENS: Final = 128_000


@dataclass(frozen=True)
class Compared:
    """A row, and our run of it."""

    row: Mapping[str, str]
    run: Run

    @property
    def error(self) -> float | None:
        """Relative error, signed; None where ours failed."""
        return (self.run.reserved + WORKSPACE) / GIB / float(self.row["gib"]) - 1 if self.run.reserved else None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.row['id']:42} FAILED: {self.run.failure[:160]}"
        ours = ((self.run.reserved or 0) + WORKSPACE) / GIB
        return f"{self.row['id']:42} {ours:6.2f} for {float(self.row['gib']):6.2f} GiB {self.error:+.2%}"


def prepare(folder: Path) -> None:
    """Put in a folder what torchtitan looks for there: a tokenizer of as many tokens, and texts."""
    letters = (bytes(word) for size in (2, 3, 4) for word in itertools.product(range(97, 123), repeat=size))
    tokens = itertools.islice(itertools.chain((bytes([byte]) for byte in range(256)), letters), TOKENS)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    texts = folder / "tests" / "assets" / "c4_test"
    texts.mkdir(parents=True)
    (texts / "data.json").write_text(400 * (json.dumps({"text": 2000 * "never the same "}) + "\n"))


def command(row: Mapping[str, str], root: Path, folder: Path) -> list[str]:
    """What was typed, with the tokenizer and the texts that are in `folder`."""
    words = ["torchrun", "--nproc_per_node=8", "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0"]
    words += [str(root / "torchtitan" / "train.py")]
    words += ["--job.config_file", str(root / "torchtitan/models/llama/train_configs/llama3_8b.toml")]
    words += [f"--job.dump_folder={folder}", f"--model.tokenizer_path={folder / 'tokenizer.model'}"]
    return [*words, "--training.dataset=c4_test", "--training.steps=100", *row["words"].split()]


def ran(row: Mapping[str, str], root: Path, python: str) -> Run:
    """Run torchtitan as a row has it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        answer = folder / "answer.json"
        words = [python, "-m", "simulator", "record", "-q", "--gpu", "H100-80GB", "--ranks", "0", "--steps", str(STEPS)]
        words += ["--json", str(answer), "--", *command(row, root, folder)]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT), str(root))))
        given = {**os.environ, "PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        try:
            done = subprocess.run(
                words, cwd=folder, env=given, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return Run(failure=f"not done in {LIMIT} s")
        if done.returncode or not answer.exists():
            return Run(failure=next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), "?"))
        rank = json.loads(answer.read_text())["ranks"][0]
        return Run(rank["peak_allocated"], rank["peak_reserved"])


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, and how far off they are."""
    sizes = np.abs([one.error for one in found if one.error is not None])
    errors = f": median {np.median(sizes):.2%}, worst {sizes.max():.2%}" if len(sizes) else ""
    return f"{len(sizes)} of {len(found)} rows ran{errors}"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    runs = known(KEPT)
    found = [Compared(row, runs[row["id"]]) for row in read(TABLE) if row["id"] in runs]
    return [f"torchtitan on eight H100s, reserved; runs kept in {KEPT.name}:", f"    {summary(found)}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy torchtitan")
    parser.add_argument("root", type=Path, metavar="ROOT")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--results", type=Path, help="keep what was found, and do not run it again")
    options = parser.parse_args(arguments)
    runs = known(options.results) if options.results is not None and options.results.exists() else {}
    found = []
    for row in read(TABLE):
        if not all(word in row["id"] for word in options.words):
            continue
        one = Compared(row, runs.get(row["id"]) or ran(row, options.root.resolve(), options.python))
        if options.results is not None and row["id"] not in runs:
            keep(options.results, row["id"], one.run)
        found.append(one)
        print(one, flush=True)
    print(summary(found))
