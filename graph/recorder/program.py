"""The observer of a program that runs as it is: each storage and each workspace goes to a live allocator as it comes.

It keeps no tensor, and for each allocation a few numbers only, so that Python's collector runs when it would without
us: operators leave no objects behind. What backward runs has the module of the forward operator that made its node.
"""

from __future__ import annotations

import functools
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.operators.native import functional
from graph.fake_cuda.torch_private import current_device, current_node
from graph.recorder.lines import NONE, Lines
from graph.recorder.origins import Origins
from graph.recorder.recorder import Memo
from graph.recorder.sequences import BIRTH, EMPTY, KEEP, RELEASE, sequence
from graph.recorder.sequences import Sequence as Steps
from graph.workspaces import plan, rules
from graph.workspaces.cub.indexing import RESIZING, grown
from graph.workspaces.gemm import ENVIRONMENT
from graph.workspaces.rules import Call
from traces.model import BY_CHOICE

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.fake_cuda.served import Allocator
    from graph.fake_cuda.torch_private import Operator

#: What a call takes in ns: of an operator, its arguments and what it returned.
Price = Callable[[Any, tuple[Any, ...], Mapping[str, Any], object], int]
Place = tuple[int, int, int]  # codes of the operator and of the module (-1: none), number of the stack

#: A module's code above 0 and a stack's number above it, in one integer.
_BITS: Final = 32
_MODULE: Final = (1 << _BITS) - 1
#: Beside the sequences of a kind of call: what it takes in ns, and the code of its operator's name.
_DURATION: Final = "ns"
_CODE: Final = "code"
#: That a host issues.
OPERATORS_A_SECOND: Final = 20_000
#: A thread that is neither the main one nor autograd's.
_OWN: Final = 2

_grad_enabled: Final = torch.is_grad_enabled
_deterministic: Final = torch.get_deterministic_debug_mode
_memory: Final[Any] = torch.utils.deterministic
_get_ident: Final = threading.get_ident


@functools.cache
def _resizes(func: Operator) -> bool:
    """Whether new storages of this operator are those of tensors that it has resized."""
    resizing = func._opname == "resize_" or str(func) in RESIZING
    return resizing or any(argument.is_out for argument in func._schema.arguments)


@functools.cache
def _ruled(func: Operator) -> str:
    """The name that workspace rules know an operator by: its own, or that of the one without `out=`."""
    return str(func if str(func) in rules() else functional(func))


class Labels:
    """What is known of each allocation, by its number: codes into the texts of `names`, and stacks of `lines`."""

    def __init__(self, lines: Lines, names: dict[str, int] | None = None) -> None:
        self.names: dict[str, int] = {} if names is None else names
        self.operator = array("i")
        self.module = array("i")
        self.stack = array("i")
        self.category: dict[int, int] = {}  # of those whose category was found
        self.title: dict[int, int] = {}  # of those that have a name of their own
        self.collected = array("i")  # allocations that Python's collector has freed
        self.gpu_bytes: dict[int, int] = {}  # by allocation: bytes on a GPU, where libraries take more
        self.lines = lines

    def code(self, name: str) -> int:
        """The code of a text."""
        return self.names.setdefault(name, len(self.names))


class Card:
    """What is known of one GPU of the process."""

    def __init__(self, index: int, allocator: Allocator, labels: Labels) -> None:
        self.index = index
        self.allocator = allocator
        self.labels = labels
        self.numbers: dict[int, int] = {}  # the device's number of a living storage -> the allocator's
        self.state: dict[Any, Any] = {ENVIRONMENT: os.environ}  # of the workspace rules
        self.workspaces: dict[tuple[str, int, int], int] = {}  # that stay: of what, thread and stream
        self.cleared = 0  # how often they went
        self.malloc = allocator.malloc
        self.free: Callable[[int], None] = allocator.free


