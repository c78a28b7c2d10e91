"""Stacks as numbers are the stacks that Python's own `traceback` tells, and each is kept once."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graph.recorder.lines import NONE, Frame, Lines

HERE = __file__


def told() -> list[Frame]:
    """The caller's stack, by `traceback`."""
    return [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(traceback.extract_stack()[:-1])]


def taken(lines: Lines) -> tuple[list[Frame], list[Frame]]:
    return lines.stack(lines.here())[1:], told()[1:]


def in_a_generator(lines: Lines) -> tuple[list[Frame], list[Frame]]:
    def made() -> Iterator[tuple[list[Frame], list[Frame]]]:
        yield taken(lines)

    return next(made())


def in_a_comprehension(lines: Lines) -> tuple[list[Frame], list[Frame]]:
    (found,) = [taken(one) for one in (lines,)]
    return found


def in_compiled_text(lines: Lines) -> tuple[list[Frame], list[Frame]]:
    space: dict[str, Any] = {"taken": taken, "lines": lines}
    exec(compile("\n\nfound = (lambda:\n taken(lines))()", "text.py", "exec"), space)
    found: tuple[list[Frame], list[Frame]] = space["found"]
    return found


@pytest.mark.parametrize("way", [taken, in_a_generator, in_a_comprehension, in_compiled_text])
def test_stacks_are_those_of_traceback(way: Callable[[Lines], tuple[list[Frame], list[Frame]]]) -> None:
    ours, theirs = way(Lines())
    assert len(ours) > 5
    assert ours == theirs


def test_a_stack_that_comes_again_has_its_number_and_another_line_another() -> None:
    lines = Lines()
    again = [lines.here() for _ in range(3)]
    other = lines.here()
    assert len(set(again)) == 1
    assert other not in again
    assert [lines.stack(number)[0][1] for number in (again[0], other)] == [line_of("again ="), line_of("other =")]
    assert len(lines.texts()) == 2
    assert lines.texts()[1].split("\n")[0] == f"{HERE}:{line_of('other =')}:{told()[0][2]}"


def line_of(text: str) -> int:
    """The first line of this file with a text."""
    with open(HERE) as file:
        return next(number for number, line in enumerate(file, 1) if line.strip().startswith(text))


def test_functions_that_are_made_again_and_again_are_told_apart() -> None:
    lines, told_of = Lines(), []
    for number in range(50):  # code objects that die may leave their place to others
        space: dict[str, Any] = {"lines": lines}
        exec(compile("\n" * number + "found = lines.here()", f"text{number}.py", "exec"), space)
        told_of.append((space["found"], (f"text{number}.py", number + 1, "<module>")))
    assert [lines.stack(number)[0] for number, _ in told_of] == [frame for _, frame in told_of]


def test_frames_end_where_the_program_begins() -> None:
    def started() -> int:
        return program()

    def program() -> int:
        return lines.here()

    lines = Lines(started.__code__)
    assert [name for _, _, name in lines.stack(started())] == ["program"]


def test_a_stack_stands_on_another() -> None:
    """Autograd's thread has no frames: it has the line that made the node, and the call of backward."""

    def forward() -> int:
        return lines.here()

    def backward() -> int:
        return lines.here()

    def alone() -> None:
        found.append(lines.here(made, caller))

    def start(thread: threading.Thread) -> None:
        thread.start()
        thread.join()

    lines = Lines()
    made, caller = forward(), backward()
    found: list[int] = []
    start(threading.Thread(target=alone))
    frames = lines.stack(found[0])
    assert frames[0][2] == "alone"  # it has a frame of its own
    assert frames[-len(lines.stack(caller)) :] == lines.stack(caller)
    lines = Lines(alone.__code__)
    made, caller = forward(), backward()
    start(threading.Thread(target=alone))
    file, line, name = lines.stack(found[1])[0]
    assert (file, line, name) == (*lines.stack(made)[0][:2], "forward [backward]")
    assert lines.stack(found[1])[1:] == lines.stack(caller)
    assert lines.leaf(caller) == lines.stack(caller)[0]
    assert lines.stack(NONE) == []
    assert lines.leaf(NONE) is None
