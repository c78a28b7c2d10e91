"""Measured pretraining as programs: what is typed for a row, and what is printed of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tests.accuracy.sft import Run, read
from tests.accuracy.torchtitan import GIB, KEPT, TABLE, TOKENS, WORKSPACE, Compared, command, kept, prepare, summary

ROWS = read(TABLE)


def test_what_is_typed_for_a_row(tmp_path: Path) -> None:
    for row in ROWS:
        words = command(row, Path("titan"), tmp_path)
        assert words[:2] == ["torchrun", "--nproc_per_node=8"]
        assert ("--training.compile" in words) == ("bf16" not in row["id"] or "none" in row["id"])
        assert ("--model.converters=float8" in words) == ("float8" in row["id"].removesuffix("bf16").split("-")[-1])


def test_tokens_are_as_many_as_llamas_and_all_different(tmp_path: Path) -> None:
    prepare(tmp_path)
    lines = (tmp_path / "tokenizer.model").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    assert len(set(tokens)) == TOKENS
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    texts = (tmp_path / "tests" / "assets" / "c4_test" / "data.json").read_text().splitlines()
    assert all(len(json.loads(text)["text"]) > 8192 for text in texts)


def test_what_is_printed() -> None:
    row = {"id": "a row", "gib": "10.00"}
    exact, failed = Compared(row, Run(0, 10 * GIB - WORKSPACE)), Compared(row, Run(failure="ImportError: torchao"))
    assert str(exact).endswith(" 10.00 for  10.00 GiB +0.00%")
    assert str(failed).endswith("FAILED: ImportError: torchao")
    far = Compared(row, Run(0, 11 * GIB - WORKSPACE))
    assert summary([exact, far, failed]) == "2 of 3 rows ran: median 5.00%, worst 10.00%"


def test_runs_are_kept_of_every_row() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    assert f"{len(ROWS)} of {len(ROWS)} rows ran" in kept()[1]
