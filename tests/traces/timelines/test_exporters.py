"""Timelines as files: nothing that matters is lost on the way."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.errors import OutputError
from traces.timelines.chrome import MAX_POINTS, ranks_text, write_chrome
from traces.timelines.downsampling import downsample
from traces.timelines.files import COLUMNS, write_timeline
from traces.timelines.timeline import PhaseSpan, Timeline


def timeline(
    count: int = 20, *, seed: int = 0, timed: bool = False, ranks: tuple[int, ...] = (0,), **more: Any
) -> Timeline:
    rng = np.random.default_rng(seed)
    allocated = rng.integers(0, 1 << 40, count, dtype=np.int64)
    active = allocated + rng.integers(0, 1 << 30, count, dtype=np.int64)
    reserved = active + rng.integers(0, 1 << 30, count, dtype=np.int64)
    times = np.cumsum(rng.integers(0, 5000, count, dtype=np.int64)) if timed else None
    phases = (PhaseSpan("load", None, 0, count // 3), PhaseSpan('fwd, "first"', 0, count // 3, count))
    arguments: dict[str, Any] = {"phases": phases, "limit_bytes": 1 << 41, **more}
    return Timeline(ranks, allocated, active, reserved, time_ns=times, **arguments)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    count = draw(st.integers(1, 400))
    values = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    one, two, three = (np.array(draw(values), dtype=np.int64) for _ in range(3))
    bounds = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    phases = tuple(PhaseSpan("p", i, a, b) for i, (a, b) in enumerate(pairwise(bounds)) if a < b)
    ooms = tuple(draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True)))
    return Timeline((0,), one, two, three, phases=phases, limit_bytes=100, ooms=ooms)


@given(timelines(), st.integers(1, 500))
def test_downsampling_never_loses_a_peak(line: Timeline, max_points: int) -> None:
    kept = downsample(line, max_points)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(line) - 1
    for column in (line.allocated, line.active, line.reserved):
        assert column[kept].max() == column.max()
        assert column[kept].min() == column.min()
        assert int(column.argmax()) in kept  # where it was first reached
    for phase in line.phases:
        assert phase.start in kept
        assert phase.stop - 1 in kept
    assert set(line.ooms) <= set(kept.tolist())
    fixed = 2 + 2 * len(line.phases) + len(line.ooms)
    assert len(kept) <= max(max_points, fixed + 6)


@given(timelines(), st.integers(30, 500))
def test_every_stretch_keeps_its_own_extremes(line: Timeline, max_points: int) -> None:
    """Of every bucket of events the greatest value is kept; there are as many as points are left for them."""
    kept = downsample(line, max_points)
    if len(kept) == len(line):
        return
    ends = {end for phase in line.phases for end in (phase.start, phase.stop - 1)}
    buckets = max(1, (max_points - len({0, len(line) - 1, *ends, *line.ooms})) // 6)
    size = -(-len(line) // buckets)
    for start in range(0, len(line), size):
        inside = kept[(kept >= start) & (kept < start + size)]
        stretch = line.allocated[start : start + size]
        assert line.allocated[inside].max() == stretch.max()


def test_a_short_timeline_is_kept_whole() -> None:
    assert downsample(timeline(20), 20).tolist() == list(range(20))
    assert len(downsample(timeline(1), 1)) == 1
    assert len(downsample(timeline(0, phases=()), 5)) == 0
    with pytest.raises(ValueError, match="1 or more"):
        downsample(timeline(5), 0)


def test_a_long_timeline_is_cut_to_size() -> None:
    line = timeline(1_000_000)
    kept = downsample(line, 100_000)
    assert 30_000 < len(kept) <= 100_000
    assert line.reserved[kept].max() == line.reserved.max()


# Tables


def rows_of(path: Path) -> list[dict[str, str]]:
    data = path.read_bytes()
    text = gzip.decompress(data).decode() if path.name.endswith(".gz") else data.decode()
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
@pytest.mark.parametrize("timed", [False, True])
def test_csv(tmp_path: Path, ending: str, timed: bool) -> None:
    first, second = timeline(9, timed=timed), timeline(6, seed=1, ranks=(3, 4), timed=timed)
    path = tmp_path / f"t{ending}"
    write_timeline([first, second], path)
    rows = rows_of(path)
    assert tuple(rows[0]) == COLUMNS
    assert [row["rank"] for row in rows] == ["0"] * 9 + ["3"] * 6
    assert [int(row["event"]) for row in rows] == [*range(9), *range(6)]
    assert [int(row["allocated_bytes"]) for row in rows[:9]] == first.allocated.tolist()
    assert [int(row["active_bytes"]) for row in rows[9:]] == second.active.tolist()
    assert [int(row["reserved_bytes"]) for row in rows[9:]] == second.reserved.tolist()
    assert [row["phase"] for row in rows[:9]] == ["load"] * 3 + ['fwd, "first"'] * 6
    assert [row["step"] for row in rows[:9]] == [""] * 3 + ["0"] * 6
    times = [row["time_ns"] for row in rows[:9]]
    assert times == ([str(t) for t in first.time_ns.tolist()] if first.time_ns is not None else [""] * 9)


def test_npz(tmp_path: Path) -> None:
    first, second = timeline(9), timeline(6, seed=1, ranks=(3,), timed=True, phases=(PhaseSpan("load", 2, 2, 6),))
    path = tmp_path / "t.npz"
    write_timeline([first, second], path)
    with np.load(path, allow_pickle=False) as data:
        assert data["rank"].tolist() == [0] * 9 + [3] * 6
        assert data["allocated_bytes"].dtype == np.int64
        assert data["reserved_bytes"].tolist() == first.reserved.tolist() + second.reserved.tolist()
        assert second.time_ns is not None
        assert data["time_ns"].tolist() == [-1] * 9 + second.time_ns.tolist()
        names = [*data["phase_names"].tolist(), ""]
        assert [names[code] for code in data["phase"].tolist()] == (
            ["load"] * 3 + ['fwd, "first"'] * 6 + [""] * 2 + ["load"] * 4
        )
        assert data["step"].tolist() == [-1] * 3 + [0] * 6 + [-1] * 2 + [2] * 4


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    first, second = timeline(9), timeline(6, seed=1, ranks=(3,), timed=True)
    path = tmp_path / "t.parquet"
    write_timeline([first, second], path)
    table = parquet.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    rows = table.to_pylist()
    assert [row["reserved_bytes"] for row in rows] == first.reserved.tolist() + second.reserved.tolist()
    assert rows[0]["phase"] == "load"
    assert rows[0]["step"] is None
    assert rows[0]["time_ns"] is None
    assert second.time_ns is not None
    assert rows[9]["time_ns"] == int(second.time_ns[0])


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(OutputError, match=r"pip install 'vramsim\[parquet\]'"):
        write_timeline([timeline()], tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_no_timelines_and_empty_ones_are_tables_too(tmp_path: Path) -> None:
    for i, lines in enumerate(([], [timeline(0, phases=())])):
        for ending in (".csv", ".npz", ".parquet"):
            write_timeline(lines, tmp_path / f"t{i}{ending}")
        assert rows_of(tmp_path / f"t{i}.csv") == []


def test_other_endings_and_existing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"\.csv, \.csv\.gz, \.npz, \.parquet"):
        write_timeline([timeline()], tmp_path / "t.xlsx")
    (tmp_path / "t.csv").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write_timeline([timeline()], tmp_path / "t.csv")
    write_timeline([timeline()], tmp_path / "t.csv", force=True)
    assert len(rows_of(tmp_path / "t.csv")) == 20


# Chrome


def trace_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_chrome_has_a_process_with_two_counters_for_each_rank(tmp_path: Path, ending: str) -> None:
    first, second = timeline(9, timed=True, ooms=(4,)), timeline(6, seed=1, ranks=(2, 3, 5))
    path = tmp_path / f"t{ending}"
    write_chrome([first, second], path)
    events = trace_of(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 2: "ranks 2-3, 5"}
    for pid, line in ((0, first), (2, second)):
        for name, column in (("allocated", line.allocated), ("reserved", line.reserved)):
            points = [e for e in events if e["ph"] == "C" and e["pid"] == pid and e["name"] == name]
            assert [e["args"] for e in points] == [{name: value} for value in column.tolist()]
            assert all(one["ts"] <= other["ts"] for one, other in pairwise(points))
    assert first.time_ns is not None
    at = [e["ts"] for e in events if e["ph"] == "C" and e["pid"] == 0 and e["name"] == "allocated"]
    assert at == [t / 1000 for t in first.time_ns.tolist()]
    assert [e["ts"] for e in events if e["ph"] == "C" and e["pid"] == 2 and e["name"] == "reserved"] == list(range(6))


def test_chrome_has_phases_peaks_and_failures(tmp_path: Path) -> None:
    line = timeline(9, ooms=(4, 7))
    write_chrome([line], tmp_path / "t.json")
    events = trace_of(tmp_path / "t.json")
    phases = [(e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert phases == [("load", 0, 3, {}), ('fwd, "first"', 3, 5, {"step": 0})]
    instants = [(e["name"], e["ts"], e["args"].get("bytes")) for e in events if e["ph"] == "i"]
    assert instants == [
        ("peak allocated", line.allocated.argmax(), line.allocated.max()),
        ("peak reserved", line.reserved.argmax(), line.reserved.max()),
        ("out of memory", 4, None),
        ("out of memory", 7, None),
    ]


def test_chrome_shows_changes_only_and_never_loses_the_peak(tmp_path: Path) -> None:
    count = 600_000
    flat = np.full(count, 1000, dtype=np.int64)
    spiky = np.arange(count, dtype=np.int64) % 7919
    spiky[123_457] = 1 << 40
    line = Timeline((0,), flat, flat, spiky, phases=(), limit_bytes=1)
    write_chrome([line], tmp_path / "t.json.gz")
    events = trace_of(tmp_path / "t.json.gz")
    points = {name: [e for e in events if e["ph"] == "C" and e["name"] == name] for name in ("allocated", "reserved")}
    assert [e["ts"] for e in points["allocated"]] == [0, count - 1]
    assert len(points["reserved"]) <= MAX_POINTS
    assert max(e["args"]["reserved"] for e in points["reserved"]) == 1 << 40


def test_chrome_of_nothing(tmp_path: Path) -> None:
    write_chrome([], tmp_path / "none.json")
    assert trace_of(tmp_path / "none.json") == []
    write_chrome([timeline(0, phases=())], tmp_path / "empty.json")
    assert {e["ph"] for e in trace_of(tmp_path / "empty.json")} == {"M"}
    with pytest.raises(OutputError, match="exists already"):
        write_chrome([], tmp_path / "none.json")


def test_ranks_in_words() -> None:
    assert ranks_text((4,)) == "rank 4"
    assert ranks_text((3, 0, 1, 2)) == "ranks 0-3"
    assert ranks_text((0, 2, 3)) == "ranks 0, 2-3"
