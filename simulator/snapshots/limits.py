"""How much memory the allocator could take while a snapshot was recorded, as far as the recording shows it.

A snapshot does not say how large the device is, nor what limit `set_per_process_memory_fraction` set. It shows both
where they were felt: an `oom` entry has the bytes that the driver had left; a malloc that gave cached segments back
before it obtained a new one was refused before, or the program called empty_cache; one that gave back only some was
certainly refused, or garbage collection was at work. `find_limits` looks for one size of the device and one limit
that explain all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from simulator.snapshots.rules import Rules
from simulator.snapshots.survey import Kind, Step, Survey
from traces.model import DEFAULT_DEVICE
from traces.units import MiB

RECORDED_DEVICE: Final = "recorded GPU"


@dataclass
class Limits:
    """What a replay is given so that it meets the same lack of memory.

    `fraction` is that of `set_memory_fraction` and `limit` the bytes it stands for, or None. `others` has the bytes
    that other processes hold from just before a step on. `pressed` are the steps whose releases the replay will make
    by itself; `notes` say what was assumed.
    """

    name: str
    total: int
    fraction: float | None = None
    limit: int | None = None
    others: dict[int, int] = field(default_factory=dict)
    pressed: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def find_limits(survey: Survey, rules: Rules, place: str) -> Limits:
    """The device's size and the memory limit that explain a survey; `place` names the device in notes."""
    mallocs = [(k, step) for k, step in enumerate(survey.steps) if step.kind is Kind.MALLOC]
    limits = Limits(DEFAULT_DEVICE.name, DEFAULT_DEVICE.total_bytes)
    limit = _limit(mallocs, rules)
    free = {k: step.after + step.device_free for k, step in mallocs if step.oom}
    partial = [k for k, step in mallocs if _is_partial(step) and not (limit and limit.explains(step))]
    if free:
        _by_oom(limits, survey, free, mallocs, place)
    elif partial:
        _by_partial(limits, survey, partial, place)
    _by_peak(limits, survey, place)
    if limit is not None:
        limits.limit, limits.fraction = limit.value, min(limit.value / limits.total, 1.0)
        limits.notes.append(
            f"{place}: allocations were refused or collected below the device's size; a memory limit of "
            f"{limit.value} bytes (set_per_process_memory_fraction) is assumed"
        )
    for k, step in mallocs:
        if step.oom or (step.releases and step.takes):
            capacity = limits.total - _held_by_others(limits, k) if free or partial else None
            if _is_pressed(step, capacity, limit, rules):
                limits.pressed.add(k)
    return limits


def _held_by_others(limits: Limits, number: int) -> int:
    """What others hold at a step."""
    last = max((k for k in limits.others if k <= number), default=None)
    return 0 if last is None else limits.others[last]


def _is_partial(step: Step) -> bool:
    """Whether a malloc shows a refusal, or garbage collection, that no call of empty_cache would look like."""
    released_some = bool(step.releases and step.takes and step.spared)
    return not step.oom and (released_some or step.mapped_before_release or step.in_passes or bool(step.late))


def _is_pressed(step: Step, capacity: int | None, limit: _Limit | None, rules: Rules) -> bool:
    """Whether a replay with these bounds certainly releases by itself what this malloc released."""
    if step.oom or _is_partial(step) or step.fits_still:
        return True
    if rules.settings.garbage_collection_threshold or rules.limits_split:
        return False  # a refusal would have released some segments first, in another order
    least = rules.page_size(step.large) if step.expandable else step.needed
    if capacity is not None and step.before + least > capacity:
        return True
    return limit is not None and step.before + step.needed > limit.value


# The memory limit


@dataclass(frozen=True, slots=True)
class _Limit:
    """A memory limit in bytes, and the bytes above which garbage collection is at work (None: it is off)."""

    value: int
    threshold: int | None

    def explains(self, step: Step) -> bool:
        """Whether a partial release can be garbage collection."""
        return self.threshold is not None and step.before > self.threshold


