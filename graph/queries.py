"""Questions that one asks of a computation graph, answered by networkx on the view of `graph.dag.to_networkx`.

Where `graph.analysis` answers the same on arrays (critical path, what is kept for backward), tests hold both together.
A `view` is the whole graph or a part of it (`of_module`); tensors are storages, by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import networkx as nx

from graph.analysis import STANDING, makers
from graph.model import StepGraph
from traces.errors import ConfigError
from traces.text import quoted

#: Words in the names of operators whose second run gives other values.
_RANDOM: Final = ("dropout", "bernoulli", "rand", "normal_", "uniform_")
_LATER: Final = frozenset({"backward", "recompute"})


def operators(view: nx.MultiDiGraph) -> list[int]:
    """The operators of a view in topological order; of those that do not depend on each other the earlier first."""

    def place(node: int) -> int:
        return -1 if view.nodes[node]["role"] == "loaded" else node

    return [node for node in nx.lexicographical_topological_sort(view, place) if place(node) >= 0]


@dataclass(frozen=True)
class Path:
    """Operators each of which needs the one before, in order, and the sum of their costs."""

    operators: tuple[int, ...]
    cost: int


def critical_path(view: nx.MultiDiGraph, cost: Sequence[int]) -> Path:
    """The chain of dependent operators with the largest sum of `cost`, which has a number for every operator."""
    start = -1  # before all, so that the first operator's cost stands on an edge as well
    chains = nx.DiGraph()
    chains.add_node(start)
    chains.add_edges_from((start, node, {"weight": cost[node]}) for node in operators(view))
    chains.add_edges_from((s, t, {"weight": cost[t]}) for s, t in view.edges() if s in chains and t in chains)
    path = nx.dag_longest_path(chains)[1:]
    return Path(tuple(path), sum(cost[node] for node in path))


def tensor(graph: StepGraph, text: str) -> int:
    """The storage that a text names: its number, a parameter, or a name that it has alone. Raises ConfigError."""
    count = len(graph.storages)
    if text.isdecimal():
        if int(text) < count:
            return int(text)
        raise ConfigError(f"tensor {text[:40]}: there are {count}, numbered from 0")
    if text in graph.parameters:
        return graph.parameters[text]
    found = [place for place, code in enumerate(graph.storages.name.tolist()) if graph.name(code) == text]
    if not found:
        raise ConfigError(f"tensor {quoted(text)}: no tensor of the graph has that name")
    if len(found) > 1:
        some = ", ".join(map(str, found[:8])) + (" ..." if len(found) > 8 else "")
        raise ConfigError(f"tensor {quoted(text)}: {len(found)} tensors have that name; choose one by number: {some}")
    return found[0]


def readers(view: nx.MultiDiGraph, storage: int) -> list[int]:
    """The operators that read a tensor, in order: the last of them lets it go."""
    return sorted({t for _, t, key, kind in view.edges(keys=True, data="kind") if key == storage and kind == "read"})


def keeps_alive(graph: StepGraph, view: nx.MultiDiGraph, storage: int) -> list[int]:
    """The tensors that stay for what comes after `storage`, largest first.

    They are there when it is made, and an operator reads them that runs only after that: a loss keeps alive what
    backward needs. What the model has anyway (parameters, gradients, optimizer states, inputs) is left out.
    """
    maker, count = int(makers(graph)[storage]), len(graph.operators)
    start = count + storage if maker < 0 else maker
    after = nx.descendants(view, start) if start in view else set()
    found: dict[int, int] = {}
    for source, _, key, data in view.in_edges(after, keys=True, data=True):
        before = source < start if source < count else key != storage
        if before and data["kind"] == "read" and data["category"] not in STANDING:
            found[key] = data["bytes"]
    return sorted(found, key=lambda key: (-found[key], key))


def of_module(view: nx.MultiDiGraph, path: str) -> nx.MultiDiGraph:
    """The operators that ran in a module or in its parts, forward and backward, and what was loaded for them.

    Raises ConfigError where there are none.
    """

    def inside(name: str | None) -> bool:
        return name is not None and (name == path or name.startswith(f"{path}.") or not path)

    found = view.subgraph([node for node, module in view.nodes(data="module") if inside(module)]).copy()
    if not found:
        raise ConfigError(f"module {quoted(path)}: no operator of the graph ran in it; paths are as in named_modules()")
    return found


@dataclass(frozen=True)
class Recompute:
    """What to keep of one forward pass so that backward can compute the rest again.

    `keep` are (operator, storage) of tensors, `kept` their bytes; `now` are the bytes of all that backward reads of
    this pass. `again` are the operators that run a second time, `flops` and `moved` their work.
    """

    keep: tuple[tuple[int, int], ...]
    kept: int
    now: int
    again: tuple[int, ...]
    flops: int
    moved: int


def recompute(view: nx.MultiDiGraph) -> Recompute:
    """The fewest bytes between the last forward pass and its backward, by a minimum cut as PyTorch's partitioner does.

    What has FLOPs (products, attention) or is random is not computed again. A tensor is cut at the price of its bytes;
    one that the model has anyway is free. Source: Chen et al. 2016, and
    torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`. What is there only while backward computes
    again is not reckoned, so this is a proposal: estimate it with `checkpointing`. Raises ConfigError for a graph
    without a backward.
    """
    forward, backward = _last_pass(view)
    made = {(s, key, data["version"]): data["bytes"] for s, _, key, data in _between(view, forward)}
    flow = nx.DiGraph()
    flow.add_edges_from(("start", node) for node in forward if not _repeatable(view.nodes[node]))
    for place, size in made.items():
        flow.add_edge((place, "made"), (place, "had"), capacity=size)
        flow.add_edge(place[0], (place, "made"))
    read_later = set()
    for source, target, key, data in _between(view, forward):
        place = (source, key, data["version"])
        if target in forward:
            flow.add_edge((place, "had"), target)
        elif target in backward and data["kind"] == "read":
            flow.add_edge((place, "had"), "end")
            read_later.add(place)
    flow.add_nodes_from(("start", "end"))
    kept, (_, had) = nx.minimum_cut(flow, "start", "end")
    # a tensor is had in backward where it is kept, or where its operator runs again
    keep = tuple(sorted(place[:2] for place in made if (place, "had") in had and (place, "made") not in had))
    again = tuple(sorted(node for node in forward if node in had))
    work = [view.nodes[node] for node in again]
    return Recompute(
        keep,
        int(kept),
        sum({place[1]: made[place] for place in read_later}.values()),
        again,
        sum(node["flops"] for node in work),
        sum(node["moved"] for node in work),
    )


def _last_pass(view: nx.MultiDiGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Operators of the last forward pass, and those of the backward after it."""
    passes = [(node, role) for node, role in sorted(view.nodes(data="role")) if role in _LATER or role == "forward"]
    while passes and passes[-1][1] == "forward":
        passes.pop()
    if not passes:
        raise ConfigError("the graph has no backward, so that nothing is kept for one")
    turn = next((place for place in range(len(passes), 0, -1) if passes[place - 1][1] == "forward"), 0)
    first = next((place for place in range(turn, 0, -1) if passes[place - 1][1] in _LATER), 0)
    return frozenset(node for node, _ in passes[first:turn]), frozenset(node for node, _ in passes[turn:])


def _between(view: nx.MultiDiGraph, forward: frozenset[int]) -> list[tuple[int, int, int, dict[str, Any]]]:
    """The edges that carry a tensor which a forward pass made."""
    edges = view.out_edges(forward, keys=True, data=True)
    return [edge for edge in edges if edge[3]["category"] not in STANDING]


def _repeatable(node: dict[str, Any]) -> bool:
    return not node["flops"] and not any(word in node["name"] for word in _RANDOM)
