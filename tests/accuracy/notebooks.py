"""Unsloth's notebooks on A100s, whose outputs say what was reserved, run by `record`.

    python -m tests.accuracy notebooks --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/notebooks.csv` is a notebook of unslothai/notebooks (ROOT) and two figures that it
printed in GiB, to three digits: `torch.cuda.max_memory_reserved()` before training, with the model in 4 bits or in 16,
adapters and Trainer made, and after it. A notebook becomes a program, its code cells up to those figures; the model is
holes in a folder, or its configuration alone, the hub's data are made up, and it trains four steps. What training
reserves is compared where texts are so long that batches are full whichever they are. PATH is the Python of an
environment with Unsloth and the libraries of that time (README there). WORD: only rows whose id has it.
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
#: Cells that look at the texts alone, and one that does by words of tokenizers that are not here.
_SHOWN: Final = ("tokenizer.decode",)
_ANSWERS: Final = "train_on_responses_only"
_TOLD: Final = 'print("reserved", start_gpu_memory, torch.cuda.max_memory_reserved() / 1024 / 1024 / 1024)\n'
#: What ends a turn and what fills a batch, by type of model, and what begins turns and pictures: text and number.
_SPECIAL: Final = {
    "qwen3": {"<|im_end|>": 151645, "<|vision_pad|>": 151654},
    "llama": {"<|eot_id|>": 128009, "<|finetune_right_pad_id|>": 128004},
    "qwen3_5": {
        "<|im_end|>": 248046,
        "<|endoftext|>": 248044,
        "<|im_start|>": 248045,
        "<|vision_start|>": 248053,
        "<|vision_end|>": 248054,
        "<|image_pad|>": 248056,
        "<|video_pad|>": 248057,
    },
}
#: A chat's turns, with the words by which Unsloth finds questions and answers.
_TEMPLATE: Final = """{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] }} END {% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
#: The same of a model whose notebook tells the words itself.
_TOLD_TEMPLATE: Final = """{% for message in messages %}<|im_start|> {{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}"""
#: A processor's settings, as Qwen3-VL's are.
_PICTURES: Final = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_PROCESSOR: Final = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **_PICTURES},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **_PICTURES},
}


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


def program(notebook: Mapping[str, Any], model: Path, *, trains: bool, processor: bool = False) -> str:
    """A notebook's code cells up to its training, or to what is before it without `trains`. For a model with a
    `processor` the cell that looks for questions and answers is what makes numbers of the texts."""
    skipped = _SHOWN if processor else (*_SHOWN, _ANSWERS)
    lines = ["import notebook_data\n"]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or text.startswith("%%") or any(word in text for word in skipped):
            continue
        if _TRAINS in text and not trains:
            break
        text = re.sub(r"^ *[!%].*$", "", text, flags=re.MULTILINE)
        text = re.sub(r'model_name = "[^"]*"', f'model_name = "{model}"', text)
        lines.append(re.sub(r"max_steps *= *\d+", f"max_steps = {_STEPS}", text) + "\n")
        if _TRAINS in text:
            break
    return "".join([*lines, _TOLD])


def prepare(name: str, folder: Path) -> bool:
    """Put a model and a tokenizer of a thousand words into a folder: its weights are holes in 4 bits, or are left out
    where it comes with a processor, in 16 bits. Returns whether it does."""
    model = {**catalogue.configuration(name), "torch_dtype": "bfloat16"}
    processor = "vision_config" in model
    if processor:
        (folder / "config.json").write_text(json.dumps(model))
        for file, settings in _PROCESSOR.items():
            (folder / file).write_text(json.dumps({"processor_class": "Qwen3VLProcessor", **settings}))
    else:
        checkpoints.write_nf4(folder, model)
    special = _SPECIAL[str(model["model_type"])]
    words = [*(f"w{number}" for number in range(900)), "user", "assistant"]
    checkpoints.write_tokenizer(folder, words, special)
    end, fill, *_ = special
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": fill}
    template = _TOLD_TEMPLATE if processor else _TEMPLATE.replace("END", end)
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": template}))
    (folder / "chat_template.jinja").write_text(template)
    return processor


def ran(row: Mapping[str, str], root: Path, python: str) -> Printed:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (model := folder / "model").mkdir()
        processor = prepare(row["model"], model)
        notebook = json.loads((root / "nb" / f"{row['id']}.ipynb").read_text())
        lines = program(notebook, model, trains=bool(row["peak"]), processor=processor)
        (folder / "notebook.py").write_text(lines)
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
