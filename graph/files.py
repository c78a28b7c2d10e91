"""Step graphs as files: JSON in networkx's node-link form, with the order of events beside it as arrays.

One document is both. `nodes`, `edges`, `graph`, `directed` and `multigraph` are what `networkx.node_link_data` makes of
the view of `graph.dag` and what `networkx.node_link_graph` takes (edges under "edges"). Beside them stand the tables
that the view does not hold: `names`, `phases`, `modules`, `tensors`, `storages`,
`reads`, `writes`, and `events`, the exact order. Operators
stand in `nodes` alone; edges follow from the other tables, and a file in which they do not is refused.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from graph.check import check
from graph.dag import NUMBERS, ROLES, attributes, edge_rows, edges, loaded_rows, operator_rows, to_networkx
from graph.model import FORMAT, VERSION, Accesses, Operators, StepGraph, Storages, TensorInfo
from traces.collecting import uncollected
from traces.errors import ConfigError, TraceError
from traces.files import read_bytes, write_atomically
from traces.forms.document import DECODE_ERRORS, encode, fault
from traces.text import path_text, quoted

#: What the name of a file may end in; of the last two kinds only the view is written, for other tools.
ENDINGS: Final = (".json", ".json.gz", ".graphml", ".dot")

_COMPRESSION: Final = 4  # twice as fast as the usual 6, for a tenth more bytes

_Code = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Long = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Byte = Annotated[int, Meta(ge=0, le=2**8 - 1)]
_Any64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Node(Struct, forbid_unknown_fields=True):
    """An operator, or (with the role "loaded", and without the later fields) a storage that none wrote."""

    id: _Count
    name: str | None
    module: str | None
    role: str
    stream: _Count
    phase: str | UnsetType | None = UNSET
    step: _Code | UnsetType = UNSET
    thread: _Byte | UnsetType = UNSET
    flops: _Long | UnsetType = UNSET
    moved: _Long | UnsetType = UNSET
    origin: _Code | UnsetType = UNSET


class _Edge(Struct, forbid_unknown_fields=True):
    source: _Count
    target: _Count
    key: _Count
    bytes: _Long
    dtype: str | None
    category: str | None
    storage: _Count
    version: _Count
    kind: str


class _Attributes(Struct, forbid_unknown_fields=True):
    case: dict[str, Any]
    environment: dict[str, Any]
    assumptions: list[str]
    parameters: dict[str, _Count]


class _Tensor(Struct, forbid_unknown_fields=True):
    name: str
    shape: tuple[_Long, ...]
    dtype: str
    requires_grad: bool
    kind: Literal["parameter", "buffer"]
    storage: _Code


class _Storages(Struct, forbid_unknown_fields=True):
    bytes: list[_Long]
    dtype: list[_Code]
    category: list[_Code]
    name: list[_Code]
    module: list[_Code]
    stream: list[_Count]
    source: list[_Code]
    gpu_bytes: list[_Any64] | None = None


class _Accesses(Struct, forbid_unknown_fields=True):
    start: list[_Long]
    storage: list[_Count]
    version: list[_Count]


class _Events(Struct, forbid_unknown_fields=True):
    kind: list[_Byte]
    index: list[_Code]
    value: list[_Any64]


class _Document(Struct, forbid_unknown_fields=True):
    format: str
    version: int
    directed: bool
    multigraph: bool
    graph: _Attributes
    names: list[str]
    phases: list[str]
    modules: list[tuple[str, str]]
    tensors: list[_Tensor]
    storages: _Storages
    reads: _Accesses
    writes: _Accesses
    events: _Events
    nodes: list[_Node]
    edges: list[_Edge]


class _Head(Struct):
    format: Any = None
    version: Any = None


# Writing


def save(graph: StepGraph, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a step graph to a file, gzipped if its name ends in `.json.gz`; whole or not at all.

    A name that ends in `.graphml` or `.dot` gets the view alone (`graph.exports`), which is not read back.
    Raises ConfigError for another ending, OutputError where the file exists (without `force`) or cannot be written,
    TraceError for a graph that does not hold together.
    """
    check_ending(path)
    check(graph)
    if os.fspath(path).lower().endswith(ENDINGS[2:]):
        from graph.exports import export

        return export(to_networkx(graph), path, force=force)
    with uncollected(), write_atomically(path, force=force) as file:
        if os.fspath(path).lower().endswith(".gz"):
            with gzip.GzipFile("", "wb", _COMPRESSION, cast(Any, file), mtime=0) as stream:
                _write(graph, cast(IO[bytes], stream))
        else:
            _write(graph, file)


