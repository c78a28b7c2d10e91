"""The commands on real replays: figures that section 9 of the allocator's rules gives, in every kind of file."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome

from simulator.cli import main
from tests.simulator.reports.test_report import SCHEMA

MIB = 1 << 20
TOTAL = 100 * MIB


def trace(tmp_path: Path, events: list[dict[str, Any]], ranks: Any = 0, **extra: Any) -> str:
    """A trace file of one event sequence, on a device of 100 MiB."""
    device = {"name": "toy", "total_bytes": TOTAL, "va_base": 1 << 40}
    document = {
        "format": "memory-trace",
        "version": 1,
        "allocator": {"release": "2.11", **extra},
        "devices": [device],
        "ranks": [{"rank": ranks, "events": events}],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    return str(path)


def alloc(number: int, size: int, **extra: Any) -> dict[str, Any]:
    return {"op": "alloc", "id": number, "bytes": size, **extra}


SIMPLE = [
    {"op": "phase", "name": "forward", "step": 0},
    alloc(1, 3_000_000, category="activation", name="model.layers.0"),
    alloc(2, 1000, category="parameter"),
    {"op": "free", "id": 1},
    {"op": "empty_cache"},
]


def call(*arguments: str) -> Outcome:
    outcome = CliRunner().invoke(main, list(arguments))
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.output
    return outcome


def document(outcome: Outcome) -> dict[str, Any]:
    parsed = json.loads(outcome.stdout)
    jsonschema.validate(parsed, SCHEMA)
    assert isinstance(parsed, dict)
    return parsed


def test_json_of_a_simple_trace(tmp_path: Path) -> None:
    outcome = call("run", trace(tmp_path, SIMPLE), "--json")
    assert outcome.exit_code == 0
    (rank,) = document(outcome)["ranks"]
    stats = rank["memory_stats"]
    assert stats["allocated_bytes.all.peak"] == rank["peak_allocated"] == 3_000_320 + 1024
    assert stats["reserved_bytes.all.peak"] == rank["peak_reserved"] == 22 * MIB
    assert stats["requested_bytes.all.peak"] == rank["lower_bound"] == 3_001_000
    assert stats["reserved_bytes.all.current"] == 2 * MIB
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (0, 0)
    assert rank["peak"]["by_category"] == {"activation": 3_000_320, "parameter": 1024}
    assert rank["peak"]["largest"][0]["name"] == "model.layers.0"
    assert rank["fragmentation"]["reserved"] == 22 * MIB
    assert rank["fragmentation"]["rounding"] == 344
    assert rank["all_phases"][0]["peak"] == 3_000_320 + 1024


def test_events_and_calls(tmp_path: Path) -> None:
    source = trace(tmp_path, SIMPLE, ranks=[0, 3])
    events, calls = tmp_path / "events.csv.gz", tmp_path / "calls.csv"
    assert call("run", source, "--events", str(events), "--calls", str(calls)).exit_code == 0
    base, small = str(1 << 40), str((1 << 40) + 20 * MIB)
    rows = list(csv.reader(gzip.decompress(events.read_bytes()).decode().splitlines()))
    one = [
        ["0", "phase", "", "0", "0", "0", "0", "0", "0", "0"],
        ["1", "alloc", "1", base, str(20 * MIB), "3000320", "3000320", "1", "0", "0"],
        ["2", "alloc", "2", small, str(22 * MIB), "3001344", "3001344", "2", "0", "0"],
        ["3", "free", "1", base, str(22 * MIB), "1024", "1024", "2", "0", "0"],
        ["4", "empty_cache", "", "0", str(2 * MIB), "1024", "1024", "1", "0", "0"],
    ]
    assert rows[1:] == [["0", *row] for row in one] + [["3", *row] for row in one]
    got = list(csv.reader(calls.read_text().splitlines()))
    made = [["1", "A", base, str(20 * MIB)], ["2", "A", small, str(2 * MIB)], ["4", "F", base, str(20 * MIB)]]
    assert got[1:] == [["0", *row] for row in made] + [["3", *row] for row in made]


def test_out_of_memory(tmp_path: Path) -> None:
    source = trace(
        tmp_path, [alloc(1, 60 * MIB), alloc(2, 512), alloc(3, 60 * MIB, name="big"), {"op": "free", "id": 3}]
    )
    events = tmp_path / "events.csv"
    outcome = call("run", source, "--json", "--events", str(events))
    assert outcome.exit_code == 3
    parsed = document(outcome)
    oom = parsed["ranks"][0]["oom"]
    assert parsed["verdict"] == "oom"
    assert (oom["event"], oom["id"], oom["name"], oom["requested"]) == (2, 3, "big", 60 * MIB)
    assert oom["device_free"] == 38 * MIB
    stats = parsed["ranks"][0]["memory_stats"]
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["reserved_bytes.all.current"]) == (1, 1, 62 * MIB)
    assert [row.split(",")[4] for row in events.read_text().splitlines()[3:4]] == ["-1"]
    table = call("run", source)
    assert table.exit_code == 3
    assert "Out of memory at event 2" in table.stdout
    assert "38.00 MiB on the GPU" in table.stdout
    assert call("run", source, "--memory", "200MiB").exit_code == 0
    assert call("run", source, "--memory", "200MiB", "--context", "90MiB").exit_code == 3


def test_an_allocator_that_a_trace_cannot_have_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    set_later = [alloc(1, 512), {"op": "set_allocator", "conf": "max_split_size_mb:1"}]
    for rows, conf, release, says in (
        (SIMPLE, "max_split_size_mb:1", "2.11", ": allocator: allocator option 'max_split_size_mb' cannot be '1'"),
        (SIMPLE, "", "2.99", ": allocator: release '2.99' is not known"),
        (set_later, "", "2.11", ": rank 0, event 1, field 'conf': allocator option 'max_split_size_mb'"),
    ):
        source = trace(tmp_path, rows, conf=conf, release=release)
        for arguments in (("run", source), ("convert", source, str(tmp_path / "o.csv"))):
            outcome = call(*arguments)
            assert outcome.exit_code == 1
            assert outcome.stderr.startswith(f"error: {source}{says}")
    source = trace(tmp_path, SIMPLE, conf="max_split_size_mb:1", release="2.99")
    assert call("run", source, "--allocator", "", "--release", "2.11").exit_code == 0
    assert call("run", source, "--allocator", "").exit_code == 1
    assert call("run", source, "--allocator", "frob:1", "--release", "2.11").stderr.startswith("error: unknown")


def test_verify_of_a_trace_says_that_run_takes_it(tmp_path: Path) -> None:
    source = trace(tmp_path, SIMPLE)
    outcome = call("verify", source)
    assert outcome.exit_code == 1
    assert outcome.stderr == f"error: {source}: a trace, not a torch memory snapshot: `run` takes it\n"


def test_settings_and_release_of_the_command_line_win(tmp_path: Path) -> None:
    source = trace(tmp_path, [alloc(1, 1200)], conf="roundup_power2_divisions:1", release="2.11")
    new = document(call("run", source, "--json"))
    old = document(call("run", source, "--json", "--release", "2.3"))
    plain = document(call("run", source, "--json", "--release", "2.3", "--allocator", ""))
    peaks = [parsed["ranks"][0]["peak_allocated"] for parsed in (new, old, plain)]
    assert peaks == [1536, 1200, 1536]
    assert (old["release"], old["conf"], plain["conf"]) == ("2.3", "roundup_power2_divisions:1", "")


def test_a_trace_with_bad_settings_of_its_own(tmp_path: Path) -> None:
    outcome = call("run", trace(tmp_path, SIMPLE, conf="max_split_size:5"))
    assert outcome.exit_code == 1
    assert "nearest" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_assumptions_are_said(tmp_path: Path) -> None:
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({"format": "memory-trace", "version": 1, "ranks": [{"rank": 0, "events": SIMPLE}]}))
    notes = call("run", str(path)).stderr
    assert "2.13" in notes
    assert "A100-80GB" in notes


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.npz", "t.parquet", "t.json", "t.json.gz"])
def test_timelines(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    assert call("run", trace(tmp_path, SIMPLE), "--timeline", str(target)).exit_code == 0
    assert target.stat().st_size > 0


def test_snapshot_holds_every_rank_and_replays_to_the_same_peaks(tmp_path: Path) -> None:
    source = trace(tmp_path, SIMPLE, ranks=[0, 1])
    snapshot = tmp_path / "s.pickle"
    assert call("run", source, "--snapshot", str(snapshot)).exit_code == 0
    first = document(call("run", source, "--json"))
    again = document(call("run", str(snapshot), "--json", "--memory", "100MiB"))
    assert [rank["rank"] for rank in again["ranks"]] == [0, 1]
    for key in ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "requested_bytes.all.peak"):
        assert again["ranks"][1]["memory_stats"][key] == first["ranks"][1]["memory_stats"][key]
    verified = call("verify", str(snapshot), "--release", "2.11", "--json")
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["verdict"] == "equal"


@pytest.mark.parametrize(
    ("name", "to"),
    [("a.pickle", None), ("a.pkl.gz", None), ("a.csv", None), ("a.json", "chrome"), ("a.npz", "timeline-npz")],
)
def test_convert_by_replay(tmp_path: Path, name: str, to: str | None) -> None:
    target = tmp_path / name
    outcome = call("convert", trace(tmp_path, SIMPLE), str(target), *(["--to", to] if to else []))
    assert outcome.exit_code == 0, outcome.output
    assert target.stat().st_size > 0
    assert outcome.stdout == ""
