"""The engine in simulated time: cases worked out by hand, and random ones against a plain model
(`tests/oracles/naive_time.py`).

Every hand-made case is served by both, so that the model is held to the same numbers as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import event, given

from simulator.engine.replay import replay
from tests.oracles.naive_time import DeadlockError, naive
from tests.support.random_ranks import cases
from tests.support.timed import (
    MIB,
    Case,
    Row,
    Shown,
    alloc,
    busy,
    collective,
    fast,
    free,
    hold,
    kernel,
    plain,
    record,
    synchronize,
    wait_stream,
)
from traces.errors import EventError

Serve = Callable[[Case], Mapping[int, Shown]]


@pytest.fixture(params=[fast, naive], ids=["engine", "model"])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Either of the two that serve a case."""
    chosen: Serve = request.param
    return chosen


def alone(serve: Serve, rows: list[Row], **more: Any) -> Shown:
    """What a single rank shows."""
    return serve(Case({0: rows}, **more))[0]


# --- host and streams ---------------------------------------------------------------------------------------------


def test_kernels_queue_on_their_stream(serve: Serve) -> None:
    shown = alone(serve, [kernel(10), kernel(5), kernel(100, stream=1), synchronize(0)])
    assert shown.times == [0, 0, 0, 15]
    assert shown.duration == 100


def test_kernels_of_two_streams_run_side_by_side(serve: Serve) -> None:
    assert alone(serve, [kernel(10), kernel(7, stream=1), synchronize()]).times[-1] == 10


def test_a_kernel_does_not_start_before_it_is_launched(serve: Serve) -> None:
    shown = alone(serve, [kernel(3), busy(10), kernel(5), synchronize()])
    assert shown.times == [0, 10, 10, 15]


def test_host_ns_passes_on_any_op_after_the_op_itself(serve: Serve) -> None:
    rows = [kernel(8, host_ns=3), alloc(1, host_ns=2), free(1, host_ns=1), synchronize(host_ns=4)]
    assert alone(serve, rows).times == [3, 5, 6, 12]


def test_launches_cost_the_host_before_the_work_can_start(serve: Serve) -> None:
    shown = alone(serve, [kernel(100), kernel(1, stream=1), alloc(1), synchronize(1)], launch_ns=7)
    assert shown.times == [7, 14, 14, 15]
    assert shown.duration == 107


def test_a_launch_of_a_collective_costs_the_host_too(serve: Serve) -> None:
    case = Case({0: [collective("g", 100), busy(1)], 1: [collective("g", 50)]}, {"g": [0, 1]}, launch_ns=7)
    shown = serve(case)
    assert shown[0].times == [7, 8]
    assert (shown[0].duration, shown[1].duration) == (107, 57)


def test_synchronize_waits_for_one_stream_or_for_all(serve: Serve) -> None:
    rows = [kernel(10), kernel(30, stream=2), synchronize(0), synchronize(1), synchronize(), synchronize(0)]
    assert alone(serve, rows).times == [0, 0, 10, 10, 30, 30]


def test_synchronize_never_turns_the_clock_back(serve: Serve) -> None:
    assert alone(serve, [kernel(10), busy(50), synchronize()]).times == [0, 50, 50]


def test_wait_stream_orders_streams(serve: Serve) -> None:
    rows = [kernel(10), wait_stream(1, on=0), kernel(5, stream=1), synchronize(1)]
    assert alone(serve, rows).times[-1] == 15


def test_wait_stream_costs_the_host_nothing(serve: Serve) -> None:
    assert alone(serve, [kernel(10), wait_stream(1, on=0)], launch_ns=3).times == [3, 3]


def test_wait_stream_waits_for_the_work_so_far_only(serve: Serve) -> None:
    rows = [kernel(10), wait_stream(1, on=0), kernel(100), kernel(5, stream=1), synchronize(1)]
    assert alone(serve, rows).times[-1] == 15


def test_wait_stream_leaves_the_other_stream_alone(serve: Serve) -> None:
    rows = [kernel(10, stream=1), wait_stream(1, on=0), kernel(1), synchronize(0)]
    assert alone(serve, rows).times[-1] == 1


