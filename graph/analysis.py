"""What a step graph tells without an allocator: memory over the order of events, what is kept for backward, and work.

Bytes are those that were asked for: what a perfect allocator would need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from graph.dag import Edges, edges, text_of
from graph.model import Int64Array, Kind, Role, StepGraph

#: Categories that hold what a model learns or is given; they are not kept for backward, whoever reads them.
STANDING: Final = frozenset({"parameter", "gradient", "optimizer_state", "buffer", "input", "workspace"})


# Memory over the order of events


@dataclass(frozen=True)
class Lives:
    """Births and deaths: `born` and `died` are events, by storage (`died` is the number of events if it never does).

    A storage without a birth has `born` equal to the number of events.
    """

    born: Int64Array
    died: Int64Array


def lives(graph: StepGraph) -> Lives:
    """When each storage lives."""
    count, end = len(graph.storages), len(graph.kind)
    born, died = np.full(count, end, dtype=np.int64), np.full(count, end, dtype=np.int64)
    for kind, column in ((Kind.ALLOC, born), (Kind.FREE, died)):
        at = np.flatnonzero(graph.kind == kind)
        column[graph.index[at]] = at
    return Lives(born, died)


def live_bytes(graph: StepGraph) -> Int64Array:
    """Bytes alive after each event."""
    change = np.zeros(len(graph.kind), dtype=np.int64)
    for kind, sign in ((Kind.ALLOC, 1), (Kind.FREE, -1)):
        at = np.flatnonzero(graph.kind == kind)
        change[at] = sign * graph.storages.bytes[graph.index[at]]
    return np.cumsum(change, dtype=np.int64)


#: Columns of storages that are texts, in the order of `Tensor`.
_TEXTS: Final = ("category", "name", "module", "dtype")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage for people; texts are None where nothing is known."""

    storage: int
    bytes: int
    category: str | None
    name: str | None
    module: str | None
    dtype: str | None
    born: int


@dataclass(frozen=True)
class Peak:
    """The most bytes alive (after `event`, the first such), in which phase and step, and what was alive then."""

    bytes: int
    event: int
    phase: str | None
    step: int
    by_category: dict[str, int]
    tensors: tuple[Tensor, ...]  # largest first


def peak(graph: StepGraph, *, phase: PhasePeak | None = None) -> Peak:
    """The peak of live bytes of the whole run, or of one of its phases (see `phase_peaks`), with what is alive."""
    if phase is None:
        live = live_bytes(graph)
        event = int(np.argmax(live)) if len(live) else 0
        found = next((one for one in phase_peaks(graph) if one.start <= event < one.end), None)
    else:
        event, found = phase.event, phase
    tensors = alive(graph, event)
    totals: dict[str, int] = {}
    for tensor in tensors:
        category = tensor.category or "unknown"
        totals[category] = totals.get(category, 0) + tensor.bytes
    by_category = dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
    name, step = (None, -1) if found is None else (found.name, found.step)
    return Peak(sum(totals.values()), event, name, step, by_category, tensors)


def alive(graph: StepGraph, event: int) -> tuple[Tensor, ...]:
    """The storages that hold bytes after event `event`, the largest first (then by number)."""
    span = lives(graph)
    return _tensors(graph, np.flatnonzero((span.born <= event) & (span.died > event) & (graph.storages.bytes > 0)))


def largest(graph: StepGraph, count: int) -> tuple[Tensor, ...]:
    """The `count` largest storages of the whole run, the largest first."""
    return _tensors(graph, np.argsort(-graph.storages.bytes, kind="stable")[:count])


def _tensors(graph: StepGraph, storages: Int64Array) -> tuple[Tensor, ...]:
    """Storages given by number, the largest first."""
    storages = storages[np.lexsort((storages, -graph.storages.bytes[storages]))]
    sizes = graph.storages.bytes[storages]
    columns = (text_of(graph, getattr(graph.storages, name)[storages]) for name in _TEXTS)
    born = lives(graph).born[storages]
    return tuple(map(Tensor, storages.tolist(), sizes.tolist(), *columns, born.tolist()))


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """One stretch of a phase: events `start` to before `end`, the most bytes alive in it (what it began with counts),
    after which event, and what it left. `step` is -1 for none; before the first phase the name is empty."""

    name: str
    step: int
    start: int
    end: int
    peak: int
    event: int
    left: int


