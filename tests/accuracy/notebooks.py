"""Unsloth's notebooks on A100s, whose outputs say what was reserved, run by `record`.

    python -m tests.accuracy notebooks --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/notebooks.csv` is a notebook of unslothai/notebooks (ROOT) and two figures that it
printed in GiB, to three digits: `torch.cuda.max_memory_reserved()` before training, with the model in 4 bits, adapters
and Trainer made, and after it. A notebook becomes a program, its code cells up to those figures; the model is holes in
a folder, the hub's data are made up, and it trains four steps. What training reserves is compared where texts are so
long that batches are full whichever they are. PATH is the Python of an environment with Unsloth and the libraries of
that time (README there). WORD: only rows whose id has it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graph.models import catalogue
from tests.accuracy import checkpoints
from tests.accuracy.sft import FOLDER, Judged, keeping, of_kept, of_root, output, read, spread

TABLE: Final = FOLDER / "notebooks.csv"
#: What our runs of the table's rows printed (README there).
KEPT: Final = FOLDER / "notebooks_runs.csv"
#: transformers reserves a share of free memory before it loads 4 bits: an A100's likely context, as `record` says it.
_CONTEXT: Final = "548MiB"
_TRAINS: Final = "trainer.train()"
_STEPS: Final = 4
#: Cells that look at the texts alone, some by words of tokenizers that are not here.
_SKIPPED: Final = ("train_on_responses_only", "tokenizer.decode")
_TOLD: Final = 'print("reserved", start_gpu_memory, torch.cuda.max_memory_reserved() / 1024 / 1024 / 1024)\n'
#: What ends a turn and what fills a batch, by type of model: text and number.
_SPECIAL: Final = {
    "qwen3": {"<|im_end|>": 151645, "<|vision_pad|>": 151654},
    "llama": {"<|eot_id|>": 128009, "<|finetune_right_pad_id|>": 128004},
}
#: A chat's turns, with the words by which Unsloth finds questions and answers.
_TEMPLATE: Final = """{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] }} END {% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


@dataclass(frozen=True)
class Printed:
    """Reserved memory before training and after, in GiB: None where it failed (`failure`)."""

    start: float | None = None
    peak: float | None = None
    failure: str = ""


known: Final = keeping(Printed)


@dataclass(frozen=True)
class Compared(Judged[Printed]):
    """A row, and our run of it."""

    column = "start"

    @property
    def ours(self) -> float | None:
        """What ours reserved before training."""
        return self.run.start

    @property
    def peak_error(self) -> float | None:
        """Relative error of what training reserves, signed; None where that depends on the texts."""
        return self.run.peak / float(self.row["peak"]) - 1 if self.run.peak and self.row["peak"] else None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.row['id']:42} FAILED: {self.run.failure[:160]}"
        peak = (
            "" if self.peak_error is None else f", {self.run.peak:6.3f} for {self.row['peak']} {self.peak_error:+.2%}"
        )
        return f"{self.row['id']:42} {self.ours:6.3f} for {self.row['start']} GiB {self.error:+.2%}{peak}"


def program(notebook: Mapping[str, Any], model: Path, *, trains: bool) -> str:
    """A notebook's code cells up to its training, or to what is before it without `trains`."""
    lines = ["import notebook_data\n"]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or text.startswith("%%") or any(word in text for word in _SKIPPED):
            continue
        if _TRAINS in text and not trains:
            break
        text = re.sub(r"^ *[!%].*$", "", text, flags=re.MULTILINE)
        text = re.sub(r'model_name = "[^"]*"', f'model_name = "{model}"', text)
        lines.append(re.sub(r"max_steps *= *\d+", f"max_steps = {_STEPS}", text) + "\n")
        if _TRAINS in text:
            break
    return "".join([*lines, _TOLD])


def prepare(name: str, folder: Path) -> None:
    """Put a model, whose weights are holes in 4 bits, and a tokenizer of a thousand words into a folder."""
    model = {**catalogue.configuration(name), "torch_dtype": "bfloat16"}
    checkpoints.write_nf4(folder, model)
    special = _SPECIAL[str(model["model_type"])]
    checkpoints.write_tokenizer(folder, [f"w{number}" for number in range(900)], special)
    end, fill = special
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": fill}
    template = _TEMPLATE.replace("END", end)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def ran(row: Mapping[str, str], root: Path, python: str) -> Printed:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (model := folder / "model").mkdir()
        prepare(row["model"], model)
        notebook = json.loads((root / "nb" / f"{row['id']}.ipynb").read_text())
        (folder / "notebook.py").write_text(program(notebook, model, trains=bool(row["peak"])))
        words = [*row["options"].split(), "--context", _CONTEXT, "--on-gpu", "--steps", "all", "notebook.py"]
        text, failure = output(words, folder, python, FOLDER / "programs", UNSLOTH_DISABLE_STATISTICS="1")
    found = re.search(r"^reserved ([\d.]+) ([\d.]+)$", text, re.MULTILINE)
    if found is None:
        return Printed(failure=failure or "no figures")
    return Printed(float(found[1]), round(float(found[2]), 3))


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, and how far off they are."""
    ran = [one for one in found if one.error is not None]
    peaks = spread(one.peak_error for one in ran)
    return f"{len(ran)} of {len(found)} rows ran, before training{spread(one.error for one in ran)}; after it{peaks}"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    told = summary(of_kept(read(TABLE), known(KEPT), Compared))
    return [f"Unsloth's notebooks on A100s, reserved memory; runs kept in {KEPT.name}:", f"    {told}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    print(summary(of_root("notebooks", arguments, read(TABLE), known, ran, Compared)))