def test_a_stream_that_waits_for_itself_does_nothing(serve: Serve) -> None:
    assert alone(serve, [kernel(10), wait_stream(0, on=0), synchronize()]).times[-1] == 10


def test_streams_are_known_by_their_numbers(serve: Serve) -> None:
    high = (1 << 63) - 1
    rows = [kernel(10, stream=high), wait_stream(7, on=high), kernel(1, stream=7), synchronize(7)]
    assert alone(serve, rows).times[-1] == 11


def test_a_trace_of_order_alone_has_no_time() -> None:
    rows = [alloc(1), record(1, 1), free(1, host_ns=5), wait_stream(1, on=0), synchronize(), alloc(2)]
    (result,) = replay(Case({0: rows}).trace(), events=True).ranks
    assert result.timeline.time_ns is None
    assert result.duration_ns is None
    assert result.columns is not None
    assert result.columns.address[0] == result.columns.address[5], "the event was complete at once"


def test_one_timed_rank_gives_every_rank_a_clock(serve: Serve) -> None:
    shown = serve(Case({0: [kernel(10)], 1: [busy(3)]}))
    assert shown[1].times == [3]
    assert (shown[0].duration, shown[1].duration) == (10, 3)


@pytest.mark.parametrize(
    "row",
    [
        plain("snapshot"),
        plain("statistics"),
        plain("set_memory_fraction", fraction=0.5),
        plain("set_allocator", conf="max_split_size_mb:128"),
        plain("other_process", bytes=1),
        plain("reset_peak"),
        plain("reset_accumulated"),
        plain("empty_cache"),
        plain("pool_create", pool=1),
        plain("complete_events", stream=0),
        hold(True),
    ],
    ids=lambda row: row["op"],
)
def test_the_host_is_busy_with_any_op(row: Row, serve: Serve) -> None:
    rows = [kernel(1), row | {"host_ns": 4}, plain("phase", name="end")]
    assert alone(serve, rows).times == [0, 4, 4]


def test_the_host_is_busy_with_a_failed_allocation(serve: Serve) -> None:
    shown = alone(serve, [kernel(1), alloc(1, 30 * MIB, host_ns=4), alloc(2)], total_bytes=20 * MIB)
    assert shown.times == [0, 4, 4]
    assert shown.addresses[1:] == [-1, 0]


# --- deferred frees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waited", "again"), [(99, False), (100, True), (101, True)])
def test_a_deferred_free_returns_when_the_stream_has_passed(waited: int, again: bool, serve: Serve) -> None:
    """The free waits for 100 ns of work; equal time counts as complete."""
    rows = [alloc(1), kernel(100, stream=1), record(1, 1), free(1), busy(waited), alloc(2)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 2) == (0 if again else 512)
    assert shown.allocated == [512, 512, 512, 0, 0, 512]
    assert shown.active == [512, 512, 512, 512, 512, 512 if again else 1024]


def test_only_a_malloc_polls(serve: Serve) -> None:
    rows = [alloc(1), alloc(2), record(1, 1), kernel(10, stream=1), free(1), busy(20), free(2), alloc(3)]
    shown = alone(serve, rows)
    assert shown.active[4:] == [1024, 1024, 512, 512]


def test_an_event_stands_where_the_stream_was_at_the_free(serve: Serve) -> None:
    """Neither the moment of record_stream nor work launched after the free counts."""
    rows = [alloc(1), record(1, 1), kernel(10, stream=1), free(1), kernel(100, stream=1), busy(10), alloc(2)]
    assert alone(serve, rows).address_of(rows, 2) == 0


def test_a_free_waits_for_every_stream_that_used_it(serve: Serve) -> None:
    rows = [alloc(1), record(1, 1), record(1, 2), kernel(10, stream=1), kernel(20, stream=2), free(1)]
    rows += [busy(10), alloc(2), busy(10), alloc(3)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 2) == 512
    assert shown.address_of(rows, 3) == 0


def test_events_of_a_stream_complete_in_their_order(serve: Serve) -> None:
    rows = [alloc(1), alloc(2), record(1, 1), record(2, 1), kernel(10, stream=1), free(2), kernel(10, stream=1)]
    rows += [free(1), busy(10), alloc(3), busy(10), alloc(4)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 3) == 512
    assert shown.address_of(rows, 4) == 0