def phase_peaks(graph: StepGraph) -> tuple[PhasePeak, ...]:
    """The peaks of all phases, in order of events."""
    live = live_bytes(graph)
    if not len(live):
        return ()
    starts = np.flatnonzero(graph.kind == Kind.PHASE)
    marks = [(int(at), graph.phases[graph.index[at]], int(graph.value[at])) for at in starts]
    if not marks or marks[0][0] > 0:
        marks.insert(0, (0, "", -1))
    ends = [*(at for at, _, _ in marks[1:]), len(live)]
    found = []
    for (start, name, step), end in zip(marks, ends, strict=True):  # the mark itself changes nothing
        event = start + int(np.argmax(live[start:end]))
        found.append(PhasePeak(name, step, start, end, int(live[event]), event, int(live[end - 1])))
    return tuple(found)


# What is kept for backward


@dataclass(frozen=True, slots=True)
class Saved:
    """What operators of one name in one module (of all layers) made in forward and backward found: bytes, storages.

    `kind` is the module's class. `read`: bytes of those that backward, or what it computes again, reads; the rest is
    only held.
    """

    operator: str
    module: str | None
    kind: str | None
    storages: int
    bytes: int
    read: int


def saved_storages(graph: StepGraph, step: int | None = None) -> Int64Array:
    """The storages made in forward and alive when backward begins: of one step, or of the last that has a backward.

    With several micro-batches in the step it is the last one.
    """
    start = _backward_starts(graph, step)
    if start is None:
        return np.empty(0, dtype=np.int64)
    began, event = start
    span, role = lives(graph), graph.operators.role
    maker = makers(graph)
    made = (maker >= 0) & (role[np.maximum(maker, 0)] == Role.FORWARD) if len(role) else maker >= 0
    codes = {code for code, text in enumerate(graph.names) if text in STANDING}
    standing = np.isin(graph.storages.category, list(codes))
    chosen: Int64Array = np.flatnonzero(
        made & ~standing & (span.born >= began) & (span.born < event) & (span.died > event)
    )
    return chosen


def _backward_starts(graph: StepGraph, step: int | None) -> tuple[int, int] | None:
    """Events: where the last forward pass began (of `step`), and where the first operator of its backward stands."""
    at = np.flatnonzero(graph.kind == Kind.OPERATOR)
    number = graph.index[at]
    role, steps = graph.operators.role[number], graph.operators.step[number]
    passes = (role == Role.FORWARD) | (role == Role.BACKWARD)
    at, role, steps = at[passes], role[passes], steps[passes]
    turn = np.flatnonzero((role[1:] == Role.BACKWARD) & (role[:-1] == Role.FORWARD)) + 1
    if step is not None:
        turn = turn[steps[turn] == step]
    if not len(turn):
        return None
    earlier = np.flatnonzero(role[: turn[-1]] == Role.BACKWARD)
    return (int(at[earlier[-1]]) if len(earlier) else 0), int(at[turn[-1]])


def makers(graph: StepGraph) -> Int64Array:
    """The operator in which each storage was born (-1: none before it)."""
    at = np.flatnonzero(graph.kind == Kind.OPERATOR)
    born = lives(graph).born
    place = np.searchsorted(at, born, side="right") - 1
    found = np.full(len(born), -1, dtype=np.int64)
    known = place >= 0
    found[known] = graph.index[at[place[known]]]
    return found


def saved_for_backward(graph: StepGraph, step: int | None = None) -> tuple[Saved, ...]:
    """What `saved_storages` holds, by the operator that made it and its module (layers together), largest first."""
    storages = saved_storages(graph, step)
    maker = makers(graph)[storages]
    readers = np.repeat(np.arange(len(graph.operators)), np.diff(graph.reads.start))
    later = np.isin(graph.operators.role[readers], (Role.BACKWARD, Role.RECOMPUTE)) if len(readers) else readers > 0
    read = np.isin(storages, graph.reads.storage[later])
    sizes = graph.storages.bytes[storages]
    table = graph.operators
    groups: dict[tuple[str, str | None, str | None], list[int]] = {}
    classes = dict(graph.modules)
    for operator, size, used in zip(maker.tolist(), sizes.tolist(), read.tolist(), strict=True):
        module = graph.name(int(table.module[operator]))
        kind = None if module is None else classes.get(module)
        key = (graph.name(int(table.name[operator])) or "", layers_together(module), kind)
        group = groups.setdefault(key, [0, 0, 0])
        group[0] += 1
        group[1] += size
        group[2] += size if used else 0
    rows = (Saved(*key, *group) for key, group in groups.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.operator, row.module or "")))


