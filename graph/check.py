"""Whether a step graph holds together: columns of one length, codes inside their tables, events that can happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from graph.model import Accesses, Int64Array, Kind, Role, StepGraph
from traces.errors import TraceError
from traces.model import CATEGORIES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Kinds of events whose index is a storage.
OF_STORAGES: Final = (Kind.ALLOC, Kind.FREE, Kind.GRADIENT, Kind.RECORD_STREAM)


def check(graph: StepGraph) -> None:
    """TraceError, naming table, column and place, for the first thing found that cannot be."""
    for name in ("names", "phases"):
        texts = getattr(graph, name)
        if len(set(texts)) != len(texts):
            again = next(place for place, text in enumerate(texts) if text in texts[:place])
            raise TraceError(f"{name}[{again}]: {texts[again]!r} stands there twice")
    _check_storages(graph)
    _check_operators(graph)
    for name in ("reads", "writes"):
        _check_accesses(name, getattr(graph, name), len(graph.operators), len(graph.storages))
    _check_events(graph)
    for text, storage in graph.parameters.items():
        if not 0 <= storage < len(graph.storages):
            raise TraceError(f"parameters, {text!r}: there is no storage {storage}")
    for place, tensor in enumerate(graph.tensors):
        if not -1 <= tensor.storage < len(graph.storages):
            raise TraceError(f"tensors[{place}].storage: there is no storage {tensor.storage}")


def _check_storages(graph: StepGraph) -> None:
    table, count = graph.storages, len(graph.names)
    _same_length("storages", table)
    _within("storages.bytes", table.bytes, 0)
    for name in ("dtype", "category", "name", "module"):
        _within(f"storages.{name}", getattr(table, name), -1, count, "names")
    if table.gpu_bytes is not None:
        _within("storages.gpu_bytes", table.gpu_bytes, -1)
    _within("storages.stream", table.stream, 0)
    _within("storages.source", table.source, -1, len(table), "storages")
    known = [text in CATEGORIES for text in graph.names] + [True]
    _all("storages.category", np.array(known)[table.category], f"must be one of {', '.join(CATEGORIES)}")


def _check_operators(graph: StepGraph) -> None:
    table, count = graph.operators, len(graph.names)
    _same_length("operators", table)
    _within("operators.name", table.name, 0, count, "names")
    _within("operators.module", table.module, -1, count, "names")
    _within("operators.role", table.role, 0, len(Role), "roles")
    _within("operators.phase", table.phase, -1, len(graph.phases), "phases")
    _within("operators.step", table.step, -1)
    _within("operators.origin", table.origin, -1, len(table), "operators")
    for name in ("stream", "flops", "moved"):
        _within(f"operators.{name}", getattr(table, name), 0)


def _check_accesses(name: str, accesses: Accesses, operators: int, storages: int) -> None:
    start = accesses.start
    if len(start) != operators + 1:
        raise TraceError(f"{name}.start: must have {operators + 1} entries, one more than operators, has {len(start)}")
    if start[0] != 0:
        raise TraceError(f"{name}.start[0]: must be 0, is {start[0]}")
    _all(f"{name}.start", np.diff(start, prepend=0) >= 0, "must not be smaller than the entry before it")
    for column in ("storage", "version"):
        if len(getattr(accesses, column)) != start[-1]:
            raise TraceError(f"{name}.{column}: must have {start[-1]} entries, as {name}.start says")
    _within(f"{name}.storage", accesses.storage, 0, storages, "storages")
    _within(f"{name}.version", accesses.version, 0)


def _check_events(graph: StepGraph) -> None:
    kind, index, value = graph.kind, graph.index, graph.value
    if not len(kind) == len(index) == len(value):
        raise TraceError(f"events: kind, index and value have {len(kind)}, {len(index)} and {len(value)} entries")
    _within("events.kind", kind, 0, len(Kind), "kinds")
    storages, names = len(graph.storages), len(graph.names)
    tables = {
        **dict.fromkeys(OF_STORAGES, (storages, "storages")),
        Kind.PHASE: (len(graph.phases), "phases"),
        Kind.ENTER: (names, "names"),
        Kind.EXIT: (names, "names"),
        Kind.COLLECTIVE: (names, "names"),
    }
    for which, (size, table) in tables.items():
        at = np.flatnonzero(kind == which)
        _within("events.index", index[at], 0, size, table, at)
    at = np.flatnonzero(kind == Kind.OPERATOR)
    if len(at) != len(graph.operators):
        raise TraceError(f"events: {len(at)} operators start, {len(graph.operators)} there are")
    _all("events.index", index[at] == np.arange(len(at)), "operators must start one after another, from 0", at)
    _check_lives(graph)


def _check_lives(graph: StepGraph) -> None:
    """Each storage is born once, and dies once at most, later."""
    at = np.flatnonzero(np.isin(graph.kind, (Kind.ALLOC, Kind.FREE)))
    storage = graph.index[at]
    order = np.lexsort((at, storage))
    at, storage = at[order], storage[order]
    kind = graph.kind[at]
    first = np.ones(len(at), dtype=np.bool_)
    first[1:] = storage[1:] != storage[:-1]
    after_free = np.zeros(len(at), dtype=np.bool_)
    after_free[1:] = ~first[1:] & (kind[:-1] == Kind.FREE)
    birth = kind == Kind.ALLOC
    wrong = (birth != first) | after_free
    if wrong.any():
        place = np.flatnonzero(wrong)[np.argmin(at[wrong])]
        name = f"storage {storage[place]}"
        if birth[place]:
            raise TraceError(f"events[{at[place]}]: {name} is born a second time")
        raise TraceError(
            f"events[{at[place]}]: {name} dies {'before it is born' if first[place] else 'after its death'}"
        )


def _same_length(name: str, table: DataclassInstance) -> None:
    columns = ((entry.name, getattr(table, entry.name)) for entry in dataclasses.fields(table))
    lengths = {name: len(column) for name, column in columns if column is not None}
    first, expected = next(iter(lengths.items()))
    for column, length in lengths.items():
        if length != expected:
            raise TraceError(f"{name}.{column}: has {length} entries, {name}.{first} has {expected}")


def _within(
    column: str,
    values: npt.NDArray[Any],
    least: int,
    end: int | None = None,
    table: str = "",
    places: Sequence[int] | Int64Array | None = None,
) -> None:
    """TraceError for the first value below `least`, or not below `end`, the length of `table`."""
    bad = values < least
    if end is not None:
        bad |= values >= end
    if bad.any():
        found = int(np.argmax(bad))
        place = found if places is None else places[found]
        limit = f"must be {least} or more" if end is None else f"must lie in {table}, from {least} to {end - 1}"
        raise TraceError(f"{column}[{place}]: {limit}, is {values[found]}")


def _all(
    column: str, good: npt.NDArray[np.bool_], reason: str, places: Sequence[int] | Int64Array | None = None
) -> None:
    if not good.all():
        found = int(np.argmin(good))
        raise TraceError(f"{column}[{found if places is None else places[found]}]: {reason}")