def test_a_free_behind_wait_stream_waits_for_the_other_stream(serve: Serve) -> None:
    rows = [alloc(1), record(1, 1), kernel(50, stream=2), wait_stream(1, on=2), free(1), busy(49), alloc(2)]
    rows += [busy(1), alloc(3)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 2) == 512
    assert shown.address_of(rows, 3) == 0


def test_an_idle_stream_gives_back_at_once(serve: Serve) -> None:
    rows = [alloc(1), kernel(5, stream=1), busy(5), record(1, 1), free(1), alloc(2)]
    assert alone(serve, rows).address_of(rows, 2) == 0


def test_the_own_stream_of_a_block_never_counts(serve: Serve) -> None:
    rows = [alloc(1, stream=1), kernel(100, stream=1), record(1, 1), free(1), alloc(2, stream=1)]
    assert alone(serve, rows).address_of(rows, 2) == 0


@pytest.mark.parametrize("stream", [1, None])
def test_after_synchronize_the_next_malloc_gets_the_block(stream: int | None, serve: Serve) -> None:
    rows = [alloc(1), record(1, 1), kernel(10, stream=1), free(1), synchronize(stream), alloc(2)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 2) == 0
    assert shown.active[4:] == [512, 512], "the block is freed by the malloc, not by synchronize"


def test_synchronizing_another_stream_is_no_completion(serve: Serve) -> None:
    rows = [alloc(1), record(1, 1), kernel(10, stream=1), kernel(9, stream=2), free(1), synchronize(2), alloc(2)]
    assert alone(serve, rows).address_of(rows, 2) == 512


def test_complete_events_overrules_time(serve: Serve) -> None:
    rows = [alloc(1), record(1, 1), kernel(10, stream=1), free(1), plain("complete_events", stream=1), alloc(2)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 2) == 0
    assert shown.times[-1] == 0


def test_complete_free_overrules_time(serve: Serve) -> None:
    rows = [alloc(1), record(1, 1), record(1, 2), kernel(10, stream=1), kernel(10, stream=2), free(1)]
    rows += [plain("complete_free", id=1), alloc(2), busy(10), alloc(3)]
    shown = alone(serve, rows)
    assert shown.active[5:] == [512, 0, 512, 512, 1024]
    assert shown.address_of(rows, 2) == 0
    assert shown.times[7] == 0


def test_complete_free_takes_one_of_several(serve: Serve) -> None:
    """The FIFO closes over the hole, at its front, inside and at its end."""
    for taken in (1, 2, 3):
        others = [id_ for id_ in (1, 2, 3) if id_ != taken]
        rows = [alloc(1), alloc(2), alloc(3), *(record(id_, 1) for id_ in (1, 2, 3)), kernel(10, stream=1)]
        rows += [free(1), free(2), free(3), plain("complete_free", id=taken), busy(10), alloc(9, 2 * MIB)]
        shown = alone(serve, rows)
        assert shown.active[-3] == 512 * len(others)
        assert shown.active[-1] == 2 * MIB


def test_complete_free_of_a_free_behind_a_collective(serve: Serve) -> None:
    """The event's record serves another free before the collective's time is known."""
    first = [alloc(1), record(1, 1), collective("g", 10, stream=1), free(1), plain("complete_free", id=1)]
    first += [alloc(2), record(2, 2), kernel(500, stream=2), free(2), busy(100), alloc(3), synchronize(1), alloc(4)]
    case = Case({0: first, 1: [busy(50), collective("g", 10)]}, {"g": [0, 1]})
    shown = serve(case)[0]
    assert shown.address_of(first, 2) == 0
    assert shown.address_of(first, 3) == 512, "the work of stream 2 takes 500 ns"
    assert shown.address_of(first, 4) == 1024


# --- hold_events in time ------------------------------------------------------------------------------------------


def test_held_events_stay_incomplete_whatever_the_time(serve: Serve) -> None:
    rows = [kernel(1, stream=1), hold(True), alloc(1), record(1, 1), free(1), busy(1000), alloc(2)]
    assert alone(serve, rows).address_of(rows, 2) == 512


