"""The marker `gpu_memory`, in pytest itself."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from simulator.integrations import process, testing
from tests.support import warm

pytest_plugins = ["pytester"]

TESTS = """
import pytest, torch

@pytest.fixture
def weight():
    assert torch.cuda.is_available()
    return torch.ones(1 << 28, device="cuda")

@pytest.mark.gpu_memory("4GiB")
def test_fits(weight):
    assert torch.cuda.mem_get_info()[1] <= 4 << 30
    torch.relu(weight)

@pytest.mark.gpu_memory("2GiB", gpu="T4")
def test_too_small(weight):
    torch.relu(weight)

@pytest.mark.gpu_memory(gpu="T4")
def test_asks():
    assert torch.cuda.get_device_name() == "no such card"

@pytest.mark.gpu_memory("1GiB")
def test_skipped():
    pytest.skip("not today")

@pytest.mark.gpu_memory("4")
def test_without_a_unit():
    pass

def test_plain():
    assert not torch.cuda.is_available()
"""


#: That of the user, whose compiled kernels are in it: `pytester` has another one.
HOME = str(Path.home())


def llmem(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """The command: of the first test by a process as a user's is."""
    return (process.llmem if words[-1].endswith("::test_fits") else warm.llmem)(words, **options)


def test_marked_tests_run_on_a_gpu_that_is_not_there(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setattr(testing, "llmem", llmem)
    pytester.makepyfile(test_train=TESTS)
    done = pytester.runpytest_inprocess("-rA", "--strict-markers", "-p", "simulator.integrations.testing")
    said = str(done.stdout)
    assert done.ret == 1, said
    assert "2 passed, 1 skipped" in said
    assert "3 failed" in said
    assert "at most 2.00 GiB allocated, 2.00 GiB reserved" in said
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB" in said
    assert "'Tesla T4' == 'no such card'" in said
    assert "size '4' has no unit" in said
    assert "PASSED test_train.py::test_plain" in said
