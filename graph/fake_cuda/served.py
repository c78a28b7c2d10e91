"""What programs ask of the caching allocator, answered by one that serves the fake device while they run.

PyTorch's own `torch.cuda.memory` and `torch.accelerator.memory` stay as they are; what they call in C++ is answered
here. The allocator itself is not of this package: `Allocator` says what it must do.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from graph.fake_cuda.operators import places
from graph.fake_cuda.torch_private import BINDINGS, compile_with, compiling, has_triton_package

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: What is raised where memory runs out.
OutOfMemoryError: Final = torch.OutOfMemoryError


def has_triton() -> bool:
    """Whether Triton is installed. PyTorch itself keeps to the answer that it gets here."""
    return has_triton_package()


class Allocator(Protocol):
    """A caching allocator. Allocations have numbers, which it gives."""

    lock: AbstractContextManager[Any]  # one thread at a time; a thread may take it again

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate `size` bytes on a stream; raises torch.OutOfMemoryError."""

    def free(self, ident: int) -> None:
        """Give an allocation back; called from any thread, must not raise."""

    def record_stream(self, ident: int, stream: int) -> None:
        """An allocation is in use on another stream."""

    def launch(self, name: int, duration: int, stream: int) -> None:
        """Work of `duration` ns begins on a stream; the name's code is the caller's."""

    def collective(self, name: int, kind: str, group: str, size: int, stream: int) -> None:
        """A collective of `size` bytes among the ranks of `group` (`0,1,2`, or `0,1,2:1>2`) begins on a stream."""

    def wait_stream(self, stream: int, on: int) -> None:
        """What comes on a stream waits for what another one has now."""

    def synchronize(self, stream: int) -> None:
        """The host waits for a stream (-1: for all)."""

    def pool_create(self, pool: tuple[int, int], no_split: bool, use_on_oom: bool) -> None:
        """A private pool comes into use."""

    def pool_begin(self, pool: tuple[int, int], streams: set[int] | None) -> None:
        """What is allocated on one of these streams, of which a graph is captured, or (None) by this thread comes from
        a private pool; it counts as a use. The set may change."""

    def pool_end(self, pool: tuple[int, int]) -> None:
        """It comes from the pool no more."""

    def pool_release(self, pool: tuple[int, int]) -> None:
        """A use of the pool ends."""

    def pool_empty(self, pool: tuple[int, int]) -> None:
        """Give back to the driver what is cached in a pool without uses."""

    def pool_uses(self, pool: tuple[int, int]) -> int:
        """How many uses the pool has."""

    def pool_living(self, pool: tuple[int, int]) -> set[int]:
        """The allocations that live in the pool."""

    def pool_checkpoint(self, pool: tuple[int, int]) -> int:
        """Remember the pool's blocks, by a number."""

    def pool_restore(self, pool: tuple[int, int], number: int) -> tuple[set[int], dict[int, int]]:
        """The pool has the blocks that it had: allocations that were freed, and those that lived then by their new
        numbers."""

    def begin(self) -> object:
        """CUDA is initialized: what the environment says of settings counts as it is now."""

    def empty_cache(self) -> None:
        """Give back to the driver what is cached."""

    def mark(self, phase: int, step: int) -> None:
        """A phase of the run begins."""

    def region(self, name: int, begins: bool) -> None:
        """A named part of the program begins, or ends."""

    def reset_peak(self) -> None:
        """Peaks become what stands now."""

    def reset_accumulated(self) -> None:
        """Counts of what was allocated and freed begin again."""

    def set_fraction(self, fraction: float) -> None:
        """The process may take this much of the device."""

    def set_conf(self, conf: str) -> None:
        """Settings change, by an option string as in PYTORCH_ALLOC_CONF."""

    @property
    def fraction(self) -> float:
        """What `set_fraction` set."""

    def statistics(self) -> dict[str, Any]:
        """`torch.cuda.memory_stats_as_nested_dict`."""

    def snapshot(self) -> dict[str, Any]:
        """A memory snapshot, as PyTorch makes them."""

    def record_history(self, most: int, *, clear: bool) -> None:
        """From here on snapshots have the last `most` entries of the history; `clear`: and nothing from before."""

    def observe(self, observer: Callable[[int, int, int], object]) -> None:
        """Call `observer` where memory runs out: bytes asked of the driver, all there may be, and free ones."""

    def memory_info(self) -> tuple[int, int]:
        """Free bytes of the device, and all."""


