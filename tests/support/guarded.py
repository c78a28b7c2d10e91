"""Runs the kernels as plain Python with every access to their memory checked: compiled, they use bare pointers.

`NUMBA_DISABLE_JIT=1 python -m tests.support.guarded [FIRST STOP]`; `tests/simulator/commands/test_fuzz.py` starts it.
An access outside the array is an error, and so is an event that takes more words from the top of the memory than
`words_needed` says.
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

import traces.jit
from traces.model import Int64Array


class Guard:
    """An array as kernels see it; `stop` is the end of what they may touch now."""

    def __init__(self, array: Int64Array) -> None:
        self.array = array
        self.stop = len(array)

    def __getitem__(self, index: int) -> int:
        self.check(index)
        return int(self.array[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.check(index)
        self.array[index] = value

    def check(self, index: int) -> None:
        if not 0 <= index < self.stop:
            raise AssertionError(f"word {index} of {self.stop} is touched (the array has {len(self.array)})")


traces.jit.pointer = Guard

from simulator.allocator import layout as at  # noqa: E402
from simulator.engine import kernels as engine  # noqa: E402 (kernels take the pointer function when they are imported)
from simulator.engine.replay import replay  # noqa: E402
from tests.support.extremes import extreme_document  # noqa: E402
from traces.errors import LLMemError  # noqa: E402
from traces.forms.json_events import read_json  # noqa: E402

MIB = 1 << 20
_has_room = engine.has_room


def has_room(m: Any) -> bool:
    """`engine.has_room`; the event that follows may take no more than the least that it promises."""
    m.stop = len(m.array)
    if not _has_room(m):
        return False
    m.stop = min(m.stop, m[at.TOP] + engine.words_needed(m) + m.stop - m[at.ROOM])
    return True


engine.has_room = has_room


def serve(document: dict[str, Any]) -> str:
    """Replay a document with everything kept: what became of it."""
    try:
        result = replay(read_json(json.dumps(document).encode()), events=True, log=True, snapshot=True)
    except LLMemError:
        return "error"
    return result.verdict


def alloc(number: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"op": "alloc", "id": number, "bytes": size, "stream": stream}


def document(*ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A trace of one group of all ranks."""
    return {
        "format": "memory-trace",
        "version": 1,
        "allocator": {"release": "2.13"},
        "devices": [{"name": "toy", "total_bytes": 1 << 43}],
        "groups": {"g": list(range(len(ranks)))},
        "ranks": [{"rank": number, "events": events} for number, events in enumerate(ranks)],
    }


def many_sets_filled_at_once(streams: int) -> dict[str, Any]:
    """Blocks of many streams, each alone in its segment, are all freed by one event: each opens a set of its own."""
    events = [alloc(i, 20 * MIB, i) for i in range(streams)]
    events += [{"op": "record_stream", "id": i, "stream": streams} for i in range(streams)]
    events += [{"op": "hold_events", "hold": True}, *({"op": "free", "id": i} for i in range(streams))]
    return document([*events, {"op": "hold_events", "hold": False}, alloc(streams, 100)])


def many_uses_behind_a_collective(streams: int) -> dict[str, Any]:
    """A block used on many streams is freed while all of them wait for a collective: each use becomes work."""
    meet = {"op": "collective", "group": "g", "stream": 0, "duration_ns": 5}
    events = [alloc(0, 100), meet, *({"op": "wait_stream", "stream": i, "on": 0} for i in range(1, streams))]
    events += [{"op": "record_stream", "id": 0, "stream": i} for i in range(1, streams)]
    return document([*events, {"op": "free", "id": 0}, alloc(1, 100)], [{"op": "kernel", "duration_ns": 100}, meet])


def main() -> None:
    """Replay what is known to need much room, and random documents FIRST to STOP (0 to 150)."""
    first, stop = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (0, 150)
    assert serve(many_sets_filled_at_once(700)) == "fits"
    assert serve(many_uses_behind_a_collective(2000)) == "fits"
    ends = [serve(extreme_document(Random(seed))) for seed in range(first, stop)]
    print(", ".join(f"{ends.count(end)} {end}" for end in ("fits", "oom", "error")))


if __name__ == "__main__":
    main()
