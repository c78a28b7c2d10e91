"""Measured pipelines as programs: what is typed for a row, what they find, and what is printed of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accuracy import pipelines
from tests.accuracy.pipelines import KEPT, TABLE, Compared, Run, command, kept, prepare, summary
from tests.accuracy.sft import read

ROWS = read(TABLE)


def test_what_is_typed_for_a_row() -> None:
    for row in ROWS:
        program, *words = command(row)
        assert program == ("benchmark_image.py" if row["id"].startswith("flux") else "benchmark_video.py")
        assert ("--compile" in words) == ("compileTrue" in row["id"])
        assert any("fuse" in word for word in words) == ("fuseTrue" in row["id"])


def test_files_for_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_pieces", lambda file, text: file.write_text(text))
    transformers, diffusers = pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    prepare(tmp_path, "a panda sits on a wooden stool\n" * 40)
    text = transformers.CLIPTokenizer.from_pretrained(tmp_path / "black-forest-labs/FLUX.1-dev/tokenizer")
    assert text("a panda", padding="max_length").input_ids[-1] == text.eos_token_id
    for size, layers in (("2b", 30), ("5b", 42)):
        folder = tmp_path / "THUDM" / f"CogVideoX-{size}"
        config = diffusers.CogVideoXTransformer3DModel.load_config(folder, subfolder="transformer")
        assert config["num_layers"] == layers
        assert (folder / "tokenizer" / "spiece.model").stat().st_size > 0


def test_what_is_printed() -> None:
    row = {"id": "a row", "gib": "10.000"}
    exact, less, failed = (Compared(row, run) for run in (Run(10.0), Run(9.0), Run(failure="ImportError: no module")))
    assert str(exact).endswith("  10.000 for  10.000 GiB +0.00%")
    assert str(less).endswith("   9.000 for  10.000 GiB -10.00%")
    assert str(failed).endswith("FAILED: ImportError: no module")
    assert summary([exact, less, failed]) == "2 of 3 rows ran: median 5.00%, worst 10.00%"


def test_runs_are_kept_of_rows() -> None:
    runs = [row["id"] for row in read(KEPT)]
    assert [row["id"] for row in ROWS if row["id"] in runs] == runs
    assert f"{len(runs)} of {len(runs)} rows ran" in kept()[1]
