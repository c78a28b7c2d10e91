"""The replay equals recordings of the compiled allocator with private pools: captures, pools shared and side by side,
`MemPool`, releases with and without living blocks, checkpoints, memory that runs out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support import golden
from tests.support.fast import fast_replay, to_trace
from tests.support.observed import Call, Observed, Row, Setup, assert_same


def in_any_order(calls: Iterable[Call]) -> list[Call]:
    """Calls, those that give memory back first and by address: PyTorch visits its pools in the order of a hash map."""
    return sorted(calls, key=lambda call: (call[0] not in "FU", call[0] in "FU" and call[1]))


def comparable(got: Observed) -> Observed:
    """What PyTorch's own history and snapshots show: no reservations of addresses, no leftovers of free blocks."""
    got.calls = [in_any_order(call for call in calls if call[0] in "AFMU") for calls in got.calls]
    for report in got.reports.values():
        for segment in report.get("segments", ()):
            segment["blocks"] = [
                [size, asked * (state != "inactive"), state, 0] for size, asked, state, _ in segment["blocks"]
            ]
    return got


@pytest.mark.parametrize("name", sorted(golden.archive("private_pools")))
def test_replay_equals_recording(name: str) -> None:
    recording = golden.parse(name, golden.archive("private_pools")[name])
    recording.observed.calls = [in_any_order(calls) for calls in recording.observed.calls]
    assert_same(name, recording.rows, recording.observed, comparable(fast_replay(recording.rows, recording.setup)))


def test_all_recordings_are_there() -> None:
    assert len(golden.archive("private_pools")) == 26


MIB = 1 << 20
CHECKPOINT: list[Row] = [["pb", 1], ["m", 0, 5 * MIB, 0], ["m", 1, 3 * MIB, 0], ["pe", 1], ["pk", 1, 7]]


def test_a_restore_needs_an_empty_pool() -> None:
    free: list[Row] = [["f", 0], ["f", 1]]
    again: list[Row] = [["px", 1, 7], ["t", 2, 5 * MIB, 0, 0]]
    setup = Setup("2.13", "", 1 << 30)
    assert fast_replay([*CHECKPOINT, *free, *again], setup).column("allocated")[-2:] == [8 * MIB, 8 * MIB]
    assert fast_replay([*CHECKPOINT, ["f", 0], *again], setup).undefined == len(CHECKPOINT) + 1
    assert fast_replay([*CHECKPOINT, *free, *again, ["t", 3, 5 * MIB, 0, 0]], setup).undefined == len(CHECKPOINT) + 4


def test_what_was_checked_is_said() -> None:
    from simulator.engine.replay import replay

    def notes(release: str) -> list[str]:
        return [note for note in replay(to_trace(CHECKPOINT, Setup(release, "", 1 << 30))).notes if "pools" in note]

    assert notes("2.13") == []
    assert notes("2.9") == [
        "private pools of PyTorch 2.9 follow its source: they were checked against the library of 2.13"
    ]
