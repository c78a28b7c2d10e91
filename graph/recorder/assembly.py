"""From a recorder's log to a step graph: tables as arrays, categories of storages, and iterations that repeat.

A run in which every iteration from the second on is equal needs only two of them: `repeat` copies the last one, where
what it leaves alive matches, one to one, what it found alive and freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from graph.model import Accesses, Kind, Operators, Role, StepGraph, Storages, TensorInfo
from graph.recorder.attribution import Roles
from graph.recorder.recorder import KIND_BITS, Log

Int64Array = npt.NDArray[np.int64]
Boundary = tuple[int, int, int]

#: Events whose index is a storage.
_OF_STORAGES: Final = (
    int(Kind.ALLOC),
    int(Kind.FREE),
    int(Kind.GRADIENT),
    int(Kind.RECORD_STREAM),
)


@dataclass
class Tables:
    """A log as arrays: events (kind, index, value), operators and storages (columns by name), accesses."""

    kind: Int64Array
    index: Int64Array
    value: Int64Array
    operators: dict[str, Int64Array]
    storages: dict[str, Int64Array]
    reads: tuple[Int64Array, Int64Array, Int64Array]  # start, storage, version
    writes: tuple[Int64Array, Int64Array, Int64Array]


def tables(log: Log, roles: Roles, parameters: Mapping[str, int], buffers: frozenset[str]) -> Tables:
    """The arrays of a finished log."""
    packed = np.array(log.events, dtype=np.int64)
    value = np.zeros(len(packed), dtype=np.int64)
    if log.values:
        value[np.fromiter(log.values.keys(), np.int64)] = np.fromiter(log.values.values(), np.int64)
    rows = log.operators
    columns = {
        "name": [row[0].code for row in rows],
        "module": [row[1] for row in rows],
        "role": [row[2] for row in rows],
        "phase": [row[3] for row in rows],
        "step": [row[4] for row in rows],
        "stream": [row[9] for row in rows],
        "thread": [row[5] for row in rows],
        "flops": [row[0].flops for row in rows],
        "moved": [row[0].moved for row in rows],
        "origin": [row[6] for row in rows],
    }
    operators = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    kind = packed & (1 << KIND_BITS) - 1
    index = packed >> KIND_BITS
    return Tables(
        kind=kind,
        index=index,
        value=value,
        operators=operators,
        storages=_storages(log, roles, parameters, buffers, operators, kind, index),
        reads=_accesses([row[7] for row in rows]),
        writes=_accesses([row[8] for row in rows]),
    )


def _accesses(rows: Sequence[Sequence[tuple[int, int]]]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Rows of (storage, version) as one table; storages without bytes (-1) are left out."""
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), dtype=np.int64).reshape(-1, 2)
    row = np.repeat(np.arange(len(rows)), np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
    kept = flat[:, 0] >= 0
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.bincount(row[kept], minlength=len(rows)), out=start[1:])
    return start, flat[kept, 0], flat[kept, 1]


def _storages(
    log: Log,
    roles: Roles,
    parameters: Mapping[str, int],
    buffers: frozenset[str],
    operators: Mapping[str, Int64Array],
    kind: Int64Array,
    index: Int64Array,
) -> dict[str, Int64Array]:
    count = len(log.born)
    operator = np.array([row[1] for row in log.born], dtype=np.int64)
    lasting, by_backward = _lifetimes(count, operators, kind, index)
    role = operators["role"][operator] if len(operators["role"]) else operator
    scratch = np.array([isinstance(row[2], str) for row in log.born], dtype=np.bool_)
    category = np.full(count, log.code("temporary"), dtype=np.int64)
    category[(role == Role.FORWARD) & lasting] = log.code("activation")
    category[(role == Role.RECOMPUTE) & by_backward] = log.code("activation")
    category[scratch] = log.code("workspace")
    name = operators["name"][operator].copy() if count else operator
    source = np.full(count, -1, dtype=np.int64)
    titles = {number: text for text, number in reversed(list(parameters.items()))}
    for number, owner in roles.gradient.items():
        if number >= 0:
            category[number] = log.code("gradient")
            source[number] = owner
    for number, (owner, state) in roles.state.items():
        category[number] = log.code("optimizer_state")
        source[number] = owner
        if owner in titles:
            name[number] = log.code(f"{titles[owner]}.{state}")
    for number in roles.input:
        if number >= 0:
            category[number] = log.code("input")
    named: set[int] = set()
    module = operators["module"][operator].copy() if count else operator
    for text, number in parameters.items():
        if number not in named:
            named.add(number)
            name[number] = log.code(text)
            module[number] = log.code(text.rpartition(".")[0])
            category[number] = log.code("buffer" if text in buffers else "parameter")
    for number, (_, _, what, _) in enumerate(log.born):
        if isinstance(what, str):
            name[number] = log.code(what)
    dtypes = {
        what: -1 if what is None or isinstance(what, str) else log.code(str(what).removeprefix("torch."))
        for what in {row[2] for row in log.born}
    }
    there = np.full(count, -1, dtype=np.int64)
    there[list(log.gpu_bytes)] = list(log.gpu_bytes.values())
    return {
        "bytes": np.array([row[0] for row in log.born], dtype=np.int64),
        "dtype": np.array([dtypes[row[2]] for row in log.born], dtype=np.int64),
        "category": category,
        "name": name,
        "module": module,
        "stream": np.array([row[3] for row in log.born], dtype=np.int64),
        "source": source,
        "gpu_bytes": there,
    }


