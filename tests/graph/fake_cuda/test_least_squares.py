"""Least squares on the device that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda import device as fake_cuda
from graph.hardware.profile import profile
from tests.support.births import Births

#: Shapes of matrices and right sides; bytes of what the CUDA build of PyTorch 2.13.0 allocated on libraries that do
#: nothing, in order, until cuBLAS or cuSOLVER did not answer. The workspace of cuBLAS is no storage.
CASES = {
    "together": ((4, 10, 3), (4, 10, 5), [16, 800, 480, 480, 32, 32]),
    "alone": ((300, 3), (300, 5), [4, 6000, 3600, 12]),
    "square": ((4, 3, 3), (4, 3, 5), [16, 240, 144, 144, 32, 32]),
    "wide": ((4, 3, 10), (4, 3, 5), [16, 800, 480, 48, 480, 32, 32]),
    "vectors": ((4, 10, 3), (4, 10), [16, 160, 480, 480, 32, 32]),
    "one vector": ((10, 3), (10,), [4, 40, 120, 12]),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[fake_cuda.Runtime]:
    with fake_cuda.fake_cuda(profile("A100-80GB", "2.13")) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_host_and_what_is_allocated_as_recorded(name: str, runtime: fake_cuda.Runtime) -> None:
    matrices, right, recorded = CASES[name]
    expected = torch.linalg.lstsq(torch.randn(matrices), torch.randn(right), driver="gels")
    given = torch.empty(matrices, device="cuda"), torch.empty(right, device="cuda")
    runtime.observer = births = Births(runtime)
    found = torch.linalg.lstsq(*given)
    runtime.observer = None
    assert [(one.shape, one.stride()) for one in found] == [(one.shape, one.stride()) for one in expected]
    assert births.bytes[: len(recorded)] == recorded
    assert births.bytes[-1] == 1  # whether a matrix could not be solved, for the host to read (`_linalg_check_errors`)


def test_solutions_have_gradients(runtime: fake_cuda.Runtime) -> None:
    given = [torch.empty(4, 10, count, device="cuda", requires_grad=True) for count in (3, 5)]
    found = torch.linalg.lstsq(*given).solution.sum()
    assert [one.shape for one in torch.autograd.grad(found, given)] == [one.shape for one in given]


def test_matrices_and_right_sides_have_about_as_many_dimensions(runtime: fake_cuda.Runtime) -> None:
    with pytest.raises(RuntimeError, match="must be greater or equal"):
        torch.linalg.lstsq(torch.empty(10, 3, device="cuda"), torch.empty(4, 10, 5, device="cuda"))
