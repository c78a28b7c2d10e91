"""A captured run of the examples' models in the words of `tests.support.worked_examples`: lines of a step, totals,
peaks.

The examples leave out activations, inputs and workspaces; `Run` does too, by category and by the sizes that
activations of 64 tokens have, none of which is the size of anything else in the examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graph.case import Case
from graph.loop.method import Method
from graph.recorder.capture import capture
from strategies.lowering import lower
from strategies.rank_events import events_of
from tests.support.worked_examples import Example
from traces.model import Events, Op

Seen = tuple[str, int, str]  # sign, bytes, stream

#: 64 tokens of 256 (inputs), 512 (hidden) and 255 (outputs) values in 4 and in 2 bytes, and the loss.
ACTIVATIONS = {64 * width * size for width in (256, 512, 255) for size in (4, 2)} | {2}


@dataclass
class Run:
    """Events up to the end of step 2 with its zero_grad. `late`: peak in blocks with waiting deaths kept."""

    lines: dict[str, list[Seen]] = field(default_factory=dict)
    waiting: set[tuple[int, str]] = field(default_factory=set)  # bytes and stream of deaths in step 2 that wait
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    persistent: tuple[int, int] = (0, 0)
    late: int = 0

    @property
    def peak(self) -> tuple[int, int]:
        """Requested bytes, and bytes in blocks of 512, at the peak."""
        return max(one[0] for one in self.peaks.values()), max(one[1] for one in self.peaks.values())

    def sizes(self, part: str) -> list[tuple[str, int]]:
        """The lines of a part without their streams."""
        return [(sign, size) for sign, size, _ in self.lines[part]]


def captured(document: Mapping[str, Any], method: Method | None = None) -> Events:
    """The events of rank 0 of a case; `method` in place of the strategy's own."""
    case = Case.of(document)
    if method is not None:
        return events_of(capture(method.captured_case() if hasattr(method, "captured_case") else case, method=method))
    return lower(case).ranks[0].events


def run(events: Events, streams: Mapping[int, str]) -> Run:
    """`streams` names the streams as the example does. Parts: "init", "step 1", "step 2".

    A step begins where its input is copied, so that it ends with the frees of its zero_grad.
    """
    found = Run({"init": []})
    ids, sizes, numbers = events.ints("id"), events.ints("bytes"), events.ints("stream")
    categories = events.strings("category")
    alive: dict[int, Seen] = {}
    recorded: set[int] = set()
    part, step, live, blocks, pending = "init", 0, 0, 0, 0
    for index, code in enumerate(events.op.tolist()):
        ident, category = int(ids[index]), categories.get(index)
        if code == Op.ALLOC and category == "input":
            step += 1
            if step == 3:
                break
            part = f"step {step}"
            found.lines[part] = []
        elif code == Op.ALLOC and category != "workspace" and not _activation(int(sizes[index]), category):
            seen = alive[ident] = ("+", int(sizes[index]), streams[int(numbers[index])])
            found.lines[part].append(seen)
            live, blocks = live + seen[1], blocks + _block(seen[1])
            before = found.peaks.get(part, (0, 0))
            found.peaks[part] = (max(before[0], live), max(before[1], blocks))
            found.late = max(found.late, blocks + pending)
        elif code == Op.FREE and ident in alive:
            _, size, stream = alive.pop(ident)
            found.lines[part].append(("-", size, stream))
            live, blocks = live - size, blocks - _block(size)
            if ident in recorded:
                pending += _block(size)
                if part == "step 2":
                    found.waiting.add((size, stream))
        elif code == Op.RECORD_STREAM:
            if ident in alive and streams[int(numbers[index])] != alive[ident][2]:
                recorded.add(ident)
        elif code == Op.SYNCHRONIZE:
            pending = 0
    found.persistent = (live, blocks)
    return found


def expected(example: Example, part: str) -> list[Seen]:
    """The lines of an example in the form of a run's."""
    return [(sign, size, example.streams[name]) for sign, name, size in example.lines(part)]


def rewritten(lines: list[Seen], old: str, new: str) -> list[Seen]:
    """`lines` with the one place where `old` stands replaced by `new`; both such as "+510:D -261120:D"."""
    before, after = _read(old), _read(new)
    width = len(before)
    places = [place for place in range(len(lines) - width + 1) if lines[place : place + width] == before]
    assert len(places) == 1, f"{old!r} stands at {len(places)} places"
    return [*lines[: places[0]], *after, *lines[places[0] + width :]]


def _read(text: str) -> list[Seen]:
    words = (word.partition(":") for word in text.split())
    return [(size[0], int(size[1:].replace("_", "")), stream or "D") for size, _, stream in words]


def _activation(size: int, category: str | None) -> bool:
    return size in ACTIVATIONS or (size == 4 and category != "optimizer_state")


def _block(size: int) -> int:
    return -(-size // 512) * 512
