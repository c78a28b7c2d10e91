"""Records what an eager program does to device memory: operators, and storages from birth to death, in exact order.

The recorder is the observer of a fake device (`graph.fake_cuda`): each kernel tells it what ran and which storages
were born, each storage tells when its last reference is gone. It adds what the device cannot know: phase, module, the
forward operator behind a backward one, versions of storages, and the allocations inside kernels that rules know of
(`graph.workspaces`). It holds no tensor.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from graph.model import Kind, Role
from graph.recorder.origins import Origins
from graph.workspaces.rules import Step, gpu_bytes

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

KIND_BITS: Final = 4
_KIND: Final = (1 << KIND_BITS) - 1
_ALLOC: Final = int(Kind.ALLOC)
_FREE: Final = int(Kind.FREE)
_OPERATOR: Final = int(Kind.OPERATOR)
_FORWARD: Final = int(Role.FORWARD)
_BACKWARD: Final = int(Role.BACKWARD)
_RECOMPUTE: Final = int(Role.RECOMPUTE)

_grad_enabled: Final = torch.is_grad_enabled
_get_ident: Final = threading.get_ident

Plan = Callable[[str, Any, Mapping[str, Any], Any, int, int, bool, dict[Any, Any]], Any]
Cost = Callable[[str, Any, Mapping[str, Any], Any], tuple[int, int]]
#: Called with the phase, the step and the number of operators so far.
Progress = Callable[[str, int, int], None]


class Runtime(Protocol):
    """What the recorder asks of the fake device."""

    observer: Any
    stream: Any  # the current stream: None, or an object with a `stream_id`

    def storage(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; 0: it has no bytes."""

    def bytes(self, storage: int) -> int:
        """Its bytes, as asked of the allocator."""


class Memo(Protocol):
    """A kind of call, the same object for each call of it; `note` is the recorder's, None at first."""

    note: Any


class Signature:
    """What is known of a kind of call: one for each operator and metadata of its arguments."""

    __slots__ = ("code", "dtypes", "flops", "moved", "name", "plans", "reads", "writes")

    def __init__(self, code: int, name: str) -> None:
        self.code = code
        self.name = name
        self.reads: tuple[Any, ...] = ()  # where its tensors are: position, or (position, place in the list)
        self.writes: tuple[Any, ...] = ()
        self.dtypes: tuple[Any, ...] = ()
        self.plans: dict[int, Any] = {}
        self.flops = 0
        self.moved = 0

    def named(self, code: int) -> Signature:
        """The same by another name."""
        other = copy.copy(self)
        other.code = code
        return other


#: Operators in place that do not read what they overwrite.
OVERWRITING: Final = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "_foreach_zero_", "_foreach_copy_"}
)


class Log:
    """What has been recorded so far: flat lists, no tensors."""

    def __init__(self) -> None:
        self.events: list[int] = []  # index << KIND_BITS | kind
        self.values: dict[int, int] = {}  # position in `events` -> value
        self.operators: list[tuple[Any, ...]] = []
        self.born: list[tuple[int, int, Any, int]] = []  # storage -> (bytes, operator, dtype or text, stream)
        self.names: dict[str, int] = {}
        self.gpu_bytes: dict[int, int] = {}  # storage -> bytes on a GPU, where libraries take more

    def code(self, name: str) -> int:
        """The code of a text in the name table."""
        return self.names.setdefault(name, len(self.names))

    def event(self, kind: Kind, index: int, value: int | None = None) -> None:
        """Append an event."""
        if value is not None:
            self.values[len(self.events)] = value
        self.events.append(index << KIND_BITS | int(kind))


