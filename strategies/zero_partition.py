"""ZeRO stage 3's parameters: each rank holds a part of every one, and a module's are gathered while it runs.

The order of modules is recorded in the first forward and backward pass. From then on parameters are gathered ahead of
their use, and those that are soon used again are kept (deepspeed/runtime/zero/partitioned_param_coordinator.py,
partition_parameters.py and parameter_offload.py of DeepSpeed 0.19.8).
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from strategies.zero_norm import gather_shares
from strategies.zero_settings import Settings

#: So many gathers or reductions may be under way before the host waits.
MOST_UNDER_WAY: Final = 2


class Status(enum.Enum):
    """Where the whole of a parameter is."""

    GONE = 0
    COMING = 1
    HERE = 2


class Shard:
    """A parameter and the part of it that this rank holds. The parameter's `shard` is this object."""

    def __init__(self, parameter: torch.nn.Parameter, number: int, settings: Settings) -> None:
        self.parameter = parameter
        self.number = number
        self.settings = settings
        self.shape = parameter.shape
        self.numel = parameter.numel()
        self.size = -(-self.numel // settings.world)
        self.persistent = False
        self.users: set[int] = set()
        self.status = Status.HERE
        self.part = torch.empty(self.size, dtype=parameter.dtype, device=parameter.device)
        start = self.size * settings.rank
        have = min(self.size, self.numel - start)
        if have > 0:
            line = parameter.detach().contiguous().view(-1).narrow(0, start, have)
            self.part.narrow(0, 0, have).copy_(line)
            del line
        parameter.shard = self  # type: ignore[attr-defined]
        self.drop()

    @property
    def gone(self) -> bool:
        """Whether the whole is not on this device, nor on its way."""
        return self.status is Status.GONE

    def drop(self) -> None:
        """Give the whole back; memory of the gathering stream may still be in use on this one."""
        parameter = self.parameter
        parameter.data.record_stream(torch.cuda.current_stream())
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.status = Status.GONE

    def gather_alone(self) -> None:
        """Gather the whole at once, on the current stream."""
        whole = torch.empty(self.size * self.settings.world, dtype=self.part.dtype, device=self.part.device)
        gather_shares(whole, self.part)
        self.parameter.data = whole.narrow(0, 0, self.numel).view(self.shape)
        torch.cuda.synchronize()
        self.status = Status.HERE


def gather_at_once(shards: Sequence[Shard]) -> None:
    """Gather several parameters, each into a tensor of its own."""
    waiting = [shard for shard in shards if shard.gone]
    if len(waiting) == 1:
        waiting[0].gather_alone()
    elif waiting and waiting[0].settings.world == 1:
        Gather(waiting).wait()
    elif waiting:
        world = waiting[0].settings.world
        whole = [torch.empty(one.size * world, dtype=one.part.dtype, device=one.part.device) for one in waiting]
        for shard, tensor in zip(waiting, whole, strict=True):
            gather_shares(tensor, shard.part.view(-1))
        for shard, tensor in zip(waiting, whole, strict=True):
            shard.parameter.data = tensor.narrow(0, 0, shard.numel).view(shard.shape).data
            shard.status = Status.HERE
        torch.cuda.synchronize()


class Gather:
    """Parameters on their way: one in a tensor that becomes it, several in one tensor that is cut up at `wait`."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = sorted(shards, key=lambda shard: shard.number)
        self.done = False
        self.parts: list[torch.Tensor] = []
        for shard in self.shards:
            shard.status = Status.COMING
        if self.shards[0].settings.world > 1:
            if len(self.shards) == 1:
                self._one(self.shards[0])
            else:
                self._several()

    def _one(self, shard: Shard) -> None:
        whole = torch.empty(shard.size * shard.settings.world, dtype=shard.part.dtype, device=shard.part.device)
        gather_shares(whole, shard.part)
        shard.parameter.data = whole.narrow(0, 0, shard.numel).view(shard.shape)

    def _several(self) -> None:
        first = self.shards[0]
        world, rank = first.settings.world, first.settings.rank
        size = sum(shard.size for shard in self.shards)
        whole = torch.empty(size * world, dtype=first.part.dtype, device=first.part.device)
        self.parts = [whole.narrow(0, size * one, size) for one in range(world)]
        torch.cat([shard.part for shard in self.shards], out=self.parts[rank])
        gather_shares(whole, self.parts[rank])

    def wait(self) -> None:
        """The parameters are here."""
        if self.done:
            return
        offset = 0
        for shard in self.shards:
            if shard.settings.world == 1:
                shard.parameter.data = shard.part.data.view(shard.shape)
            elif self.parts:
                found = []
                for rank, part in enumerate(self.parts):
                    start = rank * shard.size
                    if start < shard.numel:
                        found.append(part.narrow(0, offset, min(shard.numel - start, shard.size)))
                shard.parameter.data = torch.cat(found).view(shard.shape)
                offset += shard.size
            shard.status = Status.HERE
        self.done = True


class Mode(enum.Enum):
    """What is known of the order of modules."""

    NOTHING = 0
    RECORDING = 1
    KNOWN = 2


class Throttle:
    """Keeps the host from running far ahead: it waits when more than two events are under way."""

    def __init__(self) -> None:
        self.events: collections.deque[Any] = collections.deque()

    def before(self) -> None:
        """Wait for the oldest event if there are too many (DeepSpeed forgets complete ones first: it waits no less)."""
        if len(self.events) > MOST_UNDER_WAY:
            self.events.popleft().synchronize()

    def after(self) -> None:
        """What was started is one more event."""
        make: Any = torch.cuda.Event
        event = make()
        event.record()
        self.events.append(event)


class Coordinator:
    """Gathers and drops the parameters of modules as they run."""

    def __init__(self, settings: Settings, stream: Any) -> None:
        self.settings = settings
        self.stream = stream
        self.throttle = Throttle()
        self.mode = Mode.NOTHING
        self.step = 0
        self.here = 0  # elements gathered, as DeepSpeed counts them
        self.modules: list[torch.nn.Module] = []
        self.order: list[tuple[Shard, int]] = []
        self.queue: collections.deque[tuple[Shard, int]] = collections.deque()
        self.latest: dict[Shard, int] = {}
        self.coming: dict[Shard, Gather] = {}
        self.running_backward: dict[int, torch.nn.Module] = {}
        self.recomputed: dict[int, set[Shard]] = {}  # frozen parameters that recomputation gathers, by whose backward
        self._own: dict[int, tuple[Shard, ...]] = {}
        self._releasable: dict[tuple[int, int], frozenset[Shard]] = {}

    def own(self, module: torch.nn.Module) -> tuple[Shard, ...]:
        """The parameters of a module itself."""
        found = self._own.get(id(module))
        if found is None:
            found = tuple(parameter.shard for parameter in module._parameters.values() if parameter is not None)  # type: ignore[attr-defined]
            self._own[id(module)] = found = tuple(dict.fromkeys(found))
        return found

    def expect(self, module: torch.nn.Module) -> None:
        """Note a module that is about to run, or see that it is the one that ran here before."""
        if self.mode is Mode.KNOWN and (self.step >= len(self.modules) or self.modules[self.step] is not module):
            self.mode = Mode.NOTHING
            self.modules, self.order = [], []
            self.queue.clear()
            self.latest.clear()
            self._clear_coming()
        if self.mode is Mode.RECORDING:
            self.modules.append(module)

    def restart(self) -> None:
        """A forward pass of the whole model begins."""
        self._clear_coming()
        if self.mode is Mode.RECORDING:
            self.order = [
                (shard, step)
                for step, module in enumerate(self.modules)
                for shard in sorted(self.own(module), key=lambda shard: shard.number)
            ]
            self.mode = Mode.KNOWN
        elif self.mode is Mode.NOTHING:
            self.mode = Mode.RECORDING
        self.queue = collections.deque(self.order)
        self.latest.clear()
        self.step = 0
        self.here = 0

    def _clear_coming(self) -> None:
        for shard, gather in self.coming.items():
            gather.wait()
            self._drop(shard)
        self.coming.clear()

    def fetch(self, module: torch.nn.Module, *, forward: bool) -> None:
        """Gather what a module needs, wait for it, then start to gather what comes next."""
        if not forward:
            self.running_backward[id(module)] = module
        wanted = self.own(module)
        self._gather(wanted)
        recomputing = forward and torch._C._current_graph_task_id() != -1
        for shard in wanted:
            shard.users.add(id(module))
            if recomputing and self.running_backward and not shard.parameter.requires_grad:
                owner = next(reversed(self.running_backward))
                self.recomputed.setdefault(owner, set()).add(shard)
                shard.users.add(owner)
            if shard in self.coming:
                with torch.cuda.stream(self.stream):
                    self.throttle.before()
                    self.coming.pop(shard).wait()
                    self.throttle.after()
        torch.cuda.current_stream().wait_stream(self.stream)
        if self.mode is Mode.KNOWN:
            self._skip(wanted)
            self._prefetch()
        self.step += 1

    def _skip(self, wanted: Iterable[Shard]) -> None:
        """What the module has now need not be gathered ahead for it."""
        fresh = {shard for shard in wanted if self.latest.get(shard, -1) < self.step}
        skipped: set[Shard] = set()
        while self.queue and len(skipped) < len(fresh):
            shard, step = self.queue.popleft()
            self.latest[shard] = step
            skipped.add(shard)

    def _prefetch(self) -> None:
        most = min(self.settings.max_live - self.here, self.settings.prefetch)
        chosen: dict[Shard, None] = {}
        elements = 0
        while self.queue and elements < most:
            shard, step = self.queue.popleft()
            self.latest[shard] = max(self.latest.get(shard, -1), step)
            if shard.gone and shard not in chosen:
                chosen[shard] = None
                elements += shard.numel
        self._gather(chosen)

    def _gather(self, shards: Iterable[Shard]) -> None:
        missing = [shard for shard in shards if shard.gone]
        if not missing:
            return
        self.here += sum(shard.numel for shard in missing)
        with torch.cuda.stream(self.stream):
            gather = Gather(missing)
        for shard in missing:
            self.coming[shard] = gather

    def _drop(self, shard: Shard) -> None:
        if shard.status is Status.HERE and not shard.users:
            shard.drop()
            self.here -= shard.numel

    def release(self, module: torch.nn.Module, *, forward: bool) -> None:
        """A module has run: drop its parameters that are not used again soon."""
        own = self.own(module)
        leaving = self._leaving(module) if self.mode is Mode.KNOWN else frozenset(own)
        if not forward:
            recomputed = self.recomputed.pop(id(module), set())
            leaving |= {shard for shard in recomputed if not shard.persistent}
            own = tuple(dict.fromkeys([*own, *sorted(recomputed, key=lambda shard: shard.number)]))
            self.running_backward.pop(id(module), None)
        for shard in own:
            shard.users.discard(id(module))
            if shard in leaving:
                self._drop(shard)

    def _leaving(self, module: torch.nn.Module) -> frozenset[Shard]:
        """Found once for each place in the order, and kept."""
        key = (id(module), self.step)
        found = self._releasable.get(key)
        if found is None:
            found = self._releasable[key] = self._not_soon(module)
        return found

    def _not_soon(self, module: torch.nn.Module) -> frozenset[Shard]:
        leaving = {
            shard for shard in self.own(module) if not shard.persistent and self.latest.get(shard, -1) <= self.step
        }
        elements = 0
        for place in range(self.step, len(self.modules)):
            if not leaving or elements >= self.settings.max_reuse:
                break
            for shard in self.own(self.modules[place]):
                leaving.discard(shard)
                elements += shard.numel
        return frozenset(leaving)

    def release_leftovers(self) -> None:
        """Modules whose gradients never came, as their inputs need none."""
        while self.running_backward:
            _, module = self.running_backward.popitem()
            for shard in dict.fromkeys([*self.own(module), *self.recomputed.pop(id(module), ())]):
                shard.users.discard(id(module))
                if not shard.persistent:
                    self._drop(shard)

    def release_all(self, shards: Iterable[Shard]) -> None:
        """Drop every parameter, also those that are usually kept."""
        for shard in shards:
            if shard in self.coming:
                self.coming.pop(shard).wait()
            shard.users.clear()
            self._drop(shard)


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and calls `call` when its gradient passes."""

    @staticmethod
    def forward(tensor: torch.Tensor, call: Any) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.call()
        return gradient, None


def marked(value: Any, call: Any) -> Any:
    """`value` with every tensor in it marked."""
    if isinstance(value, torch.Tensor):
        return _Mark.apply(value, call(value))  # type: ignore[no-untyped-call]
    if isinstance(value, tuple | list):
        found = [marked(one, call) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        for key in value:
            value[key] = marked(value[key], call)
    return value


class Hooks:
    """The hooks of one module: before and after its forward, before and after its backward."""

    def __init__(self, coordinator: Coordinator, module: torch.nn.Module) -> None:
        self.coordinator = coordinator
        self.module = module
        self.gradients = 0  # of inputs, that have not come yet
        self.calls = 0
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)
        module.register_forward_hook(self._mark_outputs)
        module.register_forward_pre_hook(self._mark_inputs)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        with torch.no_grad():
            self.coordinator.expect(module)
            self.coordinator.fetch(module, forward=True)

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            self.coordinator.release(module, forward=True)

    def _mark_outputs(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return marked(output, self._output)

    def _output(self, tensor: torch.Tensor) -> Any:
        self.calls += 1
        return self._backward_begins

    def _backward_begins(self) -> None:
        if self.calls > 0:
            with torch.no_grad():
                self.coordinator.expect(self.module)
                self.coordinator.fetch(self.module, forward=False)
            self.calls -= 1

    def _mark_inputs(self, module: torch.nn.Module, args: Any) -> Any:
        self.gradients = 0
        return marked(args, self._input)

    def _input(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            self.gradients += 1
        return self._backward_ended

    def _backward_ended(self) -> None:
        self.gradients -= 1
        if self.gradients == 0:
            with torch.no_grad():
                self.coordinator.release(self.module, forward=False)
