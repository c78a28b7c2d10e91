"""Results made by hand, for tests of the reporters: no replay stands behind them, only numbers that agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from simulator.engine.result import (
    Fragmentation,
    FreePiece,
    LiveTensor,
    OutOfMemory,
    OutsideTerm,
    Peak,
    PhasePeak,
    RankResult,
    Result,
)
from traces.model import Column, Device, Events, Int64Array, Op, RankEvents, Strings, Trace
from traces.timelines.timeline import PhaseSpan, Timeline

MIB = 1 << 20
GIB = 1 << 30


def walk(
    events: int, *, top: int = 40 * GIB, steps: int = 3, seed: int = 0
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Allocated, active and reserved bytes that look like `steps` training steps; exact multiples of 512."""
    random = np.random.default_rng(seed)
    at = np.arange(events) / max(1, events) * steps
    part = at % 1.0
    wave = np.where(part < 0.4, part / 0.4, np.where(part < 0.85, (0.85 - part) / 0.45, 0.05))
    base = np.minimum(0.15 + 0.15 * np.floor(at + 0.15), 0.45)
    noise = random.integers(0, 64, events) / 64 * 0.03
    allocated = ((base + 0.5 * wave + noise) * top).astype(np.int64) // 512 * 512
    active = allocated + (random.integers(0, 100, events) == 0) * np.int64(256 * MIB)
    reserved = np.maximum.accumulate(active) // (2 * MIB) * (2 * MIB) + 2 * MIB
    return allocated, active, reserved


def timeline(
    events: int,
    *,
    ranks: Sequence[int] = (0,),
    limit: int = 80 * GIB,
    seed: int = 0,
    steps: int = 3,
    timed: bool = False,
) -> Timeline:
    """A timeline of `steps` training steps of three phases each."""
    allocated, active, reserved = walk(events, steps=steps, seed=seed)
    names = ("forward", "backward", "optimizer")
    cuts = [round(events * (step + part) / steps) for step in range(steps) for part in (0.0, 0.4, 0.85)] + [events]
    phases = tuple(
        PhaseSpan(names[place % 3], place // 3, start, stop)
        for place, (start, stop) in enumerate(pairwise(cuts))
        if start < stop
    )
    clock = np.cumsum(np.random.default_rng(seed).integers(0, 20_000, events)) if timed else None
    return Timeline(tuple(ranks), allocated, active, reserved, phases, limit, clock)


def rank_result(
    line: Timeline, *, names: Sequence[str | None] = ("model.layers.0.mlp",), oom: OutOfMemory | None = None
) -> RankResult:
    """A rank's result whose figures are those of its timeline."""
    peak_at = int(np.argmax(line.allocated)) if len(line) else 0
    reserved_at = int(np.argmax(line.reserved)) if len(line) else 0
    allocated = int(line.allocated[peak_at]) if len(line) else 0
    reserved = int(line.reserved[reserved_at]) if len(line) else 0
    rounding = allocated // 50
    return RankResult(
        ranks=line.ranks,
        device=Device("A100-80GB", 85_097_971_712),
        events=len(line),
        memory_stats={
            "allocated_bytes.all.peak": allocated,
            "reserved_bytes.all.peak": reserved,
            "requested_bytes.all.peak": allocated - rounding,
            "num_alloc_retries": 1 if oom else 0,
            "num_ooms": 1 if oom else 0,
        },
        oom=oom,
        phases=tuple(
            PhasePeak(
                f"{span.name}_{span.step}",
                span.name,
                span.step,
                int(line.allocated[span.start : span.stop].max(initial=0)),
                int(line.allocated[max(0, span.stop - 1)]),
                int(line.reserved[span.start : span.stop].max(initial=0)),
            )
            for span in line.phases
        ),
        peak=Peak(
            event=peak_at,
            phase="forward",
            allocated=allocated,
            reserved=int(line.reserved[peak_at]) if len(line) else 0,
            by_category={
                "activation": allocated // 2,
                "parameter": allocated // 4,
                "optimizer_state": allocated - allocated // 2 - allocated // 4,
            },
            largest=tuple(
                LiveTensor(place, share, share, "activation", name, place, "forward")
                for place, name in enumerate(names)
                for share in (allocated // (4 + place),)
            ),
        ),
        fragmentation=Fragmentation(
            reserved_at, reserved, allocated - rounding, rounding, 0, 0, (reserved - allocated) // 2,
            reserved - allocated - (reserved - allocated) // 2,
        ),
        outside=(
            OutsideTerm("CUDA context", 450 * MIB, "measured on an A100, driver 550"),
            OutsideTerm("NCCL communicators", 300 * MIB, "one group of 8 ranks"),
        ),
        timeline=line,
    )  # fmt: skip


def out_of_memory(event: int) -> OutOfMemory:
    """An out-of-memory report with free pieces and a remedy."""
    return OutOfMemory(
        event=event, id=77, name="model.layers.31.mlp.down_proj", phase="forward", requested=3 * GIB, rounded=3 * GIB,
        stream=0, device_free=512 * MIB, reserved=78 * GIB, allocated=70 * GIB, free_in_segments=8 * GIB,
        largest_free=2 * GIB,
        pieces=(FreePiece("large", 0, 130, 7 * GIB, 2 * GIB), FreePiece("small", 0, 20, 3 * MIB, MIB)),
        peak_allocated_before=71 * GIB, peak_reserved_before=78 * GIB,
        remedies=(("expandable_segments:True", 74 * GIB),),
    )  # fmt: skip


def result(*ranks: RankResult, conf: str = "", notes: Sequence[str] = (), **metadata: str) -> Result:
    """A result of these ranks."""
    return Result(ranks, conf, "2.13", metadata=metadata, notes=tuple(notes))


def busy_trace(events: int, *, live: int = 300, names: Sequence[str] = (), seed: int = 0) -> Trace:
    """A trace with phases, categories and names: about `live` allocations at a time, random sizes and lives."""
    random = np.random.default_rng(seed)
    table = tuple(names) or tuple(f"model.layers.{layer}.{part}: aten.mm" for layer in range(40) for part in "qkv")
    categories = ("parameter", "activation", "gradient", "temporary")
    period = 2 * live + 1
    at = np.arange(events)
    phase = at % max(1, events // 12) == 0
    born = np.cumsum(~phase) - 1
    grows = born % period < live  # `live` births, then `live` deaths in another order, and one that stays
    ids = born // period * period + born % period
    order = random.permutation(live)
    dies = ~grows & (born % period < 2 * live)
    ids[dies] = born[dies] // period * period + order[born[dies] % period - live]
    op = np.where(dies, Op.FREE, Op.ALLOC).astype(np.uint8)
    op[phase] = Op.PHASE
    sizes = np.where(
        random.random(events) < 0.2, random.integers(1, 1 << 22, events), random.integers(1, 1 << 14, events)
    )
    codes = np.where(op == Op.ALLOC, random.integers(0, len(categories), events), -1).astype(np.int32)
    code = np.where(op == Op.ALLOC, random.integers(0, len(table), events), -1).astype(np.int32)
    code[phase] = len(table)
    columns: dict[str, Column] = {
        "id": np.where(phase, -1, ids),
        "bytes": np.where(op == Op.ALLOC, sizes, 0),
        "category": Strings(codes, categories),
        "name": Strings(code, (*table, "forward")),
        "step": np.where(phase, at // max(1, events // 12), -1),
    }
    return Trace(ranks=(RankEvents((0,), Events(op, columns)),))
