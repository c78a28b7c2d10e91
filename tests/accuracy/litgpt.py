"""Fine-tuning that LitGPT's authors measured on A10Gs and A100s, by LitGPT's own programs, run by `record`.

    python -m tests.accuracy litgpt --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/litgpt.csv` is a line of one of their tables and the peak that the program printed, in
GB of 1e9 bytes; empty where memory ran out. It is run by the program of the commit that brought the line:

- `config_hub/finetune/README.md`: the id is the file of settings (`phi-2/lora` is `phi-2/lora.yaml`). Each sample has
  more than the 512 tokens to which the settings cut, so every batch is full. Of theirs one was, and the one before it,
  whose logits are still there, maybe not: of Gemma, with its 256,000 tokens, ours may be too high by as much.
- `tutorials/resource-tables.md` (`tables/...`): program, model, quantization, samples in a batch x GPUs. The longest
  sample has as many tokens as the page says, and comes first, as the program has it. `generate` is inference.

ROOT is a clone of LitGPT with its history; PATH the Python of an environment with Lightning and bitsandbytes of that
time (README there). Weights are holes. Ours is rank 0's, as theirs, of training with the workspace of autograd's own
cuBLAS handle, which every real GPU has.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.accuracy.sft import FOLDER, WORKSPACE, Judged, Run, known, of_kept, of_root, read, recorded, spread

TABLE: Final = FOLDER / "litgpt.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "litgpt_runs.csv"
GB: Final = 1e9
#: Tokens to which the settings of `config_hub` cut a sample.
CUT: Final = 512
_INFERENCE: Final = "generate"
_SETTINGS: Final = Path("config_hub") / "finetune"


@dataclass(frozen=True)
class Compared(Judged[Run]):
    """A row, and our run of it."""

    column = "gb"

    @property
    def ours(self) -> float | None:
        """Our peak in GB; None where the program failed or ran out of memory."""
        backward = self.row["program"] != _INFERENCE
        return None if not self.run.allocated else (self.run.allocated + backward * WORKSPACE) / GB

    def __str__(self) -> str:
        if self.run.failure:
            return f"{self.row['id']:46} FAILED: {self.run.failure[:160]}"
        ours = f"{self.ours:.2f} GB" if self.ours else "out of memory"
        theirs = f"{float(self.row['gb']):.2f} GB" if self.row["gb"] else "out of memory"
        return f"{self.row['id']:46} {ours:>13} for {theirs:>13} {'' if self.error is None else f'{self.error:+.2%}'}"


def command(row: Mapping[str, str], root: Path, folder: Path) -> list[str]:
    """What was typed, with LitGPT's files of the row's commit in `root` and the model's in `folder`."""
    start = ["--", "python"] if row["gpus"] == "1" else ["--", "torchrun", "--nproc-per-node", row["gpus"]]
    out = ["--out_dir", str(folder / "out")]
    if row["program"]:
        quantized = ["--quantize", row["quantize"]] if row["quantize"] else []
        data = [] if row["program"] == _INFERENCE else ["--data_dir", str(folder / "data"), *out]
        given = ["--checkpoint_dir", str(folder), "--precision", "bf16-true", *quantized, *data]
        return [*start, str(_program(row, root)), *given]
    method = row["id"].rpartition("/")[2].removeprefix("q")
    # Since May 2024 a program is one word.
    joined = '"finetune_lora":' in (root / "litgpt" / "__main__.py").read_text()
    return [
        *(*start, "-m", "litgpt", *([f"finetune_{method}"] if joined else ["finetune", method]), *out),
        *("--config", str(root / _SETTINGS / f"{row['id']}.yaml"), "--devices", row["gpus"]),
        *("--data.repo_id", str(folder / "alpaca"), "--data.download_dir", str(folder / "cache")),
    ]


def prepare(row: Mapping[str, str], root: Path, folder: Path) -> str:
    """Set up LitGPT's files in `root` for a row, with the model in `folder`; the model's name, by LitGPT."""
    if not row["program"]:
        return Path(_set(root / _SETTINGS / f"{row['id']}.yaml", checkpoint_dir=f": {folder}")).name
    if row["program"] != _INFERENCE:
        _set(_program(row, root), micro_batch_size=f" = {row['micro_batch']}", devices=f" = {row['gpus']}")
    return row["model"]


def _program(row: Mapping[str, str], root: Path) -> Path:
    inference = row["program"] == _INFERENCE
    return root / "generate" / "base.py" if inference else root / "finetune" / f"{row['program']}.py"


def _set(file: Path, **values: str) -> str:
    """Have the lines of a file that begin with these names go on so; how the first went on before."""
    text, before = file.read_text(), []
    for name, value in values.items():
        line = re.compile(rf"^{name}\b(.*)$", re.MULTILINE)
        before += line.findall(text)
        text = line.sub(name + value, text)
    file.write_text(text)
    return before[0]


def ran(row: Mapping[str, str], repository: Path, python: str) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        root, folder = Path(name) / "litgpt", Path(name) / (row["model"] or "model")  # of tables: the folder names it
        folder.mkdir()
        asked = ["git", "-C", str(repository), "archive", row["commit"]]
        packed = subprocess.run(asked, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(root, filter="data")
        maker = [python, "-W", "ignore", str(FOLDER / "programs" / "litgpt_checkpoint.py"), prepare(row, root, folder)]
        told = [*maker, str(folder), row["longest"] or str(CUT)]
        subprocess.run(told, cwd=root, env={"PYTHONPATH": str(root)}, check=True)
        # Steps of tables are of 128 samples.
        words = ["--gpu", row["gpu"], "--steps", "1" if _of_tables(row) else "3"]
        rank, failure = recorded([*words, *command(row, root, folder)], folder, python, root)
        if rank is not None and rank["num_ooms"]:
            return Run()
        if rank is None or failure:
            return Run(failure=failure)
        return Run(rank["peak_allocated"], rank["peak_reserved"])


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, how far off they are, and whether they run out of memory."""
    ran = [one for one in found if not one.run.failure]
    right = sum((one.ours is None) == (not one.row["gb"]) for one in ran)
    errors = spread(one.error for one in ran)
    return f"{len(ran)} of {len(found)} rows ran{errors}; verdicts: {right} of {len(ran)} right"


def by_table(found: Sequence[Compared]) -> list[str]:
    """The summary of each of their tables."""
    kinds = {
        "settings of config_hub": [one for one in found if not one.row["program"]],
        "resource tables, one GPU": [one for one in found if _of_tables(one.row) and one.row["gpus"] == "1"],
        "resource tables, several GPUs": [one for one in found if _of_tables(one.row) and one.row["gpus"] != "1"],
        "resource tables, inference": [one for one in found if one.row["program"] == _INFERENCE],
    }
    return [f"{name}: {summary(those)}" for name, those in kinds.items() if those]


def _of_tables(row: Mapping[str, str]) -> bool:
    return row["program"] not in ("", _INFERENCE)


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    return [f"LitGPT's own tables; runs kept in {KEPT.name}:", *(f"    {line}" for line in by_table(found))]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    found = of_root("litgpt", arguments, read(TABLE), known, ran, Compared)
    print("\n".join(by_table(found)))
