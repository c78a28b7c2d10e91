"""`llmem record --on-gpu`: the program itself is told what a GPU would say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.simulator.recording.test_record import answer, record

TRAINING = """
import torch
layer = torch.nn.Linear(1024, 1024, device="cuda")
for _ in range(3):
    layer(torch.randn(64, 1024, device="cuda")).sum().backward()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
#: 512 MiB of images, as many of results; a copy of both would be as much again.
IMAGES = """
import torch
layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.float16)
with torch.no_grad():
    layer(torch.empty(64, 64, 256, 256, device="cuda", dtype=torch.float16))
print(torch.cuda.memory_stats()["num_ooms"])
"""


def test_a_program_prints_the_peaks_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    plain = record(tmp_path, "--gpu", "H100-80GB", "--context", "auto", "train.py")
    (bare,) = answer(tmp_path)["ranks"]
    assert plain.stdout.split() == [str(bare["peak_allocated"]), str(bare["peak_reserved"])]
    there = record(tmp_path, "--on-gpu", "--gpu", "H100-80GB", "--context", "auto", "train.py")
    (rank,) = answer(tmp_path)["ranks"]
    peaks = [str(bare["on_gpu"][name]) for name in ("peak_allocated", "peak_reserved")]
    assert there.stdout.split() == peaks == [str(rank["peak_allocated"]), str(rank["peak_reserved"])]
    assert rank["peak_allocated"] - bare["peak_allocated"] == 32 << 20  # the workspace of autograd's thread, on Hopper
    assert "on a GPU" not in there.stderr


@pytest.mark.parametrize(("memory", "ooms"), [("3GiB", 0), ("1600MiB", 1)])
def test_a_convolution_without_room_for_its_workspace(memory: str, ooms: int, tmp_path: Path) -> None:
    """It takes another algorithm, after the allocator has counted that it was out of memory."""
    (tmp_path / "images.py").write_text(IMAGES)
    done = record(tmp_path, "--on-gpu", "--gpu", "H100-80GB", "--memory", memory, "images.py")
    assert (done.returncode, done.stdout.strip()) == (0, str(ooms)), done.stderr
    (rank,) = answer(tmp_path)["ranks"]
    assert rank["num_ooms"] == ooms
    assert rank["peak_allocated"] == (1 + (not ooms)) * (1 << 30) + (72 << 10) * (1 + (not ooms))
