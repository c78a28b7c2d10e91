"""The Python side of `torch.cuda` for a device that is not there: answers from a profile, and nothing done."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import functools
import heapq
import importlib
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributions import Distribution
from torch.profiler import ProfilerActivity

from graph.fake_cuda import graphs, objects, sdpa, served
from graph.fake_cuda.operators import comm, places, rnn
from graph.fake_cuda.operators.composed import jitted
from graph.fake_cuda.torch_private import (
    BINDINGS,
    JITTED,
    RAW_STREAM,
    RUN_BACKWARD,
    cuda_utils,
    fake_tensor,
    set_device,
)
from graph.hardware.profile import STREAMS

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.hardware.profile import Profile


#: How PyTorch was built. A build without CUDA cannot say it any more once a GPU seems to be there.
_BUILT: Final = torch.__config__.show()
#: Seconds in which another thread is let on.
_A_MOMENT: Final = 1e-6
#: The first number of a stream that stands for an event.
FIRST_POINT: Final = 5000


class Stream:
    """A CUDA stream by number; 0 is the default stream."""

    runtime: Runtime
    _made = 0

    def __init__(self, device: object = None, priority: int = 0, *, number: int | None = None, **_: object) -> None:
        self.runtime.there(device)
        if number is None:
            number = Stream._made + 1
            Stream._made = number % STREAMS
        self.stream_id = number
        self.cuda_stream = self.stream_id
        self.device = self.runtime.named(device)
        self.device_index = self.device.index
        self.device_type = 1
        self.priority = priority
        self._outside: list[_StreamContext] = []  # in which it is current

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority (of CUDA's, those that PyTorch has pools of streams for)."""
        return 0, -3

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        """What ctypes gives to functions of CUDA's libraries."""
        return ctypes.c_void_p(self.cuda_stream)

    def query(self) -> bool:
        """All is done."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.runtime.synchronized()

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured of it."""
        return self.stream_id in self.runtime.captured

    def wait_stream(self, stream: Stream) -> None:
        """What comes on this stream waits for what is on `stream` now."""
        self.runtime.tell("wait_stream", self.stream_id, stream.stream_id)
        if stream.stream_id in self.runtime.captured:
            self.runtime.captured.add(self.stream_id)

    def wait_event(self, event: Event) -> None:
        """What comes on this stream waits for `event`."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Any:
        """`event`, or a new one, recorded on this stream."""
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> Stream:
        self._outside.append(_StreamContext(self))
        self._outside[-1].__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._outside.pop().__exit__(*exc)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return False
        return (other.device_index, other.stream_id) == (self.device_index, self.stream_id)

    def __hash__(self) -> int:
        return hash((Stream, self.device_index, self.stream_id))


class Points:
    """Numbers of the streams that stand for events: one for each event that lives, used again when it is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}  # by the stream on which such events were recorded
        self._stream: dict[int, int] = {}

    def take(self, stream: int) -> int:
        """A number for an event on `stream`."""
        free = self._free.setdefault(stream, [])
        if free:
            return heapq.heappop(free)
        number = FIRST_POINT + len(self._stream)
        self._stream[number] = stream
        return number

    def give_back(self, number: int) -> None:
        """The event of this number (0: none) is gone, or recorded anew."""
        if number:
            heapq.heappush(self._free[self._stream[number]], number)


class ExternalStream(Stream):
    """A stream that another library has made, by its pointer, which here is its number."""

    def __init__(self, stream_ptr: int, device: object = None, **_: object) -> None:
        super().__init__(number=stream_ptr)


