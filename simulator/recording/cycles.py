"""What Python's collector gave back: memory that nobody used any more, but that cycles of references kept alive.

Where that is much, the peak depends on when the collector happens to run, and the program would do with less.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from graph.recorder.program import Labels, ProgramRecorder
from graph.user_code import place
from traces.model import Int64Array
from traces.units import format_bytes

#: What is worth a word.
_LEAST: Final = 1 << 20


@contextmanager
def followed(recorder: ProgramRecorder) -> Iterator[None]:
    """Inside, allocations that the collector frees are noted in the recorder's labels."""

    def told(phase: str, info: object) -> None:
        recorder.collecting = phase == "start"

    gc.callbacks.append(told)
    try:
        yield
    finally:
        gc.callbacks.remove(told)


def notice(labels: Labels, size: Int64Array) -> str:
    """What the collector freed, of allocations of these sizes, and where most of that had come from; or nothing."""
    lines: Counter[str] = Counter()
    for number in labels.collected:
        leaf = labels.lines.leaf(labels.stack[number])
        lines["an unknown place" if leaf is None else place(*leaf)] += int(size[number])
    if lines.total() < _LEAST:
        return ""
    (where, most), *_ = lines.most_common(1)
    return (
        f"Python's collector freed {format_bytes(lines.total())} kept alive by cycles of references, "
        f"{format_bytes(most)} of it from {where}"
    )
