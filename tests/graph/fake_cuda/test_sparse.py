"""Sparse tensors on the device that is not there, in a CPU build of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda.operators import sparse
from graph.fake_cuda.torch_private import has_kernel
from graph.hardware.profile import profile
from tests.support.births import Births

#: Of matrices of 50 x 60 with 200 elements, all of which differ: what is done with one, and the bytes of what the CUDA
#: build of PyTorch 2.13.0 allocated for it on libraries that do nothing, in order, without temporaries of scans and
#: sorts.
WORK: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "clone": (lambda of: of.coo.clone(), [800, 3200]),
    "half": (lambda of: of.coo.half(), [3200, 400]),
    "twice": (lambda of: of.coo * 2.0, [3200, 800]),
    "third": (lambda of: of.coo / 3, [3200, 800]),
    "with itself": (lambda of: of.coo + of.coo, [6400, 1600]),
    "to dense": (lambda of: of.dense + of.coo, [12000]),
    "to dense by places": (lambda of: of.dense + of.loose, [12000, 1600]),
    "to dense of half": (lambda of: of.short + of.coo, [12000, 12000]),
    "to dense of half by places": (lambda of: of.short + of.loose, [12000, 12000, 1600]),
    "into dense of half by places": (lambda of: of.short.add_(of.loose), [12000, 12000, 1600]),
    "nothing to dense of half": (lambda of: of.short + of.none, [12000]),
    "nothing into dense of half": (lambda of: of.short.add_(of.none), []),
    "dense": (lambda of: of.loose.to_dense(), [12000, 1600]),
    "by dense": (lambda of: of.coo * of.dense, [800, 3200, 800]),
    "by a row": (lambda of: of.coo * of.dense[0], [800, 3200, 800]),
    "transposed": (lambda of: of.loose.t(), [800, 3200, 1600]),
    "roots": (lambda of: of.coo.sqrt(), [800, 3200]),
    "masked": (lambda of: of.dense.sparse_mask(of.coo), [4, 800, 3200, 800]),
    "norm": (lambda of: of.coo.norm(), [4]),
    "together": (lambda of: torch.cat([of.coo, of.coo]), [6400, 1600]),
    "CSR of COO": (lambda of: of.coo.to_sparse_csr(), [408]),
    "COO of CSR": (lambda of: of.csr.to_sparse_coo(), [3200]),
    "CSR clone": (lambda of: of.csr.clone(), [800, 1600, 408]),
    "CSR twice": (lambda of: of.csr * 2.0, [800, 1600, 408]),
    "CSR sum": (lambda of: of.csr.sum(), [4]),
    "CSC of CSR": (
        lambda of: of.csr.to_sparse_csc(),
        [8, 8, 400, 408, 3200, *[1600] * 5, 3200, 800, 488, 488, 480],
    ),
    "CSR dense": (
        lambda of: of.csr.to_dense(),
        [12000, 8, 1600, 8, 400, 400, 400, 8, 8, 408, 3200, *[1600] * 6],
    ),
}


class Matrices:
    """One matrix in each layout, and without the word that its places differ (`loose`)."""

    def __init__(self) -> None:
        places = torch.stack([torch.arange(200) % 50, torch.arange(200) % 60]).cuda()
        values = torch.ones(200, device="cuda")
        self.loose = torch.sparse_coo_tensor(places, values, (50, 60))
        self.coo = torch.sparse_coo_tensor(places, values, (50, 60), is_coalesced=True)
        self.csr = self.coo.to_sparse_csr()
        self.none = torch.sparse_coo_tensor(places[:, :0], values[:0], (50, 60))
        self.dense = torch.ones(50, 60, device="cuda")
        self.short = self.dense.bfloat16()


@pytest.fixture(scope="module")
def runtime() -> Iterator[fake_cuda.Runtime]:
    with fake_cuda.fake_cuda(profile("A100-80GB", "2.13")) as found:
        yield found


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", WORK)
def test_sparse_tensors_take_what_a_cuda_build_took(name: str, runtime: fake_cuda.Runtime) -> None:
    work, recorded = WORK[name]
    matrices = Matrices()
    runtime.observer = births = Births(runtime)
    work(matrices)
    runtime.observer = None
    assert births.bytes == recorded


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["loose", "coo", "csr"])
def test_products_have_shapes_and_gradients_and_say_what_is_not_counted(
    layout: str, runtime: fake_cuda.Runtime
) -> None:
    dense = torch.ones(60, 16, device="cuda", requires_grad=True)
    product = getattr(Matrices(), layout) @ dense
    product.sum().backward()
    assert (product.shape, product.stride()) == ((50, 16), (16, 1))
    assert dense.grad is not None
    assert dense.grad.shape == (60, 16)
    assert any("what cuSPARSE itself takes is not counted" in told for told in runtime.assumptions)


@pytest.mark.filterwarnings("ignore:The PyTorch API of Sparse")
@pytest.mark.parametrize(
    ("dtype", "recorded"),
    [(torch.float16, [294_912]), (torch.bfloat16, [294_912]), (torch.int8, [163_840]), (torch.float32, [589_824])],
)
def test_half_of_a_matrix_is_compressed(dtype: torch.dtype, recorded: list[int], runtime: fake_cuda.Runtime) -> None:
    """As the CUDA build of PyTorch 2.13.0 allocated, with a cuSPARSELt that asks for 9/16 of the matrix, of bytes
    10/16: as much as PyTorch 2.8 gave it, unasked."""
    source, dense = (torch.zeros(rows, 1024, device="cuda").to(dtype) for rows in (256, 64))
    runtime.observer = births = Births(runtime)
    packed = torch._cslt_compress(source)
    product = torch._cslt_sparse_mm(packed, dense.t())
    runtime.observer = None
    assert births.bytes == [*recorded, 256 * 64 * dtype.itemsize]
    assert (packed.shape, product.shape) == ((256, recorded[0] // 256 // dtype.itemsize), (256, 64))
    assert any("what cuSPARSELt itself takes is not counted" in told for told in runtime.assumptions)


def test_tables_with_sparse_gradients_are_trained(runtime: fake_cuda.Runtime) -> None:
    table = torch.nn.EmbeddingBag(1000, 64, mode="sum", sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        table(torch.tensor([[1, 2, 3], [3, 4, 5]]).cuda()).sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
    gradient = table.weight.grad
    assert gradient is not None
    assert (gradient._nnz(), gradient.coalesce()._nnz()) == (12, 5)  # rows of two backwards, of which five differ


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("work", [lambda one: one * one, lambda one: torch.sparse.softmax(one, 1)])
def test_what_needs_a_cuda_build_is_refused(work: Callable[[Any], object], runtime: fake_cuda.Runtime) -> None:
    with pytest.raises(NotImplementedError, match="'SparseCUDA' backend"):
        work(Matrices().coo)


def test_what_a_cuda_build_has_for_cuda_alone_is_not_here(runtime: fake_cuda.Runtime) -> None:
    """In a CPU build nothing serves it either: a program ends with one error under both."""
    names = {(layout, name) for layout, found in sparse._NOT_HERE.items() for name in found}
    assert {(layout, name) for layout, name in names if has_kernel(f"aten::{name}", f"{layout}CUDA")} == set()
    assert {(layout, name) for layout, name in names if not has_kernel(f"aten::{name}", f"{layout}CPU")} == set()
