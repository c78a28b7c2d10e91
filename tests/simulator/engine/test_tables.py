"""`run --events` and `run --calls`: the CSV files, against Python's own csv module."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine import tables
from simulator.engine.replay import replay
from simulator.engine.result import LOG_KINDS, EventColumns, EventLog, RankResult, Result
from simulator.engine.tables import CALLS_HEADER, EVENTS_HEADER, write_calls, write_events
from tests.support import golden
from tests.support.fast import to_trace
from tests.support.handmade import rank_result, result, timeline
from traces.errors import OutputError, ReplayError
from traces.model import Events, Op, RankEvents, Trace

WITH_ID = (Op.ALLOC, Op.FREE, Op.RECORD_STREAM, Op.COMPLETE_FREE)
FIGURES = ("address", "reserved", "allocated", "active", "segments", "num_alloc_retries", "num_ooms")


def made(count: int, ranks: tuple[int, ...], seed: int = 0) -> tuple[RankResult, RankEvents]:
    """A rank's result and events of every op, with numbers of all lengths."""
    random = np.random.default_rng(seed)
    op = random.integers(0, len(Op), count).astype(np.uint8)
    ids = np.where(np.isin(op, WITH_ID), random.integers(0, 10**9, count), -1)
    columns = {name: random.integers(0, 2 ** random.integers(0, 63, count), endpoint=True) for name in FIGURES}
    columns["address"] = np.where(random.random(count) < 0.2, -1, columns["address"])
    group = replace(rank_result(timeline(10, ranks=ranks)), events=count, columns=EventColumns(**columns))
    return group, RankEvents(ranks, Events(op, {"id": ids}))


def expected(group: RankResult, events: Events, rank: int) -> list[list[str]]:
    assert group.columns is not None
    ids = events.ints("id")
    return [
        [
            str(rank),
            str(index),
            Op(op).name.lower(),
            str(ids[index]) if op in WITH_ID else "",
            *(str(getattr(group.columns, name)[index]) for name in FIGURES),
        ]
        for index, op in enumerate(events.op)
    ]


def rows(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text().splitlines()))


def test_every_event_of_every_rank_is_a_row_in_ascending_order(tmp_path: Path) -> None:
    (first, a), (second, b) = made(300, (1, 4)), made(200, (0, 3), seed=1)
    path = tmp_path / "events.csv"
    write_events(result(first, second), Trace((a, b)), path)
    header, *body = rows(path)
    assert ",".join(header) == EVENTS_HEADER
    assert body == [
        *expected(second, b.events, 0),
        *expected(first, a.events, 1),
        *expected(second, b.events, 3),
        *expected(first, a.events, 4),
    ]
    assert path.read_bytes().endswith(b"\n")


def test_parts_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, events = made(100, (0, 7))
    write_events(result(group), Trace((events,)), tmp_path / "whole.csv")
    monkeypatch.setattr(tables, "_ROWS", 7)
    monkeypatch.setattr(tables, "_KEEP_ROWS", 0)
    write_events(result(group), Trace((events,)), tmp_path / "parts.csv")
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_gzipped_by_its_name_and_reproducible(tmp_path: Path) -> None:
    group, events = made(50, (0,))
    for name in ("a.csv", "b.csv.gz", "c.csv.gz"):
        write_events(result(group), Trace((events,)), tmp_path / name)
    zipped = (tmp_path / "b.csv.gz").read_bytes()
    assert gzip.decompress(zipped) == (tmp_path / "a.csv").read_bytes()
    assert zipped == (tmp_path / "c.csv.gz").read_bytes()


