"""Symmetric memory (torch/csrc/distributed/c10d/symm_mem), by which ranks of one host write to each other: async tensor
parallelism, low-contention collectives.

Such memory is taken from the driver, outside of the caching allocator, which is noted. Of what a rendezvous of ranks
takes, the allocator serves the two tables of addresses alone (`CUDAPeerAllocInfo`). PyTorch's operators that are
written in Python run; those in C++ give their results, whose values are those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Final
from unittest import mock

import torch

from graph.fake_cuda.device import Runtime
from graph.fake_cuda.memory import Layout, contiguous
from graph.fake_cuda.torch_private import (
    SYMMETRIC_MEMORY,
    fake_store,
    group_named,
    operator_names,
    schemas,
    symmetric_memory,
)
from graph.user_code import reader

_SPACE: Final = "symm_mem::"
#: Bytes of an address, and of the pad by which a rank signals to others.
_ADDRESS: Final = 8
_SIGNALS: Final = 2048
#: Blocks are whole pages of the driver's.
_PAGE: Final = 2 << 20
#: An operator whose result is of another shape than its operands.
_PRODUCT: Final = "_async_input_mm"
#: Operators that PyTorch has written in Python, and those of classes in C++, begin so.
_RUN: Final = ("fused_", "_low_contention_", "get_remote_tensors", "_rendezvous", "_barrier")


class SymmetricMemory:
    """`_SymmetricMemory`: a block of memory that each rank of a group has, and how they meet there."""

    runtime: ClassVar[Runtime]
    #: By address of this rank's block: the group that it is for, if one was named, and where its ranks have met.
    groups: ClassVar[dict[int, str | None]]
    met: ClassVar[dict[tuple[int, str], SymmetricMemory]]
    #: Blocks that are made once, by the number that the program gave.
    lasting: ClassVar[dict[int, torch.Tensor]]
    signal_pad_size = _SIGNALS

    def __init__(self, block: torch.Tensor, group: str) -> None:
        of = group_named(group)
        self.rank, self.world_size = of.rank(), of.size()
        self.buffer_size, self.device = block.untyped_storage().nbytes(), block.device
        self.multicast_ptr = 0
        self._blocks: dict[int, torch.Tensor] = {self.rank: _bytes_of(block)}
        self._pads: dict[int, torch.Tensor] = {}
        self._tables = [torch.empty(self.world_size * _ADDRESS, dtype=torch.uint8, device=block.device) for _ in "bs"]

    @staticmethod
    def set_group_info(*args: object) -> None:
        """The ranks of a group can find each other."""

    @staticmethod
    def set_backend(name: str) -> None:
        """CUDA's own, NCCL's or NVSHMEM's: none allocates what the others do not."""

    @staticmethod
    def get_backend(device: object) -> str:
        """Whose memory it is."""
        return "CUDA"

    @staticmethod
    def get_mempool_allocator(device: object) -> None:
        """What serves a `MemPool` of such memory, which the caching allocator counts: none of our own."""

    @staticmethod
    def has_multicast_support(device_type: object, device_idx: int) -> bool:
        """Whether a switch between the GPUs writes to all: from Hopper on."""
        return SymmetricMemory.runtime.profile.arch >= (9, 0)

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """A tensor in a block of its own, or in that of `alloc_id`."""
        cls = SymmetricMemory
        if alloc_id is not None and alloc_id in cls.lasting:
            return _seen(cls.lasting[alloc_id], size, dtype, 0, stride)
        made = _block(cls.runtime, Layout(size, stride, dtype))
        cls.groups[made.data_ptr()] = group_name
        if alloc_id is not None:
            cls.lasting[alloc_id] = _bytes_of(made)
        return made

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        """Whether it lies in such memory."""
        return tensor.untyped_storage().data_ptr() in SymmetricMemory.groups

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> SymmetricMemory | None:
        """Where the ranks of a group have met; None of other memory. RuntimeError where no group is named."""
        cls, place = SymmetricMemory, tensor.untyped_storage().data_ptr()
        if place not in cls.groups:
            return None
        group = group_name or cls.groups[place]
        if group is None:
            raise RuntimeError("rendezvous: group_name is not set, neither here nor where the tensor was allocated")
        if (place, group) not in cls.met:
            cls.met[place, group] = cls(tensor, group)
        return cls.met[place, group]

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0
    ) -> torch.Tensor:
        """What a rank has in its block, at an offset in elements."""
        if rank not in self._blocks:
            self._blocks[rank] = SymmetricMemory.runtime.memory.elsewhere(_flat(self.buffer_size))
        return _seen(self._blocks[rank], sizes, dtype, storage_offset or 0)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, from the start of it."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int | None = 0,
    ) -> torch.Tensor:
        """Where a rank is signalled to: all of it, or a part."""
        dtype = dtype or torch.uint32
        if rank not in self._pads:
            self._pads[rank] = SymmetricMemory.runtime.memory.elsewhere(_flat(self.signal_pad_size))
        return _seen(self._pads[rank], sizes or (self.signal_pad_size // dtype.itemsize,), dtype, storage_offset or 0)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """The stream waits for the other ranks'."""

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """The stream signals to a rank's."""

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """The stream waits for a rank's signal."""

    @staticmethod
    def memset32(tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        """Some words of a tensor are written."""
        return tensor

    @staticmethod
    def stream_write_value32(tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """A word of a tensor is written."""
        return tensor

    @property
    def buffer_ptrs(self) -> list[int]:
        """Where each rank's block begins."""
        return [self.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(self.world_size)]

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """Where each rank's signals are."""
        return [self.get_signal_pad(rank).data_ptr() for rank in range(self.world_size)]

    @property
    def buffer_ptrs_dev(self) -> int:
        """Where the device finds the first of these lists."""
        return self._tables[0].data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Where the device finds the second."""
        return self._tables[1].data_ptr()


def _flat(size: int) -> Layout:
    return Layout((size,), (1,), torch.uint8)


def _block(runtime: Runtime, layout: Layout) -> torch.Tensor:
    size = -(-(layout.nbytes + _SIGNALS) // _PAGE) * _PAGE
    runtime.note(
        f"{reader() or 'the program'} takes {size >> 20} MiB of symmetric memory from the driver: they are outside of "
        "the allocator, and not counted"
    )
    return runtime.memory.elsewhere(layout)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _seen(
    block: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, offset: int, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A part of a block, at an offset in elements."""
    whole = block[: block.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(tuple(sizes), tuple(strides or contiguous(tuple(sizes))), offset)


def _kernel(schema: torch.FunctionSchema) -> Callable[..., object]:
    """What an operator in C++ does to memory: it writes to an operand, or makes a tensor like the first."""
    written = [place for place, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]

    def kernel(first: torch.Tensor, *rest: object) -> object:
        if not schema.returns:
            return None
        return (first, *rest)[written[-1]] if written else torch.empty_like(first)

    return kernel


def _product(one: torch.Tensor, other: torch.Tensor, *signals: object) -> torch.Tensor:
    """A product that begins with what has come of its first operand."""
    return one.new_empty((*one.shape[:-1], other.shape[-1]))


@contextmanager
def shared(runtime: Runtime) -> Iterator[None]:
    """Inside, ranks have symmetric memory."""
    module, enabled, workspaces = symmetric_memory()
    cls = SymmetricMemory
    cls.runtime, cls.groups, cls.met, cls.lasting = runtime, {}, {}, {}
    names = {name.partition(".")[0] for name in operator_names() if name.startswith(_SPACE)}
    named = [(name.removeprefix(_SPACE), one) for name in sorted(names) for one in schemas(name)]
    cpp = [(name, one) for name, one in named if not name.startswith(_RUN)]
    kernels = [(name, "CUDA", _product if name == _PRODUCT else _kernel(one)) for name, one in cpp]

    def enable(group_name: str) -> None:
        enabled.setdefault(group_name, fake_store())

    with ExitStack() as stack:
        for owner in (SYMMETRIC_MEMORY[0], module):
            stack.enter_context(mock.patch.object(owner, SYMMETRIC_MEMORY[1], cls))
        stack.enter_context(mock.patch.object(module, "enable_symm_mem_for_group", enable))
        for known in (enabled, workspaces):
            stack.enter_context(mock.patch.dict(known, clear=True))
        runtime.register(kernels, _SPACE.rstrip(":"))
        yield
    cls.groups, cls.met, cls.lasting = {}, {}, {}
