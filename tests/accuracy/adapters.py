"""Adapters that PEFT's authors compared on an L40S, by PEFT's own benchmark, run by `record`.

    python -m tests.accuracy adapters --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/adapters.csv` is an experiment of method_comparison/MetaMathQA (Llama 3.2 3B in bf16,
batches of four samples by length, the cache emptied after every tenth step, 5,000 steps with evaluations), and the
reserved memory that it printed: PyTorch 2.13, as here. ROOT is PEFT's repository at commit d787f51, whose package is
used too; PATH the Python of an environment with transformers 5.13.1 (README there).

The benchmark runs as it is, but for its data, which are not here, and one line that wants a loss between 1 and 2. The
peak is in the batch of the longest sample: how long that is, is fitted to one row (`LONGEST`), the other rows are
judged by it. Thirty steps are run: a bucket of samples as they mostly are, and the first half of one with the longest.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from graph.models import catalogue
from tests.accuracy.sft import FOLDER, Judged, keeping, of_kept, of_root, read, recorded, spread

TABLE: Final = FOLDER / "adapters.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "adapters_runs.csv"
#: The row whose peak told how long the longest sample is.
FITTED: Final = "lora/llama-3.2-3B-rank32"
#: Tokens of the longest sample.
LONGEST: Final = 702
#: Tokens of a sample in the mean: 4,198,051 of 20,000 samples with one more each, by every row's log.
_MEAN: Final = 4_198_051 / 20_000 - 1
#: The standard deviation of their logarithm: one in a thousand has 620 or more, and texts end at 1,300 letters.
_SPREAD: Final = 0.4
#: Where PEFT's benchmarks have settings, those of one experiment, and what they log.
DEFAULTS: Final = "default_training_params.json"
SETTINGS: Final = "training_params.json"
LOGS: Final = ("results", "temporary_results", "cancelled_results")
_BUCKET: Final = 80
_STEPS: Final = 30
#: New tokens of an evaluation, which needs less memory than training does (300 in theirs).
_NEW: Final = 4
_SANITY: Final = re.compile(r"^ +assert 1 < wiki_loss_before < 2, \(\n.*\n +\)\n", re.MULTILINE)
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Run:
    """What a run of a row's program printed: reserved bytes and trained parameters; `failure` where it failed."""

    reserved: int | None = None
    trained: int | None = None
    failure: str = ""


known: Final = keeping(Run)


@dataclass(frozen=True)
class Compared(Judged[Run]):
    """A row, and our run of it."""

    column = "reserved"

    @property
    def ours(self) -> float | None:
        """Our reserved bytes; None where the run failed."""
        return self.run.reserved

    def __str__(self) -> str:
        if self.run.reserved is None:
            return f"{self.row['id']:55} FAILED: {self.run.failure[:160]}"
        ours, theirs = self.run.reserved / _MIB, int(self.row["reserved"]) / _MIB
        line = f"{self.row['id']:55} {ours:8,.0f} for {theirs:8,.0f} MiB {self.error:+.2%}"
        if self.run.trained != int(self.row["trained"]):
            line += f", trains {self.run.trained:,} for {int(self.row['trained']):,}"
        return line


def usual() -> list[int]:
    """Tokens of a bucket's samples, as a log-normal distribution spreads them evenly."""
    middle = math.log(_MEAN) - _SPREAD**2 / 2
    shares = ((place + 0.5) / _BUCKET for place in range(_BUCKET))
    return [round(math.exp(middle + _SPREAD * NormalDist().inv_cdf(share))) for share in shares]


def prepare(folder: Path, benchmark: Path, experiment: str) -> None:
    """Put an experiment of the benchmark, a model without weights, a tokenizer and lengths into a folder."""
    settings = copied(folder, benchmark, experiment, "run.py", "utils.py")
    (folder / "run.py").write_text(_SANITY.sub("", (folder / "run.py").read_text()))
    shutil.copy(FOLDER / "programs" / "adapters_data.py", folder / "data.py")
    lengths = {"train": [*usual(), *usual()[:-1], LONGEST], "valid": [50, 60], "test": [50, 60], "articles": 4}
    _write(folder / "lengths.json", lengths)
    settings |= {"model_id": str(folder / "model"), "max_steps": _STEPS, "eval_steps": _STEPS}
    settings["generation_kwargs"]["max_new_tokens"] = _NEW
    _write(folder / "experiments" / experiment / SETTINGS, settings)
    (folder / "model").mkdir()
    _write(folder / "model" / "config.json", catalogue.configuration("llama-3.2-3b"))
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1, "</s>": 2}, "unk_token": "[UNK]"}
    parts = {"model": words, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    _write(folder / "model" / "tokenizer.json", {"version": "1.0", **parts})
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "</s>"}
    _write(folder / "model" / "tokenizer_config.json", kind)


def copied(folder: Path, benchmark: Path, experiment: str, *files: str) -> dict[str, Any]:
    """Put files and an experiment of a benchmark into a folder, with the folders of its logs; the experiment's settings
    are to be written as `SETTINGS`."""
    for name in (*files, DEFAULTS):
        shutil.copy(benchmark / name, folder)
    shutil.copytree(benchmark / "experiments" / experiment, folder / "experiments" / experiment)
    for name in LOGS:
        (folder / name).mkdir()
    own = folder / "experiments" / experiment / SETTINGS
    settings: dict[str, Any] = json.loads((folder / DEFAULTS).read_text())
    return settings | (json.loads(own.read_text()) if own.exists() else {})


def _write(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document))


def ran(row: Mapping[str, str], root: Path, python: str) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, root / "method_comparison" / "MetaMathQA", row["id"])
        train, failure = trained(folder, row["id"], root, python)
        if train is None:
            return Run(failure=failure)
        return Run(train["accelerator_memory_max"], train["num_trainable_params"])


def trained(folder: Path, experiment: str, root: Path, python: str, *options: str) -> tuple[Any, str]:
    """What a benchmark, run in its folder, logs of a training (None: it did not come to the end), and why not.
    `options` are those of `record`."""
    words = ["--gpu", "L40S", *options, "--steps", "all", "run.py", f"experiments/{experiment}"]
    _, failure = recorded(words, folder, python, root / "src")
    files = list(folder.glob("*results/*.json"))
    if failure or not files:
        return None, failure or "no log"
    log = json.loads(files[0].read_text())
    failure = log["run_info"]["error_msg"]
    return (None, failure) if failure else (log["train_info"], "")


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, and how far off those are that were not fitted."""
    ran = [one for one in found if one.error is not None]
    errors = [one.error for one in ran if one.row["id"] != FITTED]
    within = sum(abs(error or 0.0) <= 0.01 for error in errors)
    return f"{len(ran)} of {len(found)} rows ran{spread(errors)}; {within} of {len(errors)} within 1 %"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    return [f"PEFT's comparison of adapters, reserved memory; runs kept in {KEPT.name}:", f"    {summary(found)}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    found = of_root("adapters", arguments, read(TABLE), known, ran, Compared)
    print(summary(found))