class Recorder:
    """The observer of a fake device. `plan` and `cost` are the rules for workspaces and FLOPs, if there are any."""

    def __init__(
        self,
        runtime: Runtime,
        device: torch.device,
        *,
        plan: Plan | None = None,
        cost: Cost | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.runtime = runtime
        self.device = device
        self.log = Log()
        self.state: dict[Any, Any] = {}
        self.waits = 0  # of the host for the device
        self.phase = 0
        self.step = -1
        self.role = int(Role.LOAD)
        self.stacks: tuple[list[int], list[int]] = ([], [])
        self.origins = Origins((-1, -1), lambda near: (-1, near[1]))  # operator and code of the module
        self._plan = plan
        self._cost = cost
        self._progress = progress
        self._named = "load"  # the phase, as the progress function is told it
        self._numbers: dict[int, int] = {}  # the device's number of a living storage -> ours
        self._given_back: dict[int, int] = {}  # as _numbers, of storages without memory: ours when they had some
        self._versions: dict[int, int] = {}  # ours -> version, where it is not 0
        self._main = _get_ident()
        self._storage = runtime.storage
        self._written: tuple[int, int] | None = None  # name and module of a buffer of compiled code
        self._kernels: dict[tuple[Any, ...], Signature] = {}  # of compiled code, by name and arguments

    # What others ask -------------------------------------------------------------------------------------------

    @property
    def operators(self) -> int:
        """How many operators have run."""
        return len(self.log.operators)

    def number(self, tensor: torch.Tensor) -> int:
        """Our number of a device tensor's storage (of its local part if it is distributed), -1 if it has none."""
        local = getattr(tensor, "_local_tensor", tensor)
        return self._numbers.get(self._storage(local), -1) if local.device.type == self.device.type else -1

    def where(self) -> str:
        """The module of the last operator; empty where that had none."""
        code = self.log.operators[-1][1] if self.log.operators else -1
        return list(self.log.names)[code] if code >= 0 else ""

    def notify(self, phase: str) -> None:
        """Tell the caller's progress function where the capture is."""
        self._named = phase
        if self._progress is not None:
            self._progress(phase, self.step, len(self.log.operators))

    def writes(self, told: tuple[str, str] | None) -> None:
        """What compiled code allocates next is written by a kernel and of a module, both by name (None: as usual)."""
        self._written = None if told is None else (self.log.code(told[0]), self.log.code(told[1]) if told[1] else -1)

    # What the device tells -------------------------------------------------------------------------------------

    def launched(self, name: str, args: Sequence[object], written: Sequence[bool]) -> None:
        """Compiled code launches a kernel, which moves its arguments once (`written`: which of them it writes)."""
        places = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        given: list[Any] = [args[place] for place in places]
        key = (name, *(tensor.nbytes for tensor in given))
        signature = self._kernels.get(key)
        if signature is None:
            signature = self._kernels[key] = Signature(self.log.code(name), name)
            signature.reads = tuple(place for place in places if not written[place])
            signature.writes = tuple(place for place in places if written[place])
            signature.moved = sum(key[1:])
        self.operator(None, tuple(args), {}, None, [], SimpleNamespace(note=signature))

    def freed(self, storage: int) -> None:
        """A storage has died (any thread)."""
        number = self._numbers.pop(storage, None)
        if number is not None:
            self.log.events.append(number << KIND_BITS | _FREE)

    def synchronize(self) -> None:
        """The host has waited for the device, to read a value."""
        self.waits += 1
        self.log.event(Kind.SYNCHRONIZE, 0)

    def reached(self, stream: int) -> None:
        """The host has waited for what `stream` had been given."""
        self.log.event(Kind.SYNCHRONIZE, stream)

    def empty_cache(self) -> None:
        """The allocator gives back what it has cached."""
        self.log.event(Kind.EMPTY_CACHE, 0)

    def resized(self, storage: int, size: int) -> None:
        """A storage has now `size` bytes: its memory is another, from the current stream, or none (0).

        As in resize_bytes_cuda (ATen/native/cuda/Resize.cpp) the new memory is there before the old one goes.
        """
        log = self.log
        old = self._numbers.pop(storage, None)
        model = old if old is not None else self._given_back.get(storage)
        if size:
            self._numbers[storage] = len(log.born)
            dtype = log.born[model][2] if model is not None else None
            log.events.append(len(log.born) << KIND_BITS | _ALLOC)
            log.born.append((size, len(log.operators) - 1, dtype, self._stream()))
        if old is not None:
            log.events.append(old << KIND_BITS | _FREE)
            self._given_back[storage] = old

    def _stream(self) -> int:
        current = self.runtime.stream
        return 0 if current is None else int(current.stream_id)

    def scratch(self, library: str, size: int) -> None:
        """A library takes bytes here on a GPU, for the time of a call."""
        if size and self.log.operators:
            number = len(self.log.operators) - 1
            self.log.event(Kind.FREE, self._scratch(("alloc", library, 0, size), number, library, self._stream()))

    def record_stream(self, storage: int, stream: int) -> None:
        """A storage is in use on another stream."""
        number = self._numbers.get(storage)
        if number is not None:
            self.log.event(Kind.RECORD_STREAM, number, stream)

    def wait_stream(self, stream: int, on: int) -> None:
        """`stream` waits for what stream `on` has been given so far."""
        self.log.event(Kind.WAIT_STREAM, stream, on)

    def collective(self, kind: str, group: str, size: int, stream: int = 0, runs: int | None = None) -> None:
        """A collective of `size` bytes in a group of ranks starts, on a stream.

        `runs` is the stream of its work in simulated time (default: the one that is current).
        """
        runs = self._stream() if runs is None else runs
        name = f"{kind} {group} {stream}" if stream else f"{kind} {group}"
        if runs and not stream:
            name = f"{kind} {group} 0 {runs}"
        self.log.event(Kind.COLLECTIVE, self.log.code(name), size)

    def operator(
        self,
        func: Operator | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
        born: list[int],
        memo: Memo,
    ) -> None:
        """A kernel has run; `born` are the storages of its new outputs. `memo.note` is ours, by kind of call.

        `func` is asked for where that is None.
        """
        log = self.log
        thread = 0 if _get_ident() == self._main else 1
        stream = self._stream()
        role = self.role
        stack = self.stacks[thread]
        number = len(log.operators)
        origin = -1
        module = stack[-1] if stack else -1
        if role == _FORWARD:
            self.origins.made(thread, (number, module))
        elif role == _BACKWARD:
            if stack:
                role = _RECOMPUTE
                self.origins.made(thread, (number, module))
            else:
                origin, module = self.origins.behind()
        signature = memo.note
        if signature is None:
            assert func is not None
            signature = memo.note = self._sign(func, args, kwargs, out)
        if self._written is not None:
            name, written = self._written
            signature = signature.named(name)
            module = written if written >= 0 else module
        log.events.append(number << KIND_BITS | _OPERATOR)
        numbers, versions, storage = self._numbers, self._versions, self._storage
        reads: list[tuple[int, int]] = []
        for place in signature.reads:
            tensor = args[place] if place.__class__ is int else _at(args, kwargs, place)
            mine = numbers.get(storage(tensor), -1)
            reads.append((mine, versions.get(mine, 0)))
        writes: list[tuple[int, int]] = []
        for place in signature.writes:
            tensor = args[place] if place.__class__ is int else _at(args, kwargs, place)
            mine = numbers.get(storage(tensor), -1)
            versions[mine] = version = versions.get(mine, 0) + 1
            writes.append((mine, version))
        steps = None
        if self._plan is not None:
            steps = self._steps(signature, args, kwargs, out, thread, stream)
        if steps is None:
            for position, new in enumerate(born):
                writes.append((self._birth(new, number, signature, position, stream), 0))
        else:
            self._follow(steps, born, number, signature, writes, stream)
        log.operators.append((signature, module, role, self.phase, self.step, thread, origin, reads, writes, stream))
        if not number & 1023 and self._progress is not None:
            self._progress(self._named, self.step, number)

    # ------------------------------------------------------------------------------------------------------------

    def _birth(self, new: int, number: int, signature: Signature, position: int, stream: int) -> int:
        log = self.log
        mine = len(log.born)
        dtype = signature.dtypes[position] if position < len(signature.dtypes) else None
        log.born.append((self.runtime.bytes(new), number, dtype, stream))
        self._numbers[new] = mine
        log.events.append(mine << KIND_BITS | _ALLOC)
        return mine

    def _scratch(self, step: Step, number: int, name: object, stream: int) -> int:
        log, size, there = self.log, step[2], gpu_bytes(step)
        mine = len(log.born)
        if there >= 0:
            log.gpu_bytes[mine] = there
        log.born.append((size, number, str(name), stream))
        log.events.append(mine << KIND_BITS | _ALLOC)
        return mine

    def _steps(
        self,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
        thread: int,
        stream: int,
    ) -> Any:
        """The plan of a call: kept for the next call of its kind, but for the one in which a workspace is born."""
        mode = stream << 2 | thread << 1 | _grad_enabled()
        steps = signature.plans.get(mode, False)
        if steps is False:
            assert self._plan is not None
            steps = self._plan(signature.name, args, kwargs or {}, out, stream, thread, bool(mode & 1), self.state)
            if not steps:
                steps = None
            if steps is None or all(step[0] != "keep" for step in steps):
                signature.plans[mode] = steps
        return steps

    def _follow(
        self,
        steps: Sequence[tuple[Any, ...]],
        born: list[int],
        number: int,
        signature: Signature,
        writes: list[Any],
        stream: int,
    ) -> None:
        """Write the events of a plan; outputs that it does not name are born first, or at its ("rest",)."""
        log = self.log
        named = {step[1] for step in steps if step[0] == "out"}
        rest = [position for position in range(len(born)) if position not in named]
        if ("rest",) not in steps:
            for position in rest:
                writes.append((self._birth(born[position], number, signature, position, stream), 0))
        scratch: dict[Any, int] = {}
        for step in steps:
            kind = step[0]
            if kind == "alloc":
                if max(step[2:]):
                    scratch[step[1]] = self._scratch(step, number, step[1], stream)
            elif kind == "free":
                mine = scratch.pop(step[1], -1)
                if mine >= 0:
                    log.events.append(mine << KIND_BITS | _FREE)
            elif kind == "out":
                if step[1] < len(born):
                    writes.append((self._birth(born[step[1]], number, signature, step[1], stream), 0))
            elif kind == "keep":
                self._scratch(step, number, "workspace", stream)
            elif kind == "rest":
                for position in rest:
                    writes.append((self._birth(born[position], number, signature, position, stream), 0))
        for mine in scratch.values():
            log.events.append(mine << KIND_BITS | _FREE)

    # Signatures ------------------------------------------------------------------------------------------------

    def _sign(self, func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> Signature:
        name = str(func)
        signature = Signature(self.log.code(name), name)
        reads: list[Any] = []
        writes: list[Any] = []
        kind = self.device.type
        overwrites = func._opname in OVERWRITING
        places = list(enumerate(args)) + list((kwargs or {}).items())
        arguments = {argument.name: argument for argument in func._schema.arguments}
        for place, value in places:
            argument = func._schema.arguments[place] if isinstance(place, int) else arguments.get(place)
            info = argument.alias_info if argument is not None else None
            written = info is not None and info.is_write
            listed = isinstance(value, (list, tuple))
            for position, tensor in enumerate(value if listed else (value,)):
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != kind:
                    continue
                where = (place, position) if listed else place if isinstance(place, int) else (place, -1)
                if not (written and overwrites):
                    reads.append(where)
                if written:
                    writes.append(where)
        signature.reads = tuple(reads)
        signature.writes = tuple(writes)
        signature.dtypes = self._new_dtypes(args, kwargs, out)
        if self._cost is not None:
            signature.flops, signature.moved = self._cost(name, args, kwargs or {}, out)
        return signature

    def _new_dtypes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> tuple[Any, ...]:
        """The dtypes of an operator's new outputs, in order."""
        storage = self._storage
        kind = self.device.type
        seen = {storage(t) for t in tensors((args, kwargs)) if t.device.type == kind}
        found: list[Any] = []
        for tensor in tensors(out):
            if tensor.device.type == kind and storage(tensor) not in seen:
                seen.add(storage(tensor))
                found.append(tensor.dtype)
        return tuple(found)

    # What PyTorch does not tell ---------------------------------------------------------------------------------

    @contextmanager
    def nested_backward(self) -> Iterator[None]:
        """Count how deep `torch.autograd.backward` is: inside a backward it is reentrant checkpointing's own."""
        backward = torch.autograd.backward

        def counted(*args: Any, **kwargs: Any) -> None:
            self.origins.depth += 1
            try:
                backward(*args, **kwargs)
            finally:
                self.origins.depth -= 1

        torch.autograd.backward = counted
        try:
            yield
        finally:
            torch.autograd.backward = backward

    @contextmanager
    def ordered_casts(self) -> Iterator[None]:
        """Frees of autocast's cache come in the order of birth: torch walks a hash table of addresses."""
        clear = torch.clear_autocast_cache
        events = self.log.events

        def ordered() -> None:
            start = len(events)
            clear()
            burst = events[start:]
            if all(event & _KIND == _FREE for event in burst):
                events[start:] = sorted(burst)

        torch.clear_autocast_cache = ordered
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear


def _at(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: tuple[int | str, int]) -> Any:
    name, position = place
    value = args[name] if isinstance(name, int) else kwargs[name]
    return value if position < 0 else value[position]


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or those in lists, tuples and mappings of such values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
