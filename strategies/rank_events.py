"""The events of a captured rank: those of its step graph, column for column, with durations by a roofline.

Storages become allocations with the storage's number as id, name and category; marks become phases. Streams and
collectives, which a captured rank of several has, go over as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from graph.model import Int32Array, Int64Array, Kind, StepGraph
from strategies.timing.host import optimizer_ns
from strategies.timing.roofline import Speed
from traces.model import Column, Events, Op, Strings

#: What a kind of graph event is in a trace; kinds that are not here leave no event.
OPS: Final[Mapping[Kind, Op]] = {
    Kind.ALLOC: Op.ALLOC,
    Kind.FREE: Op.FREE,
    Kind.PHASE: Op.PHASE,
    Kind.SYNCHRONIZE: Op.SYNCHRONIZE,
    Kind.OPERATOR: Op.KERNEL,
    Kind.RECORD_STREAM: Op.RECORD_STREAM,
    Kind.COLLECTIVE: Op.COLLECTIVE,
    Kind.WAIT_STREAM: Op.WAIT_STREAM,
    Kind.EMPTY_CACHE: Op.EMPTY_CACHE,
}
_NONE: Final = 255
#: The phase in which an optimizer on the host runs.
OPTIMIZER: Final = "optimizer"


def events_of(graph: StepGraph, speed: Speed | None = None, *, late: bool = False, on_host: bool = False) -> Events:
    """The events of a graph as columns of a trace.

    Operators become kernels where `speed` is given (those that compute or move anything). With `late`, events recorded
    on streams stay incomplete until the host waits. `on_host`: parameters and optimizer are on the host.
    """
    source, op, ident, size = _rows(graph, speed is not None)
    count = len(op)
    alloc, phase = op == Op.ALLOC, op == Op.PHASE
    index = graph.index[source]
    stream = np.zeros(count, dtype=np.int64)
    stream[alloc] = graph.storages.stream[index[alloc]]
    waits = op == Op.SYNCHRONIZE
    stream[waits] = np.where(index[waits] > 0, index[waits], -1)
    used = op == Op.RECORD_STREAM
    stream[used] = graph.value[source[used]]
    step = np.full(count, -1, dtype=np.int64)
    step[phase] = graph.value[source[phase]]
    columns: dict[str, Column] = {"id": ident, "bytes": size, "stream": stream, "step": step}
    if (there := graph.storages.gpu_bytes) is not None:
        columns["gpu_bytes"] = np.where(alloc, there[np.where(alloc, index, 0)], -1)
    columns["category"] = _coded(graph.storages.category, graph.names, index, alloc)
    labels = [
        (phase, index[phase], graph.phases),
        (alloc, *_labels(graph.storages.module, graph.storages.name, graph.names, index[alloc])),
    ]
    if speed is not None:
        kernel = op == Op.KERNEL
        calls = index[kernel]
        flops, moved = graph.operators.flops[calls], graph.operators.moved[calls]
        stream[kernel] = graph.operators.stream[calls]
        size[kernel] = moved
        columns |= {"flops": _placed(kernel, flops), "duration_ns": _placed(kernel, speed.kernels_ns(graph)[calls])}
        labels.append((kernel, *_labels(graph.operators.module, graph.operators.name, graph.names, calls)))
        if speed.host_bytes_per_second and (host := optimizer_ns(graph, speed.host_bytes_per_second, on_host=on_host)):
            starts = np.asarray([name == OPTIMIZER for name in graph.phases])[index[phase]]
            columns["host_ns"] = _placed(phase, np.where(starts, host, 0))
    columns["name"] = _joined(count, labels)
    columns |= _meetings(graph, op, source, stream, size, timed=speed is not None)
    events = Events(op, columns)
    return held(events) if late else events


def _meetings(
    graph: StepGraph,
    op: npt.NDArray[np.uint8],
    source: Int64Array,
    stream: Int64Array,
    size: Int64Array,
    *,
    timed: bool,
) -> dict[str, Column]:
    """Columns that only streams waiting for each other and collectives have; fills in their `stream` and `size`."""
    columns: dict[str, Column] = {}
    waiting = op == Op.WAIT_STREAM
    if waiting.any():
        stream[waiting] = graph.index[source[waiting]]
        columns["on"] = np.where(waiting, graph.value[source], -1)
    places = np.flatnonzero(op == Op.COLLECTIVE)
    if len(places):
        texts: list[list[str | None]] = [[None] * len(op), [None] * len(op)]
        for place in places.tolist():
            kind, group, *rest = graph.names[graph.index[source[place]]].split()
            texts[0][place], texts[1][place] = kind, group
            stream[place], size[place] = int(rest[-1 if timed else 0]) if rest else 0, graph.value[source[place]]
        columns |= {"kind": Strings.encode(texts[0]), "group": Strings.encode(texts[1])}
    return columns


def _rows(graph: StepGraph, kernels: bool) -> tuple[Int64Array, npt.NDArray[np.uint8], Int64Array, Int64Array]:
    """For every event of the trace: the graph's event that it comes from, its op, its id (-1: none) and its bytes."""
    table = np.full(len(Kind), _NONE, dtype=np.uint8)
    for kind, meaning in OPS.items():
        table[kind] = meaning
    if not kernels:
        table[Kind.OPERATOR] = _NONE
    op = table[graph.kind]
    if kernels:
        idle = (graph.operators.flops == 0) & (graph.operators.moved == 0)
        calls = np.flatnonzero(op == Op.KERNEL)
        op[calls[idle[graph.index[calls]]]] = _NONE
    source = np.flatnonzero(op != _NONE)
    op = op[source]
    storage = (op == Op.ALLOC) | (op == Op.FREE) | (op == Op.RECORD_STREAM)
    ident = np.where(storage, graph.index[source], -1).astype(np.int64)
    size = np.zeros(len(op), dtype=np.int64)
    born = op == Op.ALLOC
    size[born] = graph.storages.bytes[ident[born]]
    return source, op, ident, size