def test_letting_go_completes_held_events_and_leaves_the_others_to_time(serve: Serve) -> None:
    rows = [alloc(1), alloc(2), record(1, 1), record(2, 2), kernel(50, stream=1), kernel(50, stream=2), free(1)]
    rows += [hold(True), free(2), hold(False), alloc(3), alloc(4), busy(50), alloc(5)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 3) == 512
    assert shown.address_of(rows, 4) == 1024
    assert shown.address_of(rows, 5) == 0


def test_after_letting_go_events_take_time_again(serve: Serve) -> None:
    rows = [hold(True), hold(False), alloc(1), record(1, 1), kernel(50, stream=1), free(1), alloc(2)]
    assert alone(serve, rows).address_of(rows, 2) == 512


def test_synchronize_completes_held_events(serve: Serve) -> None:
    rows = [hold(True), alloc(1), record(1, 1), kernel(50, stream=1), free(1), synchronize(1), alloc(2)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 2) == 0
    assert shown.times[-1] == 50


def test_a_held_event_keeps_those_behind_it(serve: Serve) -> None:
    rows = [alloc(1), alloc(2), record(1, 1), record(2, 1), kernel(5, stream=1), hold(True), free(1)]
    rows += [plain("hold_events", hold=True), free(2), plain("complete_free", id=1), busy(9), alloc(3), hold(False)]
    rows += [alloc(4)]
    shown = alone(serve, rows)
    assert shown.address_of(rows, 3) == 0
    assert shown.address_of(rows, 4) == 512


# --- waiting for every event --------------------------------------------------------------------------------------


def test_an_out_of_memory_retry_waits_for_events(serve: Serve) -> None:
    """The device holds one of the two allocations: the second waits until the first is not in use any more."""
    rows = [alloc(1, 16 * MIB), record(1, 1), kernel(300, stream=1), kernel(900, stream=2), free(1), busy(100)]
    rows += [alloc(2, 18 * MIB, host_ns=5)]
    shown = alone(serve, rows, total_bytes=20 * MIB)
    assert shown.times[-2:] == [100, 305]
    assert shown.addresses[-1] == 0
    assert shown.retries[-1] == 1
    assert shown.active[-1] == 18 * MIB
    assert shown.duration == 900


def test_a_retry_that_fails_has_waited_too(serve: Serve) -> None:
    rows = [alloc(1, 16 * MIB), record(1, 1), kernel(300, stream=1), free(1), alloc(2, 40 * MIB)]
    shown = alone(serve, rows, total_bytes=20 * MIB)
    assert shown.times[-1] == 300
    assert shown.addresses[-1] == -1
    assert shown.active[-1] == shown.reserved[-1] == 0


def test_a_retry_waits_for_the_last_of_several_streams(serve: Serve) -> None:
    rows = [alloc(1, 16 * MIB), record(1, 1), record(1, 2), kernel(300, stream=1), kernel(200, stream=2), free(1)]
    assert alone(serve, [*rows, alloc(2, 18 * MIB)], total_bytes=20 * MIB).times[-1] == 300


def test_a_retry_takes_no_time_for_held_events(serve: Serve) -> None:
    rows = [hold(True), alloc(1, 16 * MIB), record(1, 1), kernel(300, stream=1), free(1), alloc(2, 18 * MIB)]
    shown = alone(serve, rows, total_bytes=20 * MIB)
    assert shown.times[-1] == 0
    assert shown.addresses[-1] == 0


def test_empty_cache_waits_for_events(serve: Serve) -> None:
    rows = [alloc(1, 16 * MIB), record(1, 1), kernel(300, stream=1), kernel(900, stream=2), free(1)]
    shown = alone(serve, [*rows, plain("empty_cache")])
    assert shown.times[-1] == 300
    assert shown.reserved[-1] == 0


def test_empty_cache_without_pending_frees_waits_for_nothing(serve: Serve) -> None:
    rows = [alloc(1, 16 * MIB), kernel(300, stream=1), free(1), plain("empty_cache")]
    assert alone(serve, rows).times[-1] == 0