def _lifetimes(
    count: int, operators: Mapping[str, Int64Array], kind: Int64Array, index: Int64Array
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For each storage: does it outlive the forward pass it was born in, which ends with its phase or, in a schedule of
    many passes, before the next backward operator; is it freed by a backward operator."""
    born = np.zeros(count, dtype=np.int64)
    freed = np.full(count, len(kind), dtype=np.int64)
    alloc = np.flatnonzero(kind == Kind.ALLOC)
    free = np.flatnonzero(kind == Kind.FREE)
    born[index[alloc]] = alloc
    freed[index[free]] = free
    at = np.flatnonzero(kind == Kind.OPERATOR)
    backward = operators["role"][index[at]] == Role.BACKWARD
    marks = np.append(np.union1d(np.flatnonzero(kind == Kind.PHASE), at[backward]), len(kind))
    ends = marks[np.minimum(np.searchsorted(marks, born, side="right"), len(marks) - 1)]
    before = np.searchsorted(at, freed) - 1
    by_backward = np.ones(count, dtype=np.bool_)
    if len(at):
        by_backward = (before < 0) | backward[np.maximum(before, 0)]
    return freed > ends, by_backward


def repeat(table: Tables, boundaries: Sequence[Boundary], times: int) -> Tables | None:
    """`table` with its last iteration repeated `times` more; None where that iteration does not repeat.

    `boundaries` has the place (event, operator, storage) where each iteration starts, and where the last one ends. What
    iterations before left alive and this one frees must be, in order of birth, what this one leaves alive.
    """
    (e1, o1, s1), (e2, o2, s2) = boundaries[-2], boundaries[-1]
    kind, index = table.kind[e1:e2], table.index[e1:e2]
    dead = index[kind == Kind.FREE]
    found = np.sort(dead[dead < s1])
    left = np.setdiff1d(np.arange(s1, s2), dead[dead >= s1])
    if len(found) != len(left):
        return None
    for name in ("bytes", "dtype", "category", "name"):
        if not np.array_equal(table.storages[name][found], table.storages[name][left]):
            return None
    born, ran = s2 - s1, o2 - o1
    total = len(table.storages["bytes"])
    parts = [(table.kind[:e2], table.index[:e2], table.value[:e2])]
    operators = {name: [column[:o2]] for name, column in table.operators.items()}
    storages = {name: [column[:s2]] for name, column in table.storages.items()}
    reads, writes = [_cut(table.reads, 0, o2)], [_cut(table.writes, 0, o2)]
    growth = _growth(table.writes, o1, o2, total)
    identity = np.arange(total, dtype=np.int64)
    for turn in range(1, times + 1):
        mapped = identity.copy()
        mapped[s1:] += turn * born
        mapped[found] = left + (turn - 1) * born
        parts.append(_shift(kind, index, table.value[e1:e2], mapped, turn, ran))
        for name, column in table.operators.items():
            part = column[o1:o2].copy()
            if name == "step":
                part[part >= 0] += turn
            elif name == "origin":
                part[part >= o1] += turn * ran
            operators[name].append(part)
        for name, column in table.storages.items():
            part = column[s1:s2].copy()
            if name == "source":
                part = np.where(part >= 0, mapped[part], part)
            storages[name].append(part)
        for access, out in ((table.reads, reads), (table.writes, writes)):
            start, storage, version = _cut(access, o1, o2)
            grown = np.where(storage < s1, growth[storage], 0) * turn
            grown[np.isin(storage, found)] = 0
            out.append((start, mapped[storage], version + grown))
    mapped = identity.copy()
    mapped[s1:] += times * born
    parts.append(_shift(table.kind[e2:], table.index[e2:], table.value[e2:], mapped, times, ran))
    for name, column in table.operators.items():
        operators[name].append(column[o2:])
    for name, column in table.storages.items():
        storages[name].append(column[s2:])
    for access, out in ((table.reads, reads), (table.writes, writes)):
        start, storage, version = _cut(access, o2, len(access[0]) - 1)
        out.append((start, mapped[storage], version))
    kinds, indices, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Tables(
        kind=kinds,
        index=indices,
        value=values,
        operators={name: np.concatenate(column) for name, column in operators.items()},
        storages={name: np.concatenate(column) for name, column in storages.items()},
        reads=_join(reads),
        writes=_join(writes),
    )


def _shift(
    kind: Int64Array, index: Int64Array, value: Int64Array, mapped: Int64Array, turn: int, ran: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    index, value = index.copy(), value.copy()
    of_storages = np.isin(kind, _OF_STORAGES)
    index[of_storages] = mapped[index[of_storages]]
    gradient = kind == Kind.GRADIENT
    value[gradient] = np.where(value[gradient] >= 0, mapped[value[gradient]], -1)
    index[kind == Kind.OPERATOR] += turn * ran
    index[kind == Kind.STEP] += turn
    timed = ((kind == Kind.PHASE) | (kind == Kind.STEP)) & (value >= 0)
    value[timed] += turn
    return kind, index, value


def _growth(writes: tuple[Int64Array, Int64Array, Int64Array], first: int, last: int, total: int) -> Int64Array:
    """How many versions each storage gains from operator `first` to `last`."""
    _, storage, version = _cut(writes, first, last)
    count = np.zeros(total, dtype=np.int64)
    np.add.at(count, storage[version > 0], 1)
    return count


def _cut(
    access: tuple[Int64Array, Int64Array, Int64Array], first: int, last: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    start, storage, version = access
    low, high = start[first], start[last]
    return start[first : last + 1] - low, storage[low:high], version[low:high]


def _join(parts: Sequence[tuple[Int64Array, Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array, Int64Array]:
    starts: list[Int64Array] = [np.zeros(1, dtype=np.int64)]
    offset = 0
    for start, _, _ in parts:
        starts.append(start[1:] + offset)
        offset += int(start[-1])
    return (
        np.concatenate(starts),
        np.concatenate([storage for _, storage, _ in parts]),
        np.concatenate([version for _, _, version in parts]),
    )


def step_graph(
    table: Tables,
    *,
    case: Mapping[str, Any],
    environment: Mapping[str, Any],
    names: tuple[str, ...],
    phases: tuple[str, ...],
    parameters: Mapping[str, int],
    assumptions: tuple[str, ...],
    tensors: tuple[TensorInfo, ...],
    modules: tuple[tuple[str, str], ...],
) -> StepGraph:
    """The frozen form, in the narrow types of `graph.model`."""
    narrow: dict[str, Any] = {"role": np.uint8, "thread": np.uint8}
    narrow |= dict.fromkeys(("flops", "moved", "bytes", "gpu_bytes"), np.int64)
    operators = {name: column.astype(narrow.get(name, np.int32)) for name, column in table.operators.items()}
    storages = {name: column.astype(narrow.get(name, np.int32)) for name, column in table.storages.items()}
    if (storages["gpu_bytes"] < 0).all():
        del storages["gpu_bytes"]
    reads, writes = (
        Accesses(start, storage.astype(np.int32), version.astype(np.int32))
        for start, storage, version in (table.reads, table.writes)
    )
    return StepGraph(
        case=case,
        environment=environment,
        names=names,
        phases=phases,
        storages=Storages(**storages),
        operators=Operators(**operators),
        reads=reads,
        writes=writes,
        kind=table.kind.astype(np.uint8),
        index=table.index.astype(np.int32),
        value=table.value,
        parameters=parameters,
        assumptions=assumptions,
        tensors=tensors,
        modules=modules,
    )
