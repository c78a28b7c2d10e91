"""What recorded allocations are for, and where phases begin: by stacks, by annotated ranges, and by lifetimes.

A snapshot has neither categories nor phases. Each entry gets a stage, where something tells it, and an allocation its
category from the stages that it is born in, lives through and dies in. Rules, the first that tells something:

Stages, by the stack (innermost frame that tells one; phases go by the outermost):
  `zero_grad` in any optimizer; torch/optim, or `step` in a file of an optimizer: optimizer; `backward`,
  torch/autograd/graph.py, or a stack that does not begin where the program's do, or none where they have one
  (autograd's own threads): backward;
  torch/nn/modules: forward, but `_apply`, `to`, `cuda`, and all before the first of them: load; collectives of
  torch.distributed: communication.
Stages, by ranges (`external_annotations`): Optimizer.step#..., Optimizer.zero_grad#..., FSDP::... and nccl:...
  (communication), `DistributedDataParallel.forward`, and ranges that a user calls forward, backward or optimizer.
FSDP2's ranges mark where a root's forward and the first backward begin.
Where only the optimizer's ranges are there: of the allocations between two steps, backward begins with the last scalar
  (at most 8 bytes: autograd's seed) before the first gradient; forward begins where the sizes do with which the second
  step begins, as often as they come again after a gradient (micro-batches); before the first of them lies load. Where
  sizes differ from step to step, load ends with the last trained parameter. Nothing is told of pipelines.

Categories:
  gradient         freed by zero_grad; or born in backward, alive in the optimizer, and as large as a parameter
  optimizer_state  born in the optimizer and alive beyond it; temporary where it is freed in it
  activation       born in forward and alive in backward; temporary where it is freed before
  temporary        born and freed in one backward, or in load
  parameter        born in load and alive at the second step (buffers that are loaded look the same)
  communication    born in a collective or in FSDP; a gradient where it is born in backward and alive in the optimizer
All else stays unknown: what lives from a forward to the end may be a workspace, a buffer, or kept by the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from traces.model import BoolArray, Int64Array
from traces.snapshot.layout import ALLOC, FREE_COMPLETED, FREE_REQUESTED, Annotation, Entries

StageArray = npt.NDArray[np.uint8]


class Stage(IntEnum):
    """What the program was at; phases bear the names of the first four."""

    NONE = 0
    LOAD = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    ZERO_GRAD = 5
    COMMUNICATION = 6


def _patterns(*rows: tuple[str, Stage], flags: re.RegexFlag = re.NOFLAG) -> tuple[tuple[re.Pattern[str], Stage], ...]:
    return tuple((re.compile(pattern, flags), stage) for pattern, stage in rows)


#: A frame as `file:line:function`, and its stage; the first that matches.
_FRAMES: Final = _patterns(
    (r"[/\\]\w*optim\w*[/\\.].*:zero_grad$", Stage.ZERO_GRAD),
    (r"[/\\]torch[/\\]optim[/\\]|[/\\]\w*optim\w*[/\\.].*:(step|update_step|_single_tensor\w*)$", Stage.OPTIMIZER),
    (r":(backward|_engine_run_backward)$", Stage.BACKWARD),
    (r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py:\d+:(_apply|to|cuda|convert|half|bfloat16)$", Stage.LOAD),
    (r"[/\\]torch[/\\]nn[/\\]modules[/\\]", Stage.FORWARD),
    (r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|_functional_collectives)\.py", Stage.COMMUNICATION),
)
#: Where a program's own threads begin.
_ROOTS: Final = frozenset({"<module>", "_bootstrap", "_run_module_as_main", "_run_code"})
#: Names of ranges, and their stage.
_RANGES: Final = _patterns(
    (r"Optimizer\.step#|[# \t]*optimizer( step)?[# \t]*$", Stage.OPTIMIZER),
    (r"Optimizer\.zero_grad#", Stage.ZERO_GRAD),
    (r"FSDP::|nccl:", Stage.COMMUNICATION),
    (r"DistributedDataParallel\.forward$|[# \t]*forward[# \t]*$", Stage.FORWARD),
    (r"[# \t]*backward[# \t]*$", Stage.BACKWARD),
    (r"[# \t]*load[# \t]*$", Stage.LOAD),
    flags=re.IGNORECASE,
)
_MARKS: Final = {"FSDP::root_pre_forward": Stage.FORWARD, "FSDP::pre_backward": Stage.BACKWARD}
#: Messages between the stages of a pipeline, whose micro-batches take turns: sizes tell nothing then.
_PIPELINE: Final = re.compile(r"nccl:(coalesced|send|recv)")
#: So many sizes in a row tell where a forward begins.
_PATTERN: Final = 8
#: Bytes of autograd's seed at most: a scalar.
_SCALAR: Final = 8


@dataclass(frozen=True)
class Roles:
    """By entry: the category of an allocation (None: unknown); and phases: first entry, name and step of each."""

    categories: list[str | None]
    phases: tuple[tuple[int, str, int], ...]


def find_roles(entries: Entries, annotations: tuple[Annotation, ...]) -> Roles:
    """Categories and phases of one device's entries; `annotations` are those of the device."""
    kind = np.array(entries.kind, dtype=np.uint8)
    freed = _freed(entries)
    inner, outer = _by_stack(entries)
    ranges = _ranges(entries, annotations)
    for start, stop, stage in ranges:
        inner[start:stop] = stage
        if stage is not Stage.COMMUNICATION:
            outer[start:stop] = stage
    steps = _steps(ranges, outer)
    if not (outer == Stage.BACKWARD).any():
        _by_marks(entries, annotations, [start for start, _ in steps], outer)
    if not (outer == Stage.BACKWARD).any() and not any(_PIPELINE.match(mark.name) for mark in annotations):
        _by_sizes(np.array(entries.size, dtype=np.int64), kind == ALLOC, freed, steps, inner, outer)
    if any(entries.frames):  # what has no stage before the first forward
        begin = int(np.argmax(np.isin(outer, (Stage.FORWARD, Stage.BACKWARD))))
        np.copyto(outer[:begin], np.uint8(Stage.LOAD), where=outer[:begin] == Stage.NONE)
    np.copyto(inner, outer, where=inner == Stage.NONE)
    found = _categories(entries, kind == ALLOC, freed, steps, inner, outer)
    return Roles(found, tuple(_phases(outer, steps)))


