"""The same training in another order: iterations changed places, longer and shorter batches, frees prompt or late.

A trace that marks its steps (`phase` events with a `step`) is cut at them. Steps that leave nothing for good behind may
change places; tensors that one step hands to the next (gradients until they are set to None) are matched in the order
of their birth. A batch of another length is approximated: bytes of activations, inputs and temporaries of a step are
scaled (linearly: what grows with the square of the length is underestimated), parameters, gradients and optimizer
states stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from traces.errors import ConfigError
from traces.model import Column, Events, Int64Array, Op, RankEvents, Trace

Deferred = Literal["recorded", "prompt", "late"]

#: Lengths of batches in a mix, as parts of the recorded one.
FACTORS: Final = (0.25, 0.5, 0.75, 1.0)
#: Movable steps without which there is nothing to draw.
LEAST: Final = {"orders": 2, "lengths": 1}
#: A mix of lengths has at least so many iterations: recorded ones come again where there are fewer.
ITERATIONS: Final = 8
#: Categories whose bytes follow the length of the batch; of `unknown` what lives and dies in one step.
SCALED: Final = frozenset({"activation", "input", "temporary", "unknown"})
#: Phases in which no tensor follows the length of the batch.
_UNSCALED_PHASES: Final = frozenset({"optimizer", "step", "load"})
_TIMES: Final = (Op.KERNEL, Op.COLLECTIVE, Op.WAIT_STREAM)
_HELD: Final = (Op.HOLD_EVENTS, Op.COMPLETE_EVENTS, Op.COMPLETE_FREE)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is changed in a trace's events: frees that wait for other streams, and the number of a draw of each kind.

    `order` and `lengths` are None for the recorded order and lengths; draws are reproducible by `seed`.
    """

    deferred: Deferred = "recorded"
    order: int | None = None
    lengths: int | None = None
    seed: int = 0


def vary(trace: Trace, variant: Variant) -> Trace:
    """The trace with its events changed as `variant` says; ConfigError where its steps do not allow it."""
    if variant.order is not None or variant.lengths is not None:
        trace = _mixed(trace, variant)
    if variant.deferred != "recorded":
        late = variant.deferred == "late"
        ranks = tuple(replace(rank, events=_deferred(rank.events, late=late)) for rank in trace.ranks)
        trace = replace(trace, ranks=ranks)
    return trace


def has_deferred_frees(trace: Trace) -> bool:
    """Whether any tensor is in use on a stream besides its own, so that its free may have to wait."""
    return any(bool((rank.events.op == Op.RECORD_STREAM).any()) for rank in trace.ranks)


def movable_steps(trace: Trace) -> int:
    """How many steps of a trace may change places: 0 where it marks none."""
    return min((len(_Steps(rank).movable) for rank in trace.ranks), default=0)


# --- deferred frees -----------------------------------------------------------------------------------------------


def _deferred(events: Events, *, late: bool) -> Events:
    """Frees that wait for other streams complete at once, or only when the host waits or memory runs short.

    Without simulated time, and without what the trace says about the completion of events.
    """
    keep = np.flatnonzero(~np.isin(events.op, (*_TIMES, *_HELD)))
    events = events.take(keep)
    return Events.joined([_holding(), events]) if late else events


def _holding() -> Events:
    return Events(np.asarray([Op.HOLD_EVENTS], np.uint8), {"hold": np.ones(1, np.bool_)})


# --- steps --------------------------------------------------------------------------------------------------------


