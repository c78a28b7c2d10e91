"""The step graph as a graph: edges against a plain model, no cycles ever, and what networkx sees."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.dag import Edges, edges, operator_rows
from graph.model import Kind, StepGraph
from tests.support.made_graphs import Maker, example, large_graph, random_graph

NUMBERS = st.lists(st.integers(0, 2**32), max_size=120)


def naive_edges(graph: StepGraph) -> set[tuple[int, int, int, int, bool]]:
    """The rule, told operator by operator: (source, target, storage, version, replaced)."""
    last: dict[int, tuple[int, int]] = {}
    found = set()
    count = len(graph.operators)
    for operator in range(count):
        reads, writes = (
            [
                (int(table.storage[place]), int(table.version[place]))
                for place in range(table.start[operator], table.start[operator + 1])
            ]
            for table in (graph.reads, graph.writes)
        )
        for storage, _ in reads:
            source, version = last.get(storage, (count + storage, 0))
            found.add((source, operator, storage, version, False))
        for storage, _ in writes:
            source, version = last.get(storage, (-1, 0))
            if source >= 0 and (source, operator, storage, version, False) not in found:
                found.add((source, operator, storage, version, True))
        for storage, version in writes:
            last[storage] = (operator, version)
    return found


def rows(found: Edges) -> list[tuple[int, int, int, int, bool]]:
    columns = (found.source, found.target, found.storage, found.version, found.replaced)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(NUMBERS)
def test_edges_follow_the_rule(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    found = rows(edges(graph))
    assert set(found) == naive_edges(graph)
    assert len(set(found)) == len(found)
    assert [row[1::-1] for row in found] == sorted(row[1::-1] for row in found)


@given(NUMBERS)
def test_every_edge_runs_forward(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    found = edges(graph)
    inner = found.source < len(graph.operators)
    assert (found.source[inner] < found.target[inner]).all()


def test_in_place_operators_make_versions_not_cycles() -> None:
    make = Maker()
    first = make.operator("empty")
    buffer = make.alloc(100)
    left = make.operator("copy_", writes=[buffer])  # fills a part: reads nothing
    right = make.operator("copy_", writes=[buffer])
    add = make.operator("add_", [buffer, buffer], [buffer])
    use = make.operator("sum", [buffer])
    assert rows(edges(make.graph())) == [
        (first, left, buffer, 0, True),
        (left, right, buffer, 1, True),
        (right, add, buffer, 2, False),
        (add, use, buffer, 3, False),
    ]


def test_a_graph_without_operators_or_events() -> None:
    assert rows(edges(Maker().graph())) == []
    make = Maker()
    make.alloc(10, made=False)
    assert rows(edges(make.graph())) == []


# networkx


def view_of(graph: StepGraph) -> Any:
    pytest.importorskip("networkx")
    from graph.dag import to_networkx

    return to_networkx(graph)


@settings(deadline=None)
@given(NUMBERS)
def test_networkx_sees_a_dag_with_every_operator_and_tensor(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    view = view_of(graph)
    import networkx as nx

    assert nx.is_directed_acyclic_graph(view)
    found = edges(graph)
    assert view.number_of_edges() == len(found)
    operators = [node for node, role in view.nodes(data="role") if role != "loaded"]
    assert operators == list(range(len(graph.operators)))
    # what runs into an operator is what it reads, each storage once, and what it replaces unread
    sizes = graph.storages.bytes
    for operator in operators:
        start, end = graph.reads.start[operator], graph.reads.start[operator + 1]
        reads = set(graph.reads.storage[start:end].tolist())
        into = [data for _, _, data in view.in_edges(operator, data=True)]
        assert {data["storage"] for data in into if data["kind"] == "read"} == reads
        assert sum(data["bytes"] for data in into if data["kind"] == "read") == sum(int(sizes[one]) for one in reads)
    total = sum(data["bytes"] for *_, data in view.edges(data=True))
    assert total == int(sizes[found.storage].sum())


def test_attributes_of_nodes_and_edges() -> None:
    graph = example()
    view = view_of(graph)
    assert view.nodes[2] == {
        "name": "aten.mm.default",
        "module": "layers.0",
        "role": "forward",
        "phase": "forward",
        "step": 0,
        "stream": 0,
        "thread": 0,
        "flops": 500,
        "moved": 1400,
        "origin": -1,
    }
    assert view.nodes[7]["origin"] == 2
    assert view.edges[2, 3, 3] == {
        "bytes": 300,
        "dtype": "float32",
        "category": "activation",
        "storage": 3,
        "version": 0,
        "kind": "read",
    }
    assert view.edges[0, 1, 0]["kind"] == "replaced"
    loaded = {node: data for node, data in view.nodes(data=True) if data["role"] == "loaded"}
    operators = len(graph.operators)
    assert {node - operators for node in loaded} == {1, 2}  # the second weight, the input
    assert loaded[operators + 1]["name"] == "layers.1.weight"
    assert view.graph["case"] == {"model": "opt-125m"}
    assert view.graph["parameters"] == {"layers.0.weight": 0, "layers.1.weight": 1}


def test_several_tensors_between_the_same_operators() -> None:
    make = Maker()
    first = make.operator("split")
    one, two = make.alloc(10), make.alloc(20)
    second = make.operator("cat", [one, two])
    view = view_of(make.graph())
    assert {key: data["bytes"] for key, data in view[first][second].items()} == {one: 10, two: 20}


def test_a_large_graph_in_a_second() -> None:
    pytest.importorskip("networkx")
    graph = large_graph(60_000)
    start = time.process_time()
    view = view_of(graph)
    assert time.process_time() - start < 2  # under 1 on a quiet machine
    assert view.number_of_nodes() == 60_000
    assert view.number_of_edges() > 80_000


def test_rows_have_plain_numbers() -> None:
    for row in operator_rows(example()):
        assert {type(value) for value in row.values()} <= {int, str, type(None)}
    graph = example()
    assert np.array_equal(np.flatnonzero(graph.kind == Kind.OPERATOR).shape, (9,))
