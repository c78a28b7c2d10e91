"""Makes this PyTorch behave as a CUDA build on a given GPU, with no GPU: tensors on "cuda" exist, but hold nothing.

Inside `with fake_cuda(profile) as runtime:` a tensor on "cuda" is a plain tensor with CUDA's dispatch keys, so
PyTorch's own C++ does what it does on a GPU: composite operators, autograd on its device thread, accumulation of
gradients in place, autocast, foreach optimizers. Only the kernels are ours (`graph.fake_cuda.kernels`): they make
outputs and tell `runtime.observer`. Tensors on the CPU and on "meta" are untouched.

This and the modules `graph.fake_*` are the only ones that touch PyTorch's internals. All is undone at the end, but for
autograd's threads: importing this module starts them (`_start_autograd`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch._dynamo  # optimizers import it: not under a torch.cuda that is ours

from graph.errors import CaptureError, UnsupportedTorch
from graph.fake_cuda import guard, served
from graph.fake_cuda import leftovers as fake_leftovers
from graph.fake_cuda import self_check as fake_check
from graph.fake_cuda import stubs as fake_stubs
from graph.fake_cuda.graphs import seeding
from graph.fake_cuda.kernels import Kernels, Kind
from graph.fake_cuda.marks import remember
from graph.fake_cuda.memory import ADDRESS_BITS, Memory, ignore
from graph.fake_cuda.operators import composed, places, rnn, sparse
from graph.fake_cuda.operators.deterministic import deterministic
from graph.fake_cuda.operators.native import names, operator
from graph.fake_cuda.torch_private import current_device, interpreted_groups, next_sequence_number, set_device
from graph.fake_cuda.values import Values
from graph.hardware.profile import Profile
from graph.user_code import ending, holding, passing, reader
from graph.workspaces import metadata

if TYPE_CHECKING:
    from graph.fake_cuda.served import Allocator
    from graph.fake_cuda.stubs import Stream
    from graph.fake_cuda.torch_private import Operator

_CUDA_DEVICE_TYPE: Final = 1
#: Pinned copies of more bytes have no values.
_COPIED: Final = 1 << 20
#: After so many rounds a loop ends that goes on by what is on the device.
_ROUNDS: Final = 100


class Observer(Protocol):
    """Who is told what happens on the device."""

    def operator(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, born: list[int], memo: Kind
    ) -> None:
        """A kernel ran: `born` are the storages that its outputs brought, in order. Views are not told.

        `memo` is the same object for each call of the operator with tensors of the same shapes; `memo.note` is free for
        the observer's own use, and None at first.
        """

    def freed(self, storage: int) -> None:
        """Storage died, at this point; called on the thread that dropped it. Must be quick and must not raise."""

    # An observer may also have these:
    #   resized(storage, bytes)          its bytes changed while it lived; 0: they were given back
    #   record_stream(storage, stream)   it is in use on another stream (torch.Tensor.record_stream)
    #   launched(name, args, written)    compiled code launches a kernel (`Runtime.launched`)
    #   graph_captured(graph)            a CUDA graph has what was launched since the last one
    #   graph_replayed(graph)            it runs
    #   scratch(library, bytes)          a library likely takes as much here on a GPU, for the time of a call
    #   wait_stream(stream, on)          what comes on a stream waits for what another one has now


#: PyTorch's own streams, by which autograd's thread follows; while the device is in use ours have their names.
_Stream, _stream_of_thread, _set_stream = torch.Stream, torch._C._accelerator_getStream, torch._C._accelerator_setStream


class Runtime:
    """The device that is not there, or several of one process."""

    def __init__(
        self,
        profile: Profile,
        allocator: Allocator | None = None,
        index: int = 0,
        count: int = 1,
        others: Sequence[Allocator] = (),
    ) -> None:
        self.profile = profile
        self.allocators = () if allocator is None else (allocator, *others)  # of its GPUs, from the first on
        self.several = bool(others)
        self.count = count
        self.initialized = True  # the program (`reset`) initializes CUDA anew, by what it asks for or by a tensor
        self._index = index
        self.memory = Memory()
        self.memory.index = None if others else index
        self._observer: Observer | None = None
        self.assumptions: dict[str, int] = {}
        self.values = Values(self.storage, self.memory.values, self._size)
        self.values.finite = allocator is not None
        self.values.wanted = holding
        self.values.assume = self.assume
        self.values.ones = self.ones
        self._rounds: dict[Hashable, int] = {}  # of loops that go on by what is on the device
        self.truth = True  # what booleans read from the device are, where they have no value
        self.nonzero: Callable[[torch.Tensor], int] = torch.Tensor.numel  # how many elements are not 0, likewise
        self.host_copies_keep = False  # whether a copy from the device leaves a tensor on the host as it is
        self.default_streams: dict[int, Any] = {}  # of each GPU of this process, by its number
        self._streams: dict[tuple[int, int], Any] = {}  # that were current, by device and number
        self.main_thread = threading.get_ident()
        self.points = fake_stubs.Points()
        self.captured: set[int] = set()  # streams that a CUDA graph is captured of
        self.drawn: Callable[[], object] | None = None  # asked where random numbers are drawn while one is captured
        self.managed = 0  # bytes of CUDA managed memory that were asked for
        self.late = False  # whether work ends only when the host waits for the device, or for any event
        self.synchronizations: Callable[[], None] | None = None
        self.emptied: Callable[[], None] | None = None
        self._libraries: list[Any] = []

    @property
    def index(self) -> int:
        """The number of the GPU that is current on this thread."""
        return current_device() if self.several else self._index

    @property
    def device(self) -> torch.device:
        """The GPU that is current on this thread."""
        return torch.device("cuda", self.index)

    def named(self, device: object) -> torch.device:
        """The GPU that a program names (None, or a device without a number: the current one); where this process has
        one GPU, that one."""
        index = places.number_of(device) if self.several else None
        return self.device if index is None else torch.device("cuda", index)

    @property
    def observer(self) -> Observer | None:
        """Who is told; None: nobody."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        self.memory.freed = ignore if observer is None else observer.freed

    @property
    def stream(self) -> Any:
        """The stream that is current on this thread; autograd's thread goes to the stream of each forward operator."""
        return self.stream_of(self.index) if self._streams else self.default_stream

    @stream.setter
    def stream(self, stream: Stream) -> None:
        if self._streams or stream.stream_id:
            self._streams[stream.device_index, stream.stream_id] = stream
            _set_stream(_Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1))

    def stream_of(self, index: int) -> Any:
        """The stream that is current on this thread for GPU `index`."""
        number = _stream_of_thread(index).stream_id if self._streams else 0
        return self._streams.get((index, number), self.default_streams[index])

    @property
    def default_stream(self) -> Any:
        """The default stream of the GPU that is current on this thread."""
        return self.default_streams[self.index]

    @staticmethod
    def storage(tensor: torch.Tensor) -> int:
        """The number of a CUDA tensor's storage: counted from 1 in order of birth; 0 if it has no bytes."""
        try:
            return tensor.data_ptr() >> ADDRESS_BITS
        except (RuntimeError, ValueError):  # sparse, of a lazy module, or in a transform of torch.func: it has none
            return 0

    @staticmethod
    def number_at(address: int) -> int:
        """The number of the storage at `address`."""
        return address >> ADDRESS_BITS

    def tell(self, what: str, *values: int | str) -> None:
        """Call the observer's method `what`, if it has one."""
        told = getattr(self._observer, what, None)
        if told is not None:
            told(*values)

    def launched(self, name: str, args: Sequence[object], written: Sequence[bool]) -> None:
        """Compiled code launches a kernel: its arguments in order, and whether it writes each."""
        changed = (arg for arg, writes in zip(args, written, strict=False) if writes)
        self.values.forget([arg for arg in changed if isinstance(arg, torch.Tensor)])
        told = getattr(self._observer, "launched", None)
        if told is not None:
            told(name, args, written)

    def _size(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's storage, without a look at it: autograd adds in place only what nobody has looked at.

        Of a tensor without elements 0: it has no address, by which its storage is known."""
        known = self.memory.live.get(self.storage(tensor))  # not of a tensor that a CUDA graph has made by its address
        return known if known is not None else tensor.untyped_storage().nbytes() if tensor.numel() else 0

    def bytes(self, storage: int) -> int:
        """Bytes of a living storage, as requested from the allocator."""
        return self.memory.live[storage]

    def allocated(self) -> int:
        """Bytes of all living storages."""
        return sum(self.memory.live.values())

    def assume(self, what: str, value: object) -> None:
        """Count one more use of an assumption: whoever asks for `what` gets `value`."""
        place = reader()
        if not place:
            return
        self.note(f"{place} asks for {what}: {value} is assumed, for a device that is not there has no values")

    def boolean(self) -> bool:
        """What a boolean without a value is: a program's own checks pass, and a loop that goes on by it ends."""
        wanted = passing()
        return self.looped(self.truth) if wanted is None else wanted

    def looped(self, value: bool) -> bool:
        """What a boolean is that would be `value`, by what was assumed: a loop that goes on by it ends."""
        loop, end = ending() or (None, value)
        if end == value:
            return value
        rounds = self._rounds.pop(loop, 0) + 1
        if rounds < _ROUNDS:
            remember(self._rounds, loop, rounds, _ROUNDS)
            return value
        self.note(f"{reader()} goes on by what is on the device: that it ends after {_ROUNDS} rounds is assumed")
        return end

    def read(self, tensor: torch.Tensor) -> bool | float | complex:
        """What the program reads of a tensor of one element."""
        known, boolean = self.values.of(tensor), tensor.dtype is torch.bool
        if known is not None:
            value: bool | float | complex = known.item()
            if not self.values.is_assumed(tensor) or not (boolean or tensor.dtype.is_floating_point):
                return value
            if boolean:
                return self.looped(bool(value))
        else:
            value = self.boolean() if boolean else self.unread(tensor)
        self.assume(f"the value of a {metadata.dtype(tensor)}", value)
        return value

    def unread(self, tensor: torch.Tensor) -> float:
        """What a number of `tensor`, which has no values, is."""
        return self.values.number if tensor.dtype.is_floating_point else self.values.integer(tensor)

    def there(self, device: object) -> int | None:
        """The number of a GPU that a program names (a number, a name or a device), None where it has none; raises what
        CUDA says where it is not there."""
        if self.absent(device):
            raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: invalid device ordinal")
        return places.number_of(device) if self.allocators else None

    def absent(self, device: object) -> bool:
        """Whether a program names a GPU that it does not see."""
        index = places.number_of(device) if self.allocators else None
        return index is not None and index >= self.count

    def asked_for(self, device: object) -> None:
        """A program uses a GPU that it names: one of this process's, or another rank's, whose memory counts as this
        rank's. With one visible GPU, that is number 0, whichever it is.
        """
        index = self.there(device)
        if index is None:
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        alone = not index and visible and "," not in visible
        if not self.several and index != self.index and not alone:
            self.note(
                f"{reader()} asks for cuda:{index}, another rank's GPU: what it has there counts as on {self.device}, "
                "this rank's. --visible-gpus N gives each process the N GPUs of its node"
            )

    def note(self, what: str) -> None:
        """Count an assumption once more."""
        self.assumptions[what] = self.assumptions.get(what, 0) + 1

    def ones(self, tensor: torch.Tensor, quiet: bool = False) -> int:
        """How many elements of `tensor`, without values, are not zero: as given, or one more assumption, or `quiet`."""
        if self.nonzero is not torch.Tensor.numel:
            return self.nonzero(tensor)
        spread = self.values.nonzero(tensor)
        if not quiet:
            told = "that all are not" if spread is None else "that a share of them is not"
            self.assume("elements that are not zero", told)
        return tensor.numel() if spread is None else spread

    def reset(self) -> None:
        """Count storages from 1 again; there must be none."""
        self.memory.restart()
        self.values.restart()
        self.initialized = False
        self.assumptions.clear()

    def synchronized(self, point: int = 0) -> None:
        """The host waited for the device (torch.cuda.synchronize), or for an event: the number of its stream."""
        if point and not self.late:
            self.tell("reached", point)
        elif self.synchronizations is not None:
            self.synchronizations()

    def cache_emptied(self) -> None:
        """The allocator gives back what it has cached (torch.cuda.empty_cache)."""
        if self.emptied is not None:
            self.emptied()

    def override(self, name: str, kernel: Callable[..., Any], keys: Sequence[str] = ("CUDA",)) -> None:
        """Put `kernel` in place of operator `name` (`aten::scaled_dot_product_attention`) at these dispatch keys, while
        the runtime lasts. At "AutogradCUDA" it is called above autograd and below autocast."""
        space, _, rest = name.rpartition("::")
        placed = places.on_its_device(kernel) if self.several else kernel
        self.register([(rest, key, placed if key == "CUDA" else kernel) for key in keys], space or "aten")

    def library(self, space: str, kind: str) -> Any:
        """A `torch.library.Library` that lasts as long as the runtime: its `_destroy` takes away what is in it."""
        made: Any = torch.library.Library
        self._libraries.append(made(space, kind))
        return self._libraries[-1]

    def register(self, kernels: list[tuple[str, str, Callable[..., Any]]], space: str = "aten") -> None:
        """The same of many operators of a library, each given as (name in it, dispatch key, kernel)."""
        library = self.library(space, "IMPL")
        wrapped = served.unwound if self.allocators else lambda kernel: kernel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they stand before others is what they are for
            for name, key, kernel in kernels:
                library.m.impl(name, key, wrapped(kernel), False)


_active: list[Runtime] = []
_verified: list[bool] = []
_taken: list[int] = []  # numbers of nodes, by starting autograd on this thread


@contextlib.contextmanager
def fake_cuda(
    profile: Profile,
    allocator: Allocator | None = None,
    index: int = 0,
    count: int = 1,
    others: Sequence[Allocator] = (),
) -> Iterator[Runtime]:
    """This process as a CUDA build on the GPU of `profile`.

    All tensors are on the GPU of number `index` (0 to 7), of `count` that the process sees. `allocator` answers what
    programs ask of PyTorch's caching allocator (`graph.fake_cuda.served`); the observer tells it what is allocated.
    With `others`, those of GPUs 1 to count-1, the process has its tensors on several, of which it begins on 0.

    Raises UnsupportedTorch if the installed PyTorch cannot be used so, and CaptureError if autograd's threads have
    started in this process without one for CUDA.
    """
    if _active:
        raise CaptureError("a fake CUDA device is in use already; leave it before making another")
    runtime = Runtime(profile, allocator, index, count, others)
    with contextlib.ExitStack() as stack:
        _active.append(runtime)
        stack.callback(_active.clear)
        stack.enter_context(_guard())
        stack.enter_context(interpreted_groups())
        stack.enter_context(_hooks(runtime))
        stack.enter_context(fake_stubs.patched(runtime))
        stack.enter_context(_initialized())
        stack.enter_context(_current(index))
        _check_autograd()
        stack.enter_context(_kernels(runtime))
        composed.install(runtime)
        rnn.install(runtime)
        sparse.install(runtime)
        if not _verified:
            fake_check.verify(runtime, sum(_taken))
            _verified.append(True)
        fake_leftovers.drop()
        runtime.reset()
        try:
            yield runtime
        finally:
            runtime.observer = None
            fake_leftovers.drop()


# ------------------------------------------------------------------------------------------------- the C++ side


def _library(name: str) -> ctypes.CDLL:
    path = Path(torch.__file__).parent / "lib" / f"lib{name}.so"
    if not path.exists():
        raise UnsupportedTorch(f"{path} is missing: PyTorch {torch.__version__} is not laid out as on Linux")
    return ctypes.CDLL(str(path))


def _symbol(library: str, name: str) -> Any:
    try:
        return getattr(_library(library), name)
    except AttributeError as error:
        raise UnsupportedTorch(f"PyTorch {torch.__version__}: lib{library} exports no {name}") from error


_callback_type = ctypes.CFUNCTYPE(ctypes.c_int64)
_zero = _callback_type(lambda: 0)
_one = ctypes.pythonapi.Py_IsInitialized  # C, returns 1: asked often, and from threads without the interpreter's lock
_cudnn_version = _callback_type(lambda: 91900)
_no_epsilon = ctypes.CFUNCTYPE(ctypes.c_double)(lambda: 0.0)
_dummy_table = (ctypes.c_void_p * 64)(*[ctypes.cast(_zero, ctypes.c_void_p).value] * 64)
_dummy_guard = (ctypes.c_void_p * 2)(ctypes.addressof(_dummy_table), 0)


@contextlib.contextmanager
def _guard() -> Iterator[None]:
    """The guard of CUDA devices while inside: `_fake_guard`."""
    table = (ctypes.c_void_p * 32).from_address(
        ctypes.addressof(ctypes.c_char.in_dll(_library("c10"), "_ZN3c104impl26device_guard_impl_registryE"))
    )
    before = table[_CUDA_DEVICE_TYPE]
    if not _fake_guard:
        original = None
        if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
            table[_CUDA_DEVICE_TYPE] = ctypes.addressof(_dummy_guard)
            torch._C._ensureCUDADeviceGuardSet()
            original = table[_CUDA_DEVICE_TYPE]
        _make_guard(original)
    table[_CUDA_DEVICE_TYPE] = ctypes.addressof(_fake_guard[0])
    try:
        yield
    finally:
        table[_CUDA_DEVICE_TYPE] = before


def _make_guard(original: int | None) -> None:
    """PyTorch's FakeGuardImpl (c10/core/impl/FakeGuardImpl.h: devices and streams of threads, no more), which also
    tells when autograd records a gradient on another stream. It lives for ever: events may keep a pointer to it.

    PyTorch puts that guard in the registry if the one there counts no device (ensureCUDADeviceGuardSet).
    """
    places = _virtual((Path("c10") / "core" / "impl" / "DeviceGuardImplInterface.h",))
    if "recordDataPtrOnStream" not in places:
        raise UnsupportedTorch(f"PyTorch {torch.__version__}: its device guards are not as expected")
    if original is None:
        table = guard.functions(places)
    else:
        virtual = ctypes.c_void_p * len(places)
        table = virtual(*virtual.from_address(ctypes.c_void_p.from_address(original).value or 0))
    table[places["recordDataPtrOnStream"]] = ctypes.cast(_on_stream, ctypes.c_void_p).value
    _fake_guard.extend([(ctypes.c_void_p * 2)(ctypes.addressof(table), 0), table])


_fake_guard: list[Any] = []


def _recorded(guard: int, pointer: int, stream: int) -> None:
    """recordDataPtrOnStream: a c10::DataPtr begins with the address, a c10::Stream has its id after the device."""
    if _active:
        address = ctypes.c_uint64.from_address(pointer).value
        number = ctypes.c_int64.from_address(stream + 8).value
        if address:
            _active[0].tell("record_stream", Runtime.number_at(address), number)


_on_stream = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(_recorded)


@contextlib.contextmanager
def _current(index: int) -> Iterator[None]:
    """The current device of this thread."""
    if not index:
        yield
        return
    torch._C._accelerator_setDeviceIndex(index)
    try:
        yield
    finally:
        torch._C._accelerator_setDeviceIndex(0)


@contextlib.contextmanager
def _hooks(runtime: Runtime) -> Iterator[None]:
    """CUDAHooks that say: built, with cuDNN, so many devices, initialised (ATen/detail/CUDAHooksInterface.h).

    The table of virtual functions of the hooks in use is copied, and those that would ask for a device answered here.
    """
    slots = _slots()
    get = _symbol("torch_cpu", "_ZN2at6detail12getCUDAHooksEv")
    get.restype = ctypes.c_void_p
    hooks = ctypes.cast(get(), ctypes.POINTER(ctypes.c_void_p))
    before = hooks[0]
    table = _functions(before, max(slots.values()) + 1)
    answers = _answers(runtime.profile)
    if runtime.allocators and platform.machine() == "x86_64":
        pinned = _Pinned()
        answers |= {"getPinnedMemoryAllocator": pinned.allocator, "isPinnedPtr": pinned.known}
    elif runtime.allocators:
        answers["isPinnedPtr"] = _one
    if runtime.count > 1:
        answers |= dict.fromkeys(("deviceCount", "getNumGPUs"), _callback_type(lambda: runtime.count))
        answers["getDeviceFromPtr"] = _callback_type(lambda: 1 | runtime.index << 8)
        answers |= dict.fromkeys(_CURRENT, _callback_type(lambda: runtime.index))
    if runtime.several:
        answers |= dict.fromkeys(_CHANGING, _changing)
    missing = sorted(answers.keys() - slots.keys() - _LATER)
    if missing:
        raise UnsupportedTorch(f"PyTorch {torch.__version__}: its CUDA hooks have no {', '.join(missing)}")
    for name in answers.keys() & slots.keys():
        table[slots[name]] = ctypes.cast(answers[name], ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(table)
    try:
        if torch.accelerator.current_accelerator() != torch.device("cuda"):
            raise UnsupportedTorch(f"PyTorch {torch.__version__}: its CUDA hooks are not where its headers say")
        yield
    finally:
        hooks[0] = before


#: Hooks that releases up to 2.8 lack, one or the other.
_LATER: Final = frozenset({"isAvailable", "isBuilt", "versionRuntimeCuDNN"})
#: Hooks that give the number of the device that is current.
_CURRENT: Final = ("getCurrentDevice", "exchangeDevice", "maybeExchangeDevice", "current_device")
#: Those that make another one current.
_CHANGING: Final = ("setCurrentDevice", "exchangeDevice", "maybeExchangeDevice")


def _changed(hooks: int, index: int) -> int:
    """The GPU of this number becomes the current one, if it is one; the answer is the one before."""
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


_changing = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int8)(_changed)


def _functions(table: int | None, count: int) -> ctypes.Array[ctypes.c_void_p]:
    """A copy of the first of a table of virtual functions."""
    kind = ctypes.c_void_p * count
    return kind(*kind.from_address(table or 0))


def _cpu_allocator() -> Any:
    """c10::GetCPUAllocator."""
    found = _symbol("c10", "_ZN3c1015GetCPUAllocatorEv")
    found.restype = ctypes.c_void_p
    return found


class _Pinned:
    """Memory of the host that counts as pinned: what PyTorch asked of the allocator for it, and nothing else.

    That allocator is the CPU's (c10/core/Allocator.h) with an `allocate` of ours in its table of virtual functions. It
    begins half of c10's 64 bytes later than other memory, so what is freed and taken again is not mistaken for it. A
    c10::DataPtr, which the caller has place for (x86-64), begins with the address; what is freed stands after it.
    """

    #: Bytes: half of c10::gAlignment.
    SHIFT: Final = 32
    #: Place of `allocate` in the table, after the destructor's two, and how many there may be.
    ALLOCATE, FUNCTIONS = 2, 8

    def __init__(self) -> None:
        plain = ctypes.cast(_cpu_allocator()(), ctypes.POINTER(ctypes.c_void_p))
        self._table = _functions(plain[0], self.FUNCTIONS)
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        allocate = kind(self._table[self.ALLOCATE] or 0)
        addresses: set[int] = set()

        def shifted(result: int, allocator: int, size: int) -> int:
            allocate(result, allocator, size and size + self.SHIFT)
            address = ctypes.c_uint64.from_address(result)
            if address.value:
                address.value += self.SHIFT
                addresses.add(address.value)
            return result

        self._called = kind(shifted)
        self._table[self.ALLOCATE] = ctypes.cast(self._called, ctypes.c_void_p).value
        self._object = ctypes.c_void_p(ctypes.addressof(self._table))
        where = ctypes.addressof(self._object)
        self.allocator = _callback_type(lambda: where)
        self.known = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)(
            lambda hooks, address: address in addresses
        )


