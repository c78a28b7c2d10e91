"""The strategy of one GPU: what each event of a step graph becomes in a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import traces
from graph.model import Kind
from strategies import Speed, lower, registry
from strategies.lowering import device_of
from strategies.rank_events import events_of
from tests.support.step_graphs import Writer, training
from traces.check import check
from traces.errors import ConfigError
from traces.model import CATEGORIES, Events, Op, RankEvents, Trace


def rows(events: Events) -> list[tuple[str, int, int, int]]:
    """Op, id, bytes and stream of every event."""
    columns = (events.ints(name).tolist() for name in ("id", "bytes", "stream"))
    return [(Op(op).name.lower(), *row) for op, *row in zip(events.op.tolist(), *columns, strict=True)]


def test_events_keep_their_order_and_sizes() -> None:
    writer = Writer()
    writer.phase("load")
    weight = writer.alloc(1000, "parameter", "fc.weight", "fc")
    writer.event(Kind.STEP, value=0)
    writer.phase("forward", 0)
    writer.event(Kind.ENTER, 3)
    writer.operator("aten.mm.default", module="fc", flops=5, moved=7)
    out = writer.alloc(2000, name="aten.mm.default", module="fc", stream=7)
    writer.event(Kind.SYNCHRONIZE)
    writer.free(out)
    writer.free(weight)
    events = events_of(writer.graph())
    assert rows(events) == [
        ("phase", -1, 0, 0),
        ("alloc", 0, 1000, 0),
        ("phase", -1, 0, 0),
        ("alloc", 1, 2000, 7),
        ("synchronize", -1, 0, -1),
        ("free", 1, 0, 0),
        ("free", 0, 0, 0),
    ]
    assert events.ints("step").tolist() == [-1, -1, 0, -1, -1, -1, -1]
    names, categories = events.strings("name"), events.strings("category")
    assert [names.get(i) for i in range(7)] == [
        *("load", "fc.weight", "forward", "fc: aten.mm.default"),
        *(None, None, None),
    ]
    assert [categories.get(i) for i in (0, 1, 3, 5)] == [None, "parameter", "activation", None]
    assert set(categories.table) <= set(CATEGORIES)


def test_streams_and_collectives_go_over() -> None:
    """What a captured rank of several says of streams."""
    writer = Writer()
    shard = writer.alloc(100, "parameter", stream=7)
    writer.event(Kind.RECORD_STREAM, shard, 9)
    other = writer.alloc(10)
    writer.event(Kind.RECORD_STREAM, other, 7)
    writer.event(Kind.WAIT_STREAM, 7, 0)
    writer.event(Kind.COLLECTIVE, writer.code("all_gather fsdp 7"), 400)
    writer.event(Kind.COLLECTIVE, writer.code("all_reduce dp"), 10)
    events = events_of(writer.graph())
    assert rows(events) == [
        ("alloc", 0, 100, 7),
        ("record_stream", 0, 0, 9),
        ("alloc", 1, 10, 0),
        ("record_stream", 1, 0, 7),
        ("wait_stream", -1, 0, 7),
        ("collective", -1, 400, 7),
        ("collective", -1, 10, 0),
    ]
    assert events.ints("on").tolist() == [-1] * 4 + [0, -1, -1]
    kinds, names = events.strings("kind"), events.strings("group")
    assert [(kinds.get(i), names.get(i)) for i in (5, 6)] == [("all_gather", "fsdp"), ("all_reduce", "dp")]
    ranks = (RankEvents((0,), events),)
    check(Trace(ranks, groups={"fsdp": ((0, 1),), "dp": ((0,),)}))


def test_kernels_only_when_asked() -> None:
    writer = Writer()
    writer.operator("aten.mm.default", module="fc", flops=4_000_000, moved=1000)
    writer.operator("aten.view.default")
    writer.operator("aten.add.Tensor", flops=1000, moved=8_000_000)
    assert len(events_of(writer.graph())) == 0
    speed = Speed(flops_per_second=1e12, bytes_per_second=1e12, fixed_ns=500)
    events = events_of(writer.graph(), speed)
    assert rows(events) == [("kernel", -1, 1000, 0), ("kernel", -1, 8_000_000, 0)]
    assert events.ints("flops").tolist() == [4_000_000, 1000]
    assert events.ints("duration_ns").tolist() == [4_500, 8_500]
    assert [events.strings("name").get(i) for i in (0, 1)] == ["fc: aten.mm.default", "aten.add.Tensor"]
    check(lower(writer.graph(), speed=speed))


def test_device_settings_and_metadata_are_the_case_s() -> None:
    case = {"model": "m", "gpu": "V100", "release": "2.9.1+cu128", "alloc_conf": "max_split_size_mb:128", "batch": 4}
    trace = lower(training(case))
    check(trace)
    (device,) = trace.devices
    assert (device.name, device.total_bytes) == ("V100-16GB", 16_935_419_904)
    assert (trace.conf, trace.release) == ("max_split_size_mb:128", "2.9.1+cu128")
    assert trace.metadata["case"] == case
    assert trace.metadata["strategy"] == "single"
    assert trace.metadata["assumptions"] == ["routers spread tokens evenly"]
    assert [group.ranks for group in trace.ranks] == [(0,)]


def test_memory_of_the_case_is_the_device_s() -> None:
    assert lower(training({"model": "m", "memory": 5 << 30})).devices[0].total_bytes == 5 << 30
    assert lower(training({"model": "m", "memory": [6 << 30]})).devices[0].total_bytes == 6 << 30
    assert lower(training({"model": "m", "memory": [None]})).devices[0].total_bytes == 85_097_971_712


def test_late_events_are_held_from_the_start() -> None:
    graph = training()
    prompt, late = (lower(training({"model": "m", "deferred": which})).ranks[0].events for which in ("prompt", "late"))
    assert late.op[0] == Op.HOLD_EVENTS
    assert late.bools("hold")[0]
    assert late.op[1:].tolist() == prompt.op.tolist() == events_of(graph).op.tolist()
    assert late.strings("name").codes[1:].tolist() == prompt.strings("name").codes.tolist()
    assert rows(late)[1:] == rows(prompt)


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    trace = lower(training(steps=3, micro=2), speed=Speed(1e12, 1e12))
    for name in ("trace.json", "trace.npz"):
        path = f"{tmp_path}/{name}"
        traces.write(trace, path)
        back = traces.read(path)
        assert rows(back.ranks[0].events) == rows(trace.ranks[0].events)
        assert back.metadata == trace.metadata


def test_an_empty_graph_has_no_events() -> None:
    assert len(events_of(Writer().graph())) == 0


def test_large_graphs_are_lowered_quickly() -> None:
    """Columns, not loops: half a million events within a second."""
    import time

    writer = Writer()
    for _ in range(1000):
        writer.free(writer.alloc(4096, name="aten.add.Tensor", module="layer"))
    graph = writer.graph()
    repeated = type(graph)(
        **{
            **vars(graph),
            "kind": np.tile(graph.kind, 250),
            "index": np.tile(graph.index, 250),
            "value": np.tile(graph.value, 250),
        }
    )
    started = time.perf_counter()
    assert len(events_of(repeated)) == 500_000
    assert time.perf_counter() - started < 1


def test_an_unknown_strategy_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy 'fsdp3' is not available; did you mean 'fsdp[12]'\? there are: single"
    ):
        registry.named("fsdp3")


def test_one_size_a_rank() -> None:
    from graph.case import Case

    case = Case.of({"model": "m", "strategy": "ddp", "world": 2, "memory": [1 << 30, 2 << 30]})
    assert [device_of(case, rank).total_bytes for rank in (0, 1)] == [1 << 30, 2 << 30]
    with pytest.raises(ConfigError, match="one size a rank"):
        device_of(case, 2)
