"""Sizes, ages and states that a cut recording lets one know, each case by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.allocator.conf import AllocatorSettings
from simulator.allocator.releases import parse_release
from simulator.snapshots.reader import snapshot_to_recording
from simulator.snapshots.rules import Rules
from tests.support.snapshots import NAMES, cut, snapshot_of, snapshot_to_trace
from traces.model import Initial

MIB = 1 << 20
BASE = 0x7F0000000000


def divisions(value: int) -> AllocatorSettings:
    return AllocatorSettings(roundup_power2_divisions=(value,) * 16)


@pytest.mark.parametrize(
    ("settings", "minor", "n", "size"),
    [
        (AllocatorSettings(), 11, 1, 512),
        (AllocatorSettings(), 11, 512, 512),
        (AllocatorSettings(), 11, 513, 1024),
        (AllocatorSettings(), 11, MIB + 1, MIB + 512),
        (divisions(4), 11, 1200, 1536),
        (divisions(4), 11, 2049, 2560),
        (divisions(4), 11, 3000, 3072),
        (divisions(4), 11, 5 * MIB + 1, 6 * MIB),
        (divisions(8), 11, 4097, 4608),
        (divisions(8), 11, 4609, 5120),
        (divisions(8), 11, 8 * MIB, 8 * MIB),
        (divisions(1), 11, 1000, 1024),
        (divisions(1), 3, 1000, 1000),
        (divisions(1), 3, 400, 512),
    ],
)
def test_sizes_are_rounded_as_the_allocator_does(settings: AllocatorSettings, minor: int, n: int, size: int) -> None:
    assert Rules(settings, parse_release(f"2.{minor}")).round_size(n) == size


@given(st.integers(1, 1 << 40), st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64]))
def test_rounding_never_loses_and_repeats(n: int, value: int) -> None:
    rules = Rules(divisions(value), parse_release("2.11"))
    size = rules.round_size(n)
    assert n <= size <= max(512, n + max(511, n // max(value, 1)))
    assert rules.round_size(size) == size
    assert size % 512 == 0


class Recorder:
    """Writes a snapshot by hand: entries, and the final blocks of its segments."""

    def __init__(self, *sizes: int) -> None:
        self.segments = [(BASE + (i << 30), size) for i, size in enumerate(sizes)]
        self.entries: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, int]] = {}

    def entry(self, action: str, segment: int, offset: int, size: int) -> Recorder:
        address = self.segments[segment][0] + offset
        self.entries.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1})
        return self

    def free(self, segment: int, offset: int, size: int) -> Recorder:
        self.entry("free_requested", segment, offset, size)
        return self.entry("free_completed", segment, offset, size)

    def snapshot(self, live: dict[tuple[int, int], tuple[int, int]], **settings: Any) -> dict[str, Any]:
        """`live` has (size, requested) of the blocks in use at the end, by (segment, offset)."""
        segments = []
        for number, (address, total) in enumerate(self.segments):
            blocks = []
            cursor = 0
            for (_, offset), (size, requested) in sorted(item for item in live.items() if item[0][0] == number):
                if offset > cursor:
                    blocks.append({"size": offset - cursor, "requested_size": 0, "state": "inactive"})
                blocks.append({"size": size, "requested_size": requested, "state": "active_allocated"})
                cursor = offset + size
            if cursor < total:
                blocks.append({"size": total - cursor, "requested_size": 0, "state": "inactive"})
            kind = "small" if total == 2 * MIB else "large"
            segment = {"device": 0, "address": address, "total_size": total, "stream": 0, "segment_type": kind}
            segments.append({**segment, "is_expandable": False, "segment_pool_id": (0, 0), "blocks": blocks})
        return {"segments": segments, "device_traces": [self.entries], "allocator_settings": settings}


def initial_of(snapshot: dict[str, Any], release: str = "2.11") -> Initial:
    initial = snapshot_to_trace(snapshot, where="f", release=release).ranks[0].initial
    assert initial is not None
    return initial


def sizes_of(initial: Initial) -> list[tuple[int, int]]:
    return [(block.bytes, block.requested) for segment in initial.segments for block in segment.blocks]


def test_a_block_up_to_its_neighbour_owns_what_could_not_be_split_off() -> None:
    """10 MiB - 512 in 20 MiB, then 10 MiB in the rest: its last 512 bytes stay inside (allocator.md 9.3)."""
    half = 10 * MIB - 512
    recorder = Recorder(20 * MIB).free(0, half, 10 * MIB)
    initial = initial_of(recorder.snapshot({(0, 0): (half, half)}))
    assert sizes_of(initial) == [(half, half), (10 * MIB + 512, 10 * MIB)]


def test_a_block_with_much_room_after_it_has_its_rounded_size() -> None:
    recorder = Recorder(20 * MIB).free(0, 0, 3 * MIB + 5)
    assert sizes_of(initial_of(recorder.snapshot({}))) == [(3 * MIB + 512, 3 * MIB + 5), (17 * MIB - 512, 0)]


def test_the_next_allocation_shows_where_a_block_ends() -> None:
    """The block before it kept 1 MiB that was not worth splitting; the allocation after it is gone at the end."""
    recorder = Recorder(20 * MIB).entry("alloc", 0, 4 * MIB, 2 * MIB)
    recorder.free(0, 4 * MIB, 2 * MIB).free(0, 0, 3 * MIB)
    assert sizes_of(initial_of(recorder.snapshot({}))) == [(4 * MIB, 3 * MIB), (16 * MIB, 0)]


def test_a_better_place_that_was_passed_over_was_smaller_than_assumed() -> None:
    """5.5 MiB seem free after the first block, but a request of 5 MiB went to a hole of 6 MiB: they were fewer."""
    recorder = Recorder(20 * MIB, 40 * MIB)
    recorder.entry("alloc", 1, 10 * MIB, 5 * MIB)
    recorder.free(0, 0, 4 * MIB + MIB // 2)
    live = {(0, 10 * MIB): (10 * MIB, 10 * MIB), (1, 0): (10 * MIB, 10 * MIB), (1, 10 * MIB): (5 * MIB, 5 * MIB)}
    live[(1, 16 * MIB)] = (24 * MIB, 24 * MIB)
    initial = initial_of(recorder.snapshot(live))
    assert sizes_of(initial)[0] == (5 * MIB + 512, 4 * MIB + MIB // 2)


def test_max_split_size_gives_whole_segments_away() -> None:
    recorder = Recorder(60 * MIB).free(0, 0, 45 * MIB)
    assert sizes_of(initial_of(recorder.snapshot({}, max_split_size=40 * MIB))) == [(60 * MIB, 45 * MIB)]


def test_expandable_segments_split_at_512_bytes() -> None:
    recorder = Recorder(20 * MIB).free(0, 0, 20 * MIB - 4096)
    snapshot = recorder.snapshot({}, expandable_segments=True)
    snapshot["segments"][0]["is_expandable"] = True
    (segment,) = initial_of(snapshot).segments
    assert sizes_of(initial_of(snapshot)) == [(20 * MIB - 4096, 20 * MIB - 4096), (4096, 0)]
    assert segment.expandable
    assert segment.va_address == segment.address
    assert segment.va_bytes is not None
    assert segment.va_bytes > 80 << 30


def test_small_blocks_have_their_rounded_size() -> None:
    recorder = Recorder(2 * MIB).free(0, 0, 700)
    initial = initial_of(recorder.snapshot({}))
    assert sizes_of(initial) == [(1024, 700), (2 * MIB - 1024, 0)]
    assert initial.segments[0].pool == "small"


def test_a_free_cut_in_two_leaves_a_block_that_waits() -> None:
    recorder = Recorder(2 * MIB).entry("free_completed", 0, 0, 700)
    trace = snapshot_to_trace(recorder.snapshot({}), where="f")
    initial = trace.ranks[0].initial
    assert initial is not None
    assert initial.segments[0].blocks[0].state == "active_pending_free"
    assert [int(op) for op in trace.ranks[0].events.op] == [5]  # complete_free


@pytest.mark.parametrize(("release", "first"), [("2.13", 1), ("2.11", 0)])
def test_the_segment_chosen_of_two_was_created_first(release: str, first: int) -> None:
    """Both have 2 MiB free; the one at the higher address was taken: from 2.13 on, it is older."""
    recorder = Recorder(2 * MIB, 2 * MIB).entry("alloc", 1, 0, 600)
    initial = initial_of(recorder.snapshot({(1, 0): (1024, 600)}), release)
    assert initial.segments[0].address == recorder.segments[first][0]


@given(st.sampled_from(NAMES), st.data())
def test_the_rewound_state_tiles_and_holds_what_is_freed(name: str, data: st.DataObject) -> None:
    """Wherever a recording is cut: blocks tile their segments, and every free has its block."""
    snapshot = snapshot_of(name)
    dropped = [data.draw(st.integers(0, len(entries)), label="dropped") for entries in snapshot["device_traces"]]
    recording = snapshot_to_recording(cut(snapshot, dropped), where="cut")
    for rank in recording.trace.ranks:
        for segment in rank.initial.segments if rank.initial else ():
            assert sum(block.bytes for block in segment.blocks) == segment.bytes
            assert all(block.bytes > 0 and block.requested <= block.bytes for block in segment.blocks)
            free = [block.state == "inactive" for block in segment.blocks]
            assert not any(one and other for one, other in pairwise(free))


def test_the_whole_recording_can_be_cut_away() -> None:
    for name in NAMES:
        snapshot = snapshot_of(name)
        lengths = [len(entries) for entries in snapshot["device_traces"]]
        recording = snapshot_to_recording(cut(snapshot, lengths), where="cut")
        for rank, shown in zip(recording.trace.ranks, recording.ranks, strict=True):
            assert rank.initial is not None
            found = {
                s.address: [(b.bytes, b.requested if b.id is not None else 0, b.state) for b in s.blocks]
                for s in rank.initial.segments
            }
            want = {
                s["address"]: [(size, 0 if state == "inactive" else n, state) for size, n, state in s["blocks"]]
                for s in shown.segments
            }
            assert _merged(found) == _merged(want)


def _merged(segments: Mapping[int, Sequence[tuple[int, int, str]]]) -> dict[int, list[tuple[int, int, str]]]:
    """Neighbouring free blocks as one: one beside a pending free may not be merged yet."""
    result = {}
    for address, blocks in segments.items():
        merged: list[tuple[int, int, str]] = []
        for size, requested, state in blocks:
            if merged and state == merged[-1][2] == "inactive":
                size += merged.pop()[0]
            merged.append((size, requested, state))
        result[address] = merged
    return result