# --- collectives --------------------------------------------------------------------------------------------------


def test_a_collective_starts_when_the_last_rank_arrives(serve: Serve) -> None:
    case = Case(
        {
            0: [collective("g", 10), synchronize()],
            1: [busy(30), collective("g", 10), synchronize()],
            2: [busy(20), collective("g", 40), synchronize()],
        },
        {"g": [0, 1, 2]},
    )
    shown = serve(case)
    assert [shown[rank].times[-1] for rank in range(3)] == [40, 40, 70]


def test_arrival_is_when_the_stream_comes_to_it(serve: Serve) -> None:
    case = Case(
        {
            0: [kernel(25), collective("g", 10), synchronize()],
            1: [kernel(99, stream=3), busy(5), collective("g", 10), synchronize(0)],
        },
        {"g": [0, 1]},
    )
    shown = serve(case)
    assert (shown[0].times[-1], shown[1].times[-1]) == (35, 35)


def test_the_host_does_not_wait_for_a_collective(serve: Serve) -> None:
    case = Case({0: [collective("g", 10), busy(3)], 1: [busy(50), collective("g", 10)]}, {"g": [0, 1]})
    assert serve(case)[0].times == [0, 3]


def test_the_nth_collective_of_a_group_is_the_same_everywhere(serve: Serve) -> None:
    """Kinds, names, streams and what lies between do not matter; their number does."""
    case = Case(
        {
            0: [collective("g", 10), collective("g", 10), collective("g", 10), synchronize()],
            1: [
                collective("g", 10, stream=1, kind="all_gather"),
                busy(100),
                collective("g", 10, stream=2, name="second"),
                busy(1000),
                collective("g", 10, stream=1),
                synchronize(2),
                synchronize(),
            ],
        },
        {"g": [0, 1]},
    )
    shown = serve(case)
    assert shown[0].times[-1] == 1110
    assert shown[1].times[-2:] == [1100, 1110]


def test_collectives_of_two_groups_are_counted_apart(serve: Serve) -> None:
    case = Case(
        {
            0: [collective("a", 10, stream=1), collective("b", 10, stream=2), synchronize(1), synchronize(2)],
            1: [collective("b", 10, stream=2), busy(100), collective("a", 10, stream=1), synchronize()],
        },
        {"a": [0, 1], "b": [1, 0]},
    )
    shown = serve(case)
    assert shown[0].times[-2:] == [110, 110]
    assert shown[1].times[-1] == 110


def test_a_later_collective_on_another_stream_need_not_wait_for_an_earlier_one(serve: Serve) -> None:
    """All ranks have reached the second one of the group; the first is held up behind a group that nobody waits for."""
    first = [
        collective("g", 10, stream=1),
        collective("g", 10, stream=2),
        synchronize(2),
        collective("h", 10, stream=3),
    ]
    second = [
        collective("h", 10, stream=1),
        collective("g", 10, stream=1),
        collective("g", 10, stream=2),
        synchronize(),
    ]
    shown = serve(Case({0: first, 1: second}, {"g": [0, 1], "h": [0, 1]}))
    assert shown[0].times == [0, 0, 10, 10]
    assert shown[1].times[-1] == 30


def test_work_behind_a_collective_follows_it(serve: Serve) -> None:
    first = [collective("g", 10), kernel(5), wait_stream(1, on=0), kernel(7, stream=1), synchronize(0), synchronize(1)]
    case = Case({0: first, 1: [busy(100), collective("g", 1)]}, {"g": [0, 1]})
    assert serve(case)[0].times[-2:] == [115, 122]


def test_kernels_behind_a_collective_are_not_before_their_launch(serve: Serve) -> None:
    first = [collective("g", 10), busy(200), kernel(5), synchronize()]
    case = Case({0: first, 1: [busy(100), collective("g", 1)]}, {"g": [0, 1]})
    assert serve(case)[0].times[-1] == 205


def test_a_waiting_stream_waits_for_another_that_is_known(serve: Serve) -> None:
    first = [collective("g", 10), kernel(500, stream=1), wait_stream(0, on=1), kernel(100, stream=1), synchronize(0)]
    case = Case({0: first, 1: [busy(100), collective("g", 1)]}, {"g": [0, 1]})
    assert serve(case)[0].times[-1] == 500


