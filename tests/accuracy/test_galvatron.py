"""Galvatron's measurements as its commands: what is typed for a row, what is read of a run, what is printed of it."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy import galvatron
from tests.accuracy.galvatron import FIGURES, KEPT, TABLE, Compared, Run, command, kept, ran, summary
from tests.accuracy.sft import MIB, WORKSPACE, read

ROWS = read(TABLE)


def test_what_is_typed_for_a_row() -> None:
    for row in ROWS:
        words = command(row)
        pipeline, tensor, data, checkpointed, vocabulary, layers = re.fullmatch(
            r"galvatron-llama2-7b-(\d)_(\d)_(\d)(_c)?(_vtp)?_sp-l(\d)", row["id"]
        ).groups()  # type: ignore[union-attr]
        assert int(pipeline) * int(tensor) * int(data) == 8
        given = dict(itertools.pairwise(words))
        assert (given["--pp_deg"], given["--global_tp_deg"]) == (pipeline, tensor)
        assert given["--num_hidden_layers"] == layers
        assert given["--global_checkpoint"] == str(int(bool(checkpointed)))
        assert given["--vocab_tp"] == (tensor if vocabulary else "1")


def test_what_the_profiler_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "galvatron" / "models" / "llama_hf"
    (place / "configs").mkdir(parents=True)
    (place / "configs" / "memory_profiling_old_all.json").write_text("{}")

    def record(words: list[str], folder: Path, *rest: object) -> object:
        assert not list((folder / "configs").iterdir())  # theirs is not taken for ours
        named = {
            f"layernum[1]_bsz8_seq2048_rank{rank}_{name}": value + rank
            for rank in (0, 7)
            for name, value in (("ms", 100.0), ("act", 20.0), ("act_peak", 30.5))
        }
        (folder / "configs" / "memory_profiling_new_all.json").write_text(json.dumps({"1_1_8_sp": named}))
        return None

    monkeypatch.setattr(galvatron, "record", record)
    found = ran(ROWS[0], tmp_path, sys.executable)
    left = 100 * MIB + WORKSPACE
    first, last = (left, 20 * MIB, left + 30.5 * MIB), (left + 7 * MIB, 27 * MIB, left + 7 * MIB + 37.5 * MIB)
    assert tuple(vars(found).values()) == (*first, *last, "")


def test_what_is_printed() -> None:
    row = {"id": "a row", **dict.fromkeys(FIGURES, str(100 * MIB))}
    same: dict[str, Any] = dict.fromkeys(FIGURES, 100 * MIB)
    exact, far = Compared(row, Run(**same)), Compared(row, Run(**{**same, "peak_last": 90 * MIB}))
    failed = Compared(row, Run(failure="ImportError: x"))
    assert "peak_last 90.00 for 100.00 MiB" in str(far)
    assert str(failed).endswith("FAILED: ImportError: x")
    assert summary([exact, far, failed]) == [
        "2 of 3 commands ran",
        "after the backward: 4 of 4 within 0.01 %, median 0.000%, worst 0.00%",
        "kept by the forward: 4 of 4 within 0.01 %, median 0.000%, worst 0.00%",
        "peak: 3 of 4 within 0.01 %, median 0.000%, worst 10.00%",
    ]


def test_runs_are_kept_of_every_row() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    assert f"{len(ROWS)} of {len(ROWS)} commands ran" in kept()[1]
