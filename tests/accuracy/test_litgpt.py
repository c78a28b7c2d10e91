"""LitGPT's measurements as programs: what is typed for a row, what is set up for it, what is printed of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.accuracy.litgpt import GB, KEPT, TABLE, Compared, command, kept, prepare, summary
from tests.accuracy.sft import WORKSPACE, Run, read

ROWS = read(TABLE)
SETTINGS = "# Where it is\ncheckpoint_dir: checkpoints/google/gemma-2b\n\ndevices: 1\n"
PROGRAM = "devices = 1\nbatch_size = 128\nmicro_batch_size = 4  # set to fit\niters = batch_size // micro_batch_size\n"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_what_is_typed_for_a_row(row: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "litgpt").mkdir()
    main = tmp_path / "litgpt" / "__main__.py"
    main.write_text("")
    words = command(row, tmp_path, Path("model"))
    given = dict(itertools.pairwise(words))
    assert (words[1] == "torchrun") == (row["gpus"] != "1")
    if row["program"]:
        _, program, model, quantized, size = row["id"].split("/")
        inference = program == "generate"
        assert str(tmp_path / ("generate/base.py" if inference else f"finetune/{program}.py")) in words
        assert ("--data_dir" in words) != inference
        assert (row["model"], f"{row['micro_batch']}x{row['gpus']}") == (model, size)
        assert given.get("--quantize", "bnb.bf16") == f"bnb.{quantized}"
    else:
        assert Path(given["--config"]).parts[-2:] == Path(f"{row['id']}.yaml").parts
        assert given["--devices"] == row["gpus"]
        method = "full" if row["id"].endswith("/full") else "lora"
        assert given["finetune"] == method
        main.write_text('{"finetune_lora": setup}')
        assert f"finetune_{method}" in command(row, tmp_path, Path("model"))


def test_what_is_set_up_for_a_row(tmp_path: Path) -> None:
    settings, program = tmp_path / "config_hub/finetune/gemma-2b/lora.yaml", tmp_path / "finetune/lora.py"
    for file, text in ((settings, SETTINGS), (program, PROGRAM)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    named = {row["id"]: row for row in ROWS}
    assert prepare(named["gemma-2b/lora"], tmp_path, Path("/model")) == "gemma-2b"
    assert settings.read_text() == "# Where it is\ncheckpoint_dir: /model\n\ndevices: 1\n"
    assert prepare(named["tables/lora/phi-1_5/bf16/2x2"], tmp_path, Path("/model")) == "phi-1_5"
    assert program.read_text() == (
        "devices = 2\nbatch_size = 128\nmicro_batch_size = 2\niters = batch_size // micro_batch_size\n"
    )


def test_what_is_printed() -> None:
    row = {"id": "a row", "gb": "10.00", "program": ""}
    exact, failed = Compared(row, Run(int(10 * GB) - WORKSPACE)), Compared(row, Run(failure="ImportError: x"))
    full, far = Compared({**row, "gb": ""}, Run()), Compared(row, Run(int(11 * GB) - WORKSPACE))
    assert str(exact).split() == ["a", "row", "10.00", "GB", "for", "10.00", "GB", "+0.00%"]
    assert str(failed).endswith("FAILED: ImportError: x")
    assert str(full).split() == ["a", "row", "out", "of", "memory", "for", "out", "of", "memory"]
    told = summary([exact, failed, full, far, Compared(row, Run())])
    assert told == "4 of 5 rows ran: median 5.00%, worst 10.00%; verdicts: 3 of 4 right"


def test_runs_are_kept_of_rows() -> None:
    runs = [row["id"] for row in read(KEPT)]
    assert {row["id"] for row in ROWS if not row["program"]} < set(runs) <= {row["id"] for row in ROWS}
    assert len(runs) == len(set(runs))
    assert len(kept()) == 5