class Event:
    """A CUDA event: a point on a stream.

    It is told as a stream of its own that waits there for the one it is recorded on; who waits for the event waits for
    that stream.
    """

    _point = 0  # also where Dynamo makes one without `__init__`

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device: torch.device | None = None  # of the streams that it is recorded on
        self._captured = False
        self._points = Stream.runtime.points

    def __del__(self) -> None:
        if self._point:
            self._points.give_back(self._point)

    def record(self, stream: Stream | None = None) -> None:
        """This point of `stream`, or of the current one."""
        recorded = Stream.runtime.stream if stream is None else stream
        self.device = self.device or recorded.device
        if self.device != recorded.device:
            here, there = self.device.index, recorded.device.index
            raise RuntimeError(f"Event device {here} does not match recording stream's device {there}.")
        on = recorded.stream_id
        self._points.give_back(self._point)
        self._point = self._points.take(on)
        self._captured = on in Stream.runtime.captured
        Stream.runtime.tell("wait_stream", self._point, on)

    def wait(self, stream: Stream | None = None) -> None:
        """What comes on `stream`, or on the current one, waits for this point."""
        if self._point:
            waiting = Stream.runtime.stream if stream is None else stream
            Stream.runtime.tell("wait_stream", waiting.stream_id, self._point)
            if self._captured and Stream.runtime.captured:
                Stream.runtime.captured.add(waiting.stream_id)

    def query(self) -> bool:
        """It is complete."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        Stream.runtime.synchronized(self._point)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as if one kernel ran between: nothing is measured here, and programs divide by it."""
        return 1.0


class _Storages:
    """What changes in `torch.UntypedStorage` and `torch.Tensor`: storages that change their size, and use on streams.

    A storage keeps its address when it is resized: only the runtime knows that its bytes were given back.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.live = runtime.memory.live
        self.again = runtime.memory.again_bytes
        self.tell = runtime.tell
        self.number = runtime.number_at

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Owner, name and function of each."""
        live, again, tell, number = self.live, self.again, self.tell, self.number
        storage: Any = torch.UntypedStorage
        resize, nbytes, record = storage.resize_, storage.nbytes, torch.Tensor.record_stream

        def numbered(self: torch.UntypedStorage) -> int | None:
            """Its number; None for one that has no data (a tensor subclass that wraps others)."""
            try:
                return number(self.data_ptr())
            except RuntimeError:
                return None

        def resized(self: torch.UntypedStorage, size: int) -> Any:
            if self.device.type != "cuda" or (mine := numbered(self)) is None:
                return resize(self, size)
            if mine in live and live[mine] != size:
                live[mine] = int(size)
                tell("resized", mine, int(size))
            return self

        def measured(self: torch.UntypedStorage) -> Any:
            if self.device.type != "cuda" or (mine := numbered(self)) is None:
                return nbytes(self)  # a symbol where sizes are symbols: Dynamo must not take it for a number
            return live.get(mine) or again.get(mine, 0)

        def recorded(self: torch.Tensor, stream: Stream | torch.Stream) -> None:
            if isinstance(stream, Stream):
                tell("record_stream", number(self.untyped_storage().data_ptr()), stream.stream_id)
            else:
                record(self, stream)

        return [
            (storage, "resize_", resized),
            (storage, "nbytes", measured),
            (storage, "size", measured),
            (torch.Tensor, "record_stream", recorded),
        ]


class _Silent:
    """A library all of whose functions give 0."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


class _Device:
    """`torch.cuda.device`; of a tensor, `torch.cuda.device_of`."""

    def __init__(self, device: object = None) -> None:
        self.place = device.device if isinstance(device, torch.Tensor) else device
        Stream.runtime.there(self.place)
        self.idx = Stream.runtime.named(self.place).index
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.born = Stream.runtime.memory.born
        self.prev_idx = _exchange(Stream.runtime, self.idx)

    def __exit__(self, *exc: object) -> None:
        _exchange(Stream.runtime, self.prev_idx)
        if Stream.runtime.memory.born != self.born:
            Stream.runtime.asked_for(self.place)


def _exchange(runtime: Runtime, index: int) -> int:
    """The GPU of this number is the current one, where the process has several (-1: as it is); the one before."""
    before = runtime.index
    if runtime.several and index >= 0 and index != before:
        set_device(index)
    return before


class _StreamContext:
    """`torch.cuda.stream(s)`: its GPU is current inside, too."""

    def __init__(self, stream: Stream | None) -> None:
        self.runtime, self.stream = Stream.runtime, stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.index = _exchange(self.runtime, self.stream.device_index)
            self.before = self.runtime.stream
            self.runtime.stream = self.stream

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            self.runtime.stream = self.before
            _exchange(self.runtime, self.index)


class _CudaDeviceProperties(types.SimpleNamespace):
    """What a GPU is; those of two GPUs are not equal, whatever they are."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