def _freed(entries: Entries) -> Int64Array:
    """For every allocation the entry that frees it; the number of entries where none does (and for other entries)."""
    freed = np.full(len(entries), len(entries), dtype=np.int64)
    alive: dict[int, int] = {}
    for i, (kind, address) in enumerate(zip(entries.kind, entries.address, strict=True)):
        if kind == ALLOC:
            alive[address] = i
        elif kind in (FREE_REQUESTED, FREE_COMPLETED) and address in alive:
            freed[alive.pop(address)] = i
    return freed


# Stages ---------------------------------------------------------------------------------------------------------------


def _by_stack(entries: Entries) -> tuple[StageArray, StageArray]:
    """The innermost and the outermost stage that the stack of an allocation tells."""
    threads = any(_root(text) in _ROOTS for text in set(entries.frames) if text)
    engine = Stage.BACKWARD if threads else Stage.NONE
    known: dict[str | None, tuple[int, int]] = {None: (engine, engine)}
    for text in set(entries.frames) - {None}:
        known[text] = _stages(str(text), threads)
    pairs = np.array([known[text] for text in entries.frames], dtype=np.uint8).reshape(-1, 2)
    pairs[np.array(entries.kind, dtype=np.uint8) != ALLOC] = Stage.NONE
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _root(text: str) -> str:
    return text.rpartition("\n")[2].rpartition(":")[2]


def _stages(text: str, threads: bool) -> tuple[int, int]:
    told = [stage for frame in text.split("\n") if (stage := _stage(frame)) is not Stage.NONE]
    if threads and _root(text) not in _ROOTS:  # a thread of autograd
        told.append(Stage.BACKWARD)
    return (told[0], told[-1]) if told else (Stage.NONE, Stage.NONE)


def _stage(frame: str) -> Stage:
    return next((stage for pattern, stage in _FRAMES if pattern.search(frame)), Stage.NONE)


def _ranges(entries: Entries, annotations: tuple[Annotation, ...]) -> list[tuple[int, int, Stage]]:
    """Entries of annotated ranges that tell a stage, later and inner ones last; none where times go backwards."""
    times = np.array(entries.time_us, dtype=np.int64)
    if not annotations or not len(times) or (np.diff(times) < 0).any():
        return []
    told = [(mark, stage) for mark in annotations if (stage := _range_stage(mark.name)) is not None]
    ends = {id(start): end.time_us for start, end in _closed([mark for mark, _ in told])}
    starts = [mark.time_us for mark, _ in told if mark.starts]
    found = []
    for mark, stage in told:
        if mark.starts:  # one whose end was not recorded lasts until another begins
            last = ends.get(id(mark), min((time - 1 for time in starts if time > mark.time_us), default=int(times[-1])))
            begin, end = np.searchsorted(times, mark.time_us, "left"), np.searchsorted(times, last, "right")
            found.append((int(begin), max(int(begin), int(end)), stage))
    return sorted(found, key=lambda one: (one[0], -one[1]))


