"""The networkx view of a step graph for other tools: node-link JSON, GraphML (Gephi, yEd), DOT (Graphviz).

One way only: `graph.files` writes the JSON that is read back.
"""

from __future__ import annotations

import json
import os
from typing import IO, TYPE_CHECKING, Any, Final

from traces.errors import ConfigError
from traces.files import write_atomically
from traces.text import path_text

if TYPE_CHECKING:
    import networkx as nx

#: Colours of operators by role, of Graphviz's `pastel19` scheme.
_COLOURS: Final = {"loaded": 9, "load": 9, "forward": 2, "backward": 1, "recompute": 6, "optimizer": 3, "other": 8}


def export(view: nx.MultiDiGraph, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a view by the ending of the file's name: `.json`, `.graphml` or `.dot`; whole or not at all.

    Raises ConfigError for another ending, OutputError where the file exists (without `force`) or cannot be written.
    """
    write = WRITERS.get(os.path.splitext(os.fspath(path).lower())[1])
    if write is None:
        raise ConfigError(f"{path_text(path)}: a graph is written as {', '.join(WRITERS)}; choose one of these endings")
    with write_atomically(path, force=force) as file:
        write(view, file)


def _node_link(view: nx.MultiDiGraph, file: IO[bytes]) -> None:
    import networkx as nx

    file.write(json.dumps(nx.node_link_data(view, edges="edges")).encode() + b"\n")


def _graphml(view: nx.MultiDiGraph, file: IO[bytes]) -> None:
    """GraphML has neither lists nor None, and an edge's key is its id, which must be its own."""
    import networkx as nx

    plain = nx.MultiDiGraph(**{name: json.dumps(value) for name, value in view.graph.items()})
    plain.add_nodes_from((node, _known(data)) for node, data in view.nodes(data=True))
    for number, (source, target, data) in enumerate(view.edges(data=True)):
        plain.add_edge(source, target, key=number, **_known(data))
    nx.write_graphml_xml(plain, file)


def _known(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _dot(view: nx.MultiDiGraph, file: IO[bytes]) -> None:
    """Boxes of operators in colours of their roles; an arrow is a tensor, dashed where it is replaced unread."""
    lines = ["digraph {", "  node [shape=box, style=filled, colorscheme=pastel19];"]
    for node, data in view.nodes(data=True):
        name = (data["name"] or "").removeprefix("aten.")
        label = _quoted("\n".join(text for text in (name, data["module"]) if text))
        lines.append(f"  {node} [label={label}, fillcolor={_COLOURS[data['role']]}];")
    for source, target, data in view.edges(data=True):
        style = "" if data["kind"] == "read" else ", style=dashed"
        lines.append(f'  {source} -> {target} [label="{data["bytes"]:,} B"{style}];')
    file.write("\n".join((*lines, "}", "")).encode())


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


#: How the view is written, by the ending of the file's name.
WRITERS: Final = {".json": _node_link, ".graphml": _graphml, ".dot": _dot}