def _limit(mallocs: list[tuple[int, Step]], rules: Rules) -> _Limit | None:
    """The limit that refusals with enough memory left, and garbage collection, show."""
    low = max((_asked(step) for _, step in mallocs if step.takes and not step.oom), default=0)
    refused = [step.after + step.needed for _, step in mallocs if step.oom and _by_limit(step, rules)]
    high = min(refused, default=0)
    threshold = rules.settings.garbage_collection_threshold
    if threshold:
        collected = [s.before for _, s in mallocs if s.releases and s.takes and (s.spared or s.in_passes)]
        left = [s.before for _, s in mallocs if s.takes and not s.releases and s.idle_large]
        most = min(collected, default=0)
        if refused and low < high:
            most = min((b for b in collected if b > threshold * low), default=0)
        least = max([b for b in left if b < most], default=0) if most else 0
        if most:
            value = _within(int(least / threshold) + 1, int(most / threshold), low, high if refused else 0)
            return _Limit(value, int(value * threshold))
    if not refused:
        return None
    if low >= high:  # the limit changed while recording
        low = max(0, high - MiB)
    value = low + (high - low) // 2
    return _Limit(value, int(value * threshold) if threshold else None)


def _within(least: int, most: int, low: int, high: int) -> int:
    """The middle of [least, most), narrowed to [low, high) as far as the two overlap."""
    narrow_least, narrow_most = max(least, low), min(most, high) if high else most
    if narrow_least < narrow_most:
        least, most = narrow_least, narrow_most
    return least + max(most - least, 0) // 2


def _asked(step: Step) -> int:
    """What the limit was compared with when the malloc got its memory (`alloc_block`)."""
    return step.after - step.obtained + step.needed


def _by_limit(step: Step, rules: Rules) -> bool:
    """Whether the driver had enough for what was refused."""
    page = rules.page_size(step.large)
    return step.device_free >= max(step.needed, -(-step.needed // page) * page)


# The device's size


def _by_oom(limits: Limits, survey: Survey, free: dict[int, int], mallocs: list[tuple[int, Step]], place: str) -> None:
    """The device's size from what the driver could give in all at each `oom` (by step)."""
    limits.name, limits.total = RECORDED_DEVICE, max(max(free.values()), survey.peak)
    limits.others = _others(limits.total, free, mallocs)
    limits.notes.append(
        f"{place}: the device is taken to hold {limits.total} bytes, by what was free at its out-of-memory errors"
    )


def _by_partial(limits: Limits, survey: Survey, partial: list[int], place: str) -> None:
    """A size that explains the mallocs that were refused at first and served after a partial release."""
    steps = survey.steps
    low, high = survey.peak, min(steps[k].before + steps[k].needed for k in partial)
    if low < high:
        limits.name, limits.total = RECORDED_DEVICE, min(limits.total, high - 1)
    else:  # no single size does: others must have held some of it for a while
        limits.total = max(limits.total, survey.peak)
        for k in partial:
            limits.others[k] = limits.total - steps[k].peak
            limits.others.setdefault(k + 1, 0)
    limits.notes.append(
        f"{place}: {len(partial)} allocations were refused by the driver at first; what it could give is inferred"
    )


def _by_peak(limits: Limits, survey: Survey, place: str) -> None:
    """The assumed device must at least hold what was reserved."""
    assumed = f"{DEFAULT_DEVICE.name} ({DEFAULT_DEVICE.total_bytes} bytes)"
    if survey.peak > limits.total:
        limits.name, limits.total = RECORDED_DEVICE, survey.peak
        limits.notes.append(
            f"{place}: more was reserved than {assumed} has; the device is taken to hold {survey.peak} bytes"
        )
    elif limits.name == DEFAULT_DEVICE.name:
        limits.notes.append(f"{place}: the snapshot does not say the device's size; {assumed} is assumed")


def _others(total: int, free: dict[int, int], mallocs: list[tuple[int, Step]]) -> dict[int, int]:
    """Bytes that others held, from just before a step on: as at each `oom`, as early as what was reserved allows."""
    held: dict[int, int] = {}
    previous, current = -1, 0
    ooms = sorted(free)
    for k in ooms:
        other = total - free[k]
        if other != current:
            most = max((step.peak for m, step in mallocs if previous < m < k), default=0)
            held[previous + 1 if most <= free[k] else k] = other
            current = other
        previous = k
    if current and max((step.peak for m, step in mallocs if m > previous), default=0) > total - current:
        held[previous + 1] = 0
    return held
