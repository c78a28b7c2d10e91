"""`nvidia-smi`, which programs run to ask for free memory: a program of that name stands in the PATH.

It says what NVML says (`graph.host.driver.nvml`): which GPUs there are, how much memory they have and how much is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from graph.host.driver import nvidia_smi, nvml

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

_NAME: Final = "nvidia-smi"
#: What is asked that a GPU alone knows.
_MEASURED: Final = re.compile("utilization|power|temperature|compute-apps")
_NOTE: Final = (
    "the program asks nvidia-smi what a GPU does, and there is none: it is told of no load, power and temperature, and "
    "of no other processes"
)


@contextlib.contextmanager
def in_path(runtime: Runtime, folder: Path) -> Iterator[None]:
    """Inside, a program finds `nvidia-smi`; `folder` is for files."""
    place = folder / "driver"
    place.mkdir()
    figures, program = place / "gpus.json", place / _NAME
    command = shlex.join((sys.executable, "-IS", nvidia_smi.__file__, str(figures)))
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o755)

    def telling(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: object, **kwargs: object) -> Any:
            words = " ".join(str(word) for word in (*args, *kwargs.values()) if isinstance(word, str | list | tuple))
            if _NAME in words:
                _write(figures, runtime)
                if _MEASURED.search(words):
                    runtime.note(_NOTE)
            return start(*args, **kwargs)

        return started

    _write(figures, runtime)
    first = f"{place}{os.pathsep}"
    os.environ["PATH"] = first + os.environ.get("PATH", os.defpath)
    try:
        with (
            mock.patch.object(subprocess.Popen, "__init__", telling(subprocess.Popen.__init__)),
            mock.patch.object(os, "system", telling(os.system)),
        ):
            yield
    finally:
        if "PATH" in os.environ:  # the program's own by now
            os.environ["PATH"] = os.environ["PATH"].replace(first, "")


def _write(figures: Path, runtime: Runtime) -> None:
    """Beside the file, which another process may read."""
    made = figures.with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps([_known(runtime, index) for index in range(runtime.count)]), encoding="utf-8")
    made.replace(figures)


def _known(runtime: Runtime, index: int) -> dict[str, object]:
    """What is known of the GPU of this number."""
    free, total = nvml.free_and_all(runtime, index)
    return {
        "index": index,
        "count": runtime.count,
        "name": runtime.profile.product,
        "uuid": nvml.uuid(index),
        "capability": "{}.{}".format(*runtime.profile.arch),
        "total": total,
        "used": total - free,
        "driver": nvml.DRIVER,
        "cuda": f"{nvml.CUDA // 1000}.{nvml.CUDA % 1000 // 10}",
    }
