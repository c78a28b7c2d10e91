"""Where in a program something was asked for: the Python stack, at the price of a walk over its frames.

A stack is taken as numbers, one a frame, and is kept once however often it comes. It is put into words at the end, as
PyTorch's own `torch.cuda.memory._record_memory_history(stacks="python")` does: file, line and function, the innermost
first. What stands between the program and the device (this project, torch's dispatch of operators) is left out.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from itertools import dropwhile
from types import CodeType, FrameType
from typing import Final

from graph.user_code import DISPATCH, OURS
from traces.snapshot.names import FOREIGN

Frame = tuple[str, int, str]  # file, line, function

#: No stack.
NONE: Final = -1


class Lines:
    """The stacks of one run, by number in the order in which they first came; they end before the frame of `base`.

    A stack may stand on another: what autograd's thread does stands on the call of `backward`, and what it does for
    itself has the line of the forward pass whose derivative it works out.
    """

    def __init__(self, base: CodeType | None = None) -> None:
        self._base = base
        self._known: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[int, int, list[tuple[CodeType, int]]]] = []
        self._starts: dict[int, tuple[list[int], list[int]]] = {}

    def here(self, forward: int = NONE, under: int = NONE) -> int:
        """The number of the stack of whoever calls this.

        It stands on stack `under`. Where no code of a program or library is in it, it is autograd's own, and has a line
        of stack `forward`, the one that made the node.
        """
        frame: FrameType | None = sys._getframe(1)
        base = self._base
        key = [forward, under]
        add = key.append
        while frame is not None and (code := frame.f_code) is not base:
            add(id(code) + frame.f_lasti)  # an instruction lies within its code object: no two have the same
            frame = frame.f_back
        stack = tuple(key)
        found = self._known.get(stack)
        return self._keep(stack, sys._getframe(1)) if found is None else found

    def stack(self, number: int) -> list[Frame]:
        """The frames of a stack, the innermost first."""
        if number == NONE:
            return []
        forward, under, frames = self._stacks[number]
        places = [self._place(code, instruction) for code, instruction in frames]
        own = [place for place in dropwhile(_between, places) if not place[0].startswith(OURS)]
        if not own and (made := self.leaf(forward)) is not None:
            own = [(*made[:2], f"{made[2]} [backward]")]
        return [*own, *self.stack(under)]

    def leaf(self, number: int) -> Frame | None:
        """The innermost frame of a stack that is a program's or a model library's; where none is, the innermost."""
        frames = self.stack(number)
        return next((frame for frame in frames if not FOREIGN.search(frame[0])), next(iter(frames), None))

    def texts(self) -> list[str]:
        """All stacks as the field `frames` of a trace has them, one frame a line."""
        every = map(self.stack, range(len(self._stacks)))
        return ["\n".join(f"{file}:{line}:{name}" for file, line, name in stack) for stack in every]

    # ----------------------------------------------------------------------------------------------------------------

    def _keep(self, stack: tuple[int, ...], frame: FrameType | None) -> int:
        """A stack that is new. Its code objects are kept, so that no others come to lie where they are."""
        frames = []
        while frame is not None and frame.f_code is not self._base:
            frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        self._known[stack] = len(self._stacks)
        self._stacks.append((stack[0], stack[1], frames))
        return len(self._stacks) - 1

    def _place(self, code: CodeType, instruction: int) -> Frame:
        known = self._starts.get(id(code))
        if known is None:
            parts = list(code.co_lines())
            lines = [line or code.co_firstlineno for _, _, line in parts]
            known = self._starts[id(code)] = ([start for start, _, _ in parts], lines)
        starts, lines = known
        return code.co_filename, lines[bisect_right(starts, max(instruction, 0)) - 1], code.co_name


def _between(frame: Frame) -> bool:
    """Whether a frame is ours, or torch's on the way from an operator's call to its kernel."""
    return frame[0].startswith(OURS) or any(part in frame[0] for part in DISPATCH)