#: What `torch.cuda.get_device_properties` gives: a constant to Dynamo.
DEVICE_PROPERTIES: Final = _CudaDeviceProperties


@functools.cache
def _properties(card: Profile, index: int) -> _CudaDeviceProperties:
    """`torch.cuda.get_device_properties`, of the GPU of this number."""
    return _CudaDeviceProperties(
        name=card.product,
        major=card.arch[0],
        minor=card.arch[1],
        total_memory=card.total_bytes,
        multi_processor_count=card.sm_count,
        max_threads_per_multi_processor=card.max_threads_per_sm,
        max_threads_per_block=card.max_threads_per_block,
        warp_size=card.warp_size,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared_memory_per_block,
        shared_memory_per_multiprocessor=card.shared_memory_per_sm,
        regs_per_multiprocessor=65536,
        L2_cache_size=card.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="",
    )


def _nothing(*args: object, **kwargs: object) -> None:
    """A call that has no effect without a device."""


class _Driver:
    """CUDA's driver for kernels of the program's own: all it is asked for succeeds, a launch does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


def _compiled(source: str, name: str, *args: object, **kwargs: object) -> tuple[bytes, str]:
    """A kernel that the program gives as CUDA source: no code, and its name."""
    return b"", name


#: Where a kernel that the program gives as CUDA source finds the driver and the compiler (since 2.8).
_COMPILING: Final[Mapping[str, Callable[..., Any]]] = {
    "_get_cuda_library": _Driver,
    "_get_gpu_runtime_library": _Driver,
    "_nvrtc_compile": _compiled,
}


def _each(names: str, answer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A function of its own for each name: Dynamo has a rule for every function of torch, by the function."""
    return {name: lambda *args, **kwargs: answer(*args, **kwargs) for name in names.split()}


#: Functions of `torch.cuda` that initialize CUDA (torch/cuda/__init__.py, torch/csrc/cuda/Module.cpp).
_INITIALIZING: Final = (
    *("_lazy_init", "init", "set_device", "current_device", "synchronize", "current_stream", "default_stream"),
    *("set_stream", "get_device_name", "get_device_capability", "get_device_properties", "get_rng_state"),
    *("get_rng_state_all", "set_rng_state", "initial_seed", "ipc_collect", "can_device_access_peer"),
)


def _initializing(runtime: Runtime, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: object, **kwargs: object) -> Any:
        if not runtime.initialized:
            runtime.initialized = True
            for allocator in runtime.allocators:
                allocator.begin()
        return function(*args, **kwargs)

    return called


def attributes(runtime: Runtime) -> dict[str, Any]:
    """What replaces the attributes of these names in `torch.cuda`."""
    found = _attributes(runtime)
    return found | {name: _initializing(runtime, found[name]) for name in _INITIALIZING}


