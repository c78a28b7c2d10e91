"""modded-nanogpt's speedruns: the files that a log begins with, the tokens, what is printed of a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.accuracy.sft import read
from tests.accuracy.speedrun import KEPT, TABLE, Compared, Printed, kept, main, programs, summary, write_tokens

LOG = f"""import os
    num_scheduled_iterations: int = 1365  # steps
    num_extension_iterations: int = 10

{"-" * 40}
# triton_kernels.py
{"-" * 40}

import triton
{"=" * 100}
peak memory allocated: 36347 MiB reserved: 52032 MiB
"""


def test_a_log_begins_with_its_program_and_kernels() -> None:
    files = programs(LOG)
    assert list(files) == ["train_gpt.py", "triton_kernels.py"]
    assert (
        "num_scheduled_iterations: int = 12  # steps\n    num_extension_iterations: int = 2\n" in files["train_gpt.py"]
    )
    assert files["triton_kernels.py"].strip() == "import triton"


def test_tokens_begin_texts(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin", 100_000)
    header = np.fromfile(tmp_path / "tokens.bin", np.int32, 256)
    tokens = np.fromfile(tmp_path / "tokens.bin", np.uint16, offset=1024)
    assert header[:3].tolist() == [20240520, 1, len(tokens)] == [20240520, 1, 100_000]
    begins = np.flatnonzero(tokens == 50256)
    assert begins[0] == 0
    assert 300 < np.median(np.diff(begins)) < 600


def test_what_is_printed() -> None:
    row = {"id": "one", "allocated": "1000", "reserved": "2000"}
    exact, failed = Compared(row, Printed(1000.0, 2020.0)), Compared(row, Printed(failure="ImportError: x"))
    assert str(exact).split(maxsplit=1)[1] == "allocated 1,000 for 1,000 MiB +0.00%, reserved 2,020 for 2,000 +1.00%"
    assert str(failed).endswith("FAILED: ImportError: x")
    told = "1 of 2 rows ran, allocated: median 0.00%, worst 0.00%; reserved: median 1.00%, worst 1.00%"
    assert summary([exact, failed]) == told


def test_a_root_without_the_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^error: .*/records/track_1_short/.*\.txt: no such file; --root names"):
        main(["1-gpu", "--root", str(tmp_path)])


def test_every_row_has_a_run_that_is_kept() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in read(TABLE)]
    assert len(kept()) == 2
