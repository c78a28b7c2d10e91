"""Who owns what: the module that runs, the parameter whose gradient is ready, and the category of each storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as hooks

from graph.model import Kind
from graph.recorder.recorder import Recorder, tensors


class Roles:
    """What storages were found to be, by number: gradients, optimizer states, inputs (with the parameter's storage)."""

    def __init__(self) -> None:
        self.gradient: dict[int, int] = {}
        self.state: dict[int, tuple[int, str]] = {}  # with the name of the state
        self.input: set[int] = set()


@contextmanager
def followed(recorder: Recorder, model: torch.nn.Module, roles: Roles) -> Iterator[None]:
    """Follow `model` while it runs: module hooks keep a stack for each thread, parameters tell of their gradients.

    The forward hook is called for a forward that raises as well: non-reentrant checkpointing ends its recomputation so.
    """
    log = recorder.log
    codes = {id(part): log.code(name) for name, part in model.named_modules()}
    main = threading.get_ident()
    stacks = recorder.stacks

    def enter(part: torch.nn.Module, args: object) -> None:
        stack = stacks[threading.get_ident() != main]
        code = codes.get(id(part))
        if code is None:  # a module made on the fly is part of the one that runs it
            stack.append(stack[-1] if stack else -1)
        else:
            stack.append(code)
            log.event(Kind.ENTER, code)

    def leave(part: torch.nn.Module, args: object, output: object) -> None:
        stack = stacks[threading.get_ident() != main]
        if stack:
            code = stack.pop()
            if id(part) in codes:
                log.event(Kind.EXIT, code)

    def ready(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            owner = recorder.number(parameter)
            number = recorder.number(gradient)
            roles.gradient[number] = owner
            log.event(Kind.GRADIENT, owner, number)

    handles: list[Any] = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    for name, parameter in model.named_parameters():
        code = log.code(name.rpartition(".")[0])
        recorder.origins.variables[id(parameter)] = (-1, code)
        if parameter.requires_grad:
            hooked: Any = parameter
            handles.append(hooked.register_post_accumulate_grad_hook(ready))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        recorder.origins.variables.clear()


def note_states(recorder: Recorder, optimizer: torch.optim.Optimizer, roles: Roles) -> None:
    """Note which storages are states of the optimizer (ZeroRedundancyOptimizer: of the one inside), and of what."""
    inner: Any = getattr(optimizer, "optim", optimizer)
    for parameter, state in inner.state.items():
        owner = recorder.number(parameter)
        for name, value in state.items() if isinstance(state, Mapping) else ():
            for tensor in tensors(value):
                number = recorder.number(tensor)
                if number >= 0:
                    roles.state[number] = (owner, str(name))
