"""The trace of a case: lowered from captures, or recorded of its training script where a capture cannot have it.

CUDA graphs (`compile` reduce-overhead, max-autotune) ask the allocator where blocks lie and what their pool holds; a
capture has none. Such a case is run as its script is (`simulator.launch.training_script`), by `record`, on a
GPU whose memory never runs out: what the case's own GPU has is for the replay.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from graph.case import GRAPHED, Case
from graph.errors import CaptureError
from graph.models.lookup import configuration
from simulator.launch.training_script import script, why_not
from strategies import modifiers
from strategies.lowering import finished, lower
from strategies.strategy import MACHINE
from traces.errors import ConfigError
from traces.model import Op

if TYPE_CHECKING:
    from simulator.recording.launch import Recorded
    from strategies.strategy import Capture
    from strategies.timing.clock import Clock
    from strategies.timing.roofline import Speed
    from traces.model import RankEvents, Trace

#: Recordings that a process keeps.
_KEPT: Final = 8
#: How the names of folders begin in which scripts are run.
_FOLDER: Final = "llmem-estimate-"


def trace_of(
    case: Case,
    *,
    capture: Capture | None = None,
    clock: Clock | None = None,
    speed: Speed | None = None,
    interconnect: str = "",
    rank: int | None = None,
) -> Trace:
    """The trace of all ranks of a case, as `strategies.lower` has it, whose arguments these are.

    `interconnect` is that of the clock. Of ranks that are recorded the first and the last are run, or `rank` alone.
    Raises what `lower` raises, ConfigError for a case that would have to be recorded and has no script, and
    CaptureError where its script fails.
    """
    if not is_recorded(case):
        return lower(case, capture=capture, clock=clock, speed=speed, rank=rank)
    modifiers.check(case)
    if reason := why_not(case):
        raise ConfigError(
            f"'compile': {case.compile!r} is worked out by running the case's training script, and it has none "
            f"({reason}); llmem record runs a program of your own"
        )
    ranks = (rank,) if rank is not None else tuple(sorted({0, case.world - 1}))
    recorded = _recorded(
        json.dumps(replace(case, memory=None).document()), ranks, clock is not None or speed is not None, interconnect
    )
    return _dressed(recorded, case, ranks)


def is_recorded(case: Case) -> bool:
    """Whether a case's trace is recorded."""
    return case.compile in GRAPHED


@functools.lru_cache(maxsize=_KEPT)
def _recorded(document: str, ranks: tuple[int, ...], timed: bool, interconnect: str) -> Recorded:
    """The run of a case's script, of its model's configuration without weights."""
    from simulator.recording.launch import record
    from simulator.recording.request import INTERRUPTED, Request

    case = Case.of(json.loads(document))
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(configuration(case.model).document))
        program = folder / "train.py"
        program.write_text(script(replace(case, model=name)))
        given = {"STEPS": str(case.steps), "RANDOM_WEIGHTS": "1"}
        found = record(
            Request(
                (str(program),),
                "script",
                "",
                case.gpu,
                case.release,
                conf=case.alloc_conf,
                steps=0,
                world=case.world,
                processes=min(case.world, MACHINE),
                environment=given,
                launched=case.world > 1,
                late=case.deferred == "late",
                timed=timed,
                interconnect=interconnect,
                endless=True,
            ),
            ranks,
            silent=True,
        )
    if found.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if found.exit_code:
        raise CaptureError(f"the training script of the case fails: {found.raised or f'exit code {found.exit_code}'}")
    return found


def _dressed(recorded: Recorded, case: Case, ran: tuple[int, ...]) -> Trace:
    """The trace of a recording with the ranks, devices, settings and metadata of the case."""
    from graph.loop.compiled import FIRST
    from graph.models.sources import build

    built = build(case)
    ours = [text for text in recorded.assumptions if _FOLDER not in text]  # what it has no weights for, and prints
    environment = {"gpu": case.gpu, "release": case.release, "model": built.facts.document()}
    made = finished(
        tuple(_standing(entry, case, ran) for entry in recorded.trace.ranks),
        recorded.trace.groups,
        case,
        environment,
        (*built.assumptions, *ours, *([FIRST] if case.compile.startswith("max-autotune") else [])),
    )
    (device,) = recorded.trace.devices
    return replace(made, devices=tuple(replace(one, launch_ns=device.launch_ns) for one in made.devices))


def _standing(entry: RankEvents, case: Case, ran: tuple[int, ...]) -> RankEvents:
    """A rank's events up to its last step's end. Ranks that did not run do what the first that did does."""
    events = entry.events
    after = np.flatnonzero((events.op == Op.PHASE) & (events.ints("step") >= case.steps))
    entry = replace(entry, events=events.take(slice(int(after[0]) if len(after) else None)))
    if ran[0] not in entry.ranks:
        return entry
    others = set(ran) - {*entry.ranks}
    return replace(entry, ranks=tuple(rank for rank in range(case.world) if rank not in others))