def _range_stage(name: str) -> Stage | None:
    return next((stage for pattern, stage in _RANGES if pattern.match(name)), None)


def _closed(marks: list[Annotation]) -> Iterator[tuple[Annotation, Annotation]]:
    """Starts with their ends; ranges of one name nest."""
    begun: dict[str, list[Annotation]] = {}
    for mark in marks:
        if mark.starts:
            begun.setdefault(mark.name, []).append(mark)
        elif begun.get(mark.name):
            yield begun[mark.name].pop(), mark


def _steps(ranges: list[tuple[int, int, Stage]], outer: StageArray) -> list[tuple[int, int]]:
    """The optimizer's steps: first entry and the one after the last; SGD's may be empty."""
    mask = np.append(outer == Stage.OPTIMIZER, False)
    empty = {start for start, stop, stage in ranges if stage is Stage.OPTIMIZER and start == stop and not mask[start]}
    return sorted([*_runs(mask), *((start, start) for start in empty)])


def _by_marks(entries: Entries, annotations: tuple[Annotation, ...], steps: list[int], outer: StageArray) -> None:
    """Forward and backward by the marks of FSDP2: the root's forward begins, the first backward hook is called."""
    times = np.array(entries.time_us, dtype=np.int64)
    marks = [(start, Stage.NONE) for start in [0, *steps, len(times)]]
    for mark in annotations:
        stage = _MARKS.get(re.sub(r" [(].*", "", mark.name))
        if stage is not None and mark.starts:
            marks.append((int(np.searchsorted(times, mark.time_us, side="left")), stage))
    if (np.diff(times) < 0).any() or len(marks) == len(steps) + 2:
        return
    marks.sort(key=lambda one: one[0])
    for (start, stage), (stop, _) in pairwise(marks):
        np.copyto(outer[start:stop], np.uint8(stage), where=outer[start:stop] == Stage.NONE)
    outer[: int(np.argmax(outer == Stage.FORWARD))] = Stage.LOAD


def _by_sizes(
    sizes: Int64Array,
    allocs: BoolArray,
    freed: Int64Array,
    steps: list[tuple[int, int]],
    inner: StageArray,
    outer: StageArray,
) -> None:
    """Forward and backward between the optimizer's steps, in place."""
    bodies = list(pairwise([0, *(edge for run in steps for edge in run)]))[::2]
    plain = allocs & (outer == Stage.NONE) & (inner == Stage.NONE)
    places = [start + np.flatnonzero(plain[start:stop]) for start, stop in bodies]
    places = [place for place in places if len(place)]
    if len(places) < 2:
        return
    over = freed > places[1][-1] + 1  # alive at the second step
    early = np.arange(len(sizes)) < places[0][-1]
    lasting = np.unique(sizes[allocs & over & early & (sizes > _SCALAR)])
    pattern = sizes[places[1][:_PATTERN]]
    ends = [*(place[-1] for place in places[1:]), len(sizes)]
    gradients = [_gradients(*one, sizes, freed, lasting, outer) for one in zip(places, ends, strict=True)]
    held = over[places[0]] & np.isin(sizes[places[0]], sizes[places[1]][gradients[1]])
    for number, (place, found) in enumerate(zip(places, gradients, strict=True)):
        starts = _occurrences(sizes[place], pattern)
        if number == 0 and not len(starts):  # other lengths: after the last trained parameter
            starts = np.flatnonzero(held)[-1:] + 1
        _split(place, sizes[place], found, starts, number == 0, outer)


def _gradients(
    place: Int64Array, end: int, sizes: Int64Array, freed: Int64Array, lasting: Int64Array, outer: StageArray
) -> Int64Array:
    """Which allocations of a stretch are gradients: freed by zero_grad, or alive in its step, but not in the next."""
    zeroed = np.append(outer, Stage.NONE)[freed[place]] == Stage.ZERO_GRAD
    kept = zeroed if zeroed.any() else (freed[place] > place[-1] + 1) & (freed[place] <= end)
    return np.flatnonzero(kept & np.isin(sizes[place], lasting))


