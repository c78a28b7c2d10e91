"""`torch.compile` gives back what it is given: programs that compile are recorded as they run without it, and say so.

Compiled code allocates at other places than eager code does, and mostly less. What torch itself compiles is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch

from graph.fake_cuda.device import Runtime
from graph.user_code import place


@contextmanager
def uncompiled(runtime: Runtime) -> Iterator[None]:
    """Inside, what the program compiles runs as it stands; each place is noted in the runtime's assumptions."""
    plain: Callable[..., Any] = torch.compile

    def compile(model: object = None, **options: object) -> Any:
        caller = sys._getframe(1)
        if str(caller.f_globals.get("__name__")).startswith("torch."):
            return plain(model, **options)
        _note(runtime, caller)
        return (lambda function: function) if model is None else model

    def in_place(module: torch.nn.Module, *args: object, **options: object) -> None:
        _note(runtime, sys._getframe(1))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compile))
        stack.enter_context(mock.patch.object(torch.nn.Module, "compile", in_place))
        yield


def _note(runtime: Runtime, caller: FrameType) -> None:
    line = place(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_qualname)
    runtime.note(f"{line} compiles: recorded as it runs uncompiled, which mostly takes more memory")
