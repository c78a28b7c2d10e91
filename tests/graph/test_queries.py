"""Questions to the networkx view: the same as arrays say, a minimum cut that no other choice beats, and the files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.places import DATA

pytest.importorskip("networkx")

import networkx as nx

from graph import analysis, queries
from graph.dag import edges, to_networkx
from graph.exports import export
from graph.files import load, save
from graph.model import Role, StepGraph
from simulator.cli import main
from tests.support.made_graphs import Maker, assert_equal, example, random_graph
from traces.errors import ConfigError

NUMBERS = st.lists(st.integers(0, 2**32), max_size=80)


@settings(deadline=None, max_examples=40)
@given(NUMBERS)
def test_the_critical_path_is_that_of_the_arrays(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    view = to_networkx(graph)
    path = queries.critical_path(view, graph.operators.flops.tolist())
    assert path.cost == analysis.critical_path(graph).flops
    assert all(view.has_edge(one, two) for one, two in itertools.pairwise(path.operators))


@settings(deadline=None, max_examples=40)
@given(NUMBERS)
def test_the_recorded_order_is_a_topological_one(numbers: list[int]) -> None:
    graph = random_graph(numbers)
    assert queries.operators(to_networkx(graph)) == list(range(len(graph.operators)))


def trained(numbers: list[int]) -> StepGraph:
    """A forward pass of up to seven operators with inputs at random, and a backward that reads some of its tensors."""
    make = Maker()
    weight = make.alloc(10, "parameter", made=False)
    draw = np.random.default_rng(numbers)
    made: list[int] = []
    for _ in range(int(draw.integers(1, 8))):
        inputs = [one for one in made if draw.random() < 0.4]
        name = "aten.native_dropout.default" if draw.random() < 0.1 else "aten.gelu.default"
        make.operator(name, [weight, *inputs], role=Role.FORWARD, flops=int(draw.random() < 0.3), moved=1)
        made.append(make.alloc(int(draw.integers(1, 50))))
    for _ in range(3):
        make.operator("aten.mm.default", [one for one in made if draw.random() < 0.4], role=Role.BACKWARD)
        make.alloc(5, "gradient")
    return make.graph()


def least_kept(graph: StepGraph) -> int:
    """The least bytes, by trying every set of operators that run again."""
    role, made = graph.operators.role.tolist(), analysis.makers(graph).tolist()
    forward = [node for node, one in enumerate(role) if one == Role.FORWARD]
    reads = [
        {made[one] for one in graph.reads.storage[start:end].tolist()} & set(forward)
        for start, end in itertools.pairwise(graph.reads.start.tolist())
    ]
    size = {made[one]: int(graph.storages.bytes[one]) for one in range(len(made)) if made[one] in forward}
    needed = set().union(*(reads[node] for node, one in enumerate(role) if one == Role.BACKWARD))
    free = [
        node
        for node in forward
        if not graph.operators.flops[node] and "dropout" not in (graph.name(graph.operators.name[node]) or "")
    ]
    totals = []
    for count in range(len(free) + 1):
        for again in itertools.combinations(free, count):
            had = needed.union(*(reads[node] for node in again)) - set(again)
            totals.append(sum(size[node] for node in had))
    return min(totals)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=3))
def test_no_choice_keeps_less_than_the_cut(numbers: list[int]) -> None:
    graph = trained(numbers)
    found = queries.recompute(to_networkx(graph))
    assert found.kept == least_kept(graph)
    assert found.kept == sum(int(graph.storages.bytes[storage]) for _, storage in found.keep)
    assert found.now == sum(row.read for row in analysis.saved_for_backward(graph))
    assert found.kept <= found.now


@pytest.fixture(scope="module")
def captured() -> StepGraph:
    pytest.importorskip("transformers")
    from graph import Case, capture

    return capture(Case(str(DATA / "tiny_gpt2.json"), seq=64, steps=2))


def test_of_a_real_step(captured: StepGraph) -> None:
    view = to_networkx(captured)
    assert nx.is_directed_acyclic_graph(view)
    flops = captured.operators.flops.tolist()
    assert queries.critical_path(view, flops).cost == analysis.critical_path(captured).flops
    found = queries.recompute(view)
    saved = analysis.saved_for_backward(captured)
    assert found.now == sum(row.read for row in saved)
    assert found.kept < 0.6 * found.now  # GELU's eight tensors of a layer become one
    again = {view.nodes[node]["name"] for node in found.again}
    assert "aten.tanh.default" in again
    assert not again & {"aten.addmm.default", "aten.native_dropout.default"}


def test_the_loss_keeps_alive_what_backward_reads(captured: StepGraph) -> None:
    view = to_networkx(captured)
    last = max(node for node, data in view.nodes(data=True) if data["role"] == "forward")
    loss = next(one for one, maker in enumerate(analysis.makers(captured).tolist()) if maker == last)
    kept = queries.keeps_alive(captured, view, loss)
    assert set(kept) <= set(analysis.saved_storages(captured).tolist())
    # the same on the arrays: edges come sorted by target, so that one pass finds all that is downstream
    found, after = edges(captured), {last}
    for source, target in zip(found.source.tolist(), found.target.tolist(), strict=True):
        if source in after:
            after.add(target)
    columns = (found.source, found.target, found.storage, found.replaced)
    expected = {
        storage
        for source, target, storage, replaced in zip(*(column.tolist() for column in columns), strict=True)
        if target in after - {last} and source < last and not replaced
    }
    standing = {one for one in expected if captured.name(captured.storages.category[one]) in analysis.STANDING}
    assert set(kept) == expected - standing
    sizes = [int(captured.storages.bytes[one]) for one in kept]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) > 0.8 * sum(row.read for row in analysis.saved_for_backward(captured))


def test_readers_are_those_of_the_arrays(captured: StepGraph) -> None:
    view = to_networkx(captured)
    name = "transformer.h.0.mlp.c_fc.weight"
    storage = queries.tensor(captured, name)
    start = captured.reads.start
    expected = [
        node
        for node in range(len(captured.operators))
        if storage in captured.reads.storage[start[node] : start[node + 1]].tolist()
    ]
    assert queries.readers(view, storage) == expected
    assert {view.nodes[node]["role"] for node in expected} >= {"forward", "backward"}


def test_a_module_is_what_ran_in_it_and_in_its_parts(captured: StepGraph) -> None:
    whole = to_networkx(captured)
    part = queries.of_module(whole, "transformer.h.1")
    inside = {data["module"] for _, data in part.nodes(data=True)}
    assert "transformer.h.1.attn.c_attn" in inside
    assert all(name.split(".")[:3] == ["transformer", "h", "1"] for name in inside)
    assert {"forward", "backward"} <= {role for _, role in part.nodes(data="role")}
    with pytest.raises(ConfigError, match=r"module 'transformer\.x': no operator"):
        queries.of_module(whole, "transformer.x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no tensor of the graph has that name"),
        ("9999", "numbered from 0"),
        ("aten.mm.default", r"3 tensors have that name; choose one by number: 3, 5, 6"),
    ],
)
def test_a_tensor_that_is_not_one(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        queries.tensor(example(), text)


def test_a_graph_without_backward_has_no_cut() -> None:
    make = Maker()
    make.operator("aten.mm.default", role=Role.FORWARD)
    with pytest.raises(ConfigError, match="no backward"):
        queries.recompute(to_networkx(make.graph()))


# Files


def test_graphml_is_read_back_by_networkx(tmp_path: Path) -> None:
    graph, path = example(), tmp_path / "g.graphml"
    save(graph, path)
    view, back = to_networkx(graph), nx.read_graphml(path, node_type=int, force_multigraph=True)
    assert set(back.nodes) == set(view.nodes)
    for node, data in view.nodes(data=True):
        assert back.nodes[node] == {name: value for name, value in data.items() if value is not None}

    def plain(edges: Any) -> list[tuple[int, int, int, str]]:
        return sorted((s, t, data["storage"], data["kind"]) for s, t, data in edges)

    assert plain(back.edges(data=True)) == plain(view.edges(data=True))
    assert len({key for *_, key in back.edges(keys=True)}) == view.number_of_edges()  # ids are each edge's own
    assert json.loads(back.graph["case"]) == {"model": "opt-125m"}


def test_dot_has_every_operator_and_tensor(tmp_path: Path) -> None:
    make = Maker()
    first = make.operator('say "hi" \\', module="a.b")
    make.operator("use", [make.alloc(1024)])
    export(to_networkx(make.graph()), tmp_path / "g.dot")
    lines = (tmp_path / "g.dot").read_text().splitlines()
    assert lines[0] == "digraph {"
    assert lines[-1] == "}"
    assert rf'  {first} [label="say \"hi\" \\\na.b", fillcolor=8];' in lines
    assert '  0 -> 1 [label="1,024 B"];' in lines
    assert len(lines) == 2 + 2 + 1 + 1


def test_node_link_of_a_part_is_read_back_by_networkx(tmp_path: Path) -> None:
    view = queries.of_module(to_networkx(example()), "layers.1")
    export(view, tmp_path / "part.json")
    back = nx.node_link_graph(json.loads((tmp_path / "part.json").read_text()), edges="edges")
    assert dict(back.nodes(data=True)) == dict(view.nodes(data=True))
    assert sorted(back.edges(keys=True)) == sorted(view.edges(keys=True))


# The command


def ask(*arguments: str) -> dict[str, Any]:
    outcome = CliRunner().invoke(main, ["graph", *arguments, "--json"])
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert isinstance(found, dict)
    return found


def test_the_command_answers_by_what_it_is_asked(tmp_path: Path, captured: StepGraph) -> None:
    path = str(tmp_path / "g.json.gz")
    save(captured, path)
    assert_equal(load(path), captured)
    found = ask(path, "--critical-path", "flops", "--kept-by", "lm_head.weight", "--recompute", "--order")
    assert list(found) == ["order", "critical_path", "kept_by", "keep", "again"]
    assert sum(row["flops"] for row in found["critical_path"]["rows"]) == analysis.critical_path(captured).flops
    assert {row["tensor"] for row in found["keep"]["rows"]} == {
        storage for _, storage in queries.recompute(to_networkx(captured)).keep
    }
    assert len(found["order"]["rows"]) == len(captured.operators)
    timed = ask(path, "--critical-path", "time", "--module", "transformer.h.0")
    assert all(row["module"].startswith("transformer.h.0") for row in timed["critical_path"]["rows"])
    assert all(row["ns"] >= 0 for row in timed["critical_path"]["rows"])
    assert sum(row["ns"] for row in timed["critical_path"]["rows"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keeps-alive", "nothing"], "tensor 'nothing': no tensor of the graph has that name"),
        (["--module", "nothing"], "module 'nothing': no operator of the graph ran in it"),
        (["-o", "out.png"], "a graph is written as .json, .graphml, .dot"),
    ],
)
def test_one_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(example(), "g.json")
    outcome = CliRunner().invoke(main, ["graph", "g.json", *arguments])
    assert outcome.exit_code == 1
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_tables_fit_a_narrow_terminal(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    save(example(), path)
    outcome = CliRunner().invoke(main, ["graph", str(path), "--critical-path", "flops", "--kept-by", "layers.0.weight"])
    assert outcome.exit_code == 0, outcome.output
    assert "stays for" in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80
