"""The trace of a recorded program: the allocator's history, with names, categories and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graph.recorder.phase_names import BACKWARD, FORWARD, PHASES
from simulator.engine import kernels as engine
from simulator.engine.program import POOL_OPS
from simulator.recording import kernels
from strategies.rank_events import held
from traces.model import BoolArray, Column, Events, Int64Array, Op, OpArray, RankEvents, Strings, Trace

if TYPE_CHECKING:
    from graph.recorder.program import Labels
    from simulator.recording.allocator import LiveAllocator

_TEMPORARY: Final = "temporary"
_ACTIVATION: Final = "activation"


def trace_of(allocator: LiveAllocator, labels: Labels, metadata: Mapping[str, Any], rank: int = 0) -> Trace:
    """All that was served, as the trace of one rank."""
    return Trace(
        ranks=(RankEvents((rank,), _events(allocator, labels)),),
        metadata={"producer": "llmem", **metadata},
        conf=allocator.conf or "",
        release=allocator.release.text,
        devices=(allocator.device,),
    )


def together(traces: Sequence[Trace]) -> Trace:
    """One trace of ranks that were recorded apart; those whose events are the same share them."""
    kinds: list[RankEvents] = []
    for mine in (rank for trace in traces for rank in trace.ranks):
        for place, kind in enumerate(kinds):
            if _same(kind.events, mine.events):
                kinds[place] = replace(kind, ranks=(*kind.ranks, *mine.ranks))
                break
        else:
            kinds.append(mine)
    return replace(traces[0], ranks=tuple(kinds))


def _same(one: Events, other: Events) -> bool:
    """Whether two ranks did the same: ops, allocations, sizes and streams."""
    columns = ("id", "bytes", "stream", "step", "on", "duration_ns")
    return np.array_equal(one.op, other.op) and all(np.array_equal(one.ints(c), other.ints(c)) for c in columns)


def _events(allocator: LiveAllocator, labels: Labels) -> Events:
    history = allocator.history
    op = history[:, kernels.H_OP].astype(np.uint8)
    ident = history[:, kernels.H_IDENT].copy()
    alloc, phase = op == Op.ALLOC, op == Op.PHASE
    code = np.where(phase, ident, -1)
    region = np.isin(op, (Op.REGION_BEGIN, Op.REGION_END))
    kernel = op == Op.KERNEL
    names = _names(labels, alloc, ident, code, region | kernel)
    ident[phase | region | kernel] = -1
    columns: dict[str, Column] = {
        "id": ident,
        "bytes": np.where(alloc, history[:, kernels.H_ARG], 0),
        "stream": history[:, kernels.H_STREAM].copy(),
        "step": np.where(phase, history[:, kernels.H_ARG], -1),
        "category": _categories(labels, alloc, code, ident, op == Op.FREE),
        "name": names,
        "frames": _frames(labels, alloc, ident),
    }
    if labels.gpu_bytes:
        there = np.full(len(labels.operator), -1, dtype=np.int64)
        there[list(labels.gpu_bytes)] = list(labels.gpu_bytes.values())
        columns["gpu_bytes"] = np.where(alloc, there[np.where(alloc, ident, 0)], -1)
    for what, column, none in ((Op.KERNEL, "duration_ns", 0), (Op.WAIT_STREAM, "on", -1)):
        if (op == what).any():
            columns[column] = np.where(op == what, history[:, kernels.H_ARG], none)
    columns |= _pools(op, history[:, kernels.H_ARG])
    for name, sparse in (("checkpoint", allocator.checkpoints), ("was", allocator.taken)):
        if sparse:
            numbers = np.full(len(op), -1, dtype=np.int64)
            numbers[list(sparse)] = list(sparse.values())
            columns[name] = numbers
    if allocator.fractions:
        fractions = np.full(len(op), np.nan)
        fractions[list(allocator.fractions)] = list(allocator.fractions.values())
        columns["fraction"] = fractions
    if allocator.confs:
        columns["conf"] = Strings.encode([allocator.confs.get(row) for row in range(len(op))])
    events = Events(op, columns)
    return held(events) if allocator.late else events


def _pools(op: OpArray, args: Int64Array) -> dict[str, Column]:
    """What events of private pools say, if there are any."""
    where = np.isin(op, POOL_OPS) | ((op == Op.EMPTY_CACHE) & (args > 0))
    if not where.any():
        return {}
    packed = np.where(where, args, 0)
    number = packed & engine.POOL_MASK
    flags = {"no_split": engine.POOL_NO_SPLIT, "use_on_oom": engine.POOL_ON_OOM, "capture": engine.POOL_CAPTURE}
    return {"pool": np.where(number > 0, number, -1), **{name: packed & bit != 0 for name, bit in flags.items()}}


def _categories(labels: Labels, alloc: BoolArray, phase: Int64Array, ident: Int64Array, free: BoolArray) -> Strings:
    """What was found; of the rest, what a forward made and a later phase gave back is an activation."""
    born = np.flatnonzero(alloc)
    row = np.arange(len(alloc))
    marks = np.maximum.accumulate(np.where(phase >= 0, row, 0))  # of each event: where its phase began
    died = np.full(len(born), len(alloc), dtype=np.int64)
    freed = np.flatnonzero(free)
    died[ident[freed]] = freed
    forward = phase[marks[born]] == FORWARD
    later = np.minimum(died, len(alloc) - 1)
    lasting = forward & (marks[later] != marks[born]) & (phase[marks[later]] >= BACKWARD)
    texts = (*labels.names, _TEMPORARY, _ACTIVATION)
    codes = np.where(lasting, len(texts) - 1, len(texts) - 2)
    if labels.category:
        codes[list(labels.category)] = list(labels.category.values())
    return _column(len(alloc), born, codes, texts)


def _names(labels: Labels, alloc: BoolArray, ident: Int64Array, phase: Int64Array, region: BoolArray) -> Strings:
    """Of an allocation: its own name, else its module and operator; of phases and regions: theirs."""
    texts = list(labels.names)
    operator, module = (np.asarray(column, dtype=np.int64) for column in (labels.operator, labels.module))
    pairs, codes = np.unique((module + 1) * len(texts) + operator, return_inverse=True)
    table = [
        f"{texts[place - 1]}: {texts[what]}" if place else texts[what]
        for place, what in (divmod(int(pair), max(len(texts), 1)) for pair in pairs)
    ]
    if labels.title:
        codes[list(labels.title)] = len(table) + np.fromiter(labels.title.values(), np.int64)
    rows = np.concatenate([np.flatnonzero(where) for where in (alloc, region, phase >= 0)])
    every = [codes[ident[alloc]], len(table) + ident[region], len(table) + len(texts) + phase[phase >= 0]]
    return _column(len(ident), rows, np.concatenate(every), (*table, *texts, *PHASES))


def _frames(labels: Labels, alloc: BoolArray, ident: Int64Array) -> Strings:
    """The stacks of allocations; those that read the same are one, and an empty one is none."""
    texts = labels.lines.texts()
    table = tuple(text for text in dict.fromkeys(texts) if text)
    known = {text: code for code, text in enumerate(table)}
    codes = np.array([known.get(text, -1) for text in texts], dtype=np.int32)
    column = np.full(len(ident), -1, dtype=np.int32)
    column[alloc] = codes[np.asarray(labels.stack, dtype=np.int64)[ident[alloc]]]
    return Strings(column, table)


def _column(count: int, rows: Int64Array, codes: Int64Array, texts: tuple[str, ...]) -> Strings:
    """A text column of `count` events, with the texts of `codes` in `rows`; the table has what is used."""
    used, short = np.unique(codes, return_inverse=True)
    column = np.full(count, -1, dtype=np.int32)
    column[rows] = short
    return Strings(column, tuple(texts[code] for code in used.tolist()))