def _attributes(runtime: Runtime) -> dict[str, Any]:
    card = runtime.profile
    Stream.runtime, Stream._made = runtime, 0
    numbers = range(runtime.count) if runtime.several else [runtime.index]
    runtime.default_streams = {device: Stream(device, number=0) for device in numbers}
    generator, *_ = generators = [objects.Generator(torch.device("cuda", device)) for device in range(runtime.count)]

    def choose(device: object) -> None:
        runtime.asked_for(device)
        _exchange(runtime, runtime.named(device).index)

    def known(device: object, what: str = "Invalid device id") -> int:
        if runtime.absent(device):
            raise AssertionError(what)
        index = places.number_of(device)
        return runtime.index if index is None else index

    def properties(device: object = None) -> _CudaDeviceProperties:
        return _properties(card, known(device))

    def reaches(device: object, peer_device: object) -> bool:
        return known(device) != known(peer_device, "Invalid peer device id")

    def synchronize(device: object = None) -> None:
        runtime.there(device)
        runtime.synchronized()

    def of_stream(device: object) -> int:
        if runtime.absent(device):
            number = places.number_of(device)
            raise RuntimeError(f"Device index value {number} is out of index range [0, {runtime.count})")
        found: int = runtime.named(device).index
        return found

    quiet = "_lazy_init init ipc_collect set_rng_state set_rng_state_all manual_seed "
    quiet += "manual_seed_all seed seed_all _lazy_call"
    return {
        **_each(quiet, _nothing),
        "set_device": choose,
        "is_available": lambda: True,
        "is_initialized": lambda: runtime.initialized or runtime.memory.born > 0,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: runtime.stream.stream_id in runtime.captured,
        "device_count": lambda: runtime.count,
        "_device_count_nvml": lambda: runtime.count,
        "current_device": lambda: runtime.index,
        "_exchange_device": lambda device: _exchange(runtime, device),
        "_maybe_exchange_device": lambda device: _exchange(runtime, device),
        "device": _Device,
        "device_of": _Device,
        "_DeviceGuard": _Device,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
        "get_device_properties": properties,
        "can_device_access_peer": reaches,
        "get_arch_list": lambda: [f"sm_{card.arch[0]}{card.arch[1]}"],
        "synchronize": synchronize,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(runtime.count)],
        "initial_seed": lambda: 0,
        "default_generators": tuple(generators),
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": ExternalStream,
        "set_stream": lambda stream: setattr(runtime, "stream", stream),
        "current_stream": lambda device=None: runtime.stream_of(of_stream(device)),
        "default_stream": lambda device=None: runtime.default_streams[of_stream(device)],
        "stream": lambda stream: _StreamContext(stream),
        "StreamContext": _StreamContext,
        "get_stream_from_external": ExternalStream,
    }


def _unserved(runtime: Runtime) -> dict[str, Any]:
    """What replaces attributes of `torch.cuda` where no allocator serves the device: only what lives is known."""
    total = runtime.profile.total_bytes
    quiet = "reset_peak_memory_stats reset_max_memory_allocated reset_accumulated_memory_stats "
    quiet += "reset_max_memory_cached set_per_process_memory_fraction cudart"
    sums = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    return {
        **_each(quiet, _nothing),
        **_each(sums, lambda device=None: runtime.allocated()),
        "empty_cache": runtime.cache_emptied,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (total - runtime.allocated(), total),
    }


#: Where torch.distributions raises for parameters and samples that are out of range.
_VALIDATING: Final = ("__init__", "_validate_sample")


def _valid(runtime: Runtime, function: Callable[..., None]) -> Callable[..., None]:
    """The function, for which numbers without values are in range."""

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> None:
        with runtime.values.comparing(True):
            function(*args, **kwargs)

    return called


def _settled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's engine, after which its thread lets go of what the last node was given: on a GPU it does so at once,
    here a storage's death is Python's, for which the thread that goes on has to let it.

    The thread keeps its error as long, and with it the frames that the error has passed: the program gets another.
    """

    @functools.wraps(run)
    def called(*args: object, **kwargs: object) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            failure = _copied(error)
        finally:
            _let_on(threads_of_autograd(os.getpid()))
        del args, kwargs
        try:
            raise failure
        finally:
            del failure

    return called


def _let_on(threads: Sequence[Path]) -> None:
    """Let threads have the interpreter until they wait for work, a tenth of a second at most: others may give it."""
    for moment in (_A_MOMENT,) * 16 + (0.001,) * 100:
        time.sleep(moment)
        if not any(map(_runs, threads)):
            return


def _runs(thread: Path) -> bool:
    """Whether Linux runs a thread, or would if there were a processor for it (proc_pid_stat(5))."""
    try:
        return thread.read_text().rpartition(") ")[2][:1] in ("R", "D")
    except OSError:
        return False


@functools.cache
def threads_of_autograd(process: int) -> Sequence[Path]:
    """Where Linux tells how the engine's threads for GPUs are, of this process. They start with its first backward."""
    return [name.with_name("stat") for name in named_of_autograd()]