def check_ending(path: str | os.PathLike[str]) -> None:
    """ConfigError if the name of a file is not one of a step graph's."""
    if not os.fspath(path).lower().endswith(ENDINGS):
        raise ConfigError(f"{path_text(path)}: the name of a step graph's file must end in {', '.join(ENDINGS)}")


def _write(graph: StepGraph, file: IO[bytes]) -> None:
    for piece in _pieces(graph):
        file.write(piece)


def _pieces(graph: StepGraph) -> Iterator[bytes]:
    """The JSON text: a node, an edge or a column a line."""
    head = {"format": FORMAT, "version": VERSION, "directed": True, "multigraph": True}
    yield b"{" + b",\n ".join(encode(name) + b": " + encode(value) for name, value in head.items())
    yield b",\n " + encode("graph") + b": " + encode(attributes(graph))
    for name in ("names", "phases", "modules"):
        yield b",\n " + encode(name) + b": " + encode(getattr(graph, name))
    yield from _lines("tensors", [dataclasses.asdict(tensor) for tensor in graph.tensors])
    for name in ("storages", "reads", "writes"):
        table = getattr(graph, name)
        yield from _table(name, _columns(table))
    yield from _table("events", {"kind": graph.kind, "index": graph.index, "value": graph.value})
    found = edges(graph)
    operators = [{"id": number, **row} for number, row in enumerate(operator_rows(graph))]
    yield from _lines("nodes", operators + [{"id": number, **row} for number, row in loaded_rows(graph, found)])
    ends = (column.tolist() for column in (found.source, found.target, found.storage))
    rows = zip(*ends, edge_rows(graph, found), strict=True)
    yield from _lines("edges", [{"source": s, "target": t, "key": key, **row} for s, t, key, row in rows])
    yield b"}\n"


def _columns(table: Storages | Accesses) -> dict[str, Any]:
    """The columns that a table has."""
    found = {column: getattr(table, column) for column in table.__dataclass_fields__}
    return {column: values for column, values in found.items() if values is not None}


def _table(name: str, columns: Mapping[str, Any]) -> Iterator[bytes]:
    yield b",\n " + encode(name) + b": {"
    yield b",\n  ".join(encode(column) + b": " + encode(values) for column, values in columns.items()) + b"}"


