"""What is said of workspaces that libraries choose on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from graph.model import Kind
from graph.recorder.libraries import of_log
from graph.recorder.recorder import Log
from simulator.estimator.estimate import estimate
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
    assert [text.partition(":")[0] for text in told] == ([f"on a GPU the peak may be {more} higher"] if more else [])
    assert all("images.py:10 (" in text for text in told)


def test_the_peak_of_a_capture() -> None:
    """100 MiB stay; a call makes 50 and may take 60 for a while; what comes after it makes 80."""
    log = Log()
    modules = [log.code("layers.0"), log.code("layers.1")]
    for size, there, module in [(100, -1, -1), (50, -1, modules[1]), (0, 60, modules[1]), (80, -1, modules[0])]:
        number = len(log.born)
        log.event(Kind.OPERATOR, number)
        log.operators.append((None, module))
        log.event(Kind.ALLOC, number)
        log.born.append((size << 20, number, None if there < 0 else "algorithm", 0))
        if there >= 0:
            log.gpu_bytes[number] = there << 20
            log.event(Kind.FREE, number)
            log.event(Kind.FREE, number - 1)
    assert of_log(log).startswith("on a GPU the peak may be 30.00 MiB higher: cuDNN")
    assert "first of all at layers.1)" in of_log(log)
    log.gpu_bytes[2] = 30 << 20
    assert of_log(log) == ""


def test_the_peak_with_a_transform_s_workspace(tmp_path: Path) -> None:
    """64 MiB of complex numbers, as many again for the result, and twice as many for cuFFT."""
    (tmp_path / "waves.py").write_text(
        "import torch\nx = torch.empty(8, 1024, 1024, device='cuda', dtype=torch.complex64)\ny = torch.fft.fft2(x)\n"
    )
    done = record(tmp_path, "waves.py")
    assert done.returncode == 0, done.stderr
    (told,) = (text for text in answer(tmp_path)["notices"] if "cuFFT" in text)
    assert told.startswith("on a GPU the peak may be 128.00 MiB higher: cuFFT")
    assert "waves.py:3" in told


def test_an_estimate_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\ndef images():\n"
        "    return torch.nn.Conv2d(64, 64, 3), {'input': torch.zeros(8, 64, 256, 256)}, torch.mean\n"
    )
    monkeypatch.chdir(tmp_path)
    found = estimate({"model": "nets:images", "gpu": "A100-80GB"})
    assert [text.startswith("on a GPU the peak may be") for text in found.assumptions if "cuDNN" in text] == [True]
