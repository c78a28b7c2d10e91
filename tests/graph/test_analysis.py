"""Analyses of a step graph against plain models, and against arithmetic on a graph written by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.analysis import (
    alive,
    by_module,
    by_phase,
    critical_path,
    largest,
    layers_together,
    live_bytes,
    peak,
    phase_peaks,
    saved_for_backward,
    saved_storages,
)
from graph.dag import edges
from graph.model import Kind, Role, StepGraph, TensorInfo
from graph.summary import document, summarize
from tests.support.made_graphs import Maker, example, random_graph

NUMBERS = st.lists(st.integers(0, 2**32), max_size=120)


def naive_live(graph: StepGraph) -> list[dict[int, int]]:
    """What is alive after each event: storage -> bytes."""
    living: dict[int, int] = {}
    after = []
    for kind, index in zip(graph.kind.tolist(), graph.index.tolist(), strict=True):
        if kind == Kind.ALLOC:
            living[index] = int(graph.storages.bytes[index])
        elif kind == Kind.FREE:
            del living[index]
        after.append(dict(living))
    return after


@given(NUMBERS)
def test_live_bytes_are_those_of_a_plain_count(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    after = naive_live(graph)
    assert live_bytes(graph).tolist() == [sum(living.values()) for living in after]
    for event in range(0, len(after), 7):
        found = alive(graph, event)
        assert {tensor.storage: tensor.bytes for tensor in found} == {
            s: size for s, size in after[event].items() if size
        }
        assert [tensor.bytes for tensor in found] == sorted((tensor.bytes for tensor in found), reverse=True)


@given(NUMBERS)
def test_peaks_are_those_of_a_plain_count(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    live = [sum(living.values()) for living in naive_live(graph)]
    found = peak(graph)
    assert found.bytes == max(live, default=0) == sum(found.by_category.values())
    if live:
        assert found.event == live.index(found.bytes)
    phases = phase_peaks(graph)
    assert sum(phase.end - phase.start for phase in phases) == len(live)
    for phase in phases:
        assert phase.peak == max(live[phase.start : phase.end])
        assert phase.left == live[phase.end - 1]
        assert peak(graph, phase=phase).bytes == phase.peak


@given(NUMBERS)
def test_the_critical_path_is_the_longest_of_all(numbers: list[int]) -> None:
    nx = pytest.importorskip("networkx")
    graph = random_graph(numbers)
    flops = graph.operators.flops.tolist()
    view = nx.DiGraph()
    view.add_nodes_from(range(len(flops)))
    found = edges(graph)
    for source, target in zip(found.source.tolist(), found.target.tolist(), strict=True):
        if source < len(flops):
            view.add_edge(source, target)
    best: dict[int, int] = {}
    for node in nx.topological_sort(view):
        best[node] = flops[node] + max((best[before] for before in view.predecessors(node)), default=0)
    path = critical_path(graph)
    assert path.flops == max(best.values(), default=0) == sum(flops[operator] for operator in path.operators)
    assert all(view.has_edge(*pair) for pair in zip(path.operators, path.operators[1:], strict=False))


@given(NUMBERS)
def test_totals_add_up(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    table = graph.operators
    for totals in (by_phase(graph), by_module(graph), by_module(graph, together=False)):
        assert sum(total.operators for total in totals) == len(table)
        assert sum(total.flops for total in totals) == table.flops.sum()
        assert sum(total.moved for total in totals) == table.moved.sum()
        assert len({(total.name, total.step) for total in totals}) == len(totals)
    # a storage born before the first operator belongs to none
    start = next((place for place, kind in enumerate(graph.kind) if kind == Kind.OPERATOR), len(graph.kind))
    early = [int(graph.index[place]) for place in range(start) if graph.kind[place] == Kind.ALLOC]
    allocated = int(graph.storages.bytes.sum()) - sum(int(graph.storages.bytes[storage]) for storage in early)
    assert sum(total.allocated for total in by_phase(graph)) == allocated


def test_the_example_by_hand() -> None:
    graph = example()
    found = peak(graph)
    # weights, input, loss and logits, what is passed back, both gradients
    assert (found.bytes, found.phase, found.step) == (3000 + 100 + 44 + 300 + 3000, "backward", 0)
    assert [(phase.name, phase.step, phase.peak, phase.left) for phase in phase_peaks(graph)] == [
        ("", -1, 0, 0),
        ("load", -1, 3000, 3000),
        ("forward", 0, 3000 + 100 + 300 + 400 + 44 + 50, 3844),
        ("backward", 0, 3000 + 100 + 300 + 44 + 3000, 3000 + 100 + 44 + 3000),
        ("optimizer", 0, 6144, 3100),
    ]
    assert found.by_category == {"gradient": 3000, "parameter": 3000, "temporary": 300, "input": 100, "activation": 44}
    assert [tensor.name for tensor in found.tensors[:2]] == ["layers.1.weight"] * 2
    assert [tensor.storage for tensor in largest(graph, 3)] == [1, 8, 0]


def test_what_is_saved_for_backward() -> None:
    graph = example()
    assert saved_storages(graph).tolist() == [3, 4, 5, 6]  # hidden, active, loss, logits; not the input, nor scratch
    rows = [(row.operator, row.module, row.storages, row.bytes, row.read) for row in saved_for_backward(graph)]
    assert rows == [
        ("aten.gelu.default", "layers.*.act", 1, 400, 400),
        ("aten.mm.default", "layers.*", 1 + 2, 344, 304),  # nothing reads the logits any more
    ]
    assert saved_storages(graph, step=0).tolist() == [3, 4, 5, 6]
    assert saved_storages(graph, step=1).tolist() == []


def test_saved_of_the_last_step_and_the_last_micro_batch() -> None:
    make = Maker()
    kept: list[int] = []
    for step in range(2):
        for _ in range(2):
            make.phase("forward", step)
            make.operator("aten.mm.default", role=Role.FORWARD, module="a")
            kept.append(make.alloc(10 + len(kept)))
            make.phase("backward", step)
            make.operator("aten.mm.default", [kept[-1]], role=Role.BACKWARD, module="a")
            make.operator("aten.exp.default", role=Role.RECOMPUTE, module="a")
            make.alloc(1000)
    graph = make.graph()
    assert saved_storages(graph).tolist() == [kept[3]]
    assert saved_storages(graph, step=0).tolist() == [kept[1]]


def test_a_forward_pass_alone_saves_nothing() -> None:
    make = Maker()
    make.operator("aten.mm.default", role=Role.FORWARD)
    make.alloc(10)
    assert saved_for_backward(make.graph()) == ()
    assert saved_for_backward(Maker().graph()) == ()


def test_critical_path_of_some_roles_only() -> None:
    graph = example()
    whole = critical_path(graph)
    assert (whole.operators, whole.flops) == ((2, 3, 4, 5), 500 + 700 + 700)
    forward = critical_path(graph, among=(Role.FORWARD,))
    assert (forward.operators, forward.flops) == ((2, 3, 4), 1200)
    assert critical_path(graph, among=(Role.RECOMPUTE,)).operators == ()
    assert critical_path(Maker().graph()).flops == 0


@pytest.mark.parametrize(
    ("path", "together"),
    [("model.layers.11.mlp", "model.layers.*.mlp"), ("h.0", "h.*"), ("0.1.x2", "*.*.x2"), ("", ""), (None, None)],
)
def test_layers_are_told_together(path: str | None, together: str | None) -> None:
    assert layers_together(path) == together


def test_summary_and_its_document() -> None:
    weights = (
        TensorInfo("layers.0.weight", (10, 25), "float32", True, "parameter", 0),
        TensorInfo("layers.1.weight", (20, 25), "float32", False, "parameter", 1),
        TensorInfo("copy", (20, 25), "float32", False, "parameter", 1),
        TensorInfo("ids", (25,), "float32", False, "buffer", 2),
    )
    modules = (("", "Net"), ("layers.0", "Linear"), ("layers.1", "Linear"), ("layers.0.act", "GELU"))
    graph = dataclasses.replace(example(), tensors=weights, modules=modules)
    found = summarize(graph)
    own = found.parameters
    assert (own.elements, own.bytes, own.trained_elements, own.trained_bytes, own.buffer_bytes) == (
        1250,
        3000,
        250,
        1000,
        100,
    )
    assert (found.operators, found.storages, found.events) == (9, 11, len(graph.kind))
    assert (found.flops, found.step_flops, found.last_step) == (2400, 2400, 0)
    assert found.saved_bytes == 744
    assert found.saved_by_class() == (("GELU", 1, 400, 400), ("Linear", 3, 344, 304))
    said = document(found)
    assert said["peak"]["bytes"] == found.peak.bytes
    assert [phase["name"] for phase in said["phases"]] == ["", "load", "forward", "backward", "optimizer"]
    assert sum(phase["flops"] for phase in said["phases"]) == 2400
    assert said["assumptions"] == ["every token is real"]
