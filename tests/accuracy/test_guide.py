"""Hugging Face's guide as a program: what is printed of a row, which runs are kept, and that the program trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accuracy.guide import KEPT, MODEL, OUTSIDE, TABLE, Compared, kept
from tests.accuracy.sft import FOLDER, MIB, Run, read
from tests.accuracy.trainers import summary

ROWS = read(TABLE)


def test_what_is_printed() -> None:
    row = {"id": "a row", "mib": "10000"}
    exact, failed = Compared(row, Run(1, (10000 - OUTSIDE) * MIB)), Compared(row, Run(failure="ImportError: x"))
    far = Compared(row, Run(1, (11000 - OUTSIDE) * MIB))
    assert str(exact).split() == ["a", "row", "10,000", "for", "10,000", "MiB", "+0.00%"]
    assert str(failed).endswith("FAILED: ImportError: x")
    assert summary([exact, failed, far]) == "2 of 3 rows ran: median 5.00%, worst 10.00%"


def test_every_row_has_a_run_that_is_kept() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    assert len(kept()) == 2


@pytest.mark.parametrize("experiment", ["all+adafactor", "vanilla"])
def test_an_experiment_trains(experiment: str, tmp_path: Path) -> None:
    """A small model of the same kind, by the transformers that is installed."""
    pytest.importorskip("transformers")
    from tests.simulator.recording.test_record import answer, folder_of, record  # needs torch

    small = {**MODEL, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    folder_of(tmp_path, {"bert/config.json": json.dumps(small)})
    program = str(FOLDER / "programs" / "guide.py")
    done = record(tmp_path, "--gpu", "V100-16GB", "--steps", "2", program, "bert", experiment)
    assert (answer(tmp_path)["exit_code"], answer(tmp_path)["steps"]) == (0, 2), done.stderr
