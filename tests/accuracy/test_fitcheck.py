"""QLoRA on a T4 by fitcheck's program: what is typed for a row, what its output says, and which runs are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accuracy.fitcheck import (
    FIGURES,
    HUB,
    KEPT,
    TABLE,
    Compared,
    Printed,
    command,
    kept,
    prepare,
    printed,
    summary,
)
from tests.accuracy.sft import read

ROWS = read(TABLE)
#: Of its notebook, the first cell.
OUTPUT = """
  MEASURED
    CUDA context (at peak)                    141 MiB
    CUDA context (at init, for ref)           105 MiB
    allocated after load                    1,074 MiB
    gradients (after backward)                 34 MiB
    peak allocated  (tensor bytes)          1,849 MiB
    peak reserved   (allocator pool)        2,070 MiB
    process total   (reserved+ctx)          2,211 MiB

  PEAK BY PHASE  (which part of the step actually is the peak)
    forward   (logits + loss)               1,607 MiB
    backward  (recompute + attn)            1,849 MiB
    optimizer step                          1,370 MiB
"""
FOUND = Printed(1074, 1607, 1849, 1370, 1849, 2070)


def test_what_a_cell_printed_is_its_row() -> None:
    assert printed(OUTPUT) == FOUND
    one = Compared(ROWS[0], FOUND)
    assert (one.equal, one.error, one.reserved_error) == (len(FIGURES), 0, 0)
    with pytest.raises(ValueError, match="no line 'peak reserved'"):
        printed(OUTPUT.replace("peak reserved", "peak held"))


def test_what_is_printed() -> None:
    far, failed = Compared(ROWS[0], replace(FOUND, reserved=2277)), Compared(ROWS[0], Printed(failure="ImportError: x"))
    assert str(far).split(maxsplit=1)[1] == (
        "1,849 for  1,849 MiB +0.00%,  2,277 reserved for  2,070 +10.00%; 5 of 6 figures equal"
    )
    assert str(failed).endswith("FAILED: ImportError: x")
    assert summary([far, failed]) == (
        "1 of 2 rows ran: median 0.00%, worst 0.00%; reserved: median 10.00%, worst 10.00%; "
        "5 of 6 figures equal to the MiB"
    )


def test_what_is_typed_for_a_row() -> None:
    for row in ROWS:
        words = command(row, Path("root"))
        assert words[:2] == [str(Path("root", "scripts", "measure.py")), HUB[row["id"].split("/")[0]]]
        assert ("--attn-impl" in words) == row["id"].endswith("sdpa")


def test_a_model_is_found_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    prepare("qwen2.5-1.5b", tmp_path)
    [weights] = tmp_path.rglob("model.safetensors")
    assert weights.stat().st_size == pytest.approx(2 * 1_543_714_304, rel=1e-4)  # as the program counts
    assert weights.stat().st_blocks * 512 < 1 << 20
    assert json.loads((weights.parent / "config.json").read_text())["dtype"] == "bfloat16"


def test_every_row_has_a_run_that_is_kept() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    assert len(kept()) == 2