def _coded(
    codes: Int32Array, table: tuple[str, ...], index: npt.NDArray[np.int32], where: npt.NDArray[np.bool_]
) -> Strings:
    """Text of storages as a column: `codes` into `table`, of the storages `index[where]`."""
    column = np.full(len(index), -1, dtype=np.int32)
    column[where] = codes[index[where]]
    return Strings(column, table).only(where)


def _labels(
    module: Int32Array, name: Int32Array, names: tuple[str, ...], index: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], tuple[str | None, ...]]:
    """`module: name` of each storage or operator of `index`: codes, and the table that they are of.

    A name that begins with the module's (a parameter's) stands alone.
    """
    pairs = (module[index].astype(np.int64) + 1) * (len(names) + 1) + name[index] + 1
    distinct, codes = np.unique(pairs, return_inverse=True)
    table = []
    for pair in distinct.tolist():
        place, what = divmod(pair, len(names) + 1)
        owner, text = (names[place - 1] if place else ""), (names[what - 1] if what else "")
        alone = not owner or not text or text == owner or text.startswith(f"{owner}.")
        table.append((text or owner or None) if alone else f"{owner}: {text}")
    return codes, tuple(table)


def _joined(
    count: int,
    parts: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.integer], tuple[str | None, ...]]],
) -> Strings:
    """A text column of `count` events out of parts: (where, codes, table) each."""
    column = np.full(count, -1, dtype=np.int32)
    table: dict[str, int] = {}
    for where, codes, texts in parts:
        used = np.unique(codes)
        short = np.full(len(texts) + 1, -1, dtype=np.int32)
        for code in used.tolist():
            text = texts[code]
            if code >= 0 and text is not None:
                short[code] = table.setdefault(text, len(table))
        column[where] = short[codes]
    return Strings(column, tuple(table))


def _placed(where: npt.NDArray[np.bool_], values: Int64Array) -> Int64Array:
    """An integer column with `values` at the places of `where`, 0 elsewhere."""
    column = np.zeros(len(where), dtype=np.int64)
    column[where] = values
    return column


def held(events: Events) -> Events:
    """The same events after one that holds recorded events back."""
    return Events.joined([Events(np.asarray([Op.HOLD_EVENTS], np.uint8), {"hold": np.asarray([True])}), events])
