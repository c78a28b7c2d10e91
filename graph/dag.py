"""The step graph as a graph: which operator used what another made, as arrays of edges and as a networkx graph.

An operator depends on the one that wrote the version of a storage which it reads. One that writes a new version
without reading the last (it fills part of a storage, or all) comes after the one that wrote that: an edge of its own
kind. Every edge runs from an earlier operator to a later one, so the graph has no cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from graph.model import Accesses, Int32Array, Int64Array, Role, StepGraph
from traces.collecting import uncollected

if TYPE_CHECKING:
    import networkx as nx

BoolArray = npt.NDArray[np.bool_]

#: What an edge says, in files and in networkx: the version is read, or a later version replaces it.
READ: Final = "read"
REPLACED: Final = "replaced"


@dataclass(frozen=True)
class Edges:
    """Edges by column, sorted by target, then source, then storage; no two agree in all three.

    `source` and `target` are nodes: operator `i` is node `i`. A storage that no operator wrote before it is read
    (loaded before the recording, say) is a node of its own: the number of operators + the storage's number. `version`
    is that which the source wrote (0 from such a node). `replaced`: the target writes over it without reading it.
    """

    source: Int64Array
    target: Int64Array
    storage: Int64Array
    version: Int64Array
    replaced: BoolArray

    def __len__(self) -> int:
        return len(self.source)


def edges(graph: StepGraph) -> Edges:
    """The edges of a step graph, in linear time but for sorting."""
    count = len(graph.operators)
    readers, read, _ = _accesses(graph.reads)
    writers, written, version = _accesses(graph.writes)
    order = np.lexsort((version, writers, written))
    writers, written, version = writers[order], written[order], version[order]
    span = count + 1
    place = written * span + writers  # ascending: by storage, then by operator

    def before(storage: Int64Array, operator: Int64Array) -> Int64Array:
        """The place of the last write of a storage before an operator; -1: none."""
        found = np.searchsorted(place, storage * span + operator, side="left") - 1
        if not len(place):
            return np.full(len(storage), -1, dtype=np.int64)
        return np.where((found >= 0) & (written[np.maximum(found, 0)] == storage), found, -1)

    last = before(read, readers)
    replaced = before(written, writers)
    follows = replaced >= 0
    origin = np.concatenate((last, replaced[follows]))
    target = np.concatenate((readers, writers[follows]))
    storage = np.concatenate((read, written[follows]))
    made = origin >= 0
    if len(place):
        source = np.where(made, writers[np.maximum(origin, 0)], count + storage)
        number = np.where(made, version[np.maximum(origin, 0)], 0)
    else:
        source, number = count + storage, np.zeros(len(storage), dtype=np.int64)
    kind = np.concatenate((np.zeros(len(read), dtype=np.bool_), np.ones(int(follows.sum()), dtype=np.bool_)))
    order = np.lexsort((kind, storage, source, target))  # what is read comes before the same that is replaced
    ends = np.stack((source[order], target[order], storage[order]))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (ends[:, 1:] != ends[:, :-1]).any(axis=0)
    chosen = order[first]
    return Edges(source[chosen], target[chosen], storage[chosen], number[chosen], kind[chosen])


def _accesses(accesses: Accesses) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Operator, storage and version of every access."""
    start = accesses.start.astype(np.int64)
    operators = np.repeat(np.arange(len(start) - 1, dtype=np.int64), np.diff(start))
    return operators, accesses.storage.astype(np.int64), accesses.version.astype(np.int64)


def loaded(graph: StepGraph, found: Edges) -> Int64Array:
    """The storages that are nodes of their own: read, but written by no operator before."""
    outside = found.source >= len(graph.operators)
    return np.unique(found.storage[outside])


def text_of(graph: StepGraph, codes: Int32Array | Int64Array) -> list[str | None]:
    """Texts of codes into `names`, None for -1."""
    table = (*graph.names, None)  # -1 is the last
    return [table[code] for code in codes.tolist()]


def phase_of(graph: StepGraph, codes: Int32Array | Int64Array) -> list[str | None]:
    """Texts of codes into `phases`, None for -1."""
    table = (*graph.phases, None)
    return [table[code] for code in codes.tolist()]


#: Roles as text, in order of their codes.
ROLES: Final[tuple[str, ...]] = tuple(role.name.lower() for role in Role)

#: The columns of an operator that are its node's attributes as they are.
NUMBERS: Final[tuple[str, ...]] = ("step", "stream", "thread", "flops", "moved", "origin")


def to_networkx(graph: StepGraph) -> nx.MultiDiGraph:
    """A networkx view: operators are nodes, tensors are edges (several may run between the same two operators).

    Node `i` is operator `i`, with `name`, `module`, `role`, `phase` (texts, None where there is none), `step`,
    `stream`, `thread`, `flops`, `moved` (bytes) and `origin` (-1: none). A storage that was there before any operator
    wrote it is a node too, with `role` "loaded", its `name`, `module` and `stream`. An edge's key is its storage; it
    has `bytes`, `dtype`, `category`, `storage`, `version` and `kind` ("read", "replaced"). The graph's own
    attributes are the case, the environment, the assumptions and the parameters.
    """
    import networkx as nx

    view = nx.MultiDiGraph()
    view.graph.update(attributes(graph))
    found = edges(graph)
    with uncollected():
        view.add_nodes_from(zip(range(len(graph.operators)), operator_rows(graph), strict=True))
        view.add_nodes_from(loaded_rows(graph, found))
        ends = (column.tolist() for column in (found.source, found.target, found.storage))
        view.add_edges_from(zip(*ends, edge_rows(graph, found), strict=True))
    return view


def attributes(graph: StepGraph) -> dict[str, Any]:
    """The attributes of the networkx graph as a whole."""
    return {
        "case": dict(graph.case),
        "environment": dict(graph.environment),
        "assumptions": list(graph.assumptions),
        "parameters": dict(graph.parameters),
    }


def operator_rows(graph: StepGraph) -> list[dict[str, Any]]:
    """The attributes of every operator's node, in order."""
    table = graph.operators
    columns = (
        text_of(graph, table.name),
        text_of(graph, table.module),
        [ROLES[role] for role in table.role.tolist()],
        phase_of(graph, table.phase),
        *(getattr(table, name).tolist() for name in NUMBERS),
    )
    keys = ("name", "module", "role", "phase", *NUMBERS)
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def loaded_rows(graph: StepGraph, found: Edges) -> list[tuple[int, dict[str, Any]]]:
    """Node and attributes of every storage that is a node of its own."""
    chosen = loaded(graph, found)
    table = graph.storages
    columns = (
        text_of(graph, table.name[chosen]),
        text_of(graph, table.module[chosen]),
        table.stream[chosen].tolist(),
    )
    keys = ("name", "module", "stream")
    first = len(graph.operators)
    return [
        (first + storage, {"role": "loaded", **dict(zip(keys, row, strict=True))})
        for storage, *row in zip(chosen.tolist(), *columns, strict=True)
    ]


def edge_rows(graph: StepGraph, found: Edges) -> list[dict[str, Any]]:
    """The attributes of every edge, in order."""
    table = graph.storages
    sizes, dtypes, categories = table.bytes.tolist(), text_of(graph, table.dtype), text_of(graph, table.category)
    return [
        {
            "bytes": sizes[storage],
            "dtype": dtypes[storage],
            "category": categories[storage],
            "storage": storage,
            "version": version,
            "kind": REPLACED if replaced else READ,
        }
        for storage, version, replaced in zip(
            found.storage.tolist(), found.version.tolist(), found.replaced.tolist(), strict=True
        )
    ]
