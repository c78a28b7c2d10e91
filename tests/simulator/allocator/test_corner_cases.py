"""The corner cases of the allocator, each with the numbers it must give, on the replay and on the naive model.

Addresses are relative to the first segment; the release is 2.11 (profile A) unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.oracles.naive_replay import naive_replay
from tests.support.fast import fast_replay, to_trace
from tests.support.observed import COLUMNS, VA_BASE, Call, Entry, Observed, Row, Setup
from traces.check import check
from traces.errors import EventError, ReplayError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Replay = Callable[[Sequence[Row], Setup], Observed]
EXPANDABLE = "expandable_segments:True"
SPLIT_40 = "max_split_size_mb:40"


@dataclass(frozen=True)
class Shown:
    """What the events of a case led to."""

    observed: Observed
    places: dict[int, int]  # id -> index of its malloc

    def address(self, id_: int) -> int:
        """Where an allocation is, relative to the first segment; -1 if it failed."""
        state = self.observed.states[self.places[id_]]
        assert state is not None
        return state[0] if state[0] <= 0 else state[0] - VA_BASE

    def at(self, index: int, column: str) -> int:
        """A column after an event."""
        state = self.observed.states[index]
        assert state is not None
        return state[COLUMNS.index(column)]

    def calls(self, index: int) -> list[Call]:
        """The device calls of an event, with relative addresses."""
        return [relative(call) for call in self.observed.calls[index]]

    def calls_for(self, id_: int) -> list[Call]:
        """The device calls of an allocation."""
        return self.calls(self.places[id_])

    def log_for(self, id_: int) -> list[Entry]:
        """The whole log of an allocation, with relative addresses."""
        return [
            (kind, int(address) - VA_BASE if int(address) >= VA_BASE else address, *rest)
            for kind, address, *rest in self.observed.logs[self.places[id_]]
        ]

    def stat(self, name: str, index: int = -1) -> Any:
        """A statistic of the report at an event (default: the last one): a counter, or "current" of all pools."""
        value = self.report(index if index >= 0 else len(self.observed.states) - 2)[name]
        return value if isinstance(value, int) else (value["all"] if isinstance(value, dict) else value)[0]

    def report(self, index: int) -> dict[str, Any]:
        return self.observed.reports[index]

    @property
    def segments(self) -> list[tuple[int, list[list[Any]]]]:
        """(relative address, blocks without the gc counter) of the last snapshot."""
        report = self.report(len(self.observed.states) - 1)
        return [(s["address"] - VA_BASE, [block[:3] for block in s["blocks"]]) for s in report["segments"]]

    def size(self, id_: int) -> int:
        """The block size of an allocation that is alive at the end."""
        for address, blocks in self.segments:
            for size, _, _ in blocks:
                if address == self.address(id_):
                    return int(size)
                address += size
        raise AssertionError(f"allocation {id_} has no block")


def relative(call: Call) -> Call:
    kind, address, size = call
    return kind, address if address < VA_BASE else address - VA_BASE, size


class Case:
    """Collects events; `run` serves them and ends with a statistics and a snapshot report."""

    def __init__(self, replay: Replay, conf: str = "", *, release: str = "2.11", total: int = 64 * GIB) -> None:
        self.replay = replay
        self.setup = Setup(release, conf, total)
        self.rows: list[Row] = []
        self.places: dict[int, int] = {}

    def do(self, *row: Any) -> int:
        """Add an event; its index."""
        self.rows.append(list(row))
        return len(self.rows) - 1

    def malloc(self, bytes_: int, stream: int = 0) -> int:
        """Add an allocation; its id."""
        id_ = len(self.places)
        self.places[id_] = self.do("m", id_, bytes_, stream)
        return id_

    def free(self, *ids: int) -> int:
        """Add frees; the index of the last."""
        for id_ in ids:
            self.do("f", id_)
        return len(self.rows) - 1

    def cached(self, bytes_: int, stream: int = 0) -> None:
        """Leave a free block behind."""
        self.free(self.malloc(bytes_, stream))

    def pending(self, id_: int, *streams: int) -> int:
        """Free a block that other streams still use."""
        self.do("e", 1)
        for stream in streams:
            self.do("r", id_, stream)
        return self.free(id_)

    def run(self) -> Shown:
        self.do("x")
        self.do("s")
        observed = self.replay(self.rows, self.setup)
        assert observed.undefined is None
        return Shown(observed, self.places)


@pytest.fixture(params=["replay", "naive"])
def replay(request: pytest.FixtureRequest) -> Replay:
    """The replay under test, then the naive model."""
    return fast_replay if request.param == "replay" else naive_replay


def test_01_smallest_request(replay: Replay) -> None:
    case = Case(replay)
    case.malloc(1)
    shown = case.run()
    assert shown.segments == [(0, [[512, 1, "allocated"], [2096640, 0, "inactive"]])]
    assert shown.stat("reserved_bytes") == 2 * MIB
    assert shown.stat("inactive_split") == 1
    assert shown.stat("inactive_split_bytes") == 2096640
    assert shown.stat("requested_bytes") == 1


def test_02_border_between_small_and_large_pool(replay: Replay) -> None:
    case = Case(replay)
    small, large = case.malloc(MIB), case.malloc(MIB + 1)
    shown = case.run()
    assert shown.size(small) == MIB
    assert shown.size(large) == MIB + 512
    assert shown.calls_for(small) == [("A", 0, 2 * MIB)]
    assert shown.calls_for(large) == [("A", 2 * MIB, 20 * MIB)]
    assert shown.stat("reserved_bytes") == 22 * MIB
    assert shown.report(2)["allocated_bytes"]["small_pool"][0] == MIB
    assert shown.report(2)["allocated_bytes"]["large_pool"][0] == MIB + 512


def test_03_remainder_of_512_bytes_stays_in_a_large_block(replay: Replay) -> None:
    case = Case(replay)
    case.malloc(10 * MIB - 512)
    second = case.malloc(10 * MIB)
    shown = case.run()
    assert shown.address(second) == 0x9FFE00
    assert shown.size(second) == 10 * MIB + 512
    assert shown.stat("requested_bytes") == 20 * MIB - 512
    assert shown.stat("inactive_split") == 0
    assert shown.stat("segment") == 1


@pytest.mark.parametrize(("second", "size", "split"), [(16 * MIB, 17 * MIB, 0), (16 * MIB - 512, 16 * MIB - 512, 1)])
def test_04_remainder_of_one_mib_stays_and_one_byte_more_is_split(
    replay: Replay, second: int, size: int, split: int
) -> None:
    case = Case(replay)
    case.malloc(3 * MIB)
    block = case.malloc(second)
    shown = case.run()
    assert shown.size(block) == size
    assert shown.stat("allocated_bytes") == 3 * MIB + size
    assert shown.stat("inactive_split") == split
    assert shown.stat("inactive_split_bytes") == split * 1049088


def test_05_large_request_in_an_empty_allocator(replay: Replay) -> None:
    case = Case(replay)
    block = case.malloc(19 * MIB)
    shown = case.run()
    assert shown.calls_for(block) == [("A", 0, 20 * MIB)]
    assert shown.size(block) == 20 * MIB
    case = Case(replay)
    block = case.malloc(3 * MIB)
    shown = case.run()
    assert shown.calls_for(block) == [("A", 0, 20 * MIB)]
    assert shown.size(block) == 3 * MIB


@pytest.mark.parametrize(("bytes_", "size", "split"), [(25 * MIB, 25 * MIB, 1), (30 * MIB - 600 * KIB, 30 * MIB, 0)])
def test_06_reuse_of_a_larger_block(replay: Replay, bytes_: int, size: int, split: int) -> None:
    case = Case(replay)
    case.cached(30 * MIB)
    block = case.malloc(bytes_)
    shown = case.run()
    assert shown.calls_for(block) == []
    assert shown.size(block) == size
    assert shown.stat("requested_bytes") == bytes_
    assert shown.stat("inactive_split") == split


@pytest.mark.parametrize(("release", "taken"), [("2.9", 1), ("2.11", 1), ("2.12", 0), ("2.13", 0), ("2.15", 0)])
def test_07_tie_between_whole_segments(replay: Replay, release: str, taken: int) -> None:
    case = Case(replay, release=release)
    addresses = (VA_BASE + 0x8000000, VA_BASE + 0x4000000)
    case.setup = replace(case.setup, placement="recorded", segment_addresses=addresses)
    case.free(case.malloc(20 * MIB), case.malloc(20 * MIB))
    again = case.malloc(20 * MIB)
    assert case.run().address(again) == addresses[taken] - VA_BASE


@pytest.mark.parametrize(
    ("release", "address"), [("2.9", 0), ("2.11", 0), ("2.12", 0x180000), ("2.13", 0), ("2.15", 0)]
)
def test_08_tie_inside_a_segment(replay: Replay, release: str, address: int) -> None:
    case = Case(replay, release=release)
    first = case.malloc(512 * KIB)
    case.malloc(MIB)
    case.free(first)
    again = case.malloc(512 * KIB)
    assert case.run().address(again) == address


def test_09_free_blocks_keep_the_requested_size_of_their_last_use(replay: Replay) -> None:
    case = Case(replay)
    first = case.malloc(512 * KIB)
    case.malloc(512 * KIB)
    case.free(first)
    case.cached(300 * KIB)
    shown = case.run()
    assert shown.segments == [
        (0, [[512 * KIB, 307200, "inactive"], [512 * KIB, 512 * KIB, "allocated"], [MIB, 0, "inactive"]])
    ]


def test_10_oversize_blocks_serve_only_oversize_requests(replay: Replay) -> None:
    case = Case(replay, SPLIT_40)
    case.cached(60 * MIB)
    small, large = case.malloc(30 * MIB), case.malloc(41 * MIB)
    shown = case.run()
    assert shown.calls_for(small) == [("A", 60 * MIB, 30 * MIB)]
    assert shown.address(large) == 0
    assert shown.size(large) == 60 * MIB


@pytest.mark.parametrize(("cached", "asked"), [(62 * MIB, 42 * MIB), (60 * MIB, 40 * MIB)])
def test_10_oversize_block_is_refused_when_20_mib_would_be_lost(replay: Replay, cached: int, asked: int) -> None:
    case = Case(replay, SPLIT_40)
    case.cached(cached)
    block = case.malloc(asked)
    assert case.run().calls_for(block) == [("A", cached, asked)]


@pytest.mark.parametrize(
    ("asked", "freed"),
    [(30 * MIB, [("F", 50 * MIB, 48 * MIB)]), (90 * MIB, [("F", 0, 50 * MIB), ("F", 50 * MIB, 48 * MIB)])],
)
def test_11_oversize_blocks_are_released_for_a_request(replay: Replay, asked: int, freed: list[Call]) -> None:
    case = Case(replay, SPLIT_40, total=100 * MIB)
    case.free(case.malloc(50 * MIB), case.malloc(48 * MIB))
    block = case.malloc(asked)
    shown = case.run()
    place = 50 * MIB if asked == 30 * MIB else 0
    assert shown.calls_for(block) == [("X", 0, asked), *freed, ("A", place, asked)]
    assert shown.stat("num_alloc_retries") == 0


def test_12_oversize_blocks_released_in_vain_stay_released(replay: Replay) -> None:
    case = Case(replay, SPLIT_40, total=110 * MIB)
    first = case.malloc(40 * MIB)
    case.malloc(20 * MIB)
    case.malloc(42 * MIB)
    case.free(first)
    failed = case.malloc(90 * MIB)
    shown = case.run()
    assert shown.address(failed) == -1
    assert shown.calls_for(failed) == [("X", 0, 90 * MIB), ("F", 0, 40 * MIB), ("X", 0, 90 * MIB)]
    assert shown.stat("num_alloc_retries") == 1
    assert shown.stat("num_ooms") == 1
    assert shown.stat("reserved_bytes") == 62 * MIB


def test_13_retry_releases_idle_segments_of_all_streams(replay: Replay) -> None:
    case = Case(replay, total=40 * MIB)
    case.free(case.malloc(2 * MIB), case.malloc(2 * MIB, 1))
    block = case.malloc(25 * MIB)
    shown = case.run()
    assert shown.calls_for(block) == [
        ("X", 0, 26 * MIB),
        ("F", 0, 20 * MIB),
        ("F", 20 * MIB, 20 * MIB),
        ("A", 0, 26 * MIB),
    ]
    assert shown.stat("num_alloc_retries") == 1
    assert shown.stat("num_sync_all_streams") == 1
    assert shown.stat("num_ooms") == 0


def test_14_accounts_of_an_out_of_memory(replay: Replay) -> None:
    case = Case(replay, total=100 * MIB)
    case.malloc(60 * MIB)
    case.malloc(512)
    failed = case.malloc(60 * MIB)
    shown = case.run()
    assert shown.log_for(failed)[-1] == ("oom", 38 * MIB, 62914560, 0)
    assert shown.stat("num_alloc_retries") == 1
    assert shown.stat("num_ooms") == 1
    assert shown.stat("num_sync_all_streams") == 1
    assert shown.stat("reserved_bytes") == 62 * MIB


def test_14_result_names_the_out_of_memory() -> None:
    from simulator.engine.replay import replay as replay_trace

    case = Case(fast_replay, total=100 * MIB)
    for bytes_ in (60 * MIB, 512, 60 * MIB):
        case.malloc(bytes_)
    oom = replay_trace(to_trace(case.rows, case.setup)).ranks[0].oom
    assert oom is not None
    assert (oom.event, oom.id, oom.requested, oom.rounded) == (2, 2, 60 * MIB, 62914560)
    assert (oom.device_free, oom.reserved) == (38 * MIB, 62 * MIB)


def test_15_freed_block_waits_for_the_other_stream(replay: Replay) -> None:
    case = Case(replay)
    first = case.malloc(30 * MIB)
    case.malloc(2 * MIB)
    freed = case.pending(first, 7)
    other = case.malloc(10 * MIB - 512)
    case.do("d", 7)
    again = case.malloc(30 * MIB)
    shown = case.run()
    assert shown.at(freed, "allocated") == 2 * MIB
    assert shown.at(freed, "active") == 32 * MIB
    assert shown.address(other) == 32 * MIB
    assert shown.log_for(other) == [("alloc", 32 * MIB, 10 * MIB - 512, 0)]
    assert shown.address(again) == 0
    assert shown.log_for(again) == [("free_completed", 0, 30 * MIB, 0), ("alloc", 0, 30 * MIB, 0)]


def test_15_requested_bytes_fall_when_the_free_completes(replay: Replay) -> None:
    case = Case(replay)
    first = case.malloc(30 * MIB)
    case.malloc(2 * MIB)
    case.pending(first, 7)
    assert case.run().stat("requested_bytes") == 32 * MIB


def test_16_block_used_on_two_streams_waits_for_both(replay: Replay) -> None:
    case = Case(replay)
    case.pending(case.malloc(30 * MIB), 5, 6)
    case.do("d", 5)
    case.malloc(512)
    after_one = case.do("a")
    case.do("d", 6)
    case.malloc(512)
    after_both = case.do("a")
    shown = case.run()
    assert shown.at(after_one, "active") == 30 * MIB + 512
    assert shown.at(after_both, "active") == 1024


def test_16_record_stream_on_the_own_stream_does_nothing(replay: Replay) -> None:
    case = Case(replay)
    freed = case.pending(case.malloc(30 * MIB, 5), 5)
    shown = case.run()
    assert shown.at(freed, "active") == 0


def test_17_pending_block_keeps_neighbours_apart(replay: Replay) -> None:
    case = Case(replay)
    first, middle, last = (case.malloc(4 * MIB) for _ in range(3))
    case.pending(middle, 7)
    case.free(first, last)
    shown = case.run()
    ((_, blocks),) = shown.segments
    assert [(size, state) for size, _, state in blocks] == [
        (4 * MIB, "inactive"),
        (4 * MIB, "pending_free"),
        (12 * MIB, "inactive"),
    ]
    assert shown.stat("inactive_split") == 2
    assert shown.stat("inactive_split_bytes") == 16 * MIB


def test_18_pool_is_not_searched_again_after_the_retry(replay: Replay) -> None:
    case = Case(replay, total=40 * MIB)
    case.cached(30 * MIB)
    first, second = case.malloc(25 * MIB), case.malloc(4 * MIB)
    case.pending(first, 7)
    failed, served = case.malloc(25 * MIB), case.malloc(25 * MIB)
    shown = case.run()
    assert shown.size(second) == 5 * MIB
    assert shown.address(failed) == -1
    assert shown.log_for(failed) == [
        ("X", 0, 26 * MIB),
        ("free_completed", 0, 25 * MIB, 0),
        ("X", 0, 26 * MIB),
        ("oom", 10 * MIB, 25 * MIB, 0),
    ]
    assert shown.address(served) == 0


def test_19_limit_is_tested_against_the_segment_size(replay: Replay) -> None:
    case = Case(replay, total=120 * MIB)
    case.do("g", 0.25)
    case.malloc(12 * MIB)
    failed = case.malloc(2 * MIB)
    shown = case.run()
    assert shown.address(failed) == -1
    assert shown.stat("num_alloc_retries") == 1
    assert shown.stat("num_ooms") == 1


def test_19_expandable_segment_may_pass_the_limit(replay: Replay) -> None:
    case = Case(replay, EXPANDABLE, total=60 * MIB)
    case.do("g", 0.25)
    block = case.malloc(12 * MIB)
    shown = case.run()
    assert shown.address(block) == 0
    assert shown.stat("reserved_bytes") == 20 * MIB


def test_20_garbage_collection_without_pressure(replay: Replay) -> None:
    case = Case(replay, "garbage_collection_threshold:0.6", total=400 * MIB)
    case.do("g", 0.25)
    case.free(case.malloc(30 * MIB), case.malloc(34 * MIB))
    small, large = case.malloc(20 * MIB), case.malloc(36 * MIB)
    shown = case.run()
    assert shown.address(small) == 0
    assert shown.calls_for(large) == [("F", 30 * MIB, 34 * MIB), ("A", 30 * MIB, 36 * MIB)]
    assert shown.stat("num_alloc_retries") == 0


def test_21_history_of_inactive_split(replay: Replay) -> None:
    case = Case(replay)
    first, middle, last = (case.malloc(4 * MIB) for _ in range(3))
    marks = [case.do("x")]
    for block in (first, last, middle):
        case.free(block)
        marks.append(case.do("x"))
    shown = case.run()
    counts = [shown.stat("inactive_split", mark) for mark in marks]
    sizes = [shown.stat("inactive_split_bytes", mark) for mark in marks]
    assert counts == [1, 2, 2, 0]
    assert sizes == [8 * MIB, 12 * MIB, 16 * MIB, 0]
    assert shown.report(marks[-1])["inactive_split"]["all"][1] == 2
    assert shown.report(marks[-1])["inactive_split_bytes"]["all"][1] == 16 * MIB


@pytest.mark.parametrize(
    ("divisions", "asked", "size"),
    [
        (4, 1200, 1536),
        (4, 2049, 2560),
        (4, 3000, 3072),
        (4, 5 * MIB + 1, 6 * MIB),
        (8, 4097, 4608),
        (8, 4609, 5120),
    ],
)
def test_22_rounding_by_divisions(replay: Replay, divisions: int, asked: int, size: int) -> None:
    case = Case(replay, f"roundup_power2_divisions:{divisions}")
    block = case.malloc(asked)
    assert case.run().size(block) == size


@pytest.mark.parametrize(("release", "size"), [("2.3", 1300), ("2.4", 1536), ("2.11", 1536)])
def test_22_one_division_once_meant_no_rounding(replay: Replay, release: str, size: int) -> None:
    case = Case(replay, "roundup_power2_divisions:1", release=release)
    block = case.malloc(1300)
    assert case.run().size(block) == size


def expandable_case(replay: Replay) -> tuple[Case, list[int]]:
    """Three blocks of 25, 10 and 6 MiB in an expandable segment."""
    case = Case(replay, EXPANDABLE, total=160 * MIB)
    return case, [case.malloc(size * MIB) for size in (25, 10, 6)]


def test_23_expandable_segment_grows_at_its_tail(replay: Replay) -> None:
    case, blocks = expandable_case(replay)
    shown = case.run()
    assert [shown.address(block) for block in blocks] == [0, 25 * MIB, 35 * MIB]
    assert shown.calls_for(blocks[0]) == [("R", 0, 180 * MIB), ("M", 0, 40 * MIB)]
    assert shown.calls_for(blocks[1]) == []
    assert shown.calls_for(blocks[2]) == [("M", 40 * MIB, 20 * MIB)]
    assert shown.stat("segment") == 0
    assert shown.stat("inactive_split") == 0
    assert shown.stat("inactive_split_bytes") == 0


def test_24_empty_cache_unmaps_whole_pages(replay: Replay) -> None:
    case, blocks = expandable_case(replay)
    case.free(blocks[0])
    emptied = case.do("c")
    report = case.do("s")
    large, small = case.malloc(30 * MIB), case.malloc(4 * MIB)
    shown = case.run()
    assert shown.calls(emptied) == [("U", 0, 20 * MIB)]
    segments = shown.report(report)["segments"]
    assert [(s["address"] - VA_BASE, s["total_size"]) for s in segments] == [(20 * MIB, 40 * MIB)]
    assert [block[0] // MIB for block in segments[0]["blocks"]] == [5, 10, 6, 19]
    assert shown.calls_for(large) == [("M", 60 * MIB, 20 * MIB)]
    assert shown.address(large) == 41 * MIB
    assert shown.address(small) == 20 * MIB


def test_25_expandable_hole_is_preferred_to_the_tail(replay: Replay) -> None:
    case = Case(replay, EXPANDABLE, total=160 * MIB)
    blocks = [case.malloc(size * MIB) for size in (10, 10, 10, 10, 12)]
    case.free(blocks[1])
    block = case.malloc(5 * MIB)
    shown = case.run()
    assert shown.address(block) == 10 * MIB
    assert shown.segments[0][1][-1][0] == 8 * MIB


def test_26_expandable_out_of_memory_leaves_its_addresses(replay: Replay) -> None:
    case = Case(replay, EXPANDABLE, total=60 * MIB)
    case.cached(38 * MIB)
    failed = case.malloc(70 * MIB)
    emptied = case.do("x")
    again = case.malloc(12 * MIB)
    shown = case.run()
    assert shown.address(failed) == -1
    assert shown.calls_for(failed) == [
        ("Y", 0, 20 * MIB),
        ("U", 0, 40 * MIB),
        ("V", 0, 80 * MIB),
        ("R", 0, 80 * MIB),
        ("Y", 0, 20 * MIB),
    ]
    assert shown.stat("reserved_bytes", emptied) == 0
    assert shown.calls_for(again) == [("M", 0, 20 * MIB)]


def test_27_turning_expandable_on_splits_large_blocks_finely(replay: Replay) -> None:
    case = Case(replay)
    case.cached(12 * MIB)
    case.do("o", EXPANDABLE)
    block = case.malloc(12 * MIB - 512)
    shown = case.run()
    assert shown.address(block) == 0
    assert shown.size(block) == 12 * MIB - 512
    assert shown.stat("inactive_split") == 1
    assert shown.stat("inactive_split_bytes") == 512


def test_27_turning_expandable_off_leaves_its_blocks_unused(replay: Replay) -> None:
    case = Case(replay, EXPANDABLE, total=160 * MIB)
    case.cached(12 * MIB)
    case.do("o", "expandable_segments:False")
    block = case.malloc(12 * MIB)
    assert case.run().calls_for(block) == [("A", 180 * MIB, 12 * MIB)]


def test_28_max_split_with_expandable_segments(replay: Replay) -> None:
    plain, expandable = f"{SPLIT_40},expandable_segments:False", f"{SPLIT_40},{EXPANDABLE}"
    case = Case(replay, plain, total=480 * MIB)
    case.do("g", 0.25)
    blocks = [case.malloc(40 * MIB)]
    case.do("o", expandable)
    blocks.append(case.malloc(40 * MIB))
    case.do("o", plain)
    blocks.append(case.malloc(40 * MIB))
    failed = case.malloc(40 * MIB)
    case.free(*blocks)
    block = case.malloc(120 * MIB)
    shown = case.run()
    assert shown.address(failed) == -1
    calls = [(kind, size // MIB) for kind, _, size in shown.calls_for(block)]
    assert calls == [("F", 40), ("F", 40), ("U", 40), ("V", 540), ("A", 120)]


def test_29_garbage_collection_with_expandable_segments(replay: Replay) -> None:
    conf = "garbage_collection_threshold:0.5"
    case = Case(replay, f"{conf},expandable_segments:False", total=480 * MIB)
    case.do("g", 0.25)
    plain = case.malloc(40 * MIB)
    case.do("o", f"{conf},{EXPANDABLE}")
    expandable = case.malloc(40 * MIB)
    case.free(plain, expandable)
    block = case.malloc(80 * MIB)
    shown = case.run()
    start = shown.address(expandable)
    assert shown.calls_for(block) == [("F", 0, 40 * MIB), ("M", start + 40 * MIB, 40 * MIB)]
    assert shown.address(block) == start


def test_30_streams_and_pools_share_nothing(replay: Replay) -> None:
    case = Case(replay)
    case.cached(5 * MIB, 1)
    other, small = case.malloc(5 * MIB, 2), case.malloc(MIB, 1)
    shown = case.run()
    assert shown.calls_for(other) == [("A", 20 * MIB, 20 * MIB)]
    assert shown.calls_for(small) == [("A", 40 * MIB, 2 * MIB)]


@pytest.mark.parametrize("release", ["2.9", "2.11", "2.12", "2.13", "2.15"])
def test_31_private_pool(replay: Replay, release: str) -> None:
    case = Case(replay, release=release)
    case.cached(2 * MIB)
    case.do("pc", 1, False, False)
    case.do("pb", 1)
    inside = case.malloc(2 * MIB)
    case.free(inside)
    case.do("pe", 1)
    case.do("pr", 1)
    outside = case.malloc(2 * MIB)
    first = case.do("c")
    case.do("pr", 1)
    second = case.do("c")
    shown = case.run()
    assert shown.calls_for(inside) == [("A", 20 * MIB, 20 * MIB)]
    assert shown.address(outside) == 0
    assert shown.calls(first) == []
    assert shown.calls(second) == [("F", 20 * MIB, 20 * MIB)]


def test_32_nothing_and_an_exbibyte_touch_no_counter(replay: Replay) -> None:
    case = Case(replay)
    nothing, exbibyte = case.malloc(0), case.malloc(1 << 60)
    freed = case.free(nothing, exbibyte)
    shown = case.run()
    assert shown.address(nothing) == 0
    assert shown.address(exbibyte) == -1
    assert shown.at(freed, "address") == 0
    assert shown.observed.logs[:4] == [[], [], [], []]
    report = shown.report(len(case.rows) - 2)
    counters = [value for value in report.values() if isinstance(value, int)]
    assert set(counters) == {0, -1}  # -1: max_split_size, unlimited
    assert report["allocation"]["all"] == [0, 0, 0, 0]


def test_32_freeing_twice_is_an_error() -> None:
    rows: list[Row] = [["m", 1, 512, 0], ["f", 1], ["f", 1]]
    with pytest.raises(EventError) as caught:
        check(to_trace(rows, Setup("2.11", "", GIB)))
    assert caught.value.index == 2


def test_33_empty_cache_completes_pending_frees(replay: Replay) -> None:
    case = Case(replay)
    case.pending(case.malloc(30 * MIB), 7)
    completed = case.do("d", 7)
    emptied = case.do("c")
    shown = case.run()
    assert shown.at(completed, "active") == 30 * MIB
    assert shown.calls(emptied) == [("F", 0, 30 * MIB)]
    assert shown.at(emptied, "active") == 0
    assert shown.stat("num_sync_all_streams") == 1


def test_34_snapshots_change_nothing(replay: Replay) -> None:
    case = Case(replay)
    first = case.malloc(30 * MIB)
    case.malloc(1000)
    case.pending(first, 7)
    report = case.do("s")
    shown = case.run()
    last = len(case.rows) - 1
    assert shown.report(report) == shown.report(last)
    assert sum(segment["active_size"] for segment in shown.report(report)["segments"]) == 30 * MIB + 1024
    assert shown.at(report, "active") == 30 * MIB + 1024


def test_35_lowering_max_split_size_over_split_blocks_is_undefined(replay: Replay) -> None:
    case = Case(replay, total=100 * MIB)
    case.cached(70 * MIB)
    case.malloc(10 * MIB)
    case.do("o", SPLIT_40)
    failing = case.malloc(80 * MIB)
    assert replay(case.rows, case.setup).undefined == case.places[failing]


def test_35_error_says_where_and_why() -> None:
    from simulator.engine.replay import replay as replay_trace

    rows: list[Row] = [["m", 0, 70 * MIB, 0], ["f", 0], ["m", 1, 10 * MIB, 0], ["o", SPLIT_40], ["m", 2, 80 * MIB, 0]]
    with pytest.raises(ReplayError, match=r"event 4.*undefined in PyTorch") as caught:
        replay_trace(to_trace(rows, Setup("2.11", "", 100 * MIB)))
    assert "\n" not in str(caught.value)


def test_36_smallest_max_split_size_refuses_its_own_segments(replay: Replay) -> None:
    case = Case(replay, "max_split_size_mb:20")
    case.cached(2 * MIB)
    block = case.malloc(2 * MIB)
    assert case.run().calls_for(block) == [("A", 20 * MIB, 20 * MIB)]


def test_37_odd_pages_are_out_of_memory_in_2_11(replay: Replay) -> None:
    case = Case(replay, f"large_segment_size_mb:25,{EXPANDABLE}", total=160 * MIB)
    failed = case.malloc(5 * MIB)
    shown = case.run()
    assert shown.address(failed) == -1
    assert shown.stat("num_ooms") == 1
    assert shown.stat("reserved_bytes") == 0


def test_37_odd_pages_are_an_error_in_2_15(replay: Replay) -> None:
    case = Case(replay, f"large_segment_size_mb:25,{EXPANDABLE}", release="2.15", total=160 * MIB)
    case.malloc(5 * MIB)
    assert replay(case.rows, case.setup).undefined == 0


def test_38_streams_are_polled_from_the_last_to_the_first_after_the_default_one(replay: Replay) -> None:
    case = Case(replay)
    blocks = [case.malloc(4 * MIB - stream, 9) for stream in range(5)]
    case.do("e", 1)
    for stream, block in enumerate(blocks):
        case.do("r", block, stream)
        case.free(block)
    case.do("e", 0)
    last = case.malloc(512, 9)
    shown = case.run()
    completed = [4 * MIB - int(entry[2]) for entry in shown.log_for(last) if entry[0] == "free_completed"]
    assert completed == [0, 4, 3, 2, 1]
    assert shown.segments[0] == (0, [[20 * MIB, 4 * MIB - 1, "inactive"]])
