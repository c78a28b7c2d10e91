"""Unsloth's notebooks: the program that one becomes, what is printed of a row, and which runs are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.notebooks import KEPT, TABLE, Compared, Printed, kept, prepare, program, summary
from tests.accuracy.sft import read

ROWS = read(TABLE)
CELLS = [
    "%%capture\n!pip install unsloth\n",
    'from unsloth import FastLanguageModel\nmodel = load(\n    model_name = "unsloth/Qwen3-32B", # any\n)\n!ls\n',
    "from unsloth.chat_templates import train_on_responses_only\ntrainer = train_on_responses_only(trainer)\n",
    "start_gpu_memory = 1\n",
    "trainer = SFTTrainer(max_steps = 60)\ntrainer_stats = trainer.train()\n",
    "used_memory = 2\n",
]


def notebook(cells: list[str]) -> dict[str, Any]:
    text = {"cell_type": "markdown", "source": ["trainer.train()"]}
    return {"cells": [text, *({"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells)]}


@pytest.mark.parametrize("trains", [True, False])
def test_a_notebook_becomes_a_program(trains: bool) -> None:
    text = program(notebook(CELLS), Path("folder/model"), trains=trains)
    compile(text, "notebook.py", "exec")
    assert text.startswith("import notebook_data\n")
    assert 'model_name = "folder/model", # any' in text
    assert not any(word in text for word in ("pip", "!ls", "responses", "used_memory", "Qwen3"))
    assert ("max_steps = 4)\ntrainer_stats" in text) == trains
    assert text.splitlines()[-1].startswith('print("reserved", start_gpu_memory')


def test_a_notebook_of_a_model_with_a_processor_keeps_what_makes_numbers_of_texts() -> None:
    text = program(notebook(CELLS), Path("folder/model"), trains=True, processor=True)
    assert "trainer = train_on_responses_only(trainer)" in text


def test_what_is_printed() -> None:
    row = {"id": "one", "start": "10.000", "peak": "20.000"}
    exact, failed = Compared(row, Printed(10.0, 21.0)), Compared(row, Printed(failure="ImportError: x"))
    other = Compared({**row, "peak": ""}, Printed(10.0, 10.0))
    assert str(exact).split(maxsplit=1)[1] == "10.000 for 10.000 GiB +0.00%, 21.000 for 20.000 +5.00%"
    assert str(other).endswith("10.000 for 10.000 GiB +0.00%")
    assert str(failed).endswith("FAILED: ImportError: x")
    assert summary([exact, failed, other]) == (
        "2 of 3 rows ran, before training: median 0.00%, worst 0.00%; after it: median 5.00%, worst 5.00%"
    )


@pytest.mark.parametrize("name", ["qwen3-32b", "llama-3.3-70b"])
def test_a_model_in_four_bits_is_loaded(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    prepare(name, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 1 << 23
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "bitsandbytes"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "w7 w8"}], tokenize=False)
    assert tokenizer(turn)["input_ids"][-1] == tokenizer.eos_token_id


def test_every_row_has_a_run_that_is_kept() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    assert len(kept()) == 2
