"""Replay a torch memory snapshot's causes and compare every consequence with the recording.

Causes are allocations, frees, completions of deferred frees and empty_cache; consequences are the address of every
allocation, every call of the device, every merge that a completed free implies, and the segments at the end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from simulator.engine.replay import replay
from simulator.engine.result import LOG_KINDS, RECORDED, EventLog, RankResult, Result
from simulator.snapshots.reader import RankRecording, Recording, read_recording
from traces.model import Int64Array

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which the replay and the recording differ.

    `entry` is the index of the recording's trace entry (its length: the difference is in the final segments);
    `text` says in one line what was recorded and what the replay did.
    """

    entry: int
    text: str


@dataclass(frozen=True, slots=True)
class VerifiedRank:
    """One device of the snapshot: trace entries it has, consequences compared, peaks of the replay in bytes."""

    rank: int
    entries: int
    compared: int
    peak_allocated: int
    peak_reserved: int
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: one record a device, in order; `release` and `conf` are those replayed."""

    ranks: tuple[VerifiedRank, ...]
    release: str
    conf: str
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no device differs."""
        return not any(rank.divergence for rank in self.ranks)


def verify(path: str | os.PathLike[str], *, release: str | None = None) -> VerifyReport:
    """Verify one snapshot file; the first divergence of each device is named.

    Without `release`, the releases that write such a snapshot are tried, oldest first, until one shows no difference;
    if all differ, the oldest is reported. Raises TraceError where the file cannot be read.
    """
    return verify_recording(read_recording(path, release=release), release=release)


def verify_recording(recording: Recording, *, release: str | None = None) -> VerifyReport:
    """As `verify`, for a recording that was read already."""
    first = None
    for candidate in (release,) if release is not None else recording.releases:
        report = _verify_as(recording, candidate)
        if report.ok:
            return report if first is None else replace(report, notes=(*report.notes, _not_oldest(report, first)))
        first = first or report
    assert first is not None
    return first


def _not_oldest(report: VerifyReport, first: VerifyReport) -> str:
    return f"the recording differs from PyTorch {first.release}, and agrees with {report.release}"


def _verify_as(recording: Recording, release: str | None) -> VerifyReport:
    result = replay(recording.trace, release=release, log=True, snapshot=True, analyse=False, after_oom="continue")
    ranks = tuple(_verify_rank(expected, result.for_rank(expected.rank)) for expected in recording.ranks)
    return VerifyReport(ranks=ranks, release=result.release, conf=result.conf, notes=_notes(result))


def _notes(result: Result) -> tuple[str, ...]:
    """What was assumed, but for the release: the report names it."""
    return tuple(note for note in result.notes if "--release" not in note)


def _verify_rank(expected: RankRecording, result: RankResult) -> VerifiedRank:
    assert result.log is not None
    actual = _table(result.log)
    wanted = np.stack([expected.log.kind, expected.log.address, expected.log.bytes, expected.log.stream], axis=1)
    divergence = _first_difference(expected, wanted, actual)
    if divergence is None:
        divergence = _segment_difference(expected, result.snapshot or {})
    return VerifiedRank(
        rank=expected.rank,
        entries=len(expected.log.entry),
        compared=len(wanted) + len(expected.segments),
        peak_allocated=result.peak_allocated,
        peak_reserved=result.peak_reserved,
        divergence=divergence,
    )


def _table(log: EventLog) -> Int64Array:
    """Kind, address, bytes and stream of the log's entries that a torch trace has."""
    chosen = np.isin(log.kind, [LOG_KINDS.index(kind) for kind in RECORDED])
    columns = (log.kind.astype(np.int64), log.address, log.bytes, log.stream)
    table = np.stack([column[chosen] for column in columns], axis=1)
    table[table[:, 0] == LOG_KINDS.index("oom"), 1] = 0  # what the driver had left, not a place
    return table


def _first_difference(expected: RankRecording, wanted: Int64Array, actual: Int64Array) -> Divergence | None:
    """The first entry in which recording and replay differ."""
    common = min(len(wanted), len(actual))
    same = (wanted[:common] == actual[:common]).all(axis=1)
    if bool(same.all()) and len(wanted) == len(actual):
        return None
    i = common if bool(same.all()) else int(same.argmin())
    entry = int(expected.log.entry[i]) if i < len(wanted) else int(expected.log.entry[-1]) + 1
    recorded = _describe(wanted[i]) if i < len(wanted) else "nothing more"
    replayed = _describe(actual[i]) if i < len(actual) else "nothing more"
    return Divergence(entry, f"entry {entry}: recorded {recorded}; the replay did {replayed}")


def _describe(row: Int64Array) -> str:
    kind = LOG_KINDS[int(row[0])]
    place = "" if kind == "oom" else f" at {hex(int(row[1]))}"
    return f"{RECORDED[kind]}{place} of {int(row[2])} bytes on stream {int(row[3])}"


def _segment_difference(expected: RankRecording, snapshot: Mapping[str, Any]) -> Divergence | None:
    """The first difference between the recorded segments at the end and those of the replay."""
    actual = {int(segment["address"]): segment for segment in snapshot.get("segments", ())}
    end = int(expected.log.entry[-1]) + 1 if len(expected.log.entry) else 0
    for segment in expected.segments:
        address = int(segment["address"])
        found = actual.pop(address, None)
        difference = "the replay has none there" if found is None else _compare_segment(segment, found)
        if difference is not None:
            return Divergence(end, f"final segment at {hex(address)}: {difference}")
    if actual:
        return Divergence(end, f"final segment at {hex(min(actual))}: the recording has none there")
    return None


def _compare_segment(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str | None:
    """What differs between a recorded and a replayed segment, or None."""
    for name in ("total_size", "stream", "segment_type", "is_expandable"):
        if expected[name] != actual[name]:
            return f"{name} recorded {expected[name]}, replayed {actual[name]}"
    recorded = [_block(size, requested, state) for size, requested, state in expected["blocks"]]
    replayed = [_block(block["size"], block["requested_size"], block["state"]) for block in actual["blocks"]]
    if recorded == replayed:
        return None
    i = next((i for i, pair in enumerate(zip(recorded, replayed, strict=False)) if pair[0] != pair[1]), None)
    if i is None:
        return f"{len(recorded)} blocks recorded, {len(replayed)} replayed"
    return f"block {i} recorded {recorded[i]}, replayed {replayed[i]}"


def _block(size: int, requested: int, state: str) -> tuple[int, int, str]:
    """A block for comparison; what a free block last served is not compared: it may lie before the recording."""
    state = "active_pending_free" if state == "active_awaiting_free" else state
    return (size, 0 if state == "inactive" else requested, state)
