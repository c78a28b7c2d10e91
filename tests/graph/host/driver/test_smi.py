"""nvidia-smi in recorded programs: found in the PATH, it says which GPUs there are and what is used of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from graph.host.driver import nvidia_smi
from tests.simulator.recording.test_record import answer, folder_of, record

#: As GPUtil, YOLOX and modded-nanogpt ask.
PROGRAM = """
import os, shutil, subprocess, torch
def said(command):
    return subprocess.run(command, shell=isinstance(command, str), capture_output=True, text=True, check=True).stdout
free = "nvidia-smi --query-gpu=index,memory.free,memory.used --format=csv,nounits,noheader"
before = [[int(word) for word in line.split(",")] for line in said(free.split()).splitlines()]
held = torch.ones(1 << 28, device="cuda")
after = [[int(word) for word in line.split(",")] for line in os.popen(free).read().splitlines()]
print([now[1] - then[1] for then, now in zip(before, after)], [now[2] - then[2] for then, now in zip(before, after)])
print(said("nvidia-smi -i 0 --query-gpu=gpu_name,memory.total,utilization.gpu --format=csv"), end="")
print(said("nvidia-smi -i 1 -L"), end="")
print(os.system("nvidia-smi -L > /dev/null"), "NVIDIA-SMI" in said("nvidia-smi"), bool(shutil.which("nvidia-smi")))
"""


def test_programs_ask_for_free_memory(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": PROGRAM}), "--gpu", "H100", "--visible-gpus", "2", "train.py")
    assert done.returncode == 0, done.stderr
    changed, titles, row, listed, rest = done.stdout.splitlines()
    assert changed == "[-1024, 0] [1024, 0]"
    assert titles == "name, memory.total [MiB], utilization.gpu [%]"
    assert row == "NVIDIA H100 80GB HBM3, 80996 MiB, 0 %"
    assert listed == "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000001)"
    assert rest == "0 True True"
    assert sum("nvidia-smi" in text for text in answer(tmp_path)["assumptions"]) == 1


def test_nobody_is_told_of_it_who_does_not_ask(tmp_path: Path) -> None:
    program = "import subprocess, torch\ntorch.ones(1, device='cuda')\nsubprocess.run(['true'], check=True)\n"
    done = record(folder_of(tmp_path, {"train.py": program}), "train.py")
    assert (done.returncode, "nvidia-smi" in done.stderr) == (0, False)


@pytest.fixture
def figures(tmp_path: Path) -> str:
    gpu = {"count": 2, "capability": "9.0", "driver": "580.65.06", "cuda": "13.0", "total": 80 << 30, "used": 1 << 30}
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"]
    gpus = [{**gpu, "index": index, "name": name, "uuid": f"GPU-{index}"} for index, name in enumerate(names)]
    (tmp_path / "gpus.json").write_text(json.dumps(gpus))
    return str(tmp_path / "gpus.json")


def test_the_table_is_as_wide_as_nvidias(figures: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvidia_smi.main([figures]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert {len(line) for line in lines if line} == {91}
    assert sum(line.count("1024MiB /  81920MiB") for line in lines) == 2


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (["--query-gpu=uuid,fan.speed", "--format=csv,noheader", "-i", "1"], 0, "GPU-1, [N/A]"),
        (["--query-gpu=uuid", "--format=csv,noheader", "--id=GPU-0"], 0, "GPU-0"),
        (["--query-compute-apps=pid,used_memory", "--format=csv"], 0, "pid, used_memory"),
        (["--query-gpu=memory.most", "--format=csv"], 2, 'Field "memory.most" is not a valid field to query.'),
        (["-q", "-x"], 2, "nvidia-smi of a GPU that is not there knows nothing of -q -x"),
    ],
)
def test_what_is_asked_and_what_is_not_known(
    asked: list[str], code: int, said: str, figures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nvidia_smi.main([figures, *asked]) == code
    printed = capsys.readouterr()
    assert (printed.out + printed.err).strip() == said


def test_who_asks_early_may_still_say_how_memory_is_allocated(tmp_path: Path) -> None:
    """nvidia-smi looks at no setting of PyTorch."""
    program = """
import os, subprocess
import torch
used = "nvidia-smi --query-gpu=memory.used --format=csv,nounits,noheader"
print(subprocess.run(used.split(), capture_output=True, text=True, check=True).stdout, end="")
os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
torch.ones(3 << 20, dtype=torch.uint8, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""
    done = record(folder_of(tmp_path, {"train.py": program}), "train.py")
    assert (done.returncode, done.stdout) == (0, "0\n[True]\n"), done.stderr
