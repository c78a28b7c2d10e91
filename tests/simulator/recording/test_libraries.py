"""What is said of workspaces that libraries choose on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.simulator.recording.test_record import answer, record

#: 64 MiB of images, as many of results, 72 KiB of filters.
PROGRAM = """
import sys, torch
kept = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
del kept
layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.float16)
images = torch.empty(8, 64, 256, 256, device="cuda", dtype=torch.float16)
if sys.argv[2] == "last":
    layer, images = layer.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
with torch.no_grad():
    layer(images)
"""


@pytest.mark.parametrize(
    ("earlier", "memory_format", "more"),
    [
        ("0", "first", "128.07 MiB"),  # a copy of each operand
        ("200", "first", "56.14 MiB"),  # the peak is elsewhere: twice the operands less 200 MiB
        ("300", "first", ""),
        ("0", "last", ""),
    ],
)
def test_the_peak_with_a_workspace_that_is_likely(earlier: str, memory_format: str, more: str, tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(PROGRAM)
    done = record(tmp_path, "images.py", earlier, memory_format)
    assert done.returncode == 0, done.stderr
    told = [text for text in answer(tmp_path)["notices"] if "cuDNN" in text]
    assert [text.partition(":")[0] for text in told] == ([f"the peak may be {more} higher"] if more else [])
    assert all("images.py:10 (" in text for text in told)
