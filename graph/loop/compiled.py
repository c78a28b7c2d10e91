"""A captured run whose model torch.compile compiles, as `record` compiles a program's (`graph.host.compiled`)."""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graph.fake_cuda import triton_stand_in
from graph.fake_cuda.served import has_triton

if TYPE_CHECKING:
    from graph.case import Case
    from graph.fake_cuda.device import Runtime
    from graph.recorder.recorder import Recorder


@contextlib.contextmanager
def compiling(case: Case, runtime: Runtime, recorder: Recorder) -> Iterator[None]:
    """Inside, what is marked to be compiled is compiled when it is first called, as in a new process.

    Nothing that was compiled before is known, and nothing is kept.
    """
    if not case.compile:
        yield
        return
    from graph.host.compiled import compiling as of_device

    with tempfile.TemporaryDirectory() as name, _triton(Path(name)):
        torch._dynamo.reset()
        torch._dynamo.callback.on_compile_end(_collect)
        try:
            with of_device(runtime, Path(name) / "inductor", recorder.writes):
                yield
        finally:
            torch._dynamo.callback_handler.remove_end_callback(_collect)
            torch._dynamo.reset()


def _collect(finished: object) -> None:
    """Compiling makes so many objects that Python's collector always runs; a capture has it at one place."""
    gc.collect()


@contextlib.contextmanager
def _triton(folder: Path) -> Iterator[None]:
    """Where Triton is not installed, something stands for it."""
    if has_triton():
        yield
        return
    place = str(triton_stand_in.installed(folder))
    sys.path.append(place)
    try:
        yield
    finally:
        sys.path.remove(place)
        for module in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[module]