def _answers(profile: Profile) -> dict[str, Any]:
    """What each of the hooks answers. A c10::Device is its type, then its index, a byte each: cuda:0 is 1."""
    cpu_generator = _symbol("torch_cpu", "_ZN2at6detail22getDefaultCPUGeneratorEv")
    cpu_generator.restype = ctypes.c_void_p
    yes = "isBuilt isAvailable hasPrimaryContext deviceCount getDeviceFromPtr hasCUDA hasCUDART hasCuDNN hasCuBLASLt "
    yes += "compiledWithCuDNN supportsDilatedConvolutionWithCuDNN supportsDepthwiseConvolutionWithCuDNN getNumGPUs"
    no = "setCurrentDevice getCurrentDevice exchangeDevice maybeExchangeDevice current_device "
    no += "deviceSynchronize hasMAGMA init"
    return {
        **dict.fromkeys(yes.split(), _one),
        **dict.fromkeys(no.split(), _zero),
        "supportsBFloat16ConvolutionWithCuDNNv8": _one if profile.arch >= (8, 0) else _zero,
        "batchnormMinEpsilonCuDNN": _no_epsilon,
        "versionCuDNN": _cudnn_version,
        "versionRuntimeCuDNN": _cudnn_version,
        "getPinnedMemoryAllocator": _cpu_allocator(),
        "isPinnedPtr": _zero,
        "getDefaultGenerator": cpu_generator,
    }