class _Steps:
    """The steps of a rank: where each begins, whose tensors cross which border, and which steps may change places."""

    def __init__(self, rank: RankEvents) -> None:
        events = self.events = rank.events
        self.starts, self.numbers = _starts(events)
        count = len(self.numbers)
        ids = events.ints("id")
        early = [block.id for part in (rank.initial.segments if rank.initial else ()) for block in part.blocks]
        self.known, dense = np.unique(
            np.concatenate([[-1], ids, [i for i in early if i is not None]]).astype(np.int64), return_inverse=True
        )
        self.dense: Int64Array = dense[1 : len(ids) + 1].astype(np.int64)
        self.birth = np.full(len(self.known), -1, dtype=np.int64)
        allocs = np.flatnonzero(events.op == Op.ALLOC)
        self.birth[self.dense[allocs]] = allocs
        death = np.full(len(self.known), len(events), dtype=np.int64)
        frees = np.flatnonzero(events.op == Op.FREE)
        death[self.dense[frees]] = frees
        self.born, self.dies = self._step_of(self.birth), self._step_of(death)
        self.dies[(death == len(events)) & (self.birth >= 0)] = count + 1  # never
        self.born[0] = self.dies[0] = -2  # not a tensor
        self.movable = self._movable(count)

    def _step_of(self, places: Int64Array) -> Int64Array:
        """-1 before the first step, the number of steps behind the last."""
        return np.searchsorted(self.starts, places, side="right").astype(np.int64) - 1

    def _movable(self, count: int) -> range:
        """The longest run of steps that take from the step before alone and leave to the next alone."""
        fixed = np.zeros(count + 2, dtype=np.bool_)
        crossing = (self.born != self.dies) & (self.birth >= 0)
        long = crossing & (self.dies > self.born + 1) & (self.born != count - 1)
        fixed[self.born[long & (self.born >= 0)]] = True
        fixed[self.dies[long & (self.dies <= count)]] = True
        old = (self.birth < 0) & (self.dies >= 0)  # held before the recording
        fixed[self.dies[old & (self.dies <= count)]] = True
        first = (self.born == -1) & (self.dies == 0)
        fixed[0] |= bool(first.any())
        best = range(0)
        start = 0
        for step in range(count + 1):
            if step == count or fixed[step]:
                if step - start > len(best):
                    best = range(start, step)
                start = step + 1
        return best

    def handed_on(self, step: int) -> Int64Array:
        """Dense ids of the tensors that `step` leaves to the next, in the order of their birth."""
        left = self.dies > step if step == len(self.numbers) - 1 else self.dies == step + 1
        ids = np.flatnonzero((self.born == step) & left)
        return ids[np.argsort(self.birth[ids])]

    def span(self, step: int) -> Int64Array:
        """The events of a step."""
        return np.arange(self.starts[step], self.starts[step + 1], dtype=np.int64)


def _starts(events: Events) -> tuple[Int64Array, list[int]]:
    """Where each step begins, and behind them where the last one ends; the steps' numbers."""
    marks = np.flatnonzero(events.op == Op.PHASE)
    steps = events.ints("step")[marks]
    starts: list[int] = []
    numbers: list[int] = []
    stop = len(events)
    for mark, step in zip(marks.tolist(), steps.tolist(), strict=True):
        if step >= 0 and (not numbers or step > numbers[-1]):
            starts.append(mark)
            numbers.append(step)
            stop = len(events)
        elif step < 0 and numbers and stop == len(events):
            stop = mark
    return np.asarray([*starts, stop], dtype=np.int64), numbers


def _mixed(trace: Trace, variant: Variant) -> Trace:
    """The trace with its movable steps in another order or with other lengths; the same for all ranks."""
    cuts = [_Steps(rank) for rank in trace.ranks]
    runs = {cut.movable for cut in cuts}
    least = LEAST["orders" if variant.order is not None else "lengths"]
    if len(runs) != 1 or len(next(iter(runs))) < least:
        raise ConfigError(
            f"the trace has fewer than {least} steps that could change places: orders and lengths need phases with "
            "steps, the same ones on every rank, and one more where the first one makes the optimizer's state"
        )
    plan = _plan(list(next(iter(runs))), variant)
    entries = (_composed(rank, cut, plan) for rank, cut in zip(trace.ranks, cuts, strict=True))
    return replace(trace, ranks=tuple(entries))


def _plan(movable: Sequence[int], variant: Variant) -> list[tuple[int, float]]:
    """The steps to run, in order, each with the length of its batch."""
    steps = np.asarray(movable, dtype=np.int64)
    if variant.order is not None:
        steps = np.random.default_rng((variant.seed, 1, variant.order)).permutation(steps)
    factors = np.ones(len(steps))
    if variant.lengths is not None:
        steps = np.resize(steps, max(ITERATIONS, len(steps)))
        factors = np.random.default_rng((variant.seed, 2, variant.lengths)).choice(FACTORS, len(steps))
    return list(zip(steps.tolist(), factors.tolist(), strict=True))