def changes(runtime: Runtime) -> list[tuple[Any, str, Any]]:
    """Owner, name and function of what is to be replaced in PyTorch, for allocators to answer: that of this process's
    GPU, or those of its GPUs by number."""
    allocators = runtime.allocators

    def of(device: object = None) -> Allocator:
        if runtime.absent(device):
            raise RuntimeError("Invalid device argument : did you call init?")
        if len(allocators) == 1:
            return allocators[0]
        index = places.number_of(device)
        return allocators[torch.cuda.current_device() if index is None else index]

    def memory_info(device: object = None) -> tuple[int, int]:
        runtime.there(device)
        return of(device).memory_info()

    def of_device(ask: Callable[[Allocator], Any]) -> Callable[..., Any]:
        return lambda *device: ask(of(*device))

    def each(tell: Callable[[Allocator], object]) -> Callable[[], None]:
        def told() -> None:
            for allocator in allocators:
                tell(allocator)

        return told

    def record(
        enabled: str | None, context: object, stacks: object, most: int, clear: bool = False, *rest: object
    ) -> None:
        limits = {"all": most, "state": 1, None: 0}
        if enabled not in limits:
            raise RuntimeError("expected state to be 'state', 'all', or None")
        each(lambda allocator: allocator.record_history(limits[enabled], clear=clear))()

    def record_legacy(
        enabled: bool, context: object, most: int, stacks: object, native: object, clear: bool = False, *rest: object
    ) -> None:
        each(lambda allocator: allocator.record_history(most if enabled else 0, clear=clear))()

    def attach(observer: Callable[[int, int, int, int], object]) -> None:
        def failed(asked: int, most: int, free: int) -> None:
            observer(torch.cuda.current_device(), asked, most, free)

        each(lambda allocator: allocator.observe(failed))()

    def snapshot(pool: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Of a pool, or of all (None, or (0, 0)); newer releases say with a third number if they want the history."""
        found = allocators[0].snapshot()
        first = torch.cuda.current_device() if len(allocators) == 1 else 0
        made = {first: found["device_traces"][0]}
        for segment in found["segments"]:
            segment["device"] = first
        for index, allocator in enumerate(allocators[1:], 1):
            more = allocator.snapshot()
            made[index] = more["device_traces"][0]
            found["segments"] += [{**segment, "device": index} for segment in more["segments"]]
        found["device_traces"] = [made.get(number, []) for number in range(torch.cuda.device_count())]
        if pool is not None and any(pool[:2]):
            found["segments"] = [one for one in found["segments"] if one["segment_pool_id"] == pool[:2]]
        return found

    answers: dict[str, Any] = {
        "_cuda_memoryStats": of_device(lambda allocator: allocator.statistics()),
        "_cuda_resetPeakMemoryStats": of_device(lambda allocator: allocator.reset_peak()),
        "_cuda_resetAccumulatedMemoryStats": of_device(lambda allocator: allocator.reset_accumulated()),
        "_cuda_emptyCache": each(lambda allocator: allocator.empty_cache()),
        "_cuda_setMemoryFraction": lambda fraction, device=None: of(device).set_fraction(fraction),
        "_cuda_getMemoryFraction": lambda device=None: of(device).fraction,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": record,
        "_cuda_record_memory_history_legacy": record_legacy,
        "_cuda_attach_out_of_memory_observer": attach,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_hostMemoryStats": dict,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": of_device(lambda allocator: allocator.statistics()),
        "_accelerator_resetPeakStats": of_device(lambda allocator: allocator.reset_peak()),
        "_accelerator_resetAccumulatedStats": of_device(lambda allocator: allocator.reset_accumulated()),
        "_accelerator_emptyCache": each(lambda allocator: allocator.empty_cache()),
        "_accelerator_getMemoryInfo": memory_info,
        "_accelerator_setAllocatorSettings": lambda conf: each(lambda allocator: allocator.set_conf(conf))(),
    }
    library = types.SimpleNamespace(
        cudaMemGetInfo=memory_info,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )
    return [(BINDINGS, name, answer) for name, answer in answers.items()] + [(torch.cuda, "cudart", lambda: library)]


def unwound(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose frames keep no tensor alive where it ends in an error, as frames of C++ keep none.

    A program that catches the error may go on while it has the traceback, and counts on what the call held being gone.
    Where memory runs out the traceback is the program's alone. Dynamo sees no frame either: it compiles what it meets.
    """

    def called(*args: object, **kwargs: object) -> Any:
        compiles = compiling()
        if compiles is not None:
            compile_with(None)
        try:
            return kernel(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)
        except Exception as error:
            del args, kwargs
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if compiles is not None:
                compile_with(compiles)
        del args, kwargs
        try:
            raise failure
        finally:
            del failure

    return called