def _slots() -> dict[str, int]:
    """Places in the CUDA hooks' table of virtual functions: after the two entries of the virtual destructor, which is
    declared first."""
    folder = Path("ATen") / "detail"
    places = _virtual((folder / "AcceleratorHooksInterface.h", folder / "CUDAHooksInterface.h"))
    return {name: place + 2 for name, place in places.items()}


def _virtual(headers: tuple[Path, ...]) -> dict[str, int]:
    """Virtual functions by the headers that this PyTorch ships, in order of declaration, those of the base first: their
    order in the table (Itanium C++ ABI). Destructors are left out."""
    places: dict[str, int] = {}
    for header in headers:
        path = Path(torch.__file__).parent / "include" / header
        try:
            text = path.read_text()
        except OSError as error:
            raise UnsupportedTorch(f"{path} cannot be read: {error.strerror}") from error
        text = re.sub(r"#ifdef USE_ROCM.*?#endif", "", text, flags=re.DOTALL)
        for function in re.findall(r"^\s*virtual [^~;{]*?(\w+)\(", text, re.MULTILINE):
            places.setdefault(function, len(places))
    return places


def _start_autograd() -> None:
    """Let autograd start its threads with one for CUDA: they start at the first backward of a process, one for each
    device there is then, and once only."""
    first = next_sequence_number()
    with contextlib.suppress(UnsupportedTorch), _guard(), torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.ones(1, requires_grad=True))
    _taken.append(next_sequence_number() - first)


