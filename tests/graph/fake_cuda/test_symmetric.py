"""Memory that ranks of a host share: what of it is the allocator's, and what operators on it make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._symmetric_memory as symmetric  # noqa: E402
from torch import Tensor  # noqa: E402

from graph.fake_cuda.device import fake_cuda  # noqa: E402
from graph.fake_cuda.ranks.job import joined  # noqa: E402
from graph.hardware.profile import profile  # noqa: E402
from tests.support.births import Births, Untold  # noqa: E402

RANKS = 4
#: Bytes of the two tables of addresses that a rendezvous takes, each with one of every rank.
TABLES = [8 * RANKS, 8 * RANKS]


@pytest.fixture
def births(monkeypatch: pytest.MonkeyPatch) -> Iterator[Births]:
    monkeypatch.setattr(symmetric, "_use_implicit_mempool", False)  # a pool needs an allocator
    with fake_cuda(profile("H100-80GB", "2.13")) as runtime, joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=1, world_size=RANKS)
        runtime.observer = found = Births(runtime)
        yield found
        runtime.observer = None


def world() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def shared(births: Births, *size: int) -> Tensor:
    before = len(births.bytes)
    made = symmetric.empty(*size, dtype=torch.float32, device=torch.device("cuda"))
    assert births.bytes[before:] == [], "it comes from the driver"
    return made


def test_of_a_rendezvous_the_allocator_serves_the_tables(births: Births) -> None:
    tensor = shared(births, 1000, 10)
    met = symmetric.rendezvous(tensor, world())
    assert births.bytes == TABLES
    assert symmetric.rendezvous(tensor, world()) is met
    assert (met.rank, met.world_size, met.buffer_size) == (1, RANKS, 40_000)
    assert births.bytes == TABLES, "they have met before"
    (noted,) = births.runtime.assumptions
    assert "takes 2 MiB of symmetric memory from the driver" in noted


def test_ranks_see_each_others_memory(births: Births) -> None:
    tensor = shared(births, 1000)
    met = symmetric.rendezvous(tensor, world())
    own, other = (met.get_buffer(rank, (50, 10), torch.bfloat16, storage_offset=500) for rank in (1, 2))
    assert own.data_ptr() == tensor.data_ptr() + 1000
    assert (other.shape, other.stride(), other.dtype) == ((50, 10), (10, 1), torch.bfloat16)
    assert other.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
    met.barrier()
    other.copy_(own)
    assert len(set(met.buffer_ptrs)) == len(set(met.signal_pad_ptrs)) == RANKS
    assert births.bytes == TABLES


def test_memory_of_no_group_is_refused_and_ranks_do_not_meet_in_other(births: Births) -> None:
    meet = torch.distributed._symmetric_memory._SymmetricMemory
    tensor, other = shared(births, 10), torch.ones(10, device="cuda")
    with pytest.raises(RuntimeError, match="group_name is not set"):
        meet.rendezvous(tensor)
    assert (meet.is_symm_mem_tensor(tensor), meet.is_symm_mem_tensor(other)) == (True, False)
    assert meet.rendezvous(other, world().group_name) is None


def test_collectives_of_low_contention_go_by_a_workspace_where_their_input_is_not_shared(births: Births) -> None:
    """As PyTorch has it: the 4 MiB of this rank, which the others write to, are then none of the allocator's."""
    given = torch.ones(RANKS, 1 << 18, device="cuda")
    before = len(births.bytes)
    found = torch.ops.symm_mem._low_contention_reduce_scatter(given, "sum", world().group_name)
    assert torch.ops._c10d_functional.wait_tensor(found).shape == (1, 1 << 18)
    assert sorted(births.bytes[before:])[:2] == TABLES
    (noted,) = births.runtime.assumptions
    assert "get_symm_mem_workspace" in noted
    assert "takes 6 MiB" in noted


@pytest.mark.parametrize("dimension", [0, 1])
def test_products_that_gather_and_scatter_make_what_the_two_steps_make(births: Births, dimension: int) -> None:
    """Results are those that PyTorch's own fallback has, which is the two operators one after the other."""
    symmetric.enable_symm_mem_for_group(world().group_name)
    left = torch.ones(8, 64, 32, device="cuda", dtype=torch.bfloat16)
    right = torch.ones(32, 16, device="cuda", dtype=torch.bfloat16)
    for name, given in (
        ("fused_all_gather_matmul", (left, [right], dimension, world().group_name)),
        ("fused_matmul_reduce_scatter", (left, right, "sum", dimension, world().group_name)),
    ):
        ours = getattr(torch.ops.symm_mem, name)(*given)
        with symmetric._test_mode():
            wanted = getattr(torch.ops.symm_mem, name)(*given)
        shapes = [[(x.shape, x.dtype) for x in torch.utils._pytree.tree_leaves(out)] for out in (ours, wanted)]
        assert shapes[0] == shapes[1]


def test_operators_in_cpp_write_or_make(births: Births) -> None:
    tensor = shared(births, 256)
    symmetric.rendezvous(tensor, world())
    before = len(births.bytes)
    ops = torch.ops.symm_mem
    assert ops.multimem_all_reduce_(tensor, "sum", world().group_name) is tensor
    assert ops.two_shot_all_reduce_(tensor, "sum", world().group_name) is tensor
    assert births.bytes[before:] == []
    assert ops.one_shot_all_reduce(tensor, "sum", world().group_name).shape == (256,)
    assert births.bytes[before:] == [1024]
