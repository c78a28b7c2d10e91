"""Torch memory snapshots as traces: the reader of `_dump_snapshot` pickles of torch 2.0 to 2.15.

    bytes --unpickle--> dicts --snapshot_layout--> columns --rewind--> state at the start
          --survey--> steps --limits--> device and limit --causes--> events and expected consequences

`read_snapshot` gives the trace that `run` replays; `read_recording` gives with it what `verify` compares: every entry
of the recording as a consequence of an event, and the final segments. Several devices become several ranks.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from traces.check import check
from traces.collecting import uncollected
from traces.errors import TraceError
from traces.files import read_bytes
from traces.model import RankEvents, Trace
from traces.snapshot.causes import LOG_KINDS, Causes, ExpectedLog, find_causes
from traces.snapshot.layout import DEFAULT_POOL, DeviceRecord, Entries, Layout, PoolId, Segment, read_layout
from traces.snapshot.limits import find_limits
from traces.snapshot.rewind import SizeRules, rewind
from traces.snapshot.survey import Kind, Step, survey
from traces.snapshot.unpickle import load_builtins
from traces.text import path_text

__all__ = [
    "LOG_KINDS",
    "ExpectedLog",
    "RankRecording",
    "Recording",
    "read_recording",
    "read_snapshot",
    "snapshot_to_recording",
    "snapshot_to_trace",
]

_MINOR = re.compile(r"2\.(\d{1,3})(\D|$)")


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

    `releases` are the releases that write a snapshot with these fields, oldest first.
    """

    trace: Trace
    ranks: tuple[RankRecording, ...]
    releases: tuple[str, ...]


def read_snapshot(path: str | os.PathLike[str], *, release: str | None = None) -> Trace:
    """Read a torch memory snapshot (`.pickle`, `.pkl`, gzipped or not) as a trace.

    `release` ("2.11") is the release that recorded it; without it, the oldest that writes the fields seen is assumed,
    and the trace's notes say so. Raises TraceError, one line, where the file is not a snapshot, asks for anything but
    plain data, or contradicts itself.
    """
    return read_recording(path, release=release).trace


def read_recording(path: str | os.PathLike[str], *, release: str | None = None) -> Recording:
    """As `read_snapshot`, with the recorded consequences and final segments beside the trace."""
    where = path_text(path)
    with uncollected():
        return snapshot_to_recording(load_builtins(read_bytes(path), where), where=where, release=release)


def snapshot_to_trace(snapshot: Any, *, where: str, release: str | None = None) -> Trace:
    """A trace of an unpickled snapshot (`torch.cuda.memory._snapshot()`, or its list of segments alone).

    `where` stands for the file's name in errors. Raises TraceError as `read_snapshot` does.
    """
    return snapshot_to_recording(snapshot, where=where, release=release).trace


def snapshot_to_recording(snapshot: Any, *, where: str, release: str | None = None) -> Recording:
    """As `snapshot_to_trace`, with the recorded consequences and final segments beside the trace."""
    layout = read_layout(snapshot, where)
    minor = layout.since if release is None else _minor(release)
    rules = SizeRules(layout.settings, minor)
    records = layout.devices or (DeviceRecord(0, (), Entries(), {}),)
    read = [_read_device(record, rules, layout, where) for record in records]
    trace = _trace([(record, causes) for record, causes, _ in read], layout, release)
    try:
        check(trace)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None
    return Recording(
        trace=trace,
        ranks=tuple(_rank(record, causes, ambiguous) for record, causes, ambiguous in read),
        releases=tuple(f"2.{minor}" for minor in range(layout.since, layout.until + 1)),
    )


def _minor(release: str) -> int:
    """The minor release of "2.11", "2.11.0", "2.11.0+cu130"; the newest for what is not understood here."""
    found = _MINOR.match(release)
    return int(found[1]) if found else 99


def _read_device(
    record: DeviceRecord, rules: SizeRules, layout: Layout, where: str
) -> tuple[DeviceRecord, Causes, int]:
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


def _trace(read: list[tuple[DeviceRecord, Causes]], layout: Layout, release: str | None) -> Trace:
    settings = layout.settings
    start = {causes.expandable_at_start for _, causes in read}
    conf = settings.conf
    if start == {not settings.expandable_segments}:
        conf = settings.with_expandable(not settings.expandable_segments)
    return Trace(
        ranks=tuple(
            RankEvents((record.device,), causes.events, device=i, initial=causes.initial)
            for i, (record, causes) in enumerate(read)
        ),
        metadata={"producer": "torch.cuda.memory._snapshot"},
        conf=conf,
        release=release or f"2.{layout.since}",
        devices=tuple(causes.device for _, causes in read),
        notes=tuple(_notes(read, layout, release)),
    )


def _notes(read: list[tuple[DeviceRecord, Causes]], layout: Layout, release: str | None) -> list[str]:
    """What was assumed or skipped, for the user."""
    notes = []
    if release is None:
        span = f"2.{layout.since}" if layout.since == layout.until else f"2.{layout.since} to 2.{layout.until}"
        notes.append(f"the snapshot has the fields of torch {span}; 2.{layout.since} is assumed (--release overrides)")
    if not layout.settings.known:
        notes.append(
            "the snapshot does not hold the allocator's settings (torch 2.3 and later do): defaults are assumed"
        )
    if _minor(release or f"2.{layout.since}") == 12 and any(causes.initial for _, causes in read):
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
