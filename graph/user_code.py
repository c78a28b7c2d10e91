"""Code that is not ours, a user's function and the libraries under it: kept off stdout, and told with its place.

Places are in words that a user finds: `mine.py:12 (forward)`. What is read from a device that holds nothing has one,
and what a function raises.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Final

from traces.text import reason

_ROOT: Final = Path(__file__).resolve().parents[1]
#: Folders of code that is not the user's, and our own that stands between a user's code and a device.
_INSTALLED: Final = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib", "stdlib")})
OURS: Final = tuple(f"{_ROOT / name}{os.sep}" for name in ("traces", "graph", "strategies", "simulator"))
_DEVICE: Final = str(_ROOT / "graph" / "fake_cuda") + os.sep
#: Files of torch through which every operator goes.
DISPATCH: Final = ("torch/_ops.py", "torch/_tensor.py", "torch/overrides.py", "torch/utils/_", "torch/_prims_common")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, libraries log errors alone, nothing warns, and what is printed goes to stderr: stdout is for answers."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def reader() -> str:
    """Who called the operator that runs: the innermost code that is neither torch's dispatch nor the device's.

    Empty where our own loop did: what it reads changes nothing. "backward" where no Python code did.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((_DEVICE, "<")) or any(part in file for part in DISPATCH)):
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return "" if file.startswith(OURS) else place(file, frame.f_lineno, function)
        frame = frame.f_back
    return "backward"


def caller() -> str:
    """The innermost line of the user's own code that is running; empty where none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def raised(error: BaseException) -> str:
    """Where an error comes from: the innermost line of the user's own code, else of a library that is not torch."""
    others = ("<", *OURS, *(f"{folder}torch{os.sep}" for folder in _INSTALLED))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(others)]
    own = [one for one in frames if not one.filename.startswith(_INSTALLED)]
    found = next(reversed(own or frames), None)
    return "" if found is None else place(found.filename, found.lineno or 0, found.name)


def is_own(file: str) -> bool:
    """Whether a file is the user's: of no library, not Python's, not ours."""
    return not file.startswith(("<", *_INSTALLED, *OURS))


def told(error: BaseException) -> str:
    """What was raised, where and why, on one line."""
    place = raised(error)
    return f"{type(error).__name__}{f' at {place}' if place else ''}: {reason(error)}"


def place(file: str, line: int, function: str) -> str:
    """A place in words that a user finds: `mine.py:12 (forward)`, the file by its path from here or in its package."""
    installed = next((folder for folder in _INSTALLED if file.startswith(folder)), "")
    here = os.getcwd() + os.sep
    name = file.removeprefix(installed or here)
    return f"{name}:{line} ({function})"