def layers_together(module: str | None) -> str | None:
    """A module's path with `*` for numbers, so that the same part of every layer has the same name."""
    return None if module is None else re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)


# Work


@dataclass(frozen=True, slots=True)
class Total:
    """Operators of one group: how many, their FLOPs, bytes moved, and bytes that were allocated in them."""

    name: str
    step: int
    operators: int
    flops: int
    moved: int
    allocated: int


def by_phase(graph: StepGraph) -> tuple[Total, ...]:
    """Totals of each phase and step, in order of their first operators."""
    table = graph.operators
    keys = [
        (graph.phases[phase] if phase >= 0 else "", step)
        for phase, step in zip(table.phase.tolist(), table.step.tolist(), strict=True)
    ]
    return _totals(graph, keys)


def by_module(graph: StepGraph, *, together: bool = True) -> tuple[Total, ...]:
    """Totals of each module, over all steps, most FLOPs first; `together`: the same part of all layers is one.

    The model itself, whose path is empty, has its class as its name; what ran in no module has the empty name.
    """
    root = dict(graph.modules).get("", "the model")
    texts = [((layers_together(name) or "") if together else name) or root for name in graph.names] + [""]
    rows = _totals(graph, [(texts[code], -1) for code in graph.operators.module.tolist()])
    return tuple(sorted(rows, key=lambda row: (-row.flops, -row.moved, row.name)))


def _totals(graph: StepGraph, keys: Sequence[tuple[str, int]]) -> tuple[Total, ...]:
    groups: dict[tuple[str, int], int] = {}
    group = np.fromiter((groups.setdefault(key, len(groups)) for key in keys), np.int64, len(keys))
    maker = makers(graph)
    made = maker >= 0
    sums = [
        _sum(group, np.ones(len(group), dtype=np.int64), len(groups)),
        _sum(group, graph.operators.flops, len(groups)),
        _sum(group, graph.operators.moved, len(groups)),
        _sum(group[maker[made]], graph.storages.bytes[made], len(groups)),
    ]
    return tuple(
        Total(name, step, *row)
        for (name, step), *row in zip(groups, *(column.tolist() for column in sums), strict=True)
    )


def _sum(group: Int64Array, values: npt.NDArray[np.int64], count: int) -> Int64Array:
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, group, values)
    return total


@dataclass(frozen=True)
class CriticalPath:
    """The chain of dependent operators with the most FLOPs: they, in order, and their sum."""

    operators: tuple[int, ...]
    flops: int


def critical_path(graph: StepGraph, found: Edges | None = None, *, among: Iterable[Role] = tuple(Role)) -> CriticalPath:
    """The longest chain by FLOPs; of operators with a role in `among` (chains do not go through others).

    Among equal ones it is the chain that ends earliest, and whose steps back lead to the earliest operators.
    """
    count = len(graph.operators)
    if not count:
        return CriticalPath((), 0)
    found = edges(graph) if found is None else found
    allowed = np.isin(graph.operators.role, list(among))
    kept = found.source < count
    kept &= allowed[np.minimum(found.source, count - 1)] & allowed[found.target]
    best = np.where(allowed, graph.operators.flops, -1).tolist()
    own = graph.operators.flops.tolist()
    before = [-1] * count
    for source, target in zip(found.source[kept].tolist(), found.target[kept].tolist(), strict=True):
        reached = best[source] + own[target]  # edges come sorted by target, so that `source` is settled
        if reached > best[target]:
            best[target], before[target] = reached, source
    last = int(np.argmax(best))
    if not allowed[last]:
        return CriticalPath((), 0)
    chain = [last]
    while before[chain[-1]] >= 0:
        chain.append(before[chain[-1]])
    return CriticalPath(tuple(reversed(chain)), int(best[last]))
