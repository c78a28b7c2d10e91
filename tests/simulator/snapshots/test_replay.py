"""The proof of the reader: its events, replayed by the naive model, repeat the recording entry by entry."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from simulator.snapshots.reader import Recording, read_recording, snapshot_to_recording
from tests.support.snapshot_replay import Replay, first_divergence
from tests.support.snapshots import NAMES, cut, memory_stats, path_of, snapshot_of
from traces.model import Op

#: Recordings whose behaviour depends on what a cut recording does not show: ages of blocks in the garbage collector.
AGES = ("2.9-gc", "2.11-gc-split")
#: ... the birth order of blocks (ties in 2.12), and which pending frees a refused malloc waited for.
UNKNOWABLE = ("2.12-lag", "2.12-fraction", "2.11-expandable-oom", "2.15-expandable-oom")


@functools.cache
def recording(name: str) -> Recording:
    return read_recording(path_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_causes_repeat_the_recording(name: str) -> None:
    """Every address, every segment obtained and given back, every completion, and the final state."""
    read = recording(name)
    for number, rank in enumerate(read.ranks):
        assert first_divergence(read, number, stale=rank.complete) is None


@pytest.mark.parametrize("name", sorted(memory_stats()))
def test_peaks_and_failures_are_those_of_torch(name: str) -> None:
    read = recording(name)
    for rank, shown in zip(read.trace.ranks, read.ranks, strict=True):
        if not shown.complete:
            continue
        replay = Replay(read.trace, rank)
        replay.serve(rank.events)
        got = replay.allocator.memory_stats()
        want = memory_stats()[name][str(shown.rank)]
        for key in ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_ooms"):
            assert got[key] == want[key], key


def test_a_training_run_has_the_peaks_that_torch_reported() -> None:
    read = recording("opt-125m_fp32_sdpa_b2_s512_sgd_A100")
    replay = Replay(read.trace, read.trace.ranks[0])
    replay.serve(read.trace.ranks[0].events)
    stats = replay.allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == 1608502272
    assert stats["reserved_bytes.all.peak"] == 1702887424


@pytest.mark.parametrize("name", [name for name in NAMES if name not in AGES + UNKNOWABLE])
def test_recordings_cut_anywhere_still_repeat(name: str) -> None:
    """As a ring buffer would have left them: the state at the start is rewound from the end."""
    rng = random.Random(name)
    snapshot = snapshot_of(name)
    lengths = [len(entries) for entries in snapshot["device_traces"]]
    for _ in range(2 if max(lengths) > 4000 else 4):
        dropped = [rng.randrange(length) if length else 0 for length in lengths]
        read = snapshot_to_recording(cut(snapshot, dropped), where=f"{name} without {dropped}")
        for number in range(len(read.ranks)):
            assert first_divergence(read, number, stale=False) is None, dropped


@pytest.mark.parametrize("name", ["2.11-lag", "2.11-expandable", "2.13-late"])
def test_recordings_cut_amid_a_malloc_still_repeat(name: str) -> None:
    """The cut falls between a segment's entry and the allocation's, or amid the segments of one empty_cache."""
    snapshot = snapshot_of(name)
    (entries,) = snapshot["device_traces"]
    amid = [i for i, entry in enumerate(entries) if entry["action"].startswith("segment_")]
    for i in amid[:: max(1, len(amid) // 8)]:
        for dropped in (i, i + 1):
            read = snapshot_to_recording(cut(snapshot, [dropped]), where="cut")
            assert first_divergence(read, stale=False) is None, dropped


@pytest.mark.parametrize("name", AGES + UNKNOWABLE)
def test_cut_recordings_are_read_even_where_not_all_can_be_known(name: str) -> None:
    snapshot = snapshot_of(name)
    (entries,) = snapshot["device_traces"]
    for dropped in range(0, len(entries), len(entries) // 10):
        read = snapshot_to_recording(cut(snapshot, [dropped]), where="cut")
        assert read.ranks[0].complete == (dropped == 0)


def test_a_snapshot_without_any_cut_begins_empty() -> None:
    for name in NAMES:
        complete = not name.endswith(("ring", "ring-expandable", "late"))
        assert recording(name).ranks[0].complete == complete, name
        assert (recording(name).trace.ranks[0].initial is None) == complete, name


def test_deferred_frees_complete_where_they_did() -> None:
    read = recording("2.11-lag")
    events = read.trace.ranks[0].events
    entries = snapshot_of("2.11-lag")["device_traces"][0]
    deferred = sum(
        entry["action"] == "free_requested"
        and (
            i + 1 == len(entries)
            or entries[i + 1]["action"] != "free_completed"
            or entries[i + 1]["addr"] != entry["addr"]
        )
        for i, entry in enumerate(entries)
    )
    assert deferred > 10
    assert np.count_nonzero(events.op == Op.RECORD_STREAM) == deferred
    assert events.op[0] == Op.HOLD_EVENTS
    pending = sum(block[2] == "active_pending_free" for s in read.ranks[0].segments for block in s["blocks"])
    assert np.count_nonzero(events.op == Op.COMPLETE_FREE) == deferred - pending


def test_calls_of_empty_cache_are_found() -> None:
    """DeepSpeed calls empty_cache; the recording shows only what was released."""
    read = recording("zero_opt-125m_bf16_stage3x4_b2_s512_adamw_A100")
    assert np.count_nonzero(read.trace.ranks[0].events.op == Op.EMPTY_CACHE) == 1


def test_private_pools_are_told_by_their_ids() -> None:
    for name in ("2.13-pools", "2.11-pools-expandable"):
        events = recording(name).trace.ranks[0].events
        begun = events.op == Op.POOL_BEGIN
        assert set(events.ints("pool")[begun].tolist()) == {1, 2}
        assert np.count_nonzero(events.op == Op.POOL_CREATE) == 2
        assert (events.op[np.flatnonzero(begun) + 1] == Op.ALLOC).all()
