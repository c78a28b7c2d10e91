"""Short names for the allocations of a snapshot, from the stack that was recorded with each, and the stack as text.

A stack lists its innermost frame first. The name is the innermost frame that is the user's own or a model library's:
neither torch's, nor Python's, nor C++ (`forward@modeling_opt.py:497`). Stacks and frames are shared objects in a
snapshot, so each is looked at once.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: Files of frames that are none of the user's.
FOREIGN: Final = re.compile(
    r"[/\\](torch|functorch|numpy|triton|accelerate)[/\\]"  # libraries that work for the user's code
    r"|[/\\]lib[/\\]python3[^/\\]*[/\\](?!site-packages|dist-packages)"  # Python's own
    r"|^(<|\?\?|$)|\.(c|cc|cpp|cu|cxx|h|hpp|so|pyx|S)$|\.so\."
)
#: A frame as the field `frames` of a trace has it: file, line, function.
FRAME: Final = re.compile(r"(.*?):(\d+):(.*)")
_SLASH: Final = re.compile(r"[/\\]")
_MAX_NAME: Final = 120
_MAX_FRAME: Final = 400


class Namer:
    """Names entries; remembers the stacks that it has seen."""

    def __init__(self) -> None:
        # Each with the object itself, so that no other takes its identity meanwhile.
        self._stacks: dict[int, tuple[Any, str | None]] = {}
        self._frames: dict[int, tuple[Any, str | None]] = {}
        self._texts: dict[int, tuple[Any, str | None]] = {}

    def name(self, entry: dict[str, Any]) -> str | None:
        """The name of the allocation that an entry records, if it says anything: `user_metadata`, or its stack."""
        metadata = entry.get("user_metadata")
        if isinstance(metadata, str) and metadata:
            return _printable(metadata)
        frames = entry.get("frames")
        if not isinstance(frames, list) or not frames:
            return None
        known = self._stacks.get(id(frames))
        if known is None:
            known = self._stacks[id(frames)] = (frames, self._of_stack(frames))
        return known[1]

    def frames(self, entry: dict[str, Any]) -> str | None:
        """The whole stack of an entry, innermost frame first, one a line as `file:line:function`; None without one."""
        frames = entry.get("frames")
        if not isinstance(frames, list) or not frames:
            return None
        known = self._texts.get(id(frames))
        if known is None:
            lines = (_line_of(frame) for frame in frames)
            known = self._texts[id(frames)] = (frames, "\n".join(line for line in lines if line) or None)
        return known[1]

    def _of_stack(self, frames: list[Any]) -> str | None:
        """The innermost frame that says something to the user, else the innermost of Python."""
        python = None
        for frame in frames:
            label, foreign = self._of_frame(frame)
            if label is not None and not foreign:
                return label
            if python is None and label is not None and frame["filename"].endswith(".py"):
                python = label
        return python

    def _of_frame(self, frame: object) -> tuple[str | None, bool]:
        """The label of a frame, and whether it is none of the user's."""
        known = self._frames.get(id(frame))
        if known is None:
            label = foreign = None
            if isinstance(frame, dict):
                file, function, line = frame.get("filename"), frame.get("name"), frame.get("line")
                if isinstance(file, str) and isinstance(function, str) and type(line) is int:
                    foreign = FOREIGN.search(file) is not None
                    label = _printable(f"{function}@{_SLASH.split(file)[-1]}:{line}")
            known = self._frames[id(frame)] = (frame, ("!" if foreign else "") + label if label else None)
        text = known[1]
        if text is None:
            return None, True
        return (text[1:], True) if text.startswith("!") else (text, False)


def _line_of(frame: object) -> str:
    """A frame as memory_viz writes it."""
    if not isinstance(frame, dict):
        return ""
    return _printable(f"{frame.get('filename', '?')}:{frame.get('line', 0)}:{frame.get('name', '?')}", _MAX_FRAME)


def _printable(text: str, most: int = _MAX_NAME) -> str:
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= most else line[: most - 3] + "..."