def _check_autograd() -> None:
    """Raise CaptureError unless autograd has threads for CUDA."""
    for _ in range(50):  # a thread names itself a moment after it has started
        if any(fake_stubs.named_of_autograd()):
            return
        time.sleep(0.01)
    raise CaptureError(
        "autograd has started without a thread for CUDA, because a backward ran in this process before "
        "`graph.fake_cuda` was imported; import it first, or capture in a new process"
    )


@contextlib.contextmanager
def _initialized() -> Iterator[None]:
    """CUDA counts as initialised (torch/csrc/utils/device_lazy_init.cpp), and afterwards as not, if it was not."""
    require = _symbol("torch_python", "_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb")
    require.argtypes, require.restype = [ctypes.c_int8, ctypes.c_bool], None
    require(_CUDA_DEVICE_TYPE, False)
    try:
        yield
    finally:
        require(_CUDA_DEVICE_TYPE, True)


def _pinned(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """A copy in memory that counts as pinned. What nobody reads has no values."""
    copy = torch.empty_like(tensor, pin_memory=True)
    return copy.copy_(tensor) if tensor.nbytes <= _COPIED else copy


@contextlib.contextmanager
def _kernels(runtime: Runtime) -> Iterator[None]:
    """Our kernels for every operator that has one in a CUDA build."""
    kernels = Kernels(runtime)

    def kernel(name: str) -> Callable[..., Any]:
        func = operator(name)
        plain = composed.succeeding(runtime, func, composed.sought(func, kernels.of(name)))
        plain = composed.bounded(runtime, name, composed.parted(func, composed.widened(func, plain)))
        found = seeding(runtime, func, deterministic(func, plain))
        return places.on_one_device(func, found) if runtime.several else found

    try:
        runtime.register([("_pin_memory", "CPU", _pinned), *((name, "CUDA", kernel(name)) for name in names())])
        yield
    finally:
        for used in reversed(runtime._libraries):
            used._destroy()


_start_autograd()
