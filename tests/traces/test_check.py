"""Validation of traces built in Python, and of the numba kernel against the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import traces
from traces import _lifecycle
from traces import check as checking
from traces.check import MAX_TIME_NS, REQUIRED, check
from traces.errors import EventError, TraceError
from traces.model import Device, Events, Op, RankEvents, Strings, Trace

ALLOC, FREE = int(Op.ALLOC), int(Op.FREE)


def one_rank(op: list[int], **columns: Any) -> Trace:
    """A trace of one rank from plain lists."""
    arrays: dict[str, Any] = {
        name: Strings.encode(values) if isinstance(values[0], str) else np.array(values)
        for name, values in columns.items()
    }
    return Trace((RankEvents((0,), Events(np.array(op, dtype=np.uint8), arrays)),))


def fault(trace: Trace) -> tuple[int, str | None, str]:
    with pytest.raises(EventError) as caught:
        check(trace)
    return caught.value.index, caught.value.field, caught.value.reason


@given(traces)
def test_traces_that_keep_the_rules_pass(trace: Trace) -> None:
    check(trace)


def test_an_empty_list_of_events_passes() -> None:
    check(one_rank([]))


@pytest.mark.parametrize("op", [op for op in Op if REQUIRED.get(op, ())])
def test_a_needed_field_that_no_event_has(op: Op) -> None:
    # Where absence is not the default's own value; that is for the readers to see.
    needed = [field for field in REQUIRED[op] if field not in ("bytes", "stream")]
    if not needed:
        check(one_rank([op]))
        return
    index, field, reason = fault(one_rank([Op.EMPTY_CACHE, op]))
    assert (index, field) == (1, needed[0])
    assert reason == f"missing; '{op.name.lower()}' needs it"


def test_an_op_of_unknown_number() -> None:
    assert fault(one_rank([ALLOC, len(Op)], id=[1, -1])) == (1, "op", f"there is no op of number {len(Op)}")
    assert fault(one_rank([FREE, 255], id=[1, -1]))[0] == 0
    assert fault(one_rank([200]))[0] == 0


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("id", -2, "must be 0 or more, is -2"),
        ("bytes", -1, "must be 0 or more, is -1"),
        ("stream", -1, "must be 0 or more, is -1"),
        ("address", -2, "must be 0 or more, is -2"),
        ("step", -7, "must be 0 or more, is -7"),
        ("pool", 0, "must be 1 or more, is 0"),
        ("on", -2, "must be 0 or more, is -2"),
        ("flops", -1, "must be 0 or more, is -1"),
        ("duration_ns", -1, "must be 0 or more, is -1"),
        ("host_ns", -1, "must be 0 or more, is -1"),
    ],
)
def test_integers_out_of_range(field: str, value: int, reason: str) -> None:
    assert fault(one_rank([Op.EMPTY_CACHE], **{field: [value]})) == (0, field, reason)
    assert fault(one_rank([Op.KERNEL, Op.KERNEL], **{field: [512, value]})) == (1, field, reason)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1.0000001, -1e-9])
def test_fractions_out_of_range(value: float) -> None:
    assert fault(one_rank([Op.SET_MEMORY_FRACTION], fraction=[value]))[1] == "fraction"


def test_a_fraction_that_is_nan_is_missing() -> None:
    assert "missing" in fault(one_rank([Op.SET_MEMORY_FRACTION], fraction=[float("nan")]))[2]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.zeros(2, dtype=np.int64), "column 'id' has 2 values, 'op' has 1"),
        (np.zeros(1, dtype=np.int32), "column 'id' must be a list of int64"),
        (np.zeros(1, dtype=np.uint64), "column 'id' must be a list of int64"),
        (np.zeros(1), "column 'id' must be a list of int64"),
        (np.zeros((1, 1), dtype=np.int64), "column 'id' must be a list of int64"),
        (Strings.encode(["a"]), "column 'id' must be a list of int64"),
    ],
)
def test_columns_of_the_wrong_kind(column: Any, words: str) -> None:
    events = Events(np.array([FREE], dtype=np.uint8), {"id": column})
    with pytest.raises(TraceError, match=f"rank 0: {words}"):
        check(Trace((RankEvents((0,), events),)))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (Events(np.zeros(1, dtype=np.int64)), "column 'op' must be a list of uint8"),
        (Events(np.zeros(1, dtype=np.uint8), {"nonsense": np.zeros(1)}), "there is no column 'nonsense'"),
        (Events(np.zeros(1, dtype=np.uint8), {"name": np.zeros(1)}), "column 'name' must hold text"),
        (Events(np.zeros(1, dtype=np.uint8), {"hold": np.zeros(1)}), "column 'hold' must be a list of bool"),
        (Events(np.zeros(1, dtype=np.uint8), {}, {"id": {0: 1}}), "'id' is a field of the format"),
        (Events(np.zeros(1, dtype=np.uint8), {}, {"mine": {1: 1}}), "has values for events that do not exist"),
        (
            Events(np.zeros(1, dtype=np.uint8), {"name": Strings(np.ones(1, dtype=np.int32), ("a",))}),
            "column 'name' has codes outside its table of 1",
        ),
        (
            Events(np.zeros(1, dtype=np.uint8), {"name": Strings(np.zeros(1, dtype=np.int8), ("a",))}),
            "the codes of column 'name' must be a list of int32",
        ),
    ],
)
def test_events_that_are_no_columns(events: Events, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        check(Trace((RankEvents((0,), events),)))


def test_a_device_must_be_listed() -> None:
    entry = RankEvents((0,), Events(np.zeros(0, dtype=np.uint8)), device=1)
    with pytest.raises(TraceError, match=r"there is no device 1 \(only the default one, 0\)"):
        check(Trace((entry,)))
    with pytest.raises(TraceError, match=r"there is no device 1 \(indices 0 to 0\)"):
        check(Trace((entry,), devices=(Device("a", 1),)))
    check(Trace((entry,), devices=(Device("a", 1), Device("b", 1 << 43))))


def test_odd_addresses_are_recordings_of_old_releases_only() -> None:
    trace = one_rank([ALLOC], id=[1], bytes=[700], address=[1000])
    assert fault(trace)[1] == "address"
    for release, allowed in (("2.1", True), ("2.3.1", True), ("2.4", False), ("2.13", False), ("2.10", False)):
        dated = Trace(trace.ranks, release=release)
        if allowed:
            check(dated)
        else:
            assert fault(dated)[1] == "address"


def test_an_allocation_of_no_bytes_is_at_address_0() -> None:
    check(one_rank([ALLOC], id=[1], bytes=[0], address=[0]))


def test_durations_that_no_clock_holds() -> None:
    half = MAX_TIME_NS // 2
    check(one_rank([Op.KERNEL] * 2, duration_ns=[half, half - 1024]))
    assert fault(one_rank([Op.KERNEL] * 3, duration_ns=[half, half, 4096])) == (
        2,
        "duration_ns",
        "the times of the trace add up to more than 2^61 ns",
    )
    assert fault(one_rank([Op.KERNEL], duration_ns=[half], host_ns=[half + 4096]))[1] == "host_ns"
    entry = one_rank([Op.KERNEL], duration_ns=[half + 4096]).ranks[0]
    with pytest.raises(EventError, match="rank 1, event 0, field 'duration_ns'"):
        check(Trace((entry, RankEvents((1,), entry.events))))
    with pytest.raises(EventError, match="rank 0, event 0, field 'duration_ns'"):
        check(Trace((RankEvents((0, 1), entry.events),)))


def test_launches_that_no_clock_holds() -> None:
    entry = one_rank(
        [Op.KERNEL, Op.PHASE, Op.KERNEL], duration_ns=[0, 0, MAX_TIME_NS - (3 << 19)], name=["", "a", ""]
    ).ranks[0]
    check(Trace((entry,), devices=(Device("a", 1, launch_ns=1 << 19),)))
    with pytest.raises(EventError, match="rank 0, event 2, field 'op': with the device's launch_ns, times add up to"):
        check(Trace((entry,), devices=(Device("a", 1, launch_ns=1 << 20),)))


def test_pools_live_by_use_counts() -> None:
    create, begin, end, release = Op.POOL_CREATE, Op.POOL_BEGIN, Op.POOL_END, Op.POOL_RELEASE
    check(one_rank([create, begin, end, release, release], pool=[1] * 5))
    check(one_rank([begin, begin, end, end, begin], pool=[1, 2, 1, 2, 1]))
    check(one_rank([begin, release, end, begin], pool=[1] * 4))
    assert fault(one_rank([create, release, release], pool=[1] * 3)) == (
        2,
        "pool",
        "pool 1 is released more often than it was created or begun",
    )
    assert fault(one_rank([begin, end, end], pool=[1] * 3))[2] == "pool 1 ends without having begun"
    keep, restore, switch = Op.POOL_CHECKPOINT, Op.POOL_RESTORE, Op.POOL_SWITCH
    check(one_rank([begin, switch, switch, end, keep, restore], pool=[1, -1, 1, 1, 1, 1], checkpoint=[-1] * 4 + [3, 3]))
    faults: list[tuple[list[int], str]] = [
        ([switch], "pool 1 has not begun"),
        ([keep], "pool 1 was never created or begun"),
        ([create, restore], "pool 1 has no checkpoint 3"),
    ]
    for ops, reason in faults:
        assert fault(one_rank(ops, pool=[1] * len(ops), checkpoint=[3] * len(ops))) == (len(ops) - 1, "pool", reason)


def test_the_earliest_of_several_faults() -> None:
    trace = one_rank(
        [ALLOC, FREE, FREE, ALLOC, Op.KERNEL, 99],
        id=[1, 1, 1, 1, -1, -1],
        bytes=[1, 0, 0, -4, 0, 0],
        stream=[0, 0, 0, 0, -3, 0],
    )
    assert fault(trace)[0] == 2


# The life of ids: the plain kernel, the compiled one, and both ways of numbering ids

lives = st.lists(
    st.tuples(st.sampled_from([Op.ALLOC, Op.FREE, Op.RECORD_STREAM, Op.COMPLETE_FREE]), st.integers(0, 5)), max_size=30
)


def _expected(events: list[tuple[Op, int]]) -> int:
    """The first event that breaks a life, by sets."""
    ever, live, pending = set(), set(), set()
    for index, (op, number) in enumerate(events):
        if op == Op.ALLOC:
            if number in ever:
                return index
            ever.add(number)
            live.add(number)
        elif op == Op.FREE:
            if number not in live:
                return index
            live.remove(number)
            pending.add(number)
        elif op == Op.RECORD_STREAM:
            if number not in live:
                return index
        elif number not in pending:
            return index
        else:
            pending.remove(number)
    return -1


@pytest.mark.parametrize("stretch", [1, 10**17])
@pytest.mark.parametrize("compiled", [False, True])
@given(events=lives)
def test_lives_of_ids(events: list[tuple[Op, int]], compiled: bool, stretch: int) -> None:
    trace = one_rank([int(op) for op, _ in events], id=[number * stretch for _, number in events]) if events else None
    if trace is None:
        return
    expected = _expected(events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "SMALL", 0 if compiled else 10**9)
        if expected < 0:
            check(trace)
        else:
            index, field, _ = fault(trace)
            assert (index, field) == (expected, "id")


def test_every_fault_of_a_life_has_its_words() -> None:
    for number in range(1, 9):
        events = one_rank([FREE], id=[5]).ranks[0].events
        assert "id 5" in checking._life_reason(number, events, 0)
    assert _lifecycle.life_cycle([FREE], [-1], []) == (-1, 0)
