"""A captured run whose model torch.compile compiles, as `record` compiles a program's (`graph.host.compiled`)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from graph.fake_cuda.served import has_triton
from graph.host.extensions import triton_stand_in

if TYPE_CHECKING:
    from graph.case import Case
    from graph.fake_cuda.device import Runtime
    from graph.recorder.recorder import Recorder


#: What is assumed where kernels are measured.
FIRST: Final = "of the kernels that are measured the first is taken: which is the fastest is not known"


@contextlib.contextmanager
def compiling(case: Case, runtime: Runtime, recorder: Recorder, blocks: bool) -> Iterator[None]:
    """Inside, what is marked to be compiled is compiled when it is first called, as in a new process.

    Nothing that was compiled before is known, and nothing is kept.
    """
    if not case.compile:
        yield
        return
    from graph.host.compiled import anew
    from graph.host.compiled import compiling as of_device

    if case.compile.startswith("max-autotune"):
        runtime.note(FIRST)
    with (
        tempfile.TemporaryDirectory() as name,
        _triton(),
        anew(blocks),
        of_device(runtime, Path(name) / "inductor", recorder.writes),
    ):
        yield


#: What stood for Triton in this process: Inductor keeps to the modules that it has imported.
_stood: dict[str, ModuleType] = {}


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """Where Triton is not installed, something stands for it."""
    from graph.host.compiled import told_of_triton

    if has_triton():
        yield
        return
    place = _stand_in()
    sys.path.append(place)
    sys.modules.update(_stood)
    told_of_triton()
    try:
        yield
    finally:
        sys.path.remove(place)
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            _stood[name] = sys.modules.pop(name)


@functools.cache
def _stand_in() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(triton_stand_in.installed(Path(folder)))
