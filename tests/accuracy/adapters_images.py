"""Adapters of FLUX.2 klein that PEFT's authors compared on an L40S, by PEFT's own benchmark, run by `record`.

    python -m tests.accuracy adapters_images --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/adapters_images.csv` is an experiment of method_comparison/image-gen (FLUX.2 klein 4B
in bf16, two pictures of 512 by 512, gradient checkpointing), and the mean of the reserved memory that it found after
each of its first hundred steps. Every size of it is known. ROOT is PEFT's repository at commit 194cb8f, whose package
is used too; PATH the Python of an environment with transformers 5.13.1, diffusers 0.38 and torchvision (README there).

The benchmark runs as it is, with pictures and weights that are made up, for four steps and shorter evaluations, which
come after what is compared; the other 96 steps are taken to be as the last ones were. It is served as a GPU would
(`record --on-gpu`), by what was seen on an H100.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.accuracy.adapters import LOGS, SETTINGS, Compared, Run, copied, known, summary, trained
from tests.accuracy.sft import FOLDER, of_kept, of_root, read

TABLE: Final = FOLDER / "adapters_images.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "adapters_images_runs.csv"
#: Configurations of the pipeline and of the model that evaluates, by the path of each file in a folder.
CONFIGURATIONS: Final = FOLDER / "programs" / "flux2_klein.json"
_PICTURES: Final = 20
_STEPS: Final = 4
#: Steps of theirs that are compared.
_THEIRS: Final = 100


def prepare(folder: Path, benchmark: Path, experiment: str) -> None:
    """Put an experiment of the benchmark, a pipeline without weights, and pictures into a folder."""
    settings = copied(folder, benchmark, experiment, "run.py", "utils.py", "data.py")
    for name in LOGS:
        (folder / "sample-images" / name).mkdir(parents=True)
    settings |= {"model_id": str(folder / "flux"), "dataset_id": str(folder / "cats")}
    settings |= {"dino_model_id": str(folder / "dino"), "max_steps": _STEPS, "eval_steps": _STEPS}
    settings["num_inference_steps"] = 1
    for name in ("drift_image_prompts", "sample_image_prompts"):
        settings[name] = settings[name][:1]
    (folder / "experiments" / experiment / SETTINGS).write_text(json.dumps(settings))
    for path, document in json.loads(CONFIGURATIONS.read_text()).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(document))
    letters = [chr(letter) for letter in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    words = [*letters, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "flux" / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "flux" / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    _draw(folder / "cats")


def _draw(folder: Path) -> None:
    pictures: Any = importlib.import_module("PIL.Image")
    folder.mkdir()
    for number in range(_PICTURES):
        pictures.new("RGB", (600, 600), (number, number, number)).save(folder / f"{number:02}.png")


def ran(row: Mapping[str, str], root: Path, python: str) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, root / "method_comparison" / "image-gen", row["id"])
        train, failure = trained(folder, row["id"], root, python, "--on-gpu")
        if train is None:
            return Run(failure=failure)
        mean = hundred(train["metrics"][0]["mem reserved avg"], train["accelerator_memory_max"])
        return Run(mean, train["num_trainable_params"])


def hundred(mean: float, last: int) -> int:
    """The mean of a hundred steps, of which the first is other than the rest, by that of the few that were run."""
    first = _STEPS * mean - (_STEPS - 1) * last
    return round((first + (_THEIRS - 1) * last) / _THEIRS)


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    return [f"PEFT's comparison of adapters of FLUX.2, reserved; runs kept in {KEPT.name}:", f"    {summary(found)}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    found = of_root("adapters_images", arguments, read(TABLE), known, ran, Compared)
    print(summary(found))
