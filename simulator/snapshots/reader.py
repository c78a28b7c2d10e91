"""Torch memory snapshots as traces: the reader of `_dump_snapshot` pickles of torch 2.0 to 2.15.

    bytes --traces.snapshot.unpickle--> dicts --traces.snapshot.layout--> columns --rules--> settings, release
          --rewind--> state at the start --survey--> steps --limits--> device and limit
          --roles--> categories and phases --causes--> events and expected consequences

`read` takes any file, a trace or a snapshot. `read_recording` gives with a snapshot's trace what `verify` compares:
every entry of the recording as a consequence of an event, and the final segments. Several devices become several ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulator.allocator.conf import settings_of
from simulator.allocator.releases import parse_release
from simulator.snapshots.causes import Causes, ExpectedLog, find_causes
from simulator.snapshots.limits import find_limits
from simulator.snapshots.rewind import rewind
from simulator.snapshots.rules import Rules, possible_rules
from simulator.snapshots.survey import Kind, Step, survey
from traces.check import check
from traces.collecting import uncollected
from traces.errors import ConfigError, TraceError
from traces.files import read_bytes, sniff
from traces.model import RankEvents, Trace
from traces.reading import HEAD, in_file, read_trace
from traces.release import DEFAULT_RELEASE
from traces.snapshot.layout import DEFAULT_POOL, DeviceRecord, Entries, Layout, PoolId, Segment, read_layout
from traces.snapshot.unpickle import load_builtins
from traces.text import path_text


@dataclass(frozen=True)
class RankRecording:
    """What was recorded of one device: the consequences of its rank's events, and the final segments.

    A final segment is a dict of address, total_size, stream, segment_type ("small" or "large"), is_expandable,
    pool_id (0: default, else the pool's number in the trace) and blocks, a list of (size, requested_size, state) in
    address order; the requested_size of an inactive block is a leftover of its last use. `ambiguous` counts blocks of
    the initial state whose size may be up to 1 MiB more than assumed; `complete` says that the recording began with
    an empty allocator.
    """

    rank: int
    log: ExpectedLog
    segments: tuple[Mapping[str, Any], ...]
    ambiguous: int
    complete: bool
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Recording:
    """A snapshot as a trace of its causes, with what the replay has to show.

    `releases` are the releases that write a snapshot with these fields and read its settings, oldest first.
    """

    trace: Trace
    ranks: tuple[RankRecording, ...]
    releases: tuple[str, ...]


def read(path: str | os.PathLike[str], *, release: str | None = None, conf: str | None = None) -> Trace:
    """Read a trace (as `traces.read`) or a torch memory snapshot (as `read_recording`); its content says which.

    `release` overrides what the file says, and `conf` stands for its allocator string, which is then not looked at.
    Raises TraceError, with the file's name, where it cannot be used; ConfigError where `release` is not known.
    """
    if release is not None:
        parse_release(release)

    def snapshot(data: bytes) -> Trace:
        return _recording_of(data, path_text(path), release).trace

    trace = read_trace(Path(path), release=release, snapshot=snapshot)
    try:
        chosen = parse_release(trace.release or DEFAULT_RELEASE)
        if conf is None:
            settings_of(trace, trace.conf, chosen)
    except ConfigError as error:
        raise in_file(TraceError(f"allocator: {error}"), path) from None
    except TraceError as error:
        raise in_file(error, path) from None
    return trace


def read_recording(path: str | os.PathLike[str], *, release: str | None = None) -> Recording:
    """Read a torch memory snapshot (`.pickle`, `.pkl`, gzipped or not), with what its replay has to show.

    `release` ("2.11") is the release that recorded it; without it, the oldest that writes the fields seen and reads the
    allocator string is assumed, and the trace's notes say so. Raises TraceError, one line, where the file is not a
    snapshot, asks for anything but plain data, or contradicts itself.
    """
    data = read_bytes(path)
    if sniff(data[:HEAD]) in ("json", "npz"):
        raise TraceError(f"{path_text(path)}: a trace, not a torch memory snapshot: `run` takes it")
    return _recording_of(data, path_text(path), release)


def _recording_of(data: bytes, where: str, release: str | None) -> Recording:
    with uncollected():
        return snapshot_to_recording(load_builtins(data, where), where=where, release=release)


def snapshot_to_recording(snapshot: object, *, where: str, release: str | None = None) -> Recording:
    """As `read_recording`, of an unpickled snapshot (`torch.cuda.memory._snapshot()`, or its list of segments alone).

    `where` stands for the file's name in errors.
    """
    layout = read_layout(snapshot, where)
    possible = possible_rules(layout, release, where)
    rules = possible[0]
    records = layout.devices or (DeviceRecord(0, (), Entries(), {}),)
    read = [_read_device(record, rules, layout, where) for record in records]
    trace = _trace([(record, causes) for record, causes, _ in read], layout, rules, release, where)
    try:
        check(trace)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None
    return Recording(
        trace=trace,
        ranks=tuple(_rank(record, causes, ambiguous) for record, causes, ambiguous in read),
        releases=tuple(rules.release.text for rules in possible),
    )


def _read_device(record: DeviceRecord, rules: Rules, layout: Layout, where: str) -> tuple[DeviceRecord, Causes, int]:
    """Rewind, survey and explain one device's recording."""
    start = rewind(record, rules, where)
    steps = survey(record, start, rules, where)
    if start.ranges and steps.steps and _is_rest(steps.steps[0]):
        # The recording begins amid the work of a malloc, whose beginning is lost: begin after it.
        record = replace(record, entries=record.entries.after(steps.steps[0].end))
        start = rewind(record, rules, where)
        steps = survey(record, start, rules, where)
    limits = find_limits(steps, rules, f"device {record.device}")
    causes = find_causes(record, start, steps, limits, rules, layout.annotations)
    notes = (*limits.notes, *(f"device {record.device}: {note}" for note in causes.notes))
    if len(start.most):
        notes += (
            f"device {record.device}: the sizes of {len(start.most)} blocks of the state at the start are not certain",
        )
    return record, replace(causes, notes=notes), len(start.most)


def _is_rest(step: Step) -> bool:
    """Whether the first step may be the rest of a malloc that was refused at first."""
    return step.kind is Kind.MALLOC and bool(step.releases or step.late or step.mapped_before_release)


def _trace(
    read: list[tuple[DeviceRecord, Causes]], layout: Layout, rules: Rules, release: str | None, where: str
) -> Trace:
    settings = rules.settings
    start = {causes.expandable_at_start for _, causes in read}
    conf = settings.conf
    if start == {not settings.expandable_segments}:
        conf = rules.with_expandable(not settings.expandable_segments)
    return Trace(
        ranks=tuple(
            RankEvents((record.device,), causes.events, device=i, initial=causes.initial)
            for i, (record, causes) in enumerate(read)
        ),
        metadata={"name": os.path.basename(where), "producer": "torch.cuda.memory._snapshot"},
        conf=conf,
        release=release or rules.release.text,
        devices=tuple(causes.device for _, causes in read),
        notes=tuple(_notes(read, layout, rules, release)),
    )


def _notes(read: list[tuple[DeviceRecord, Causes]], layout: Layout, rules: Rules, release: str | None) -> list[str]:
    """What was assumed or skipped, for the user."""
    notes = []
    if release is None:
        span = f"2.{layout.since}" if layout.since == layout.until else f"2.{layout.since} to 2.{layout.until}"
        notes.append(
            f"the snapshot has the fields of torch {span}; {rules.release.text} is assumed (--release overrides)"
        )
    if layout.settings is None:
        notes.append(
            "the snapshot does not hold the allocator's settings (torch 2.3 and later do): defaults are assumed"
        )
    if rules.release.profile == "B" and any(causes.initial for _, causes in read):
        notes.append("torch 2.12 decides ties by the age of blocks, which a cut recording does not show")
    skipped = Counter[str]()
    for record, _ in read:
        skipped.update(record.unknown)
    for action, count in skipped.items():
        entries = "entry" if count == 1 else "entries"
        notes.append(f"skipped {count} {entries} of unknown action {action[:40]!r}")
    for _, causes in read:
        notes.extend(causes.notes)
    return notes


def _rank(record: DeviceRecord, causes: Causes, ambiguous: int) -> RankRecording:
    return RankRecording(
        rank=record.device,
        log=causes.log,
        segments=tuple(_final(segment, causes.pools) for segment in record.segments),
        ambiguous=ambiguous,
        complete=causes.initial is None,
        skipped=record.unknown,
    )


def _final(segment: Segment, pools: dict[PoolId, int]) -> dict[str, Any]:
    """A final segment as plain values."""
    return {
        "address": segment.address,
        "total_size": segment.size,
        "stream": segment.stream,
        "segment_type": "large" if segment.large else "small",
        "is_expandable": segment.expandable,
        "pool_id": 0 if segment.pool == DEFAULT_POOL else pools.setdefault(segment.pool, len(pools) + 1),
        "blocks": [(block.size, block.requested, block.state) for block in segment.blocks],
    }
