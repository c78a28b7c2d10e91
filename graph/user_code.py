"""Code that is not ours, a user's function and the libraries under it: kept off stdout, and told with its place.

Places are in words that a user finds: `mine.py:12 (forward)`. What is read from a device that holds nothing has one,
and what a function raises.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import logging
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Hashable, Iterator
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
#: The same, and those of every collective.
_BELOW: Final = (*DISPATCH, "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")


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
    frame = _reading()
    if frame is None:
        return "backward"
    function = frame.f_code.co_qualname.partition(".<locals>")[0]
    file = frame.f_code.co_filename
    return "" if file.startswith(OURS) else place(file, frame.f_lineno, function)


#: Methods, or functions of torch, that say of all that is asked what it is of the one that there is.
_WHOLE: Final = frozenset({"all", "any", "item"})


def passing() -> bool | None:
    """What the boolean that is read now has to be for the program to go on, where it raises otherwise: the condition of
    an `assert`, or of an `if` that ends by raising. None where both ways go on.
    """
    frame = _reading()
    if frame is None:
        return None
    line, checks = frame.f_lineno, _checks(frame.f_code.co_filename)
    return next((_wanted(test, line, wanted) for test, wanted in checks if _is_on(test, line)), None)


def holding() -> bool | None:
    """The same of what is computed now, where that is such a condition, or all or any of it are. None elsewhere."""
    frame = _reading()
    if frame is None:
        return None
    where = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    answers = (_of_part(test, where, wanted) for test, wanted in _checks(frame.f_code.co_filename))
    return next((answer for answer in answers if answer is not None), None)


def ending() -> tuple[Hashable, bool] | None:
    """The loop, if the boolean that is read now is its condition or that of a `break`, and what ends it."""
    frame = _reading()
    if frame is None:
        return None
    line = frame.f_lineno
    for test, wanted in _loops(frame.f_code.co_filename):
        if _is_on(test, line) and (end := _wanted(test, line, wanted, compared=True)) is not None:
            return (id(frame), frame.f_code, line), end
    return None


def _of_part(test: ast.expr, where: object, wanted: bool) -> bool | None:
    """What the part of a condition at this place (first and last line, columns) is, for the condition to be so."""
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == where:
        return wanted
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _of_part(test.operand, where, not wanted)
    parts: list[ast.expr] = []
    if isinstance(test, ast.BoolOp):
        parts = test.values
    elif isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr in _WHOLE:
        parts = [test.func.value, *test.args]
    answers = (_of_part(one, where, wanted) for one in parts)
    return next((answer for answer in answers if answer is not None), None)


def _reading() -> FrameType | None:
    """The frame of who called the operator that runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((_DEVICE, "<")) or any(part in file for part in _BELOW)):
            return frame
        frame = frame.f_back
    return None


@functools.cache
def _checks(file: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The conditions of a file whose outcome decides whether it raises, and what they must be."""
    found = []
    for node in _nodes(file):
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and _raises(node.body) != _raises(node.orelse):
            found.append((node.test, _raises(node.orelse)))
    return tuple(found)


@functools.cache
def _loops(file: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The conditions of a file under which a `while` ends, and what they must be for that."""
    loops = [node for node in _nodes(file) if isinstance(node, ast.While)]
    inner = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.If)]
    leaving = [node.test for node in inner if isinstance(node.body[-1], ast.Break | ast.Return)]
    return (*((loop.test, False) for loop in loops), *((test, True) for test in leaving))


@functools.lru_cache(1)  # a file's checks and its loops are asked one after the other
def _nodes(file: str) -> tuple[ast.AST, ...]:
    """The parts of a file's code; none where it cannot be read."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def _is_on(expression: ast.expr, line: int) -> bool:
    """Whether an expression has a part on a line."""
    return expression.lineno <= line <= (expression.end_lineno or expression.lineno)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether statements end by raising, or by asserting what is false."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and last.value.args:  # asserts by a call
        call = last.value
        return getattr(call.func, "attr", "") == "_assert" and getattr(call.args[0], "value", None) is False
    return isinstance(last, ast.Raise) or (isinstance(last, ast.Assert) and getattr(last.test, "value", None) is False)


def _wanted(test: ast.expr, line: int, wanted: bool, *, compared: bool = False) -> bool | None:
    """What the operand of a condition on this line is, for the condition to be what is wanted; None of a comparison, of
    which it may be a side, unless the comparison itself counts as what is read (`compared`)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _wanted(test.operand, line, not wanted, compared=compared)
    if isinstance(test, ast.BoolOp):
        answers = {_wanted(one, line, wanted, compared=compared) for one in test.values if _is_on(one, line)}
        return answers.pop() if len(answers) == 1 else None
    return None if isinstance(test, ast.Compare) and not compared else wanted


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