def test_a_waiting_stream_waits_for_the_work_so_far_on_another_that_is_known_first(serve: Serve) -> None:
    """Stream 2 waits for stream 1 while both are behind collectives; work that stream 1 gets later does not count."""
    first = [collective("a", 10, stream=1), collective("b", 10, stream=2), wait_stream(2, on=1)]
    first += [synchronize(1), kernel(1000, stream=1), synchronize(2)]
    second = [collective("a", 10), synchronize(), busy(100), collective("b", 10)]
    shown = serve(Case({0: first, 1: second}, {"a": [0, 1], "b": [0, 1]}))
    assert shown[0].times == [0, 0, 0, 10, 10, 120]


def test_work_of_one_stream_goes_on_while_that_of_another_waits(serve: Serve) -> None:
    """Stream 1 has much queued behind a collective that comes later than the one on stream 2."""
    first = [collective("a", 10, stream=1), kernel(1, stream=1), kernel(1, stream=1), collective("b", 10, stream=2)]
    first += [kernel(5, stream=2), synchronize(2), synchronize()]
    second = [collective("b", 10), synchronize(), busy(100), collective("a", 10)]
    assert serve(Case({0: first, 1: second}, {"a": [0, 1], "b": [0, 1]}))[0].times[-2:] == [15, 122]


def test_ranks_that_the_trace_lacks_count_as_arrived(serve: Serve) -> None:
    case = Case(
        {4: [collective("g", 10), synchronize()], 6: [busy(20), collective("g", 10), synchronize()]},
        {"g": [0, 4, 5, 6, 1023]},
    )
    shown = serve(case)
    assert (shown[4].times[-1], shown[6].times[-1]) == (30, 30)


def test_a_rank_whose_peers_are_all_missing_goes_on_alone(serve: Serve) -> None:
    case = Case({4: [busy(1), collective("g", 10), synchronize()]}, {"g": [3, 4, 5]})
    assert serve(case)[4].times == [1, 1, 11]


def test_a_group_of_one(serve: Serve) -> None:
    case = Case({0: [collective("g", 10), synchronize()], 1: [kernel(3)]}, {"g": [0]})
    assert serve(case)[0].times[-1] == 10


def test_a_rank_of_a_mesh_meets_those_of_its_own_list(serve: Serve) -> None:
    late = [busy(100), collective("tp", 10), synchronize()]
    soon = [collective("tp", 10), synchronize()]
    shown = serve(Case({0: soon, 1: late, 2: soon, 3: soon}, {"tp": [[0, 1], [3, 2]]}))
    assert [shown[rank].times[-1] for rank in range(4)] == [110, 110, 10, 10]


def test_a_mesh_of_two_axes(serve: Serve) -> None:
    """Rank 3 is late; it holds up rank 2 in its row at once, and by rank 2's column then rank 0."""
    rows = [collective("row", 10), collective("column", 10), synchronize()]
    case = Case(
        {0: rows, 1: rows, 2: rows, 3: [busy(100), *rows]}, {"row": [[0, 1], [2, 3]], "column": [[0, 2], [1, 3]]}
    )
    shown = serve(case)
    assert [shown[rank].times[-1] for rank in range(4)] == [120, 120, 120, 120]


def test_a_deferred_free_behind_a_collective(serve: Serve) -> None:
    """The communication of 10 ns starts at 100: at 109 the block is in use, at 110 it is back."""
    first = [alloc(1), record(1, 1), collective("g", 10, stream=1), free(1), busy(109), alloc(2), busy(1), alloc(3)]
    shown = serve(Case({0: first, 1: [busy(100), collective("g", 1)]}, {"g": [0, 1]}))[0]
    assert shown.address_of(first, 2) == 512
    assert shown.address_of(first, 3) == 0
    assert shown.times[-1] == 110