class ProgramRecorder:
    """Tells `allocator` what happens on the device of `runtime`, and `others` of further GPUs of this process. The
    program is run by the function of code `base`.

    With a `price` operators take time, and it is told of kernels, collectives and what waits for what. `on_gpu`: what
    libraries take on a GPU alone is allocated too, else it is noted.
    """

    def __init__(
        self,
        runtime: Runtime,
        allocator: Allocator,
        base: CodeType | None = None,
        price: Price | None = None,
        on_gpu: bool = False,
        others: Sequence[Allocator] = (),
    ) -> None:
        rules()  # loaded now, while the names of our modules are ours
        self.runtime = runtime
        self.waits = 0  # of the host for the device
        self.labels = Labels(Lines(base))
        further = (Labels(self.labels.lines, self.labels.names) for _ in others)
        self.cards = [Card(0, allocator, self.labels)]  # by the number of the GPU, if there are several
        self.cards += [Card(*card) for card in zip(range(1, 1 + len(others)), others, further, strict=True)]
        self.operators = 0  # that have run, or would have in a pause
        self.stacks: dict[int, list[int]] = {}  # by thread: codes of the modules that run, outermost first
        self.origins = Origins(0, lambda near: near & _MODULE)  # packed, as `_place` has it
        self.backward = NONE  # the stack that called the backward that runs
        self.collecting = False  # whether Python's collector runs
        self._written: tuple[int, int] | None = None  # operator and module of a buffer of compiled code
        self._main = _get_ident()
        self._here = self.labels.lines.here
        self._several = bool(others)
        self._held: list[tuple[int, int]] | None = None  # cards and frees that wait for others that came with them
        self._price = price
        self._on_gpu = on_gpu
        self._captured = 0  # nanoseconds of the CUDA graph that is captured
        self._graphs: dict[int, int] = {}  # of each
        self._behind: set[int] = set()  # streams of collectives that nobody has waited for

    def number(self, tensor: torch.Tensor) -> int:
        """The allocation behind a device tensor (of its local part if it is distributed), -1 if it has none."""
        return self._found(tensor)[1]

    def _found(self, tensor: torch.Tensor) -> tuple[Card, int]:
        """The GPU that a tensor (its local part) is on, and the allocation behind it."""
        local = getattr(tensor, "_local_tensor", tensor)
        storage = self.runtime.storage(local) if local.is_cuda else 0
        card = self._holder(storage)
        return card, card.numbers.get(storage, -1)

    def categorize(self, tensor: object, category: str, title: str = "") -> None:
        """An allocation is found to be of a category, and has a name."""
        if not isinstance(tensor, torch.Tensor):
            return
        card, number = self._found(tensor)
        if number >= 0:
            labels = card.labels
            labels.category[number] = labels.code(category)
            if title:
                labels.title[number] = labels.code(title)

    def mark(self, phase: int, step: int) -> None:
        """A phase of the run begins."""
        for card in self.cards:
            card.allocator.mark(phase, step)

    def region(self, name: str, begins: bool) -> None:
        """A named part of the program begins, or ends."""
        for card in self.cards:
            card.allocator.region(card.labels.code(name), begins)

    def calls_backward(self) -> int:
        """The caller is to have autograd run. What `backward` was: to be put back afterwards."""
        before, self.backward = self.backward, self._here(NONE, self.backward)
        return before

    def writes(self, told: tuple[str, str] | None) -> None:
        """What compiled code allocates next is written by a kernel and of a module, both by name (None: as usual)."""
        if told is None:
            self._written = None
        else:
            kernel, module = told
            self._written = self.labels.code(kernel), self.labels.code(module) if module else -1

    def pause(self, seconds: float) -> None:
        """The host does something else for so long, as far as watchdogs are concerned."""
        self.operators += int(seconds * OPERATORS_A_SECOND)

    # What the device tells -------------------------------------------------------------------------------------

    def operator(
        self, func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object, born: list[int], memo: Memo
    ) -> None:
        """A kernel has run; `born` are the storages of its new outputs. `memo.note` is ours, by kind of call."""
        with self.cards[0].allocator.lock:  # threads of the program: what is known of all is one's own meanwhile
            self.operators += 1
            current = self.runtime.stream
            stream = 0 if current is None else current.stream_id
            thread = 0 if _get_ident() == self._main else _OWN if current_node() is None else 1
            card = self._card()
            known = memo.note
            if known is None:
                known = memo.note = {}
            determined = _deterministic()
            filling = bool(determined and _memory.fill_uninitialized_memory)
            here = stream << 3 | thread << 1 | _grad_enabled()
            in_place = bool(args and kwargs) and kwargs.get("out") is args[0]  # rules may ask; no kind of call says it
            mode = (len(born), here, card.cleared << _BITS | card.index, determined, filling, in_place)
            steps = known.get(mode)
            if steps is None:
                on, grad = self.runtime.profile, _grad_enabled()
                call = Call(_ruled(func), args, kwargs, out, on, stream, thread, grad, card.state, determined, filling)
                steps = sequence(grown(call, plan(call), len(born) if _resizes(func) else 0), len(born))
                if all(step[0] not in (KEEP, EMPTY) for step in steps):
                    known[mode] = steps
            if self._price is not None:
                if (duration := known.get(_DURATION)) is None:
                    duration = known[_DURATION] = self._price(func, args, kwargs, out)
                if duration:
                    self._launch(str(func), duration, stream)
            if steps:
                code = known.get(_CODE)
                if code is None:
                    code = known[_CODE] = self.labels.code(str(func))
                self._follow(card, steps, born, stream, self._place(thread, code))

    def launched(self, name: str, args: Sequence[object], written: Sequence[bool]) -> None:
        """Compiled code launches a kernel, which moves its arguments once."""
        if self._price is not None:
            self._launch(name, self._price(name, tuple(args), {}, None), self._stream())

    def _launch(self, name: str, duration: int, stream: int) -> None:
        if stream in self.runtime.captured:
            self._captured += duration
        else:
            self._card().allocator.launch(self.labels.code(name), duration, stream)

    def graph_captured(self, graph: int) -> None:
        """A CUDA graph has what was launched since the last one was captured; nothing of it has run."""
        self._graphs[graph], self._captured = self._captured, 0

    def graph_replayed(self, graph: int) -> None:
        """A CUDA graph runs: one launch, and its kernels one after another."""
        if duration := self._graphs.get(graph, 0):
            self._launch("CUDA graph", duration, self._stream())

    def _stream(self) -> int:
        current = self.runtime.stream
        return 0 if current is None else int(current.stream_id)

    def freed(self, storage: int) -> None:
        """A storage has died (any thread)."""
        for card in self.cards:
            number = card.numbers.pop(storage, -1)
            if number >= 0:
                if self.collecting:
                    card.labels.collected.append(number)
                if self._held is None:
                    card.free(number)
                else:
                    self._held.append((card.index, number))

    def clear_workspaces(self, stream: int = -1) -> None:
        """The workspaces that stay on a stream (-1: on any) are given back, and made anew where they are needed."""
        for card in self.cards:
            for key in [key for key in card.workspaces if stream in (-1, key[-1])]:
                del card.state[key]
                card.cleared += 1
                card.free(card.workspaces.pop(key))

    def allocation(self, storage: int) -> int:
        """The allocation behind a storage, -1 if it has none."""
        return self._holder(storage).numbers.get(storage, -1)

    def _card(self) -> Card:
        """The GPU that is current on this thread."""
        return self.cards[current_device() if self._several else 0]

    def _holder(self, storage: int) -> Card:
        """The GPU that a storage is on; the current one if it is on none."""
        if self._several:
            return next((card for card in self.cards if storage in card.numbers), None) or self._card()
        return self.cards[0]

    def storages(self, allocations: set[int]) -> dict[int, int]:
        """The storages of living allocations of the first GPU."""
        return {number: storage for storage, number in self.cards[0].numbers.items() if number in allocations}

    def restored(self, freed: set[int], again: Mapping[int, int], storages: Mapping[int, int]) -> None:
        """A pool of the first GPU got its blocks back: allocations that are gone, those that live again, whose storages
        these were."""
        card = self.cards[0]
        card.numbers = {storage: number for storage, number in card.numbers.items() if number not in freed}
        labels = card.labels
        for old, new in again.items():
            for column in (labels.operator, labels.module, labels.stack):
                column.append(column[old])
            for known in (labels.category, labels.title):
                if old in known:
                    known[new] = known[old]
            if old in storages:
                card.numbers[storages[old]] = new

    def resized(self, storage: int, size: int) -> None:
        """A storage has now `size` bytes: the new memory is there before the old one goes (`Recorder.resized`)."""
        card = self._holder(storage)
        old = card.numbers.pop(storage, -1)
        if size:
            stream = self._stream()
            place = self._place(int(_get_ident() != self._main), self.labels.code("resize_"))
            card.numbers[storage] = self._allocate(card, size, stream, place)
        if old >= 0:
            card.free(old)

    def scratch(self, library: str, size: int) -> None:
        """A library takes bytes here on a GPU, for the time of a call."""
        if size:
            place = self._place(int(_get_ident() != self._main), self.labels.code(library))
            card = self._card()
            ident = self._workspace(card, library, 0, self._stream(), place, size)
            assert ident is not None
            card.free(ident)

    def record_stream(self, storage: int, stream: int) -> None:
        """A storage is in use on another stream."""
        card = self._holder(storage)
        number = card.numbers.get(storage, -1)
        if number >= 0:
            card.allocator.record_stream(number, stream)

    def synchronize(self) -> None:
        """The host has waited for the device."""
        self.waits += 1
        for card in self.cards:
            card.allocator.synchronize(-1)

    def reached(self, stream: int) -> None:
        """The host has waited for what `stream` had been given."""
        self.waits += 1
        for card in self.cards:
            card.allocator.synchronize(stream)

    def wait_stream(self, stream: int, on: int) -> None:
        """`stream` waits for what stream `on` has been given so far."""
        for card in self.cards:
            card.allocator.wait_stream(stream, on)

    def collective(self, kind: str, group: str, size: int, stream: int = 0, runs: int | None = None) -> None:
        """A collective of `size` bytes starts (`Recorder.collective`); with `runs` nobody waits before `settle`."""
        if self._price is None:
            return
        if runs is not None:
            self._card().allocator.wait_stream(runs, self._stream())
            self._behind.add(runs)
        on = stream or self._stream() if runs is None else runs
        self._card().allocator.collective(self.labels.code(kind), kind, group, size, on)

    def settle(self) -> None:
        """A phase ends: its collectives are waited for."""
        while self._behind:
            self._card().allocator.wait_stream(0, self._behind.pop())

    # ------------------------------------------------------------------------------------------------------------

    def _place(self, thread: int, operator: int) -> Place:
        """Where an operator runs. What autograd runs of itself has the module of the forward operator behind it."""
        modules = self.stacks.get(_get_ident())
        if self._written is not None:
            operator, written = self._written
            modules = [written] if written >= 0 else modules
        if thread and current_node() is not None:
            if not modules:
                behind = self.origins.behind()
                return operator, (behind & _MODULE) - 1, self._here((behind >> _BITS) - 1, self.backward)
            stack = self._here(NONE, self.backward)
        else:
            stack = self._here()
        module = modules[-1] if modules else -1
        if _grad_enabled():
            self.origins.made(int(thread > 0), stack + 1 << _BITS | module + 1)
        return operator, module, stack

    def _allocate(self, card: Card, size: int, stream: int, place: Place, on_gpu: int = -1) -> int:
        labels = card.labels
        operator, module, stack = place
        if on_gpu >= 0 and self._on_gpu:
            size = on_gpu
        elif on_gpu >= 0:
            labels.gpu_bytes[len(labels.operator)] = on_gpu
        labels.operator.append(operator)
        labels.module.append(module)
        labels.stack.append(stack)
        return card.malloc(size, stream)

    def _workspace(self, card: Card, name: str, size: int, stream: int, place: Place, on_gpu: int) -> int | None:
        """A workspace's number; None where there is no room for it, and the library does without."""
        try:
            ident = self._allocate(card, size, stream, (self.labels.code(name), *place[1:]), on_gpu)
        except torch.OutOfMemoryError:
            if name != BY_CHOICE:
                raise
            return None
        card.labels.category[ident] = self.labels.code("workspace")
        return ident

    def _follow(self, card: Card, steps: Steps, born: list[int], stream: int, place: Place) -> None:
        """Allocate and free as a call does. Where memory runs out, what the call has so far is given back."""
        slots: dict[int, int] = {}
        told: list[int] = []
        try:
            for action, slot, size, name, on_gpu in steps:
                if action == BIRTH:
                    card.numbers[born[slot]] = self._allocate(card, self.runtime.bytes(born[slot]), stream, place)
                    told.append(born[slot])
                elif action == RELEASE:
                    if slot in slots:  # else there was no room for it
                        card.free(slots.pop(slot))
                elif action == EMPTY:
                    card.allocator.empty_cache()
                elif (ident := self._workspace(card, name, size, stream, place, on_gpu)) is None:
                    continue
                elif action == KEEP:
                    card.workspaces[slot] = ident
                else:
                    slots[slot] = ident
        except torch.OutOfMemoryError:
            for ident in slots.values():
                card.free(ident)
            for storage in reversed(told):
                self.freed(storage)
            raise

    @contextmanager
    def ordered_casts(self) -> Iterator[None]:
        """Frees of autocast's cache come in the order of birth: torch walks a hash table of addresses."""
        clear = torch.clear_autocast_cache

        def ordered() -> None:
            held: list[tuple[int, int]] = []
            self._held = held
            clear()
            self._held = None
            for index, number in sorted(held):
                self.cards[index].free(number)

        torch.clear_autocast_cache = ordered
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear
