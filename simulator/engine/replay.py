"""Replay a trace: every rank through the caching allocator, in simulated time where the trace has it.

`replay` is the whole of it: choose settings, simulate each class of equal ranks once, explain what came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from simulator.allocator import layout as at
from simulator.allocator.conf import AllocatorSettings, settings_of
from simulator.allocator.releases import Release, parse_release
from simulator.engine import analysis
from simulator.engine import kernels as engine
from simulator.engine.machine import Machine
from simulator.engine.program import Program, compile_rank
from simulator.engine.ranks import format_ranks
from simulator.engine.result import (
    EventColumns,
    EventLog,
    OutOfMemory,
    OutsideTerm,
    RankResult,
    Report,
    Result,
)
from simulator.engine.schedule import RankClass, Schedule, classify, solo_collectives
from simulator.engine.torch_snapshot import torch_snapshot
from simulator.reports.picture import picture_of
from traces.check import check
from traces.errors import ConfigError, LLMemError
from traces.model import DEFAULT_DEVICE, Device, Op, Trace
from traces.release import DEFAULT_RELEASE
from traces.timelines.timeline import Timeline

#: Allocator settings that are tried when a trace runs out of memory.
REMEDIES: Final = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.99",  # it works below a memory limit only
)
#: What a rank does after an out-of-memory error.
AfterOom = Literal["stop", "continue"]
REMEDY_EVENTS: Final = 3_000_000  # longer traces are not tried again
ENDLESS: Final = 1 << 43  # the largest device that there may be


@dataclass(frozen=True)
class Setup:
    """The settings of a replay, worked out from the trace and from what the caller overrides."""

    conf: str
    release: Release
    settings: AllocatorSettings
    devices: tuple[Device, ...]
    recorded: bool
    notes: tuple[str, ...]

    def device(self, index: int) -> Device:
        """The device of a rank."""
        return self.devices[index] if self.devices else DEFAULT_DEVICE


@dataclass(frozen=True)
class Prepared:
    """A trace that was checked and made ready for the kernels, for many replays of it (`prepare`)."""

    trace: Trace
    classes: tuple[RankClass, ...]
    programs: tuple[Program, ...]


def prepare(trace: Trace) -> Prepared:
    """Check a trace and make it ready, once for all replays under other settings. Raises TraceError if it is bad."""
    check(trace)
    return _prepare(trace)


def _prepare(trace: Trace) -> Prepared:
    timed = any(bool(((rank.events.op == Op.KERNEL) | (rank.events.op == Op.COLLECTIVE)).any()) for rank in trace.ranks)
    classes = tuple(classify(trace))
    programs = (
        compile_rank(item.source, timed=timed, solo=solo_collectives(item, number))
        for number, item in enumerate(classes)
    )
    return Prepared(trace, classes, tuple(programs))


def replay(
    trace: Trace | Prepared,
    *,
    conf: str | None = None,
    release: str | None = None,
    memory: int | None = None,
    context: int | None = None,
    events: bool = False,
    log: bool = False,
    snapshot: bool = False,
    picture: bool = False,
    analyse: bool = True,
    needs: bool | None = None,
    after_oom: AfterOom = "stop",
) -> Result:
    """Replay a trace (or a prepared one) and return what it needs of memory, worst rank first.

    `conf`, `release`, `memory` (total bytes of every device) and `context` (bytes of it that are not PyTorch's)
    override what the trace says. `events` keeps what stood after every event, `log` every call of the device and entry
    of a torch memory trace, `snapshot` the final state in torch's layout (with the log as its trace), `picture` what a
    page draws (`simulator.reports.picture`). `needs` finds what a rank that runs out of memory needs in all, `analyse`
    that too, and tries other allocator settings. After its first out-of-memory error a rank stops, and so do those that
    then wait for it, as a program does; one that a recording has got over as well does not count. With `after_oom`
    "continue" all events are served, as by a program that catches every error.

    Raises ConfigError for illegal settings, TraceError where the trace is not valid (`traces.check`) or ranks wait for
    each other forever, and ReplayError where the events ask for what PyTorch leaves undefined.
    """
    logged = log or snapshot or picture
    setup, classes, machines, watch = _served(
        trace, conf, release, memory, context, full=events, log=logged, after_oom=after_oom
    )
    source, trace = trace, trace.trace if isinstance(trace, Prepared) else trace
    results = [
        _result_of(item, machine, watch, number, events=events, log=log, snapshot=snapshot, picture=picture)
        for number, (item, machine) in enumerate(zip(classes, machines, strict=True))
    ]
    results.sort(key=lambda result: (result.oom is None, -result.device_total, result.ranks))
    found = Result(
        ranks=tuple(results),
        conf=setup.conf,
        release=setup.release.text,
        metadata=trace.metadata,
        notes=(*trace.notes, *setup.notes, *_left_waiting(classes, machines, watch)),
    )
    if found.verdict == "oom" and (analyse if needs is None else needs):
        found = _with_needs(found, source, setup)
    return _with_remedies(found, trace, setup) if analyse and found.verdict == "oom" else found


def _left_waiting(classes: Sequence[RankClass], machines: Sequence[Machine], watch: Watch) -> Iterator[str]:
    """A note on ranks that end where they wait for one that failed, so that their figures are not the whole."""
    parts = zip(classes, machines, watch.first, strict=True)
    ranks = sorted(rank for item, machine, oom in parts if machine.ended and oom is None for rank in item.ranks)
    if ranks:
        name = "rank" if len(ranks) == 1 else "ranks"
        ends = "ends where it waits" if len(ranks) == 1 else "end where they wait"
        yield f"{name} {format_ranks(ranks)} {ends} for a rank that ran out of memory: peaks are those up to there"


@dataclass(frozen=True)
class Served:
    """One class of equal ranks after its replay: its machine, and its first out-of-memory, if there was one."""

    ranks: tuple[int, ...]
    machine: Machine
    oom: OutOfMemory | None


def serve(
    made: Prepared,
    *,
    conf: str | None = None,
    release: str | None = None,
    memory: int | None = None,
    context: int | None = None,
    after_oom: AfterOom = "stop",
) -> list[Served]:
    """The bare replay, without the analyses of `replay`, for where a few of its figures are all that is wanted.

    Arguments and errors are those of `replay`.
    """
    _, classes, machines, watch = _served(made, conf, release, memory, context, after_oom=after_oom)
    parts = zip(classes, machines, watch.first, strict=True)
    return [Served(tuple(item.ranks), machine, oom) for item, machine, oom in parts]


def _served(
    trace: Trace | Prepared,
    conf: str | None,
    release: str | None,
    memory: int | None,
    context: int | None,
    *,
    full: bool = False,
    log: bool = False,
    after_oom: AfterOom = "stop",
) -> tuple[Setup, Sequence[RankClass], list[Machine], Watch]:
    """Serve all events of all classes."""
    given = trace.trace if isinstance(trace, Prepared) else trace
    if given is trace:
        check(given)  # again, if it was read from a file: what the kernels are given must be sound
    setup = _set_up(given, conf, release, memory, context)
    made = trace if isinstance(trace, Prepared) else _prepare(trace)
    machines = _build(made, setup, full=full, log=log)
    watch = Watch([[] for _ in machines], [[] for _ in machines], [None for _ in machines], after_oom == "stop")
    schedule = Schedule(made.classes, machines)
    ranks = [item.ranks[0] for item in made.classes]
    schedule.run(lambda number, machine, status: watch.serve(number, machine, status, ranks[number]))
    return setup, made.classes, machines, watch


# --- settings -----------------------------------------------------------------------------------------------------


def _set_up(trace: Trace, conf: str | None, release: str | None, memory: int | None, context: int | None) -> Setup:
    notes: list[str] = []
    text = release if release is not None else trace.release
    if text is None:
        text = DEFAULT_RELEASE
        notes.append(f"assumed PyTorch {DEFAULT_RELEASE}: the trace does not say its release (--release)")
    if not trace.devices and memory is None:
        gib = DEFAULT_DEVICE.total_bytes / 2**30
        notes.append(f"assumed device {DEFAULT_DEVICE.name} ({gib:.2f} GiB): the trace names none (--memory)")
    chosen = parse_release(text)
    if chosen.minor != 13 and any(bool((rank.events.op == Op.POOL_BEGIN).any()) for rank in trace.ranks):
        notes.append(
            f"private pools of PyTorch {chosen.text} follow its source: they were checked against the library of 2.13"
        )
    string = trace.conf if conf is None else conf
    devices = tuple(_override(device, memory, context) for device in (trace.devices or (DEFAULT_DEVICE,)))
    same = conf in (None, trace.conf) and memory is None and context is None
    if trace.release is not None and release is not None:
        same = same and parse_release(release) == parse_release(trace.release)
    return Setup(string, chosen, settings_of(trace, string, chosen), devices, same, tuple(notes))


def _override(device: Device, memory: int | None, context: int | None) -> Device:
    """A device with another size, or another part that is not PyTorch's."""
    if memory is not None:
        if not 1 <= memory <= ENDLESS:
            raise ConfigError(f"a device of {memory} bytes is out of range: give 1 byte to 8 TiB")
        name = f"{device.name} with {memory} bytes" if memory != device.total_bytes else device.name
        device = replace(device, total_bytes=memory, name=name)
    if context is not None:
        if context < 0:
            raise ConfigError(f"a context of {context} bytes is out of range: give 0 or more")
        device = replace(device, context_bytes=context)
    if device.context_bytes > device.total_bytes:
        raise ConfigError(
            f"a context of {device.context_bytes} bytes does not fit a device of {device.total_bytes}: give less"
        )
    return device


# --- running ------------------------------------------------------------------------------------------------------


def _build(made: Prepared, setup: Setup, *, full: bool, log: bool) -> list[Machine]:
    """A machine for every class."""
    machines = []
    for item, program in zip(made.classes, made.programs, strict=True):
        device = setup.device(item.source.device)
        machines.append(
            Machine(
                program,
                device=device,
                settings=setup.settings,
                release=setup.release,
                capacity=device.total_bytes - device.context_bytes,
                full=full,
                log=log,
                recorded=setup.recorded,
            )
        )
    return machines


@dataclass
class Watch:
    """What is seen while the machines run: reports asked for, allocations that failed, the first failure explained."""

    reports: list[list[Report]]
    failed: list[list[int]]
    first: list[OutOfMemory | None] = field(default_factory=list)
    stops: bool = True

    def serve(self, number: int, machine: Machine, status: int, rank: int) -> None:
        """Handle what a machine stopped at, and let it go on."""
        if status == at.OUT_OF_MEMORY:
            self.failed[number].append(machine.index)
            if self.first[number] is None:
                self.first[number] = analysis.out_of_memory(machine, analysis.phase_spans(machine))
            machine.index += 1
            if self.stops and not machine.program.survived(machine.index - 1):
                machine.end_here()
        elif status == at.CONTROL:
            index = machine.index
            report = machine.serve_control(rank)
            if report is not None:
                kind, data = report
                self.reports[number].append(Report(index, "snapshot" if kind == "snapshot" else "statistics", data))
        else:
            raise machine.undefined(rank)


def _result_of(
    item: RankClass,
    machine: Machine,
    watch: Watch,
    number: int,
    *,
    events: bool,
    log: bool,
    snapshot: bool,
    picture: bool,
) -> RankResult:
    spans = analysis.phase_spans(machine)
    ranks = tuple(item.ranks)
    device = machine.device
    entries = _log_of(machine) if log or snapshot or picture else None
    outside: tuple[OutsideTerm, ...] = ()
    if device.context_bytes:
        outside = (OutsideTerm("context", device.context_bytes, "the trace's device, or --context"),)
    return RankResult(
        ranks=ranks,
        device=device,
        events=len(machine.program),
        memory_stats=machine.memory_stats(),
        oom=watch.first[number],
        phases=analysis.phase_peaks(machine, spans),
        peak=analysis.peak_of(machine, spans),
        fragmentation=analysis.fragmentation_of(machine),
        outside=outside,
        timeline=Timeline(
            ranks=ranks,
            allocated=machine.out[:, engine.OUT_ALLOCATED],
            active=machine.out[:, engine.OUT_ACTIVE],
            reserved=machine.out[:, engine.OUT_RESERVED],
            phases=spans,
            limit_bytes=device.total_bytes - device.context_bytes,
            time_ns=analysis.host_times(machine),
            ooms=tuple(watch.failed[number]),
            regions=analysis.regions(machine),
        ),
        reports=tuple(watch.reports[number]),
        duration_ns=_duration(machine),
        columns=_columns_of(machine) if events else None,
        log=entries if log else None,
        snapshot=torch_snapshot(machine, entries) if snapshot and entries is not None else None,
        picture=picture_of(machine, entries, spans, tuple(watch.failed[number][:1]))
        if picture and entries is not None
        else None,
    )


def _duration(machine: Machine) -> int | None:
    """When the host and all streams are done; None where nothing of the trace takes time."""
    if not machine.program.timed:
        return None
    memory = machine.memory
    clocks = [
        int(memory[int(memory[at.STREAMS]) + i * at.S_COLUMNS + at.S_CLOCK]) for i in range(int(memory[at.NUM_STREAMS]))
    ]
    return max([int(memory[at.HOST]), *clocks]) or None


def _columns_of(machine: Machine) -> EventColumns:
    out = machine.out
    return EventColumns(
        address=out[:, engine.OUT_ADDRESS],
        reserved=out[:, engine.OUT_RESERVED],
        allocated=out[:, engine.OUT_ALLOCATED],
        active=out[:, engine.OUT_ACTIVE],
        segments=out[:, engine.OUT_SEGMENTS],
        num_alloc_retries=out[:, engine.OUT_RETRIES],
        num_ooms=out[:, engine.OUT_OOMS],
    )


def _log_of(machine: Machine) -> EventLog:
    entries = machine.log()
    return EventLog(
        kind=entries[:, at.L_KIND].astype(np.uint8),
        event=entries[:, at.L_EVENT],
        address=entries[:, at.L_ADDRESS],
        bytes=entries[:, at.L_BYTES],
        stream=entries[:, at.L_STREAM],
    )


# --- other settings -----------------------------------------------------------------------------------------------


def _with_remedies(found: Result, trace: Trace, setup: Setup) -> Result:
    """Add to every out-of-memory the allocator settings under which its rank runs through."""
    if sum(len(rank.events) for rank in trace.ranks) > REMEDY_EVENTS:
        return _with_answers(found, {}, (), f"the trace has more than {REMEDY_EVENTS:,} events")
    served: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    tried = []
    for candidate in REMEDIES:
        conf = ",".join(part for part in (setup.conf, candidate) if part)
        try:
            other = replay(replace(trace, devices=setup.devices), conf=conf, release=setup.release.text, analyse=False)
        except LLMemError:  # a setting that this release does not know, or that PyTorch leaves undefined here
            continue
        tried.append(candidate)
        for result in other.ranks:
            if result.oom is None:
                served.setdefault(result.ranks, []).append((conf, result.peak_reserved))
    return _with_answers(found, served, tuple(tried), f"PyTorch {setup.release.text} refuses them")


def _with_needs(found: Result, source: Trace | Prepared, setup: Setup) -> Result:
    """Add to every out-of-memory what its rank reserves where the device has no end."""
    other = replay(source, conf=setup.conf, release=setup.release.text, memory=ENDLESS, analyse=False)
    ranks = []
    for result in found.ranks:
        whole = other.for_rank(result.ranks[0])
        if result.oom is not None and whole.oom is None:
            oom = replace(result.oom, needed=whole.peak_reserved, demand=whole.timeline)
            result = replace(result, oom=oom)
        ranks.append(result)
    return replace(found, ranks=tuple(ranks))


def _with_answers(
    found: Result, served: Mapping[tuple[int, ...], list[tuple[str, int]]], tried: tuple[str, ...], untried: str
) -> Result:
    """Enter what was tried, and what of it serves each rank; `untried` is the reason where nothing could be tried."""
    ranks = []
    for result in found.ranks:
        if result.oom is not None:
            remedies = tuple(served.get(result.ranks, ()))
            result = replace(result, oom=replace(result.oom, remedies=remedies, tried=tried, untried=untried))
        ranks.append(result)
    return replace(found, ranks=tuple(ranks))
