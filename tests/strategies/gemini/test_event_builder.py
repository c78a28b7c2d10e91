"""The event builder: what it appends are the columns that a trace written by hand would have."""

from __future__ import annotations

import pytest

from strategies.gemini.event_builder import EventBuilder
from traces.check import check
from traces.model import Op, RankEvents, Trace


def built() -> EventBuilder:
    out = EventBuilder()
    out.phase("load")
    weight = out.alloc(1000, "parameter", "w")
    out.phase("forward", 2)
    piece = out.alloc(300, "communication", "piece", 1)
    out.record_stream(piece, 3)
    out.free(piece)
    out.add(Op.WAIT_STREAM, stream=0, on=1)
    out.collective("all_gather", "dp", 4000, 700, stream=1, name="chunk")
    out.kernel(90, "mm", flops=5, moved=6)
    out.kernel(0, "nothing")
    out.add(Op.SYNCHRONIZE)
    out.add(Op.SYNCHRONIZE, stream=1)
    out.add(Op.EMPTY_CACHE)
    out.add(Op.HOLD_EVENTS, hold=True)
    out.free(weight)
    return out


def test_columns() -> None:
    events = built().events()
    assert [Op(op).name.lower() for op in events.op] == [
        *("phase", "alloc", "phase", "alloc", "record_stream", "free", "wait_stream", "collective", "kernel"),
        *("synchronize", "synchronize", "empty_cache", "hold_events", "free"),
    ]
    assert events.ints("id").tolist() == [-1, 0, -1, 1, 1, 1, *[-1] * 7, 0]
    assert events.ints("bytes").tolist() == [0, 1000, 0, 300, 0, 0, 0, 4000, 6, *[0] * 5]
    assert events.ints("stream").tolist() == [0, 0, 0, 1, 3, 0, 0, 1, 0, -1, 1, *[0] * 3]
    assert events.ints("step").tolist()[:4] == [-1, -1, 2, -1]
    assert events.ints("on").tolist()[6] == 1
    assert events.ints("duration_ns").tolist()[7:9] == [700, 90]
    assert events.bools("hold").tolist() == [*[False] * 12, True, False]
    names, groups = events.strings("name"), events.strings("group")
    assert [names.get(i) for i in (0, 1, 2, 3, 7, 8)] == ["load", "w", "forward", "piece", "chunk", "mm"]
    assert [groups.get(i) for i in (6, 7)] == [None, "dp"]


def test_they_are_a_legal_trace() -> None:
    check(Trace((RankEvents((0, 1), built().events()),), groups={"dp": ((0, 1),)}))
    assert len(EventBuilder().events()) == 0


def test_a_storage_dies_once() -> None:
    out = EventBuilder()
    first, second = out.alloc(10, "activation", "a"), out.alloc(5, "activation", "b")
    out.free(first)
    assert (out.size(first), out.size(second)) == (10, 5)
    with pytest.raises(ValueError, match="storage 0 is freed twice"):
        out.free(first)
