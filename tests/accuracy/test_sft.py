"""Measured fine-tuning as programs: every row has one, and what is printed of it is right."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.accuracy.sft import FOLDER, WORKSPACE, Compared, command, configuration, summary

with (FOLDER / "sft.csv").open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_row_has_a_program(row: Mapping[str, str], tmp_path: Path) -> None:
    assert configuration(row["model"])["architectures"]
    words = command(row, tmp_path)
    assert (
        (words[:3] == ["--", "accelerate", "launch"])
        == (row["n_gpus"] == "2")
        == (tmp_path / "accelerate.yaml").exists()
    )
    settings = dict(itertools.pairwise(words))
    assert (settings["--batch"], settings["--seq"]) == (row["micro_batch"], row["seq_len"])
    assert ("--lora" in words) == (row["method"] != "full")
    assert ("--nf4" in words) == (row["method"] == "qlora")
    assert ("--as-loaded" in words) == ("accelerated-peft-bnb" in row["notes"])


def test_what_is_printed() -> None:
    row = {"id": "a row", "peak_bytes": "1000000"}
    close, far = Compared(row, 1_000_100), Compared(row, 950_000)
    right, wrong = Compared({**row, "peak_bytes": ""}, None), Compared(row, None)
    failed = Compared(row, None, "ImportError: trl")
    assert str(close).endswith("1,000,100 for        1,000,000 +0.0100%")
    assert "out of memory for    out of memory" in str(right)
    assert "FAILED: ImportError: trl" in str(failed)
    told = summary([close, far, right, wrong, failed])
    assert told == "2 rows with figures, median 2.5050%, worst 5.0000%; 3 of 5 verdicts right"


def test_the_workspace_is_that_of_pytorch() -> None:
    """`getChosenWorkspaceSize`, CUDABlas.cpp: :4096:2:16:8 KiB on all but Hopper."""
    assert WORKSPACE == (2 * 4096 + 8 * 16) << 10
