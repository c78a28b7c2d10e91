"""Step graphs as files: what is saved is what is loaded, networkx reads the same file, and bad files are told so."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.check import check
from graph.files import load, parse, save
from graph.model import Accesses, StepGraph, TensorInfo
from tests.support.made_graphs import Maker, assert_equal, example, large_graph, random_graph
from traces.errors import ConfigError, LLMemError, OutputError, TraceError


def full() -> StepGraph:
    """The example with every optional part, and texts that JSON has to quote."""
    graph = example()
    return dataclasses.replace(
        graph,
        case={"model": 'a "model"\n\\ of π', "experts": [0.5, 1e-3], "nothing": None},
        names=(*graph.names, 'a "name"\nof two lines', "π"),
        tensors=(
            TensorInfo("layers.0.weight", (10, 25), "float32", True, "parameter", 0),
            TensorInfo("empty", (), "int64", False, "buffer", -1),
        ),
        modules=(("", "Net"), ("layers.0", "Linear")),
    )


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz", "GRAPH.JSON.GZ"])
@pytest.mark.parametrize("make", [full, lambda: Maker().graph()], ids=["full", "empty"])
def test_round_trip(tmp_path: Path, name: str, make: Callable[[], StepGraph]) -> None:
    path = tmp_path / name
    save(make(), path)
    assert_equal(load(path), make())
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.lower().endswith(".gz")
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32), max_size=60))
def test_round_trip_of_any_graph(tmp_path_factory: pytest.TempPathFactory, numbers: list[int]) -> None:
    graph = random_graph(numbers)
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    save(graph, path)
    assert_equal(load(path), graph)


def test_the_same_graph_is_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json.gz" for number in range(2)]
    for path in paths:
        save(full(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_networkx_reads_the_file(tmp_path: Path) -> None:
    nx = pytest.importorskip("networkx")
    from graph.dag import to_networkx

    path = tmp_path / "graph.json"
    save(full(), path)
    document = json.loads(path.read_text("utf-8"))
    view = to_networkx(full())
    read = nx.node_link_graph(document, edges="edges")
    assert nx.utils.graphs_equal(read, view)
    assert read.graph == json.loads(json.dumps(view.graph))
    written = json.loads(json.dumps(nx.node_link_data(view, edges="edges")))
    for one in (document, written):
        one["edges"].sort(key=lambda edge: (edge["source"], edge["target"], edge["key"]))
    assert {name: document[name] for name in written} == written


def test_large_numbers_stay_exact(tmp_path: Path) -> None:
    make = Maker()
    make.operator("aten.mm.default", flops=2**63 - 1, moved=2**62 + 1)
    make.alloc(2**60 + 1)
    path = tmp_path / "graph.json"
    save(make.graph(), path)
    assert_equal(load(path), make.graph())


def test_a_large_graph_in_three_seconds(tmp_path: Path) -> None:
    graph = large_graph(60_000)
    for name in ("graph.json", "graph.json.gz"):
        start = time.process_time()
        save(graph, tmp_path / name)
        assert time.process_time() - start < 3
    start = time.process_time()
    loaded = load(tmp_path / name)
    assert time.process_time() - start < 3
    assert_equal(loaded, graph)


def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already; give --force"):
        save(example(), path)
    assert path.read_text() == "mine"
    save(example(), path, force=True)
    assert_equal(load(path), example())


@pytest.mark.parametrize("name", ["graph", "graph.npz", "graph.gz", "graph.json.bz2"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.json, \.json\.gz, \.graphml, \.dot"):
        save(example(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_json_cannot_say_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(LLMemError, match="cannot be written as JSON"):
        save(dataclasses.replace(example(), case={"model": object()}), tmp_path / "graph.json")
    assert list(tmp_path.iterdir()) == []


# Files that are wrong


def document_of(graph: StepGraph, folder: Path) -> Any:
    save(graph, folder / "graph.json", force=True)
    return json.loads((folder / "graph.json").read_text("utf-8"))


def put(*path: Any) -> Callable[[Any], None]:
    """A change of a document: the last of `path` is the value, the others lead to its place."""

    def change(document: Any) -> None:
        for key in path[:-2]:
            document = document[key]
        if path[-1] is drop:
            del document[path[-2]]
        else:
            document[path[-2]] = path[-1]

    return change


drop = object()

WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "no format": (put("format", drop), "field 'format' must be 'step-graph', is null"),
    "a trace": (put("format", "memory-trace"), "is a memory trace, not a step graph"),
    "another version": (put("version", 2), "field 'version' must be 1, is 2: another release wrote it"),
    "no events": (put("events", drop), "missing required field `events`"),
    "a field too many": (put("extra", 1), "unknown field `extra`"),
    "not directed": (put("directed", False), "'directed' and 'multigraph' must be true"),
    "a text for a number": (put("storages", "bytes", 3, "300"), r"Expected `int`, got `str` - at `\$.storages.bytes"),
    "a fraction": (put("storages", "bytes", 3, 0.5), "Expected `int`, got `float`"),
    "a short column": (put("storages", "dtype", []), "storages.dtype: has 0 entries, storages.bytes has 11"),
    "negative bytes": (put("storages", "bytes", 0, -1), "Expected `int` >= 0"),
    "an unknown name": (put("storages", "name", 2, 99), r"storages.name\[2\]: must lie in names, from -1 to 18, is 99"),
    "an unknown category": (put("storages", "category", 1, 0), r"storages.category\[1\]: must be one of parameter"),
    "a name twice": (put("names", 1, "parameter"), r"names\[2\]: 'parameter' stands there twice"),
    "operators in disorder": (put("nodes", 1, "id", 5), r"nodes\[1\].id: must be 1, is 5"),
    "an unknown role": (put("nodes", 1, "role", "sideways"), r"nodes\[1\].role: must be one of load, forward"),
    "an unknown operator": (put("nodes", 1, "name", "aten.x"), r"nodes\[1\].name: 'aten.x' does not stand in 'names'"),
    "an operator without flops": (put("nodes", 1, "flops", drop), r"nodes\[1\]: field 'flops' is missing"),
    "accesses out of step": (put("reads", "start", 3, 9), r"reads.start\[4\]: must not be smaller"),
    "accesses of nothing": (put("reads", "storage", 0, 11), r"reads.storage\[0\]: must lie in storages, from 0 to 10"),
    "too few accesses": (put("writes", "version", [0]), "writes.version: must have 11 entries, as writes.start says"),
    "an unknown event": (put("events", "kind", 2, 20), r"events.kind\[2\]: must lie in kinds"),
    "another operator": (put("events", "index", 2, 1), r"events.index\[2\]: operators must start one after another"),
    "an operator less": (put("events", "kind", 2, 7), "events: 8 operators start, 9 there are"),
    "born twice": (put("events", "index", 4, 0), r"events\[4\]: storage 0 is born a second time"),
    "dead before birth": (put("events", "index", 16, 10), r"events\[16\]: storage 10 dies before it is born"),
    "dead twice": (put("events", "index", 31, 6), r"events\[33\]: storage 6 dies after its death|storage 6 dies after"),
    "a phase of no name": (put("events", "index", 1, 4), r"events.index\[1\]: must lie in phases, from 0 to 3, is 4"),
    "a parameter of no storage": (
        put("graph", "parameters", "x", 11),
        "parameters, 'x': there is no storage 11",
    ),
    "a tensor of no storage": (put("tensors", 0, "storage", 11), r"tensors\[0\].storage: there is no storage 11"),
    "an odd tensor": (put("tensors", 0, "kind", "soup"), "Invalid enum value 'soup'"),
    "an edge to elsewhere": (
        put("edges", 2, "target", 5),
        r"edges\[2\].target: is 5, but by the tables it should be 2",
    ),
    "an edge of other bytes": (
        put("edges", 2, "bytes", 5),
        r"edges\[2\].bytes: is 5, but by the tables it should be 100",
    ),
    "no edges": (put("edges", []), "edges: has 0 entries, but by the tables it should have 16"),
    "a loaded node less": (put("nodes", 10, drop), "nodes: has 10 entries, but by the tables it should have 11"),
    "a loaded node of flops": (
        put("nodes", 9, "flops", 1),
        r"nodes\[9\].flops: is 1, but by the tables it should be not",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_documents_are_told_in_one_line(tmp_path: Path, name: str) -> None:
    change, reason = WRONG[name]
    document = document_of(full() if "tensor" in name else example(), tmp_path)
    change(document)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match=reason) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (b"[]", "not a step graph: the document must be an object"),
        (b"nonsense", "invalid|malformed"),
        (b'{"format": "step-graph", "version": 1', "the JSON ends early"),
        (b'{"format": "step-graph", "version": true}', "field 'version' must be 1, is true"),
        (b'{"format": "step-graph", "version": 1}', "missing required field"),
        (b'{"format": "step-graph", "version": 1, "names": ["\xff"]}', "UTF-8"),
        (b"\x80\x04nonsense", "malformed|invalid|UTF-8"),
        (b'{"format": ' + b"[" * 100_000, "nested too deeply|ends early"),
    ],
)
def test_what_is_no_document_is_told_in_one_line(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=reason) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load(tmp_path / "none.json")
    save(example(), tmp_path / "graph.json.gz")
    (tmp_path / "cut.json.gz").write_bytes((tmp_path / "graph.json.gz").read_bytes()[:-20])
    with pytest.raises(TraceError, match="truncated"):
        load(tmp_path / "cut.json.gz")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_change_of_a_document_goes_wrong_otherwise(data: st.DataObject) -> None:
    """Whatever a value is replaced by, the answer is a graph that holds together or one line."""
    document = copy.deepcopy(DOCUMENT)
    holder, key = data.draw(st.sampled_from(list(places(document))))
    values: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, 1e400, 0.5, "x", "", [], {}, [0], [[]]]
    )
    holder[key] = data.draw(values)
    text = json.dumps(document).replace("Infinity", "1e400").encode()
    try:
        check(parse(text))
    except TraceError as error:
        reason = str(error)
    else:
        reason = "none"
    assert reason
    assert "\n" not in reason


def places(value: Any) -> Any:
    """Every (container, key) in a document; of long lists the first few."""
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:6]
    for key, inner in entries:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


DOCUMENT: Any = None


@pytest.fixture(scope="module", autouse=True)
def _document(tmp_path_factory: pytest.TempPathFactory) -> None:
    global DOCUMENT
    DOCUMENT = document_of(full(), tmp_path_factory.mktemp("document"))


# Graphs that are wrong


def test_graphs_that_do_not_hold_together_are_not_written(tmp_path: Path) -> None:
    graph = example()
    wrong = dataclasses.replace(graph, reads=Accesses(graph.reads.start[:-1], graph.reads.storage, graph.reads.version))
    with pytest.raises(TraceError, match=r"reads\.start: must have 10 entries"):
        save(wrong, tmp_path / "graph.json")
    wrong = dataclasses.replace(graph, value=graph.value[:-1])
    with pytest.raises(TraceError, match="events: kind, index and value have 34, 34 and 33 entries"):
        check(wrong)
    late = graph.reads.start.copy()
    late[0] = 1
    with pytest.raises(TraceError, match=r"reads\.start\[0\]: must be 0, is 1"):
        check(dataclasses.replace(graph, reads=dataclasses.replace(graph.reads, start=late)))
