"""Measured fine-tuning as programs: every row has one, and what is printed of it is right."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from simulator.estimator.outside import COMMUNICATOR
from tests.accuracy.sft import (
    FOLDER,
    KEPT,
    MIB,
    RESERVED,
    WORKSPACE,
    Compared,
    Run,
    command,
    configuration,
    counted,
    is_gptq,
    kept,
    known,
    main,
    of_that_machine,
    outside,
    plugins_of,
    read,
    summary,
    told_of_device,
)

with (FOLDER / "sft.csv").open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_row_has_a_program(row: Mapping[str, str], tmp_path: Path) -> None:
    assert configuration(row["model"])["architectures"]
    words = command(row, tmp_path, Path("root"))
    assert (
        (words[:3] == ["--", "accelerate", "launch"])
        == (row["n_gpus"] == "2")
        == (tmp_path / "accelerate.yaml").exists()
    )
    settings = dict(itertools.pairwise(words))
    assert (settings["--batch"], settings["--seq"]) == (row["micro_batch"], row["seq_len"])
    assert ("--lora" in words) == (row["method"] != "full")
    assert ("--nf4" in words) == (row["method"] == "qlora")
    assert ("--fp16" in words) == ("float16 weights" in row["dtype"].replace("bfloat16", ""))
    plugins = Path(settings["--plugins"]).name if "--plugins" in words else ""
    assert plugins == plugins_of(row)
    assert ("autogptq" in plugins) == is_gptq(row) == ("-GPTQ-" in row["id"])
    assert ("foak" in plugins) == ("foak" in row["id"])
    assert ("bnb" in plugins) == ("accelerated-peft-bnb" in row["id"])


def row(**columns: str) -> dict[str, str]:
    """A row, with some columns changed."""
    plain = {"id": "a row", "peak_bytes": "1000000", "nvidia_smi_bytes": "", "n_gpus": "1", "torch_version": "2.4.1"}
    return plain | columns


def test_what_is_printed() -> None:
    close, far = Compared(row(), Run(1_000_100, 0)), Compared(row(), Run(950_000, 0))
    right, wrong = Compared(row(peak_bytes=""), Run()), Compared(row(), Run())
    missed = Compared(row(peak_bytes=""), Run(1_000, 0))
    failed = Compared(row(), Run(failure="ImportError: trl"))
    assert str(close).endswith("1,000,100 for        1,000,000 +0.0100%")
    assert "out of memory for    out of memory" in str(right)
    assert "FAILED: ImportError: trl" in str(failed)
    assert summary([close, far, right, wrong, missed, failed]) == [
        "5 of 6 rows ran",
        "torch's counter: 2 rows, median 2.5050%, worst 5.0000%",
        "verdicts: 3 of 5 right; of 2 that ran out of memory 1",
    ]


def test_the_whole_card_has_what_lies_outside_the_allocator() -> None:
    theirs = str(2_000 * MIB)
    alone = Compared(row(nvidia_smi_bytes=theirs), Run(1, 1_000 * MIB))
    spread = Compared(row(nvidia_smi_bytes=theirs, n_gpus="2"), Run(1, 1_000 * MIB))
    assert alone.device is not None
    assert spread.device is not None
    assert alone.device - 1_000 * MIB == outside(alone.row)
    assert spread.device - alone.device == COMMUNICATOR.likely * MIB
    assert alone.device_error == alone.device / (2_000 * MIB) - 1
    assert "for   2,000 MiB" in told_of_device(alone)
    assert told_of_device(alone).endswith("beside our reserved bytes it has 1,000")


def test_one_figure_stands_for_what_lies_outside_on_a_machine() -> None:
    """The middle of the rows of as many GPUs; a row without nvidia-smi's figure, or that was not run, is left out."""
    beside = {"low": 1_000, "middle": 1_100, "high": 1_600, "not run": 5, "spread": 2_000}
    table = [
        row(id=name, nvidia_smi_bytes=str((9_000 + size) * MIB), n_gpus="2" if name == "spread" else "1")
        for name, size in beside.items()
    ]
    reserved = dict.fromkeys(("low", "middle", "high", "spread", "unseen"), 9_000 * MIB)
    alone, spread = of_that_machine([*table, row(id="unseen")], reserved)
    worst = 500 / 10_600
    assert alone.startswith("nvidia-smi, 1 GPU, 3 rows: 1,100 MiB beside")
    assert alone.endswith(f"worst {worst:.2%}")
    assert spread.startswith("nvidia-smi, 2 GPUs, 1 rows: 2,000 MiB beside")
    assert spread.endswith("with it median 0.00%, 90 % within 0.00%, worst 0.00%")


def test_the_card_held_what_pytorch_reserved_and_one_figure_more() -> None:
    """On one GPU most rows lie within 0.2 % of nvidia-smi, over models, methods, batches and kernels."""
    reserved = {one["id"]: int(one["reserved"]) for one in read(RESERVED)}
    assert reserved.keys() <= {one["id"] for one in ROWS}
    alone, spread = of_that_machine(ROWS, reserved)
    assert alone.startswith("nvidia-smi, 1 GPU, 22 rows")
    assert spread.startswith("nvidia-smi, 2 GPUs, 22 rows")
    medians = [float(line.partition("median ")[2].partition("%")[0]) for line in (alone, spread)]
    assert medians[0] <= 0.2
    assert medians[1] <= 2


def test_runs_are_kept_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "runs.csv"
    results.write_text(f"id,allocated,reserved,failure\n{ROWS[0]['id']},7,8,\n{ROWS[1]['id']},,,\n")
    assert known(results) == {ROWS[0]["id"]: Run(7, 8), ROWS[1]["id"]: Run()}
    main([ROWS[0]["id"], "--results", str(results), "--python", "/nothing"])
    assert "1 of 1 rows ran" in capsys.readouterr().out


def test_a_python_that_is_not_there_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^error: --python /nowhere/python: is no program$"):
        main([ROWS[0]["id"], "--python", "/nowhere/python"])


def test_the_kept_runs_are_of_the_table() -> None:
    """No id is unknown, and rows that ran are as close as they should be."""
    table, runs = {one["id"]: one for one in ROWS}, known(KEPT)
    assert runs.keys() <= table.keys()
    found = [Compared(table[name], run) for name, run in runs.items()]
    errors = [abs(one.error) for one in found if one.error is not None]
    assert len(errors) >= 25
    assert max(errors) <= 0.003
    assert kept()[0] == f"fms-acceleration, {len(ROWS)} rows, each with a program; runs kept in sft_runs.csv:"


def test_the_trainer_counts_in_parts() -> None:
    metrics = {"before_init_mem_gpu": 1, "init_mem_gpu_alloc_delta": 20, "init_mem_gpu_peaked_delta": 300}
    metrics |= {"train_mem_gpu_alloc_delta": 4_000, "train_mem_gpu_peaked_delta": 50_000, "train_loss": 6}
    assert counted(metrics) == 54_021 + WORKSPACE


def test_the_workspace_is_that_of_pytorch() -> None:
    """`getChosenWorkspaceSize`, CUDABlas.cpp: :4096:2:16:8 KiB on all but Hopper."""
    assert WORKSPACE == (2 * 4096 + 8 * 16) << 10