def _split(
    place: Int64Array, born: Int64Array, gradients: Int64Array, starts: Int64Array, first: bool, outer: StageArray
) -> None:
    """The stages of one stretch between two steps: `place` are the entries of its allocations, `born` their bytes."""
    if first and not len(starts):
        return
    start = int(starts[0]) if first else 0
    if not len(gradients[gradients > start]):
        return
    gradient = int(gradients[gradients > start][0])
    last = max([start, *starts[(starts > start) & (starts < gradient)].tolist()])  # before it they only evaluate
    scalars = np.flatnonzero(born[last:gradient] <= _SCALAR)
    if not len(scalars):
        return
    found = [(start, last + int(scalars[-1]))]
    for again in starts[starts > gradient].tolist():  # micro-batches: as many scalars make a forward
        seeds = again + np.flatnonzero(born[again:] <= _SCALAR)
        if len(seeds) < len(scalars):
            return
        found.append((again, int(seeds[len(scalars) - 1])))
    if first:
        outer[: place[start]] = Stage.LOAD
    ends = [*(begin for begin, _ in found[1:]), len(place)]
    for (begin, seed), end in zip(found, ends, strict=True):
        outer[place[begin] : place[seed]] = Stage.FORWARD
        outer[place[seed] : place[end] if end < len(place) else place[-1] + 1] = Stage.BACKWARD


def _occurrences(values: Int64Array, pattern: Int64Array) -> Int64Array:
    if len(values) < len(pattern):
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(values, len(pattern))
    return np.flatnonzero((windows == pattern).all(axis=1))


def _runs(mask: BoolArray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _phases(outer: StageArray, steps: list[tuple[int, int]]) -> list[tuple[int, str, int]]:
    """Where the outermost stage changes; a step ends with the optimizer."""
    found: list[tuple[int, str, int]] = []
    step, last = 0, Stage.NONE
    told = np.flatnonzero((outer >= Stage.LOAD) & (outer < Stage.OPTIMIZER)).tolist()
    marks = [(place, Stage(outer[place])) for place in told] + [(start, Stage.OPTIMIZER) for start, _ in steps]
    for place, stage in sorted(marks):
        if stage is not last:
            step += last is Stage.OPTIMIZER
            found.append((place, stage.name.lower(), step))
            last = stage
    return found


# Categories -----------------------------------------------------------------------------------------------------------


def _categories(
    entries: Entries,
    allocs: BoolArray,
    freed: Int64Array,
    step_ranges: list[tuple[int, int]],
    inner: StageArray,
    outer: StageArray,
) -> list[str | None]:
    count = len(allocs)
    places = np.arange(count)
    end = np.append(outer, Stage.NONE)[freed]
    stays = freed == count
    size = np.array(entries.size, dtype=np.int64)
    computed = np.isin(outer, (Stage.FORWARD, Stage.BACKWARD))
    steps = np.zeros(count, dtype=np.bool_)
    steps[[start for start, _ in step_ranges if start < count]] = True  # alive there: it outlives the backward
    first = int(np.argmax(computed)) if computed.any() else 0
    early = places < first
    kept = stays | _spans(steps, freed)
    second = np.zeros(count, dtype=np.bool_)  # DDP's first buckets are gone before the second step
    second[[start for start, _ in step_ranges[1:2] if start < count]] = True
    lasts = stays | _spans(second if len(step_ranges) > 1 else steps, freed)
    lasting = np.unique(size[allocs & early & kept])
    forward, backward = inner == Stage.FORWARD, (outer == Stage.BACKWARD) & (inner != Stage.FORWARD)
    beyond = _spans(allocs & np.isin(outer, (Stage.FORWARD, Stage.OPTIMIZER)), freed) | kept
    initial = forward & stays & _spans(steps, freed)
    rules = (
        ((inner == Stage.COMMUNICATION) & ~(kept & (outer == Stage.BACKWARD)), "communication"),
        (inner == Stage.COMMUNICATION, "gradient"),
        (end == Stage.ZERO_GRAD, "gradient"),
        ((inner == Stage.OPTIMIZER) & ~stays & ~_spans(allocs & computed, freed), "temporary"),
        (inner == Stage.OPTIMIZER, "optimizer_state"),
        (forward & _spans(backward, freed) & ~initial, "activation"),
        (forward & ~stays & ~initial, "temporary"),
        (backward & ~stays & ~beyond, "temporary"),
        (backward & kept & np.isin(size, lasting), "gradient"),
        ((inner == Stage.LOAD) & lasts & steps.any(), "parameter"),
        ((inner == Stage.LOAD) & (freed < first), "temporary"),
    )
    chosen = np.select([allocs & rule for rule, _ in rules], [1 + i for i in range(len(rules))], 0)
    names = (None, *(name for _, name in rules))
    return [names[code] for code in chosen.tolist()]


def _spans(mask: BoolArray, freed: Int64Array) -> BoolArray:
    """Whether an entry of `mask` lies between each entry and the one that frees it."""
    before = np.concatenate([[0], np.cumsum(mask)])
    places = np.arange(len(mask))
    return np.asarray(before[np.maximum(freed, places + 1)] > before[places + 1])
