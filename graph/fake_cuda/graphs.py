"""CUDA graphs and pools of memory where no GPU is: what is captured draws from its pool, and a replay does nothing.

`torch.cuda.graph`, `make_graphed_callables` and Inductor's trees of graphs are PyTorch's own; what they call in C++ is
answered here (aten/src/ATen/cuda/CUDAGraph.cpp and MemPool.cpp, torch/csrc/cuda/Module.cpp).
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from graph.fake_cuda.memory import Layout, set_storage
from graph.fake_cuda.torch_private import BINDINGS

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.fake_cuda.served import Allocator
    from graph.fake_cuda.torch_private import Operator

#: A pool's id in PyTorch: (0, n) where a program asked for it, (n, 0) where a capture did.
Handle = tuple[int, int]

#: From this release on each graph has a seed and an offset of the generator of its own, and its stream's workspaces end
#: with it; before, all graphs have the same.
_BY_ITSELF: Final = (2, 12)
#: From this release on it has them only where it draws random numbers.
_SEEDED_WHERE_DRAWN: Final = (2, 14)
#: Arguments by which an operator that may draw random numbers draws none, and their values.
_DRAWS_NONE: Final = {"dropout_p": 0.0, "train": False, "training": False}


def seeding(runtime: Runtime, func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that has the captured graph's seeds made where it draws random numbers, after what it makes itself."""
    if torch.Tag.nondeterministic_seeded not in func.tags or runtime.profile.release < _SEEDED_WHERE_DRAWN:
        return kernel
    arguments = [(place, one.name, one.default_value) for place, one in enumerate(func._schema.arguments)]
    telling = [one for one in arguments if one[1] in _DRAWS_NONE]

    def called(*args: object, **kwargs: object) -> Any:
        out = kernel(*args, **kwargs)
        if runtime.drawn is not None:
            told = [(name, args[at] if at < len(args) else kwargs.get(name, default)) for at, name, default in telling]
            made = out[0] if isinstance(out, tuple) else out
            if made.numel() and not any(value == _DRAWS_NONE[name] for name, value in told):
                runtime.drawn()
        return out

    return called


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    runtime: Runtime
    allocator: Allocator
    handles: itertools.count[int]
    together: dict[int, list[torch.Tensor]]  # graphs that have the same seeds, up to 2.11

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Handle = (0, 0)
        self._stream = 0
        self._captured = False
        self._seeds: list[torch.Tensor] = []

    def capture_begin(
        self, pool: Handle | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """The current stream is captured, and what is allocated on it comes from the pool."""
        runtime = self.runtime
        stream = runtime.stream
        if self._captured:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if stream == runtime.default_stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        self._pool = (next(self.handles), 0) if pool is None else pool
        self._stream = stream.stream_id
        if runtime.profile.release < _BY_ITSELF:
            self.together[id(self)] = next(iter(self.together.values()), []) or _made_seeds()
        elif runtime.profile.release < _SEEDED_WHERE_DRAWN:
            self._seed()
        else:
            runtime.drawn = self._seed
        runtime.captured.add(stream.stream_id)
        self.allocator.pool_begin(self._pool, runtime.captured)

    def capture_end(self) -> None:
        """The capture ends."""
        self.runtime.drawn = None
        self.runtime.captured.clear()
        self.allocator.pool_end(self._pool)
        self.runtime.tell("graph_captured", id(self))
        self._captured = True

    def _seed(self) -> None:
        """The generator's seed and its offset, which every replay reads; not of the graph's pool."""
        if not self._seeds:
            with torch.cuda.stream(self.runtime.default_stream):
                self._seeds = _made_seeds()

    def reset(self) -> None:
        """The graph is given up, and its pool if no other graph has it."""
        while self._seeds:
            self._seeds.pop()
        if self._captured:
            self._captured = False
            if self.runtime.profile.release >= _BY_ITSELF:
                self.runtime.tell("clear_workspaces", self._stream)
            self.allocator.pool_release(self._pool)

    def pool(self) -> Handle:
        """The pool, for other graphs to share."""
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        """Nothing is allocated by it."""
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.runtime.tell("graph_replayed", id(self))

    def _nothing(self, *args: object) -> None:
        """Nothing changes."""

    instantiate = register_generator_state = enable_debug_mode = debug_dump = _nothing

    def __del__(self) -> None:
        self.reset()
        self.together.pop(id(self), None)


def _made_seeds() -> list[torch.Tensor]:
    return [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]


class MemPool:
    """`torch.cuda.MemPool`."""

    live: Allocator
    handles: itertools.count[int]

    def __init__(self, allocator: object = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.allocator = allocator
        self.id: Handle = (0, next(self.handles))
        self.live.pool_create(self.id, no_split, use_on_oom)

    def use_count(self) -> int:
        """How often it is in use."""
        return self.live.pool_uses(self.id)

    def snapshot(self, include_traces: bool = True) -> Any:
        """Its segments."""
        shown: Any = torch.cuda.memory_snapshot
        return shown(self.id)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a module of the program still has it, when there is nothing to call any more
            self.live.pool_release(self.id)
            self.live.pool_empty(self.id)


class State(NamedTuple):
    """A pool's blocks at one point; `storages` are those of the allocations that lived then."""

    pool: Handle
    number: int
    storages: dict[int, int]


class _Trees:
    """What Inductor's trees of graphs ask (torch/_inductor/cudagraph_trees.py), and memory without tensors."""

    def __init__(self, runtime: Runtime, allocator: Allocator) -> None:
        self.runtime, self.allocator = runtime, allocator
        self.memory = runtime.memory
        self._raw: dict[int, torch.Tensor] = {}  # allocations without tensors, by address

    def number_of(self, storage: int) -> int:
        """The number of a storage, by PyTorch's own reference to it."""
        made: Any = torch.UntypedStorage
        return self.runtime.number_at(made._new_with_weak_ptr(storage).data_ptr())

    def check_live(self, device: int, pool: Handle, addresses: Iterable[int]) -> bool:
        """Whether these are all that lives in the pool; cycles of references that nobody has are collected first, as
        PyTorch does where it finds more."""
        known: Any = self.runtime.observer
        wanted = {known.allocation(self.runtime.number_at(address)) for address in addresses}
        if wanted == self.allocator.pool_living(pool):
            return True
        gc.collect()
        return wanted == self.allocator.pool_living(pool)

    def checkpoint(self, device: int, pool: Handle) -> State:
        """getCheckpointState."""
        known: Any = self.runtime.observer
        return State(pool, self.allocator.pool_checkpoint(pool), known.storages(self.allocator.pool_living(pool)))

    def restore(self, device: int, state: State, stale: list[int], live: list[int]) -> None:
        """setCheckpointPoolState: what lived lives again, to be freed with its storage, or by `raw_delete`."""
        known: Any = self.runtime.observer
        known.restored(*self.allocator.pool_restore(state.pool, state.number), state.storages)

    def raw_alloc(self, size: int, stream: int) -> int:
        """The address of `size` bytes of a stream, without a tensor (`torch.cuda.caching_allocator_alloc`)."""
        external: Any = torch.cuda.ExternalStream
        with torch.cuda.stream(external(stream)):
            made = torch.empty(size, dtype=torch.uint8, device=self.runtime.device)
        self._raw[made.data_ptr()] = made
        return made.data_ptr()

    def raw_delete(self, address: int) -> None:
        """What `raw_alloc` gave is freed, or an allocation whose storage is gone."""
        if self._raw.pop(address, None) is None:
            self.memory.freed(self.runtime.number_at(address))

    def forget(self, storage: int) -> None:
        """The allocation of a storage is freed while the storage goes on."""
        self.memory.freed(self.number_of(storage))

    def owned(self, storage: int) -> bool:
        """Whether an allocation is freed with the storage."""
        known: Any = self.runtime.observer
        return bool(known.allocation(self.number_of(storage)) >= 0)

    def storage(self, address: int, device: torch.device, size: int) -> torch.UntypedStorage:
        """A storage at an address where a graph has left a tensor."""
        return self.memory.again(self.runtime.number_at(address), size).untyped_storage()

    def tensor(self, metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of a storage."""
        made = self.memory.new(Layout((0,), (1,), metadata["dtype"]), [])
        set_storage(made, storage, metadata["size"], metadata["stride"], metadata["storage_offset"])
        return made

    def clear_workspaces(self) -> None:
        """cuBLAS has no workspaces any more."""
        self.runtime.tell("clear_workspaces")

    def answers(self) -> dict[str, Callable[..., Any]]:
        """By their names in PyTorch's C++ bindings."""
        return {
            "_cuda_checkPoolLiveAllocations": self.check_live,
            "_cuda_getCheckpointState": self.checkpoint,
            "_cuda_setCheckpointPoolState": self.restore,
            "_cuda_cudaCachingAllocator_raw_alloc": self.raw_alloc,
            "_cuda_cudaCachingAllocator_raw_delete": self.raw_delete,
            "_free_And_Remove_DeleterFn": self.forget,
            "_has_Standard_Deleter": self.owned,
            "_construct_storage_from_data_pointer": self.storage,
            "_construct_CUDA_Tensor_From_Storage_And_Metadata": self.tensor,
            "_cuda_clearCublasWorkspaces": self.clear_workspaces,
            "_tensors_data_ptrs_at_indices_equal": _same_addresses,
            "_set_storage_access_error_msg": lambda tensor, message: None,
            "_set_storage_data_ptr_access_error_msg": lambda storage, message: None,
            "_cuda_get_conv_benchmark_empty_cache": lambda: True,
            "_cudnn_set_conv_benchmark_empty_cache": lambda enabled: None,
            "_cuda_isHistoryEnabled": lambda: False,
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        }


def _same_addresses(tensors: list[Any], addresses: list[int | None], places: list[int]) -> bool:
    """Whether the tensors at these places are where they were."""
    return all(tensors[place].data_ptr() == addresses[place] for place in places)


def changes(runtime: Runtime, allocator: Allocator) -> list[tuple[Any, str, Any]]:
    """Owner, name and replacement of each."""
    handles, captures = itertools.count(1), itertools.count(1)
    CUDAGraph.runtime, CUDAGraph.allocator, MemPool.live = runtime, allocator, allocator
    CUDAGraph.handles, MemPool.handles, CUDAGraph.together = captures, handles, {}
    graphs, memory = torch.cuda.graphs, torch.cuda.memory
    pools: dict[str, Callable[..., Any]] = {
        "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: allocator.pool_begin(pool, None),
        "_cuda_endAllocateToPool": lambda device, pool: allocator.pool_end(pool),
        "_cuda_releasePool": lambda device, pool: allocator.pool_release(pool),
    }
    if runtime.profile.release < (2, 7):
        begin, end = pools["_cuda_beginAllocateCurrentThreadToPool"], pools["_cuda_endAllocateToPool"]
        pools |= {"_cuda_beginAllocateCurrentStreamToPool": begin, "_cuda_beginAllocateToPool": begin}
        pools["_cuda_endAllocateCurrentStreamToPool"] = end
    return [
        *((owner, "CUDAGraph", CUDAGraph) for owner in (torch.cuda, graphs)),
        *((owner, "MemPool", MemPool) for owner in (torch.cuda, memory)),
        *((owner, name, answer) for name, answer in pools.items() for owner in (BINDINGS, memory)),
        *((BINDINGS, name, answer) for name, answer in _Trees(runtime, allocator).answers().items()),
        (graphs, "_graph_pool_handle", lambda: (0, next(handles))),
        (BINDINGS, "_host_emptyCache", lambda: None),
    ]