def _lines(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    yield b",\n " + encode(name) + b": [\n"
    yield msgspec.json.Encoder().encode_lines(rows).rstrip(b"\n").replace(b"\n", b",\n")  # no line ends inside texts
    yield b"]"


# Reading


def load(path: str | os.PathLike[str]) -> StepGraph:
    """The step graph in a file (gzipped or not, whatever its name), as it was when it was saved.

    Raises TraceError, in one line that names the file and the place, for anything that is not such a document.
    """
    data = read_bytes(path)
    try:
        with uncollected():
            return parse(data)
    except TraceError as error:
        raise TraceError(f"{path_text(path)}: {error}") from None


def parse(data: bytes) -> StepGraph:
    """The step graph in a JSON text; TraceError for anything else."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        _check_head(data)
        document = msgspec.json.decode(data, type=_Document)
        return _graph(document)
    except DECODE_ERRORS as error:
        raise TraceError(fault(error)) from None
    except MemoryError:
        raise TraceError("too large for this machine") from None


def _check_head(data: bytes) -> None:
    """TraceError unless a text is an object with the format and version that are read here."""
    if not data.strip():
        raise TraceError("the file is empty")
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.ValidationError:
        raise TraceError("not a step graph: the document must be an object") from None
    if head.format == "memory-trace":
        raise TraceError("is a memory trace, not a step graph; `llmem run` replays it")
    if head.format != FORMAT:
        raise TraceError(f"field 'format' must be {FORMAT!r}, is {quoted(head.format)}")
    if head.version != VERSION or isinstance(head.version, bool):
        raise TraceError(f"field 'version' must be {VERSION}, is {quoted(head.version)}: another release wrote it")


def _graph(document: _Document) -> StepGraph:
    if not (document.directed and document.multigraph):
        raise TraceError("fields 'directed' and 'multigraph' must be true")
    names = {text: code for code, text in enumerate(document.names)}
    phases = {text: code for code, text in enumerate(document.phases)}
    count = next((place for place, node in enumerate(document.nodes) if node.role == "loaded"), len(document.nodes))
    events = document.events
    graph = StepGraph(
        case=document.graph.case,
        environment=document.graph.environment,
        names=tuple(document.names),
        phases=tuple(document.phases),
        storages=Storages(*(_numbers(document.storages, name) for name in Storages.__dataclass_fields__)),
        operators=_operators(document.nodes[:count], names, phases),
        reads=_to_accesses(document.reads),
        writes=_to_accesses(document.writes),
        kind=np.array(events.kind, dtype=np.uint8),
        index=np.array(events.index, dtype=np.int32),
        value=np.array(events.value, dtype=np.int64),
        parameters=document.graph.parameters,
        assumptions=tuple(document.graph.assumptions),
        tensors=tuple(TensorInfo(*msgspec.structs.astuple(tensor)) for tensor in document.tensors),
        modules=tuple(document.modules),
    )
    check(graph)
    _check_view(graph, document, count)
    return graph


def _numbers(table: _Storages, name: str) -> Any:
    values = getattr(table, name)
    return None if values is None else np.array(values, dtype=np.int64 if "bytes" in name else np.int32)


def _to_accesses(table: _Accesses) -> Accesses:
    return Accesses(
        np.array(table.start, dtype=np.int64),
        np.array(table.storage, dtype=np.int32),
        np.array(table.version, dtype=np.int32),
    )


def _operators(nodes: Sequence[_Node], names: Mapping[str, int], phases: Mapping[str, int]) -> Operators:
    """The table of operators out of their nodes."""
    roles = {text: code for code, text in enumerate(ROLES)}
    for place, node in enumerate(nodes):
        if node.id != place:
            raise TraceError(f"nodes[{place}].id: must be {place}, is {node.id}: operators stand in order, from 0")
        if node.role not in roles:
            raise TraceError(f"nodes[{place}].role: must be one of {', '.join(ROLES)}, is {quoted(node.role)}")
        for name in ("phase", *NUMBERS):
            if getattr(node, name) is UNSET:
                raise TraceError(f"nodes[{place}]: field '{name}' is missing")
    columns: dict[str, list[int]] = {name: [getattr(node, name) for node in nodes] for name in NUMBERS}
    columns["role"] = [roles[node.role] for node in nodes]
    for name, table, where in (("name", names, "names"), ("module", names, "names"), ("phase", phases, "phases")):
        columns[name] = [_code(getattr(node, name), table, where, place, name) for place, node in enumerate(nodes)]
    dtypes = {"role": np.uint8, "thread": np.uint8, "flops": np.int64, "moved": np.int64}
    return Operators(**{name: np.array(column, dtypes.get(name, np.int32)) for name, column in columns.items()})


def _code(text: str | None, table: Mapping[str, int], where: str, place: int, name: str) -> int:
    if text is None:
        return -1
    code = table.get(text)
    if code is None:
        raise TraceError(f"nodes[{place}].{name}: {quoted(text)} does not stand in '{where}'")
    return code


def _check_view(graph: StepGraph, document: _Document, count: int) -> None:
    """TraceError where nodes of loaded storages, or edges, are not those that follow from the tables."""
    found = edges(graph)
    nodes = [_Node(id=number, **row) for number, row in loaded_rows(graph, found)]
    _same("nodes", document.nodes[count:], nodes, count)
    ends = (column.tolist() for column in (found.source, found.target, found.storage))
    rows = zip(*ends, edge_rows(graph, found), strict=True)
    _same("edges", document.edges, [_Edge(source=s, target=t, key=key, **row) for s, t, key, row in rows], 0)


def _same(name: str, given: Sequence[Struct], expected: Sequence[Struct], first: int) -> None:
    if given == expected:
        return
    for place, (one, two) in enumerate(zip(given, expected, strict=False), first):
        if one != two:
            field = next(field for field in one.__struct_fields__ if getattr(one, field) != getattr(two, field))
            wanted, found = getattr(two, field), getattr(one, field)
            what = "not to be there" if wanted is UNSET else quoted(wanted)
            said = "is missing" if found is UNSET else f"is {quoted(found)}"
            raise TraceError(f"{name}[{place}].{field}: {said}, but by the tables it should be {what}")
    raise TraceError(
        f"{name}: has {first + len(given)} entries, but by the tables it should have {first + len(expected)}"
    )