def _composed(rank: RankEvents, cut: _Steps, plan: Sequence[tuple[int, float]]) -> RankEvents:
    """The rank's events with its movable steps replaced by those of `plan`."""
    first, stop = cut.movable[0], cut.movable[-1] + 1
    parts = [cut.events.take(np.arange(cut.starts[first], dtype=np.int64))]
    scaled = _scaled(cut)
    fresh = int(cut.known[-1]) + 1
    carried = cut.known[cut.handed_on(first - 1)] if first else np.empty(0, np.int64)
    for place, (step, factor) in enumerate(plan):
        ids = cut.known.copy()
        own = np.flatnonzero(cut.born == step)
        ids[own] = np.arange(fresh, fresh + len(own))
        fresh += len(own)
        shift = cut.numbers[first] + place - cut.numbers[step]
        parts += _instance(cut, cut.span(step), step, ids, carried, (scaled, factor), shift)
        carried = ids[cut.handed_on(step)]
    rest = np.arange(cut.starts[stop], len(cut.events), dtype=np.int64)
    shift = len(plan) - len(cut.movable)
    parts += _instance(cut, rest, stop, cut.known.copy(), carried, (scaled, 1.0), shift)
    return replace(rank, events=Events.joined(parts), extra={})


def _instance(
    cut: _Steps,
    places: Int64Array,
    step: int,
    ids: Int64Array,
    carried: Int64Array,
    scale: tuple[npt.NDArray[np.bool_], float],
    shift: int,
) -> list[Events]:
    """The events at `places`, which are those of `step`, with the ids that they have behind another step.

    `ids` has the new id of every dense one; `carried` what the step before left behind, which takes the places of what
    it left in the recording: what is too many is freed first, what is missing is not freed.
    """
    taken = cut.handed_on(step - 1) if step else np.empty(0, np.int64)
    freed = taken[cut.dies[taken] <= len(cut.numbers)]
    ids[taken] = -1
    ids[taken[: len(carried)]] = carried[: len(taken)]
    surplus = carried[len(taken) :] if len(freed) else carried[:0]
    dense = cut.dense[places]
    places = places[(ids[dense] >= 0) | (dense == 0)]
    part = cut.events.take(places)
    columns: dict[str, Column] = {"id": ids[cut.dense[places]]}
    wanted, factor = scale
    if factor != 1.0:
        sizes = part.ints("bytes")
        chosen = wanted[places] & (sizes > 0)
        columns["bytes"] = np.where(chosen, np.maximum((sizes * factor).astype(np.int64), 1), sizes)
        if "duration_ns" in part.columns:
            columns["duration_ns"] = (part.ints("duration_ns") * factor).astype(np.int64)
    numbers = part.ints("step")
    columns["step"] = np.where(numbers >= 0, numbers + shift, numbers)
    frees = Events(np.full(len(surplus), Op.FREE, dtype=np.uint8), {"id": surplus})
    return [frees, part.with_columns(**columns)] if len(surplus) else [part.with_columns(**columns)]


def _scaled(cut: _Steps) -> npt.NDArray[np.bool_]:
    """The allocations whose bytes follow the length of the batch."""
    events = cut.events
    categories = events.strings("category")
    named = np.asarray([name in SCALED for name in categories.table] + [True])
    unknown = np.asarray([name == "unknown" for name in categories.table] + [True])
    inside = cut.born[cut.dense] == cut.dies[cut.dense]
    chosen = (events.op == Op.ALLOC) & named[categories.codes] & (inside | ~unknown[categories.codes])
    marks = np.flatnonzero(events.op == Op.PHASE)
    names = events.strings("name")
    for mark, stop in zip(marks.tolist(), [*marks[1:].tolist(), len(events)][: len(marks)], strict=True):
        if names.get(mark) in _UNSCALED_PHASES:
            chosen[mark:stop] = False
    return np.asarray(chosen)
