"""Which ranks are simulated (once for all that are alike), and the order in which they take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.allocator import layout as at
from simulator.allocator.conf import parse_conf
from simulator.allocator.releases import parse_release
from simulator.engine.machine import Machine
from simulator.engine.program import compile_rank
from simulator.engine.replay import replay
from simulator.engine.schedule import RANK_PRIORITY, START_PRIORITY, RankClass, Schedule, classify, solo_collectives
from tests.support.random_ranks import GROUPS, cases
from tests.support.timed import (
    MIB,
    Case,
    Groups,
    Row,
    Shown,
    alloc,
    busy,
    collective,
    fast,
    free,
    kernel,
    plain,
    record,
    show,
    synchronize,
    wait_stream,
)
from traces.errors import EventError
from traces.model import Events, Op, RankEvents, Strings, Trace

MARK = plain("statistics")


def classes_of(case: Case) -> list[list[int]]:
    """The ranks of each class."""
    return [item.ranks for item in classify(case.trace())]


def separate(trace: Trace) -> Trace:
    """Every rank with an entry of its own: equal ones are then found by their contents."""
    return replace(trace, ranks=tuple(copy(entry, rank) for entry in trace.ranks for rank in entry.ranks))


def copy(entry: RankEvents, rank: int) -> RankEvents:
    """An entry for one rank, with arrays of its own."""
    events = entry.events
    columns = {
        name: Strings(column.codes.copy(), tuple(column.table)) if isinstance(column, Strings) else column.copy()
        for name, column in events.columns.items()
    }
    return replace(entry, ranks=(rank,), events=Events(events.op.copy(), columns))


# --- classes ------------------------------------------------------------------------------------------------------

STEP = [alloc(1, MIB), collective("dp", 10, stream=1), kernel(5), collective("tp", 3), free(1), synchronize()]


def mesh(ranks: int, width: int) -> Groups:
    """`tp`: rows of `width` ranks; `dp`: the columns across them."""
    return {
        "tp": [list(range(first, first + width)) for first in range(0, ranks, width)],
        "dp": [list(range(column, ranks, width)) for column in range(width)],
    }


@pytest.mark.parametrize("entries", ["one list", "an entry each"])
@pytest.mark.parametrize("ranks", [1024, 8192])
def test_equal_ranks_are_simulated_once(ranks: int, entries: str) -> None:
    trace = Case({tuple(range(ranks)): STEP}, mesh(ranks, 8)).trace()
    if entries == "an entry each":
        trace = separate(trace)
    (item,) = classify(trace)
    assert item.ranks == list(range(ranks))
    assert solo_collectives(item, 0).sum() == 2
    (result,) = replay(trace).ranks
    assert result.ranks == tuple(range(ranks))
    assert result.duration_ns == 10


def test_only_one_machine_is_made_for_equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain_init = Machine.__init__

    def count(self: Machine, *args: Any, **named: Any) -> None:
        made.append(1)
        plain_init(self, *args, **named)

    monkeypatch.setattr(Machine, "__init__", count)
    replay(separate(Case({tuple(range(1024)): STEP}, mesh(1024, 8)).trace()))
    assert len(made) == 1


def test_classes_come_in_the_order_of_their_lowest_rank() -> None:
    one, two = [kernel(1)], [kernel(2)]
    assert classes_of(Case({(9, 3): one, (7, 2): two, 5: one, 0: [kernel(3)]})) == [[0], [2, 7], [3, 5, 9]]


@pytest.mark.parametrize(
    "other",
    [
        [alloc(1, 512), kernel(2)],
        [alloc(1, 512, stream=1), kernel(1)],
        [alloc(2, 512), kernel(1)],
        [alloc(1, 512, name="weight"), kernel(1)],
        [alloc(1, 512, category="gradient"), kernel(1)],
        [alloc(1, 512, host_ns=1), kernel(1)],
        [alloc(1, 512), kernel(1), kernel(1)],
        [kernel(1), alloc(1, 512)],
        [],
    ],
    ids=["duration", "stream", "id", "name", "category", "host_ns", "longer", "order", "empty"],
)
def test_whatever_shows_in_a_result_tells_ranks_apart(other: list[Row]) -> None:
    assert classes_of(Case({0: [alloc(1, 512), kernel(1)], 1: other})) == [[0], [1]]


def test_equal_tables_of_names_in_another_order_of_use_are_told_apart() -> None:
    """The codes of both columns are 0, 1; the tables differ."""
    names = [[plain("phase", name=name) for name in order] for order in (("a", "b"), ("b", "a"))]
    assert classes_of(Case({0: names[0], 1: names[1]})) == [[0], [1]]


def test_another_device_makes_another_class() -> None:
    trace = separate(Case({(0, 1, 2): STEP}, mesh(4, 2)).trace())
    small = replace(trace.devices[0], total_bytes=40 * MIB)
    ranks = (trace.ranks[0], replace(trace.ranks[1], device=1), replace(trace.ranks[2], device=1))
    trace = replace(trace, devices=(*trace.devices, small), ranks=ranks)
    assert [item.ranks for item in classify(replace(trace, groups={"dp": ((0,), (1,), (2,)), "tp": ((0, 1, 2),)}))] == [
        [0],
        [1, 2],
    ]


def test_peers_of_another_class_split_equal_ranks() -> None:
    """Ranks 0 to 3 have the same events, but only 2 and 3 meet a late one."""
    late = [busy(100), collective("g", 1)]
    case = Case({(0, 1, 2, 3): [collective("g", 1)], (4, 5): late}, {"g": [[0, 1], [2, 3, 4], [5]]})
    assert classes_of(case) == [[0, 1], [2, 3], [4], [5]]


def test_a_difference_travels_along_groups() -> None:
    """A row of ranks, each of which meets its neighbours: the odd one at its end tells all of them apart."""
    rows = [collective("even", 1), collective("odd", 1, stream=1), synchronize()]
    groups = {"even": [[0, 1], [2, 3], [4, 5], [6, 7]], "odd": [[0], [1, 2], [3, 4], [5, 6], [7]]}
    alike = Case({tuple(range(8)): rows}, {"even": groups["even"], "odd": [[0, 7], [1, 2], [3, 4], [5, 6]]})
    assert classes_of(alike) == [list(range(8))]
    assert classes_of(Case({tuple(range(7)): rows, 7: [busy(9), *rows]}, groups)) == [[rank] for rank in range(8)]
    assert classes_of(Case({tuple(range(8)): rows}, groups)) == [list(range(8))]


def test_one_late_rank_of_a_mesh_makes_four_classes() -> None:
    """The late one, its row, its column, and the rest, however many they are."""
    ranks = 4096
    case = Case({tuple(range(1, ranks)): STEP, 0: [busy(7), *STEP]}, mesh(ranks, 8))
    found = classify(case.trace())
    assert [len(item.ranks) for item in found] == [1, 7, ranks // 8 - 1, 7 * (ranks // 8 - 1)]
    assert found[0].peers == {"dp": (0, 2), "tp": (0, 1)}
    assert len(replay(case.trace()).ranks) == 4


def test_pipeline_stages_are_classes() -> None:
    """Four stages of 256 ranks: what a rank sends to the next stage has its own group a pair."""
    stages = {
        tuple(range(stage, 1024, 4)): [kernel(10 + stage), collective("dp", 5), collective("pp", 1), synchronize()]
        for stage in range(4)
    }
    groups = {
        "dp": [list(range(stage, 1024, 4)) for stage in range(4)],
        "pp": [list(range(first, first + 4)) for first in range(0, 1024, 4)],
    }
    found = classify(Case(stages, groups).trace())
    assert [len(item.ranks) for item in found] == [256] * 4
    assert found[2].peers == {"dp": (2,), "pp": (0, 1, 2, 3)}
    assert [shown.duration for _, shown in sorted(fast(Case(stages, groups)).items())][:4] == [19, 19, 19, 19]


def test_a_group_that_no_event_uses_splits_nothing() -> None:
    case = Case({(0, 1): [kernel(1)], 2: [kernel(2)]}, {"g": [[0], [1, 2]]})
    assert classes_of(case) == [[0, 1], [2]]


def test_members_that_the_trace_lacks_split_nothing() -> None:
    case = Case({(0, 1, 2): [collective("g", 1)]}, {"g": [[0, 10], [1, 11, 12], [2]]})
    (item,) = classify(case.trace())
    assert item.peers == {"g": (0,)}


def test_solo_collectives_are_those_within_a_class() -> None:
    rows = [collective("in", 1), kernel(1), collective("out", 1), collective("in", 1)]
    case = Case({(0, 1): rows, 2: [collective("out", 2)]}, {"in": [0, 1], "out": [0, 1, 2]})
    first, second = classify(case.trace())
    assert solo_collectives(first, 0).tolist() == [True, False, False, True]
    assert solo_collectives(second, 1).tolist() == [False]
    assert not solo_collectives(RankClass([0], RankEvents((0,), Events(np.zeros(3, dtype=np.uint8)))), 0).any()


@given(cases())
def test_ranks_that_are_alike_behave_as_they_would_apart(case: Case) -> None:
    """A phase of its own name makes every rank a class of its own, and changes nothing else."""
    apart = replace(case, ranks={rank: [plain("phase", name=f"{rank}"), *rows] for rank, rows in case.by_rank()})
    assert len(classify(apart.trace())) == len(apart.ranks)
    try:
        expected = fast(case)
    except EventError:
        with pytest.raises(EventError, match="is never reached"):
            fast(apart)
        return
    assert {rank: without_first(shown) for rank, shown in fast(apart).items()} == expected


def without_first(shown: Shown) -> Shown:
    """What is shown after the first event."""
    later: dict[str, Any] = {name: value[1:] for name, value in vars(shown).items() if isinstance(value, list)}
    return replace(shown, **later)


@given(cases(), st.permutations(range(10)))
def test_the_numbers_of_ranks_do_not_matter(case: Case, names: Sequence[int]) -> None:
    """Other numbers mean other turns; where no two clocks tie in a poll, every rank sees the same."""
    ranks = {tuple(names[rank] for rank in ranks): rows for ranks, rows in case.ranks.items()}
    other = replace(case, ranks=ranks, groups={name: renamed(parts, names) for name, parts in GROUPS.items()})
    try:
        expected = fast(case)
    except EventError:
        with pytest.raises(EventError, match="is never reached"):
            fast(other)
        assume(False)
    assert fast(other) == {names[rank]: shown for rank, shown in expected.items()}


def renamed(parts: Any, names: Sequence[int]) -> Any:
    """A group of other numbers."""
    return names[parts] if isinstance(parts, int) else [renamed(part, names) for part in parts]


# --- turns --------------------------------------------------------------------------------------------------------


def machines_of(trace: Trace, classes: Sequence[RankClass]) -> list[Machine]:
    release = parse_release(trace.release or "2.11")
    device = trace.devices[0]
    return [
        Machine(
            compile_rank(item.source, timed=True, solo=solo_collectives(item, number)),
            device=device,
            settings=parse_conf("", release),
            release=release,
            capacity=device.total_bytes,
        )
        for number, item in enumerate(classes)
    ]


def marks_of(case: Case) -> list[int]:
    """The classes in the order in which they come to their `statistics` events."""
    trace = case.trace()
    classes = classify(trace)
    machines = machines_of(trace, classes)
    order: list[int] = []

    def serve(number: int, machine: Machine, status: int) -> None:
        assert status == at.CONTROL
        order.append(classes[number].ranks[0])
        machine.serve_control(classes[number].ranks[0])

    Schedule(classes, machines).run(serve)
    assert all(machine.index == len(machine.program) for machine in machines)
    return order


def meet(before: Sequence[Row], after: Sequence[Row] = (MARK,)) -> list[Row]:
    return [*before, collective("g", 10), synchronize(), *after]


def everyone(ranks: Mapping[int, Sequence[Row]]) -> Case:
    return Case(ranks, {"g": sorted(ranks)})


def test_of_two_turns_the_earlier_comes_first() -> None:
    """All three wait for the same collective; they go on by their host clocks, not by their numbers."""
    case = everyone({0: meet([busy(20)]), 1: meet([busy(10)]), 2: meet([busy(15)])})
    assert marks_of(case) == [1, 2, 0]


def test_at_equal_times_the_start_of_a_collective_comes_before_a_rank() -> None:
    """When ranks 0 and 1 have met, rank 2 has not had its first turn; it was queued before theirs, at the same time."""
    case = Case({0: meet([]), 1: meet([kernel(1, stream=7)]), 2: [kernel(3), MARK]}, {"g": [0, 1]})
    assert marks_of(case) == [0, 1, 2]
    late = Case({0: meet([busy(1)]), 1: meet([busy(2)]), 2: [kernel(3), MARK]}, {"g": [0, 1]})
    assert marks_of(late) == [2, 0, 1]
    assert START_PRIORITY < RANK_PRIORITY


def test_at_equal_times_and_priorities_the_first_in_line_comes_first() -> None:
    case = Case({0: [kernel(1), MARK, MARK], 1: [kernel(2), MARK], 2: [kernel(3), MARK]})
    assert marks_of(case) == [0, 0, 1, 2]


@pytest.mark.parametrize("ranks", [(8, 1), (3, 16, 1, 24, 33, 40)])
def test_ranks_that_go_on_at_once_stand_in_line_by_number(ranks: tuple[int, ...]) -> None:
    """Whatever order a set would give them in; all the others just end."""
    rows: dict[int, list[Row]] = {rank: [kernel(rank, stream=1)] for rank in range(max(ranks) + 1)}
    rows |= {rank: [kernel(rank, stream=1), *meet([])] for rank in ranks}
    assert marks_of(Case(rows, {"g": list(ranks)})) == sorted(ranks)


def test_pushed_turns_are_taken_by_time_then_priority_then_sequence() -> None:
    schedule = Schedule([], [])
    for number, (time, priority) in enumerate([(5, 1), (5, 0), (3, 1), (5, 1), (3, 1), (5, 0), (4, 0)]):
        schedule.push(number, time, priority)
    assert [turn[3] for turn in sorted(schedule.turns)] == [2, 4, 6, 1, 5, 0, 3]


def polling(clock: int, own: str, other: str) -> list[Row]:
    """A rank that polls at `clock` for what is behind a collective of `own`, marks that it did, and reaches `other`."""
    waits = [alloc(1), record(1, 1), collective(own, 10, stream=1), free(1), busy(clock), alloc(2)]
    return [*waits, MARK, collective(other, 10, stream=2)]


@pytest.mark.parametrize(("clocks", "order"), [((20, 10), [1, 0]), ((10, 20), [0, 1]), ((10, 10), [0, 1])])
def test_the_rank_furthest_behind_polls_first(clocks: tuple[int, int], order: list[int]) -> None:
    case = Case({0: polling(clocks[0], "a", "b"), 1: polling(clocks[1], "b", "a")}, {"a": [0, 1], "b": [0, 1]})
    assert marks_of(case) == order


def test_a_rank_that_waits_for_a_stream_does_not_poll() -> None:
    """Rank 0 is furthest behind, but waits for a collective; rank 1 polls and then reaches it."""
    first = [collective("a", 10), synchronize(), MARK, collective("b", 1)]
    case = Case({0: first, 1: polling(50, "b", "a")}, {"a": [0, 1], "b": [0, 1]})
    assert marks_of(case) == [1, 0]


def test_ranks_without_collectives_run_through_in_one_turn() -> None:
    case = Case({rank: [kernel(rank + 1), synchronize(), MARK, alloc(1), MARK] for rank in range(3)})
    assert marks_of(case) == [0, 0, 1, 1, 2, 2]


# --- many collectives ---------------------------------------------------------------------------------------------


def test_a_long_run_ahead_is_priced_in_order() -> None:
    """No rank ever waits: the first launches everything before the second begins. Times are those of the slower."""
    steps = 3000

    def step(duration: int) -> list[Row]:
        return [kernel(duration), wait_stream(1, on=0), collective("g", 2, stream=1), wait_stream(0, on=1)]

    case = Case({0: step(3) * steps, 1: step(5) * steps}, {"g": [0, 1]})
    shown = fast(case)
    assert shown[0].duration == shown[1].duration == steps * 7
    assert set(shown[0].times) == {0}


def test_every_collective_of_many_is_met_once() -> None:
    """Sixteen ranks that all differ, in two groups each, with waits in between."""
    rows = {
        rank: [
            row
            for index in range(20)
            for row in (kernel(1 + (rank + index) % 7), collective("all", 1), synchronize(), collective("half", 1))
        ]
        for rank in range(16)
    }
    shown = fast(Case(rows, {"all": list(range(16)), "half": [list(range(8)), list(range(8, 16))]}))
    assert len({tuple(one.times) for one in shown.values()}) == 1
    assert shown[0].duration == 20 * (7 + 1) + 20


def test_ranks_may_stand_anywhere_in_a_trace() -> None:
    case = everyone({rank: meet([kernel(rank + 1)], ()) for rank in range(6)})
    trace = case.trace()
    other = replace(trace, ranks=trace.ranks[::-1])
    rows = dict(case.by_rank())
    for rank, expected in fast(case).items():
        result = replay(other, events=True).for_rank(rank)
        assert show(result, rows[rank]) == expected


def test_op_numbers_are_those_of_the_model() -> None:
    """Collectives within a class are served as kernels; every other op stays as it is."""
    rows = [collective("g", 1), kernel(1), alloc(1), plain("phase", name="x")]
    trace = Case({(0, 1): rows}, {"g": [0, 1]}).trace()
    program = compile_rank(trace.ranks[0], timed=True, solo=solo_collectives(classify(trace)[0], 0))
    assert program.ops.tolist() == [Op.KERNEL, Op.KERNEL, Op.ALLOC, Op.PHASE]
    assert program.num_collectives == 0