def named_of_autograd() -> Iterator[Path]:
    """Where Linux has the names of these threads, as far as they have taken them."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            if name.read_text().startswith("pt_autograd_"):
                yield name


def _copied(error: Exception) -> Exception:
    """Another that says the same, from the same place; the same where its class cannot be copied."""
    try:
        other = copy.copy(error)
    except Exception:
        return error
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)


@contextlib.contextmanager
def patched(runtime: Runtime) -> Iterator[None]:
    """`torch.cuda` answers for `runtime`'s card while inside."""
    answers = attributes(runtime) | ({} if runtime.allocators else _unserved(runtime))
    tried = collections.deque([10], maxlen=1)  # plans that cuDNN's benchmark tries at most (ATen/Context.h)
    changes: list[tuple[Any, str, Any]] = [(torch.cuda, name, answer) for name, answer in answers.items()]
    for part in ("memory", "random", "graphs", "streams"):
        module = importlib.import_module(f"torch.cuda.{part}")
        changes += [(module, name, answer) for name, answer in answers.items() if hasattr(module, name)]
    changes += [
        (fake_tensor, "init_gpu_context", _nothing),
        (importlib.import_module("torch.cuda.nvtx"), "_nvtx", _Silent()),
        (BINDINGS, "_cuda_get_sync_debug_mode", lambda: 0),
        (BINDINGS, "_cuda_set_sync_debug_mode", _nothing),
        (BINDINGS, "_cuda_sleep", _nothing),
        (BINDINGS, "_accelerator_synchronizeDevice", lambda device: runtime.synchronized()),
        (torch.autograd.profiler, "_supported_activities", lambda: {ProfilerActivity.CPU, ProfilerActivity.CUDA}),
        (fake_tensor.log, "disabled", True),  # it logs errors that are raised as well
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        (*RAW_STREAM, lambda device: 0),
        (BINDINGS, "_accelerator_deviceCount", lambda: runtime.count),
        (BINDINGS, "_accelerator_getStream", lambda device: runtime.stream_of(runtime.named(device).index)),
        (BINDINGS, "_accelerator_setStream", lambda stream: setattr(runtime, "stream", stream)),
        (BINDINGS, "_is_flash_attention_available", lambda: True),
        (BINDINGS, "_cuda_getDevice", lambda: runtime.index),
        (BINDINGS, "_cuda_setDevice", lambda device: _exchange(runtime, device)),
        (BINDINGS, "_show_config", lambda: _BUILT),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        *((BINDINGS, kind.__name__, kind) for kind in (Stream, Event)),  # compiled code makes its own of these
        (JITTED, "__call__", jitted),
        (BINDINGS, "_has_cudnn", True),
        (BINDINGS, "_cuda_get_cudnn_benchmark_limit", lambda: tried[0]),
        (BINDINGS, "_cuda_set_cudnn_benchmark_limit", tried.append),
        (torch.backends.cudnn, "version", lambda: sdpa.cudnn_version(runtime.profile.release)),
        (torch.backends.cudnn, "is_acceptable", rnn.acceptable),
        (importlib.import_module("torch.backends.cudnn.rnn"), "get_cudnn_mode", rnn.mode_number),
    ]
    changes += [(cuda_utils, name, answer) for name, answer in _COMPILING.items() if hasattr(cuda_utils, name)]
    changes += [(owner, name, _settled(getattr(owner, name))) for owner, name in RUN_BACKWARD]
    changes += [(Distribution, name, _valid(runtime, getattr(Distribution, name))) for name in _VALIDATING]
    changes += [(BINDINGS, name, answer) for name, answer in sdpa.answers(runtime.profile).items()]
    changes += comm.changes()
    changes += _Storages(runtime).changes()
    changes += objects.changes()
    if runtime.allocators:
        changes += [*served.changes(runtime), *graphs.changes(runtime, runtime.allocators[0])]
    before = [(target, name, vars(target).get(name, _ABSENT)) for target, name, _ in changes]
    try:
        for target, name, answer in changes:
            setattr(target, name, answer)
        yield
    finally:
        for stream in runtime.default_streams.values():
            runtime.stream = stream
        for target, name, old in reversed(before):
            if old is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, old)


_ABSENT = object()