def test_a_poll_of_the_rank_furthest_behind_needs_no_wait(serve: Serve) -> None:
    """Rank 1 reaches the collective only after rank 0 has, in another group, come past its poll."""
    first = [alloc(1), record(1, 1), collective("a", 10, stream=1), free(1), alloc(2), collective("b", 10, stream=2)]
    second = [busy(50), collective("b", 10), synchronize(), collective("a", 10), synchronize()]
    shown = serve(Case({0: first, 1: second}, {"a": [0, 1], "b": [0, 1]}))
    assert shown[0].address_of(first, 2) == 512
    assert shown[1].times == [50, 50, 60, 60, 70]


def test_polls_of_several_ranks_go_by_their_clocks(serve: Serve) -> None:
    """Both poll behind a collective that the other reaches later: the one at 10 must go on before the one at 20."""
    first = [alloc(1), record(1, 1), collective("a", 5, stream=1), free(1), busy(20), alloc(2), collective("b", 5)]
    second = [alloc(1), record(1, 1), collective("b", 5, stream=1), free(1), busy(10), alloc(2), collective("a", 5)]
    shown = serve(Case({0: first, 1: second}, {"a": [0, 1], "b": [0, 1]}))
    assert shown[1].address_of(second, 2) == 512, "polled at 10: group b starts at 20"
    assert shown[0].address_of(first, 2) == 0, "polled at 20: group a started at 10 and ended at 15"


def test_of_ranks_equally_far_behind_the_lower_polls_first(serve: Serve) -> None:
    """All clocks stay at 0: rank 0 asks before group a has started; by its next step rank 1 finds b complete."""
    first = [alloc(1), record(1, 1), collective("a", 0, stream=1), free(1), alloc(2), collective("b", 0)]
    second = [alloc(1), record(1, 1), collective("b", 0, stream=1), free(1), alloc(2), collective("a", 0)]
    shown = serve(Case({1: second, 0: first}, {"a": [0, 1], "b": [0, 1]}))
    assert shown[0].address_of(first, 2) == 512
    assert shown[1].address_of(second, 2) == 0


def test_empty_cache_waits_for_a_collective(serve: Serve) -> None:
    first = [alloc(1, 16 * MIB), record(1, 1), collective("g", 10, stream=1), free(1), plain("empty_cache")]
    shown = serve(Case({0: first, 1: [busy(100), collective("g", 1)]}, {"g": [0, 1]}))[0]
    assert shown.times[-1] == 110
    assert shown.reserved[-1] == 0


def test_a_retry_waits_for_a_collective(serve: Serve) -> None:
    first = [alloc(1, 16 * MIB), record(1, 1), collective("g", 10, stream=1), free(1), alloc(2, 18 * MIB)]
    case = Case({0: first, 1: [busy(100), collective("g", 1)]}, {"g": [0, 1]}, total_bytes=20 * MIB)
    shown = serve(case)[0]
    assert shown.times[-1] == 110
    assert shown.retries[-1] == 1


def test_a_retry_waits_for_a_collective_that_is_reached_later(serve: Serve) -> None:
    """Rank 0 polls while it is furthest behind, so that nothing is complete yet; then it must wait, until 130."""
    first = [alloc(1, 16 * MIB), record(1, 1), collective("a", 10, stream=1), free(1)]
    first += [alloc(2, 18 * MIB), collective("b", 1, stream=2)]
    second = [alloc(1), record(1, 1), collective("b", 1, stream=1), free(1), busy(100), alloc(2)]
    second += [busy(20), collective("a", 10)]
    shown = serve(Case({0: first, 1: second}, {"a": [0, 1], "b": [0, 1]}, total_bytes=20 * MIB))
    assert shown[1].address_of(second, 2) == 512
    assert shown[0].times[-2:] == [130, 130]
    assert shown[0].retries[-1] == 1
    assert shown[1].duration == 131


# --- deadlocks ----------------------------------------------------------------------------------------------------


def crossed(wait: list[Row]) -> Case:
    """Two ranks that launch the collectives of two groups in opposite order, with something between."""
    return Case(
        {
            3: [alloc(1), collective("a", 10, stream=1), *wait, collective("b", 10, stream=2), synchronize()],
            5: [collective("b", 10, stream=2), *wait, collective("a", 10, stream=1), synchronize()],
        },
        {"a": [3, 5], "b": [3, 5]},
    )


