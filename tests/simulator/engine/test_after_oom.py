"""A rank ends with its first out-of-memory error, as a program does, unless all events are asked for."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.replay import AfterOom, replay
from simulator.engine.result import RankResult
from simulator.engine.tables import write_events
from simulator.snapshots.reader import read
from tests.support.fast import to_trace
from tests.support.random_events import random_rows, random_setup
from tests.support.snapshots import memory_stats, path_of
from tests.support.timed import MIB, Case, alloc, busy, collective, free, plain, synchronize
from traces.errors import ReplayError, TraceError

SMALL = 100 * MIB


def phase(name: str, step: int) -> dict[str, object]:
    return plain("phase", name=name, step=step)


def one(rows: list[dict[str, object]], after_oom: AfterOom = "stop", total: int = SMALL) -> RankResult:
    (rank,) = replay(Case({0: rows}, total_bytes=total).trace(), events=True, after_oom=after_oom).ranks
    return rank


FAILS = [
    phase("forward", 0),
    alloc(1, 60 * MIB, name="weight", category="parameter"),
    alloc(2, 20 * MIB, name="gone"),
    free(2),
    alloc(3, 60 * MIB, name="mlp: aten.mm", category="activation"),
    phase("backward", 0),
    alloc(4, 30 * MIB, name="later"),
]


def test_what_follows_the_failure_is_not_there() -> None:
    rank = one(FAILS)
    assert rank.oom is not None
    assert (rank.oom.event, rank.oom.name, rank.oom.phase) == (4, "mlp: aten.mm", "forward 0")
    assert rank.events == len(rank.timeline) == 5
    assert {span.name for span in rank.timeline.phases} == {found.name for found in rank.phases} == {"forward"}
    assert rank.timeline.ooms == (4,)
    assert rank.memory_stats["num_ooms"] == 1
    assert rank.memory_stats["allocation.all.allocated"] == 2


def test_alive_is_what_was_alive_at_the_failure() -> None:
    """The peak was before it."""
    rank = one(FAILS)
    assert rank.peak.allocated == rank.peak_allocated == 80 * MIB
    assert rank.shown.event == 4
    assert dict(rank.shown.by_category) == {"parameter": 60 * MIB}
    assert [tensor.name for tensor in rank.shown.largest] == ["weight"]


def test_the_demand_is_that_of_the_whole_program() -> None:
    rank = one(FAILS)
    assert rank.oom is not None
    assert rank.oom.demand is not None
    assert rank.oom.needed == rank.oom.demand.reserved.max() == (60 + 20 + 60 + 30 - 20) * MIB + 20 * MIB
    assert len(rank.oom.demand) == len(FAILS)


def test_all_events_where_they_are_asked_for() -> None:
    rank = one(FAILS, "continue")
    assert rank.events == len(rank.timeline) == 7
    assert rank.memory_stats["allocation.all.allocated"] == 3
    assert rank.oom is not None
    assert rank.oom.event == 4


def test_files_end_where_the_replay_does(tmp_path) -> None:  # type: ignore[no-untyped-def]
    trace = Case({0: FAILS}, total_bytes=SMALL).trace()
    write_events(replay(trace, events=True), trace, tmp_path / "events.csv")
    rows = (tmp_path / "events.csv").read_text().splitlines()
    assert len(rows) == 1 + 5
    assert rows[-1].split(",")[4] == "-1"


@pytest.mark.parametrize("name", ["2.13-oom", "2.11-oom", "2.11-expandable-oom"])
def test_errors_that_a_recorded_program_got_over_do_not_end_it(name: str) -> None:
    (rank,) = replay(read(path_of(name)), analyse=False).ranks
    assert rank.memory_stats["num_ooms"] == memory_stats()[name]["0"]["num_ooms"] > 0
    assert rank.timeline.ooms[0] < len(rank.timeline) - 1


def test_a_recorded_program_ends_with_an_error_of_its_own() -> None:
    trace = read(path_of("2.11-lag"))
    whole = replay(trace, analyse=False).ranks[0]
    rank = replay(trace, memory=whole.peak_allocated // 2, analyse=False).ranks[0]
    assert rank.memory_stats["num_ooms"] == 1
    assert rank.events == rank.timeline.ooms[0] + 1 < whole.events


@given(st.integers(0, 2**32))
def test_up_to_the_failure_all_is_as_it_was(seed: int) -> None:
    random = Random(seed)
    setup = random_setup(random)
    trace = to_trace(random_rows(random, setup, 60), setup)
    try:
        whole = replay(trace, events=True, analyse=False, after_oom="continue").ranks[0]
        rank = replay(trace, events=True, analyse=False).ranks[0]
    except ReplayError:  # what PyTorch leaves undefined
        return
    end = whole.timeline.ooms[0] + 1 if whole.timeline.ooms else len(whole.timeline)
    assert rank.events == end
    assert rank.columns is not None
    assert whole.columns is not None
    for name in ("address", "reserved", "allocated", "active", "segments", "num_alloc_retries", "num_ooms"):
        assert np.array_equal(getattr(rank.columns, name), getattr(whole.columns, name)[:end]), name
    assert rank.timeline.ooms == whole.timeline.ooms[:1]
    assert (rank.oom is None) == (whole.oom is None)


MEETS = [collective("g", 10), synchronize(), alloc(2, 10 * MIB), alloc(3, 10 * MIB)]


def test_ranks_that_wait_for_one_that_failed_end_there() -> None:
    case = Case({0: [alloc(1), *MEETS], 1: [alloc(1, 2 * SMALL), busy(5), *MEETS]}, {"g": [0, 1]}, total_bytes=SMALL)
    found = replay(case.trace(), analyse=False)
    assert [rank.ranks for rank in found.ranks] == [(1,), (0,)]
    assert [rank.oom is None for rank in found.ranks] == [False, True]
    assert [rank.events for rank in found.ranks] == [1, 2]  # rank 0 launches its collective, and waits for it
    assert found.ranks[1].peak_allocated == 512
    assert "rank 0 ends where it waits for a rank that ran out of memory: peaks are those up to there" in found.notes
    both = replay(case.trace(), analyse=False, after_oom="continue")
    assert sorted(rank.events for rank in both.ranks) == [5, 6]


def test_ranks_that_do_not_wait_run_to_their_ends() -> None:
    case = Case({0: [alloc(1), alloc(2)], 1: [alloc(1, 2 * SMALL), alloc(2)]}, total_bytes=SMALL)
    found = replay(case.trace(), analyse=False)
    assert {rank.ranks: rank.events for rank in found.ranks} == {(1,): 1, (0,): 2}


def test_waiting_forever_is_an_error_where_nobody_failed() -> None:
    case = Case({0: [alloc(1), *MEETS], 1: [alloc(1), busy(5), synchronize()]}, {"g": [0, 1]}, total_bytes=SMALL)
    with pytest.raises(TraceError, match="never reached by rank 1"):
        replay(case.trace())
