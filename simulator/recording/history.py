"""The allocator's history in the snapshots that a program makes itself, as `_record_memory_history` asks for it.

What was served so far is replayed with a log, so the entries are those that `--snapshot` writes; frames are those of
allocations alone. Times are places in the history.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from simulator.engine.replay import replay
from traces.collecting import uncollected
from traces.model import Trace

#: Where something was asked: before an event of the history, as the n-th thing of all.
_Place = tuple[int, int]


class History:
    """What snapshots have of the history, as the program asked for it; `served` makes a trace of all so far."""

    def __init__(self, served: Callable[[], Trace]) -> None:
        self._served = served
        self._limits: list[tuple[_Place, int]] = []  # from a place on there are so many entries at most
        self._switched: list[int] = []  # the events at which it began, ended, began
        self._made: list[tuple[_Place, int]] = []  # snapshots, and the bytes allocated then
        self._asked = 0

    def record(self, event: int, most: int, *, clear: bool) -> None:
        """Before this event `_record_memory_history` asks for the last `most` entries from here on (0: no more)."""
        if (most > 0) != bool(self._limits):
            self._switched.append(event)
        if clear or not most:
            self._limits.clear()
            self._made.clear()
        if most:
            self._limits.append((self._place(event), most))

    def _place(self, event: int) -> _Place:
        self._asked += 1
        return event, self._asked

    def into(self, bare: dict[str, Any], memory: int, event: int, allocated: int) -> dict[str, Any]:
        """A snapshot that has no history with what it has of it, and frames of the blocks that were allocated since.

        It is made before this event, with so many bytes allocated, of a device of `memory` bytes.
        """
        if not self._switched:
            return bare
        with uncollected():
            served = self._served()
            result = replay(served, memory=memory, snapshot=True, analyse=False, needs=False, after_oom="continue")
        (rank,) = result.ranks
        assert rank.snapshot is not None
        entries = rank.snapshot["device_traces"][-1]
        born = [one for one in entries if one["action"] == "alloc" and bisect_right(self._switched, one["time_us"]) % 2]
        _put_frames(bare, {one["addr"]: one.get("frames", []) for one in born})
        made = {**bare, "device_traces": [*bare["device_traces"][:-1], self._kept(entries)]}
        if self._limits:
            self._made.append((self._place(event), allocated))
        return made

    def _kept(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of the entries, and of the snapshots so far, what there was room for."""
        every = [((one["time_us"], sys.maxsize), one) for one in entries]
        every += [(place, _mark(place, allocated)) for place, allocated in self._made]
        every.sort(key=lambda one: one[0])
        kept: list[dict[str, Any]] = []
        for (begin, most), (end, _) in pairwise((*self._limits, ((sys.maxsize, 0), 0))):
            kept = [*kept, *(one for place, one in every if begin <= place < end)][-most:]
        return kept


def _put_frames(snapshot: dict[str, Any], frames: dict[int, Any]) -> None:
    """Blocks in use have the frames by their addresses."""
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                block["frames"] = frames.get(block["address"], [])


def _mark(place: _Place, allocated: int) -> dict[str, Any]:
    entry = {"action": "snapshot", "addr": 0, "size": allocated, "stream": 0, "time_us": place[0]}
    return {**entry, "compile_context": "N/A", "user_metadata": ""}
