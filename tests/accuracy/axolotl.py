"""Axolotl's examples, whose READMEs say about how much memory they take, run by `record` as they are.

    python -m tests.accuracy axolotl --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/axolotl.csv` is an example of axolotl's repository (ROOT) and the memory, in GiB, that
its README says the example takes, as `memory/max_active (GiB)` is in axolotl's log. What is run is `axolotl train` with
the example's file for two steps, served as a GPU would; the model is a configuration without weights, tokenizer and
texts are made up, and packed into full batches. PATH is the Python of an environment with axolotl and the libraries of
that time (README there), which has `axolotl` beside it. WORD: only rows whose id has it.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.accuracy import checkpoints
from tests.accuracy.sft import FOLDER, Judged, keeping, of_kept, of_root, output, read, spread

TABLE: Final = FOLDER / "axolotl.csv"
#: What our runs of the table's rows logged (README there).
KEPT: Final = FOLDER / "axolotl_runs.csv"
#: The models' config.json, as far as memory is asked for.
MODELS: Final = FOLDER / "programs" / "axolotl.json"
_OPTIONS: Final = ("--gpu", "A100-80GB", "--on-gpu", "--steps", "all")
#: Two steps of two batches have the peak of all.
_SHORT: Final = ("--max-steps", "2", "--gradient-accumulation-steps", "2")
_DATA: Final = ("fozziethebeat/alpaca_messages_2k_test", "Nanobit/text-think-2k-test")
#: Words that tokenizers know, and the most of a question and of an answer, whose mean lengths are Alpaca's.
_WORDS: Final = tuple(f"w{number}" for number in range(700))
_LONGEST: Final = (30, 130)
_SAMPLES: Final = 1000
_SPECIAL: Final = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
_TEMPLATE: Final = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Logged:
    """The most active and reserved memory of a training step, in GiB: None where it failed (`failure`)."""

    active: float | None = None
    reserved: float | None = None
    failure: str = ""


known: Final = keeping(Logged)


@dataclass(frozen=True)
class Compared(Judged[Logged]):
    """A row, and our run of it."""

    column = "gib"

    @property
    def ours(self) -> float | None:
        """What ours logged."""
        return self.run.active

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.row['id']:30} FAILED: {self.run.failure[:160]}"
        rest = f"{self.error:+.1%}, reserved {self.run.reserved:.2f}"
        return f"{self.row['id']:30} {self.ours:6.2f} for {self.row['gib']} GiB {rest}"


def prepare(model: str, folder: Path) -> None:
    """Put a model's configuration, tokenizers and texts where an example looks for them, in `folder`."""
    (place := folder / model).mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(json.loads(MODELS.read_text())[model]))
    checkpoints.write_tokenizer(place, _WORDS, {text: len(_WORDS) + number for number, text in enumerate(_SPECIAL)})
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": _TEMPLATE}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (place / "tokenizer_config.json").write_text(json.dumps(told))
    if model.startswith("mistralai/"):
        (place / "tekken.json").write_text(json.dumps(tekken()))
    drawn = random.Random(0)
    lines = []
    for _ in range(_SAMPLES):
        said = [" ".join(drawn.choices(_WORDS, k=drawn.randint(1, longest))) for longest in _LONGEST]
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        lines.append(json.dumps({"messages": turns}) + "\n")
    for name in _DATA:
        (folder / name).mkdir(parents=True)
        (folder / name / "data.jsonl").write_text("".join(lines))


def tekken() -> dict[str, Any]:
    """The file of one of Mistral's own tokenizers, with a token for every byte and for each of the words."""
    tokens = [bytes([byte]) for byte in range(256)] + [f" {word}".encode() for word in _WORDS]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    settings = {"pattern": r" ?[^\s]+|\s", "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 100}
    return {"vocab": vocabulary, "config": {**settings, "default_num_special_tokens": 100, "version": "v7"}}


def logged(text: str) -> Logged | None:
    """The most that a training step has logged; None where none has."""
    found = re.findall(r"{'loss'.*?/max_active \(GiB\)': ([\d.]+).*?/device_reserved \(GiB\)': ([\d.]+)", text)
    if not found:
        return None
    return Logged(max(float(active) for active, _ in found), max(float(reserved) for _, reserved in found))


def ran(row: Mapping[str, str], root: Path, python: str) -> Logged:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(row["model"], folder)
        words = [*_OPTIONS, "--", "axolotl", "train", str(root / row["yaml"]), *_SHORT]
        own = folder / row["model"] / "tekken.json"  # else asked of the hub
        words += ["--tokenizer-config", str(own)] if own.exists() else []
        found = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))
        text, failure = output(words, folder, python, FOLDER / "programs", AXOLOTL_DO_NOT_TRACK="1", PATH=found)
    return logged(text) or Logged(failure=failure or "no figures")


def summary(found: Sequence[Judged[Logged]]) -> str:
    """Rows that ran, and how far off they are."""
    errors = [one.error for one in found if one.error is not None]
    return f"{len(errors)} of {len(found)} rows ran{spread(errors)}"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    told = summary(of_kept(read(TABLE), known(KEPT), Compared))
    return [f"axolotl's examples, active memory; runs kept in {KEPT.name}:", f"    {told}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    print(summary(of_root("axolotl", arguments, read(TABLE), known, ran, Compared)))