@pytest.mark.parametrize("wait", [[], [busy(7)], [alloc(2)], [synchronize(0)]], ids=["nothing", "busy", "poll", "idle"])
def test_groups_in_another_order_are_no_deadlock_where_nobody_waits(wait: list[Row], serve: Serve) -> None:
    shown = serve(crossed(wait))
    end = 17 if wait == [busy(7)] else 10
    assert shown[3].times[-1] == shown[5].times[-1] == end


def test_a_deadlock_is_one_clear_error() -> None:
    with pytest.raises(EventError) as caught:
        fast(crossed([synchronize()]))
    assert str(caught.value) == (
        "rank 3, event 1, field 'group': collective 0 of group 'a' is never reached by rank 5; give every rank of a"
        " group the same collectives in the same order"
    )
    assert (caught.value.rank, caught.value.index, caught.value.field) == (3, 1, "group")
    with pytest.raises(DeadlockError):
        naive(crossed([synchronize()]))


def test_crossed_groups_on_one_stream_are_a_deadlock() -> None:
    """Nobody waits in between, but the streams do."""
    case = Case(
        {
            0: [collective("a", 10), collective("b", 10), synchronize()],
            1: [collective("b", 10), collective("a", 10), synchronize()],
        },
        {"a": [0, 1], "b": [0, 1]},
    )
    with pytest.raises(EventError, match=r"^rank 0, event 0, field 'group': collective 0 of group 'a' is never"):
        fast(case)
    with pytest.raises(DeadlockError):
        naive(case)


def test_a_deadlock_names_the_collective_that_lacks_a_rank() -> None:
    """The second collective of rank 2 is missing; the first is not to blame, nor are the ranks that came."""
    rows = [collective("g", 10), alloc(1), collective("g", 10), alloc(2), synchronize()]
    case = Case({(0, 1): rows, 2: [collective("g", 10)]}, {"g": [0, 1, 2]})
    with pytest.raises(EventError, match=r"^rank 0, event 2, .* collective 1 of group 'g' is never reached by rank 2;"):
        fast(case)
    with pytest.raises(DeadlockError):
        naive(case)


def test_a_collective_that_a_rank_never_reaches_is_no_error_where_nobody_waits(serve: Serve) -> None:
    """A trace may end anywhere; what is behind the collective just never ends."""
    shown = serve(Case({0: [kernel(7), collective("g", 10), kernel(5), alloc(1)], 1: [busy(3)]}, {"g": [0, 1]}))
    assert (shown[0].duration, shown[1].duration) == (7, 3)


def test_empty_cache_in_a_deadlock() -> None:
    rows = [alloc(1), record(1, 1), collective("g", 1, stream=1), free(1), plain("empty_cache")]
    with pytest.raises(EventError, match="rank 0, event 2"):
        fast(Case({0: rows, 1: [kernel(1)]}, {"g": [0, 1]}))


# --- random cases against the model -------------------------------------------------------------------------------


def assert_same(case: Case) -> None:
    """The engine and the model show the same, a deadlock included."""
    try:
        expected = naive(case)
    except DeadlockError:
        with pytest.raises(EventError, match="is never reached by rank"):
            fast(case)
        event("deadlock")
        return
    got = fast(case)
    event(f"{len({id(rows) for _, rows in case.by_rank()})} sequences of events")
    for rank, rows in case.by_rank():
        for name in vars(expected[rank]):
            wanted, made = getattr(expected[rank], name), getattr(got[rank], name)
            assert made == wanted, f"rank {rank}: {name} of {rows}"


@given(cases())
def test_random_ranks_agree_with_the_model(case: Case) -> None:
    assert_same(case)


@given(cases(total_bytes=64 * MIB, together=False))
def test_random_ranks_under_pressure_agree_with_the_model(case: Case) -> None:
    """Retries and failures, whose waits move the host clock."""
    assert_same(case)


@given(cases(total_bytes=64 * MIB))
def test_random_ranks_that_meet_under_pressure_agree_with_the_model(case: Case) -> None:
    """Retries that wait for collectives."""
    assert_same(case)
