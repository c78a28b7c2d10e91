"""The picture of a replay: its states agree with the counters, with the allocator's final state, and with the ids."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.engine.replay import replay
from simulator.engine.result import RankResult
from simulator.snapshots.reader import read
from tests.places import DATA as _DATA
from tests.support.handmade import busy_trace
from tests.support.pictures import alive, sums

DATA = _DATA / "snapshots"
SNAPSHOTS = ("2.11-expandable", "2.13-oom", "2.11-gc-split", "2.13-lag", "2.13-pools", "opt-2l_w1")
NEWER = SNAPSHOTS[:-1]  # the last one is of 2.0, which has no expandable segments


def pictured(name: str, conf: str | None = None) -> list[RankResult]:
    trace = read(DATA / f"{name}.pickle.gz")
    found = replay(trace, conf=conf, picture=True, snapshot=True, analyse=False, after_oom="continue")
    return list(found.ranks)


def agrees(rank: RankResult, event: int) -> None:
    """Sums of blocks and segments are the counters' values, and every block lies in one segment."""
    picture, line = rank.picture, rank.timeline
    assert picture is not None
    assert sums(picture, event) == (int(line.allocated[event]), int(line.active[event]), int(line.reserved[event]))
    held, used = alive(picture.segments, event), alive(picture.blocks, event)
    start, size = picture.blocks.address[used], picture.blocks.bytes[used]
    assert (start[1:] >= (start + size)[:-1]).all()
    base = picture.segments.address[held]
    edge = base + picture.segments.bytes[held]
    place = np.searchsorted(base, start, side="right") - 1
    assert (place >= 0).all()
    whole = ~picture.segments.expandable[held][place]  # mapped memory stands page by page
    assert (start + size <= edge[place])[whole].all()


@pytest.mark.parametrize(
    ("name", "conf"), [*((name, None) for name in SNAPSHOTS), *((name, "expandable_segments:True") for name in NEWER)]
)
def test_states_agree_with_the_counters(name: str, conf: str | None) -> None:
    for rank in pictured(name, conf):
        assert rank.picture is not None
        events = {*(moment.event for moment in rank.picture.moments), *range(0, len(rank.timeline), 97)}
        for event in events - {-1}:
            agrees(rank, event)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_last_state_is_the_final_one(name: str) -> None:
    for rank in pictured(name):
        assert rank.picture is not None
        assert rank.snapshot is not None
        last = rank.picture.moments[-1]
        assert "end of the trace" in last.labels
        blocks = rank.picture.blocks
        lasting = alive(blocks, last.event)
        held = [block for segment in rank.snapshot["segments"] for block in segment["blocks"]]
        used = sorted((b["address"], b["size"], b["requested_size"]) for b in held if b["state"] != "inactive")
        assert used == list(
            zip(*(c[lasting].tolist() for c in (blocks.address, blocks.bytes, blocks.requested)), strict=True)
        )
        waiting = {b["address"] for b in held if b["state"] == "active_pending_free"}
        assert waiting == set(blocks.address[lasting][blocks.freed[lasting] <= last.event].tolist())


def test_moments_are_the_peaks_and_the_ends_of_phases() -> None:
    rank = replay(busy_trace(3_000), picture=True).ranks[0]
    assert rank.picture is not None
    labels = {label: moment.event for moment in rank.picture.moments for label in moment.labels}
    assert sums(rank.picture, labels["peak allocated"])[0] == rank.peak_allocated
    assert sums(rank.picture, labels["peak reserved"])[2] == rank.peak_reserved
    for span in rank.timeline.phases[:3]:
        assert labels[f"end of forward {span.step}"] == span.stop - 1
        top = int(rank.timeline.allocated[span.start : span.stop].max())
        assert sums(rank.picture, labels[f"peak of forward {span.step}"])[0] == top


def test_categories_of_events() -> None:
    trace = busy_trace(3_000)
    rank = replay(trace, picture=True).ranks[0]
    assert rank.picture is not None
    events = trace.ranks[0].events
    born: dict[int, str] = {}
    ids, category = events.ints("id"), events.strings("category")
    for index, code in enumerate(rank.picture.changed.tolist()):
        if events.op[index] == 0:
            born[int(ids[index])] = str(category.get(index))
        wanted = born[int(ids[index])] if events.op[index] in (0, 1) else None
        assert (None if code < 0 else rank.picture.categories[code]) == wanted


def test_no_picture_unless_asked_for() -> None:
    assert replay(busy_trace(100)).ranks[0].picture is None
