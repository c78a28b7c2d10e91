"""Code of users and libraries is kept off stdout, and what it raises is told with its place and cause."""

from __future__ import annotations

import json
import logging
import sys
import warnings

import pytest

from graph.user_code import ending, passing, quiet, raised, reader, told
from traces.text import reason

HERE = "tests/graph/test_user_code.py"


def test_prints_go_to_stderr_and_libraries_are_still(capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("some.library")
    logger.addHandler(handler)
    try:
        with quiet():
            print("from a function")
            logger.warning("advice")
            logger.error("a failure")
            warnings.warn("more advice", stacklevel=1)
        logger.warning("heard again")
    finally:
        logger.removeHandler(handler)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["from a function", "a failure", "heard again"]


def _fails() -> None:
    json.loads("{")


def test_an_error_has_the_line_of_the_users_code_not_that_of_the_library() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        _fails()
    line = _fails.__code__.co_firstlineno + 1
    assert raised(caught.value) == f"{HERE}:{line} (_fails)"
    assert told(caught.value).startswith(f"JSONDecodeError at {HERE}:{line} (_fails): Expecting property name")


def test_an_error_keeps_its_cause() -> None:
    error = ImportError("cannot import it,\nsee above")
    error.__cause__ = OSError("libcudart.so.12: cannot open shared object file")
    assert reason(error) == (
        "cannot import it, see above (from OSError: libcudart.so.12: cannot open shared object file)"
    )
    said = reason(RuntimeError("begin " + "x" * 5000 + " the cause"))
    assert len(said) <= 600
    assert said.startswith("begin ")
    assert said.endswith(" the cause")


def test_who_reads_is_whoever_called_the_library() -> None:
    assert reader().startswith(f"{HERE}:")
    assert reader().endswith(" (test_who_reads_is_whoever_called_the_library)")


def test_a_check_that_raises_is_taken_to_pass() -> None:
    """What is read in its condition is what lets the program go on; None elsewhere."""
    seen: list[bool | None] = []

    def read(value: bool | None) -> bool | None:
        seen.append(value)
        return value

    assert read(passing())
    if read(passing()):
        raise AssertionError
    if not read(passing()):
        raise AssertionError
    if len(seen) > 5 or (
        len(seen) == 3
        and read(passing())
    ):  # fmt: skip
        print("told before it raises")
        assert False  # noqa: B011, PT015
    if read(passing()):
        seen.append(True)
    else:
        raise AssertionError
    if read(passing()):
        seen.clear()
    while read(passing()):
        raise AssertionError
    if read(passing()) == 3:
        raise AssertionError
    assert seen == [True, False, True, False, True, True, None, None, None]


def test_a_loop_ends_by_what_its_conditions_are() -> None:
    """What is read in the condition of a `while`, or of a `break` in it; nothing elsewhere."""
    seen: list[bool | None] = []

    def read(found: tuple[object, bool] | None, going: bool = False) -> bool:
        seen.append(None if found is None else found[1])
        return going

    while read(ending(), True):
        if not read(ending(), True):
            break
        if read(ending()):
            seen.append(None)
        if len(seen) > 3 and read(ending(), True):
            break
    while not read(ending(), True):
        pass
    while len(seen) < 0 or read(ending()) == 3:
        pass
    if read(ending()):
        seen.clear()
    assert seen == [False, False, None, False, False, None, True, True, False, None]
