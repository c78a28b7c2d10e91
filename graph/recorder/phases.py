"""Phases and steps of a program that marks none: found where modules, backward and optimizers begin and end.

The outermost module's forward begins `forward`, or where no gradients are recorded `evaluation`, and `generation` if a
function named `generate` has called it, as in transformers. The outermost `backward` begins `backward`, an optimizer's
step `optimizer`. What follows a step belongs to the next step's forward. `torch.save` is `saving`, and what goes on
after it is what went on before. A step is counted when the optimizer that has stepped most steps again: programs with
several optimizers have as many steps as the busiest of them. What the program names itself are regions
(`graph.recorder.regions`).
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers

from graph.fake_cuda.torch_private import DYNAMO
from graph.recorder.checkpoints import Saving
from graph.recorder.phase_names import BACKWARD, EVALUATION, FORWARD, GENERATION, LOAD, OPTIMIZER, SAVING
from graph.recorder.program import ProgramRecorder
from graph.recorder.recorder import tensors
from graph.recorder.regions import Regions

#: Bytes of a checkpoint that a program writes in a second, about.
_SAVED_A_SECOND: Final = 500e6


class Finished(BaseException):
    """The program has made the optimizer steps that were asked for. Raised through it, whose clean-up runs."""


class Phases:
    """Follows a program: marks its phases for `recorder`, keeps the modules that run, notes what tensors are.

    `enough` is asked after each step, with how many there were and whether every optimizer has stepped; the program is
    left by `Finished` where it says so.
    """

    def __init__(self, recorder: ProgramRecorder, enough: Callable[[int, bool], bool] | None = None) -> None:
        self.recorder = recorder
        self.enough = enough
        self.steps = 0
        self.phase = LOAD
        self.settle: Callable[[], None] | None = None  # what is done where a phase ends
        self._count: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        #: Names of each root's parameters, by id: what has weak references cannot be swapped (`Module.to` of DTensors).
        self._titles: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._main = threading.get_ident()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, phases are found."""
        self.begin(LOAD)
        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._before_step),
                optimizers.register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            stack.enter_context(_around(torch.autograd, "backward", self._backward))
            stack.enter_context(_around(torch.autograd, "grad", self._grad))
            stack.enter_context(_around(torch.optim.Optimizer, "__init__", self._make))
            saving = Saving(torch.save, self.recorder.runtime.values.of)
            stack.enter_context(
                _around(torch, "save", lambda plain, *args, **named: self._saving(saving, *args, **named))
            )
            stack.enter_context(_around(time, "sleep", self._sleep))
            stack.enter_context(Regions(self.recorder.region).followed())
            yield

    def begin(self, phase: int) -> None:
        """A phase begins, unless it goes on already."""
        if phase != self.phase or phase == LOAD:
            if self.settle is not None:
                self.settle()
            self.phase = phase
            self.recorder.mark(phase, -1 if phase == LOAD else self.steps)

    # ------------------------------------------------------------------------------------------------------------

    def _enter(self, part: torch.nn.Module, args: object) -> None:
        stack = self.recorder.stacks.setdefault(threading.get_ident(), [])
        if not stack and not self.recorder.origins.depth:
            if part not in self._names:
                self._meet(part)
            self.begin(FORWARD if torch.is_grad_enabled() else GENERATION if _generates() else EVALUATION)
        stack.append(self._names.get(part, stack[-1] if stack else -1))

    def _meet(self, root: torch.nn.Module) -> None:
        """A module runs that is in none that ran before: what it has goes by its names."""
        for name, inner in root.named_modules():
            self._names[inner] = self.recorder.labels.code(_plain(name) or type(root).__name__)
        titles = self._titles[root] = {}
        for name, parameter in root.named_parameters():
            titles[id(parameter)] = title = _plain(name)
            self.recorder.categorize(parameter, "parameter", title)
        for name, buffer in root.named_buffers():
            self.recorder.categorize(buffer, "buffer", _plain(name))

    def _leave(self, part: torch.nn.Module, args: object, output: object) -> None:
        stack = self.recorder.stacks.get(threading.get_ident())
        if stack:
            stack.pop()

    def _backward(self, plain: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if not self.recorder.origins.depth:
            self.begin(BACKWARD)
        self.recorder.origins.depth += 1
        try:
            return self._grad(plain, *args, **kwargs)
        finally:
            self.recorder.origins.depth -= 1

    def _grad(self, plain: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        before = self.recorder.calls_backward()
        try:
            return plain(*args, **kwargs)
        finally:
            self.recorder.backward = before

    def _saving(self, saving: Saving, *args: object, **kwargs: object) -> Any:
        before, saved = self.phase, saving.saved
        self.begin(SAVING)
        try:
            return saving(*args, **kwargs)
        finally:
            self.recorder.pause((saving.saved - saved) / _SAVED_A_SECOND)
            self.begin(before)

    def _sleep(self, plain: Callable[[float], None], seconds: float) -> None:
        main = threading.get_ident() == self._main
        if main and self.settle is not None:
            self.settle()  # what was issued before ends meanwhile
        plain(seconds)
        if main:
            self.recorder.pause(seconds)

    def _make(self, plain: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: object, **kw: object) -> None:
        importlib.import_module(DYNAMO)  # as the first optimizer does: until then it counts as not imported
        self._made.add(optimizer)
        plain(optimizer, *args, **kw)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.begin(OPTIMIZER)
        for parameter in _parameters(optimizer):
            name = self._title(parameter)
            self.recorder.categorize(parameter, "parameter", name)
            self.recorder.categorize(parameter.grad, "gradient", name and f"{name}.grad")

    def _title(self, parameter: torch.Tensor) -> str:
        """A parameter's name; that in the last of the roots, if several have it."""
        found = [names[id(parameter)] for names in self._titles.values() if id(parameter) in names]
        return found[-1] if found else ""

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter, states in optimizer.state.items():  # some key by name
            name = self._title(parameter) if isinstance(parameter, torch.Tensor) else str(parameter)
            for key, state in states.items() if isinstance(states, Mapping) else [("state", states)]:
                for tensor in tensors(state):
                    self.recorder.categorize(tensor, "optimizer_state", name and f"{name}.{key}")
        self._count[optimizer] = self._count.get(optimizer, 0) + 1
        if self._count[optimizer] > self.steps:
            self.steps += 1
            self.recorder.origins.forget()
            self.begin(FORWARD)
            if self.enough is not None and self.enough(self.steps, self._made <= self._count.keys()):
                raise Finished


def _plain(name: str) -> str:
    """A path among modules, without what torch.compile puts around one."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _generates() -> bool:
    """Whether a function `generate` is among those that run."""
    frame = sys._getframe(1)
    while (before := frame.f_back) is not None:
        frame = before
        if frame.f_code.co_name == "generate":
            return True
    return False


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def _around(owner: object, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Inside, `wrapper` is called in place of a function, with that as its first argument."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def called(*args: object, **kwargs: object) -> Any:
        return wrapper(plain, *args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, plain)
