"""PEFT's comparison of adapters of FLUX.2 as programs: what they find, and what stands for a hundred steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accuracy.adapters_images import KEPT, TABLE, hundred, kept, prepare
from tests.accuracy.sft import read

ROWS = read(TABLE)


def test_files_for_the_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    benchmark, folder = tmp_path / "benchmark", tmp_path / "run"
    (benchmark / "experiments" / "lora" / "small").mkdir(parents=True)
    for name in ("run.py", "utils.py", "data.py"):
        (benchmark / name).write_text(f"# {name}\n")
    defaults = {"max_steps": 750, "drift_image_prompts": ["a", "b"], "sample_image_prompts": ["c", "d"]}
    (benchmark / "default_training_params.json").write_text(json.dumps(defaults))
    folder.mkdir()
    prepare(folder, benchmark, "lora/small")
    assert (folder / "run.py").read_text() == "# run.py\n"
    settings = json.loads((folder / "experiments" / "lora" / "small" / "training_params.json").read_text())
    assert (settings["max_steps"], settings["drift_image_prompts"]) == (4, ["a"])
    assert len(list(Path(settings["dataset_id"]).glob("*.png"))) == 20
    transformers, diffusers = pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    tokenizer = transformers.Qwen2TokenizerFast.from_pretrained(folder / "flux" / "tokenizer")
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "cat"}], tokenize=False)
    config = diffusers.Flux2Transformer2DModel.load_config(folder / "flux", subfolder="transformer")
    assert (config["num_layers"], config["num_single_layers"]) == (5, 20)


def test_the_first_step_counts_once_in_a_hundred() -> None:
    first, last = 10_217_324_544, 10_557_063_168
    assert hundred((first + 3 * last) / 4, last) == round((first + 99 * last) / 100)


def test_runs_are_kept_of_rows() -> None:
    runs = [row["id"] for row in read(KEPT)]
    assert [row["id"] for row in ROWS if row["id"] in runs] == runs
    assert f"{len(runs)} of {len(runs)} rows ran" in kept()[1]