def test_no_events(tmp_path: Path) -> None:
    group, events = made(0, (0,))
    write_events(result(group), Trace((events,)), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == EVENTS_HEADER + "\n"


@given(st.lists(st.integers(-(2**62), 2**63 - 1), min_size=1, max_size=20))
def test_digits(values: list[int]) -> None:
    assert tables._join(tables._digits(np.array(values, dtype=np.int64))).decode() == "".join(f"{v}\n" for v in values)


def log(kinds: str) -> EventLog:
    count = len(kinds.split())
    columns = [np.arange(count, dtype=np.int64) * step for step in (2, 2 << 20, 512, 1)]
    return EventLog(np.array([LOG_KINDS.index(kind) for kind in kinds.split()], dtype=np.uint8), *columns)


def test_calls_leave_out_what_is_no_call(tmp_path: Path) -> None:
    group = replace(
        rank_result(timeline(4, ranks=(2,))), log=log("A alloc free_requested F oom X R M U V Y free_completed")
    )
    write_calls(result(group), tmp_path / "calls.csv")
    header, *body = rows(tmp_path / "calls.csv")
    assert ",".join(header) == CALLS_HEADER
    assert [row[2] for row in body] == list("AFXRMUVY")
    assert body[1] == ["2", "6", "F", str(3 * (2 << 20)), str(3 * 512)]


entries = st.tuples(st.sampled_from("MMUUA"), st.integers(0, 1), st.integers(0, 3), st.integers(1, 2))


@given(st.lists(entries, max_size=12))
def test_neighbouring_pages_in_a_row_are_one_call(drawn: list[tuple[str, int, int, int]]) -> None:
    drawn.sort(key=lambda entry: entry[1])
    expected: list[tuple[str, int, int, int]] = []
    for kind, event, address, size in drawn:
        before = expected[-1] if expected else ("", -1, 0, 0)
        if kind in "MU" and before[:2] == (kind, event) and before[2] + before[3] == address:
            expected[-1] = (kind, event, before[2], before[3] + size)
        else:
            expected.append((kind, event, address, size))
    events, addresses, sizes = (np.array([entry[place] for entry in drawn], dtype=np.int64) for place in (1, 2, 3))
    kinds = np.array([LOG_KINDS.index(entry[0]) for entry in drawn], dtype=np.uint8)
    found = tables._joined_calls(EventLog(kinds, events, addresses, sizes, stream=events))
    names = [LOG_KINDS[kind] for kind in found[0]]
    assert list(zip(names, *(column.tolist() for column in found[1:]), strict=True)) == expected


@pytest.mark.parametrize(
    "name", ["2.11.0/stress.expandable", "2.15.0/streams.small-device", "2.12.1/toggles.expandable"]
)
def test_files_of_a_replay_hold_what_was_recorded(name: str, tmp_path: Path) -> None:
    recording = golden.load(name)
    trace = to_trace(recording.rows, recording.setup)
    made = replay(trace, events=True, log=True, analyse=False, after_oom="continue")
    write_events(made, trace, tmp_path / "events.csv")
    write_calls(made, tmp_path / "calls.csv")
    states = [list(map(int, row[4:])) for row in rows(tmp_path / "events.csv")[1:]]
    for got, state in zip(states, recording.observed.states, strict=True):
        assert state is None or got == list(state)
    calls = [(int(row[1]), row[2], int(row[3]), int(row[4])) for row in rows(tmp_path / "calls.csv")[1:]]
    assert calls == [(index, *call) for index, made in enumerate(recording.observed.calls) for call in made]


def test_a_replay_that_kept_nothing(tmp_path: Path) -> None:
    bare: Result = result(rank_result(timeline(4)))
    trace = Trace((RankEvents((0,), Events(np.zeros(4, dtype=np.uint8))),))
    with pytest.raises(ReplayError, match="events=True"):
        write_events(bare, trace, tmp_path / "a.csv")
    with pytest.raises(ReplayError, match="log=True"):
        write_calls(bare, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_existing_files_stay(tmp_path: Path) -> None:
    group, events = made(5, (0,))
    path = tmp_path / "a.csv"
    path.write_text("mine")
    with pytest.raises(OutputError, match="--force"):
        write_events(result(group), Trace((events,)), path)
    assert path.read_text() == "mine"
    write_events(result(group), Trace((events,)), path, force=True)
    assert path.read_text().startswith(EVENTS_HEADER)
