"""Whatever the commands are given: a result, or one clear line; never a traceback, never a half-written file."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.cli import main
from simulator.engine.replay import replay
from simulator.reports.run import CAUSES
from tests.places import ROOT
from tests.simulator.reports.test_report import SCHEMA
from tests.simulator.snapshots.test_fuzz import SMALL, change, odd_values, places
from tests.support.extremes import MOST, extreme_document
from tests.support.snapshots import data_of, snapshot_of
from tests.support.strategies import as_trace, documents
from tests.traces.forms.test_native import in_columns, npz_bytes
from tests.traces.test_fuzz import EDGES, mutated_bytes, mutated_documents
from traces.errors import EventError, LLMemError
from traces.model import DEFAULT_DEVICE, Events, Op, RankEvents, Trace

REPOSITORY = ROOT
SCHEMA_CHECK = jsonschema.Draft202012Validator(SCHEMA)
SEEDS = st.integers(0, 2**32)
OUTPUTS = {
    "--events": "events.csv.gz",
    "--calls": "calls.csv",
    "--timeline": "timeline.npz",
    "--snapshot": "snapshot.pickle.gz",
    "--html": "page.html",
}
TARGETS = ("out.json", "out.npz", "out.pickle", "out.csv", "out.json --to chrome", "out --to timeline-npz")
patiently = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile the kernels here: the commands say so when they do it."""
    for seed in range(30):
        with suppress(LLMemError):
            replay(as_trace(extreme_document(Random(seed))), events=True, log=True, snapshot=True)


@contextmanager
def folder_with(data: bytes) -> Iterator[Path]:
    """A new folder with one file, `in`."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "in").write_bytes(data)
        yield Path(name)


def call(*arguments: str | Path) -> Outcome:
    """Run a command; what it printed must keep the rules of its exit code."""
    outcome = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.output
    assert "Traceback" not in outcome.output
    lines = outcome.stderr.splitlines()
    if outcome.exit_code == 1 and not outcome.stdout:
        assert len(lines) == 1, outcome.stderr
        assert lines[0].startswith("error: ")
        assert lines[0].isprintable()
        assert len(lines[0]) < 1200
    else:
        assert outcome.exit_code in (0, 1, 3)
        assert all(line.startswith("note: ") for line in lines), outcome.stderr
    return outcome


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(folder: Path) -> dict[str, Any] | None:
    """`run` with every output there is; the JSON document, if there is a result."""
    options = [word for option, name in OUTPUTS.items() for word in (option, str(folder / name))]
    outcome = call("run", folder / "in", "--json", *options)
    if outcome.exit_code == 1:
        assert outcome.stdout == ""
        assert names(folder) <= {"in", *OUTPUTS.values()}
        return None
    assert names(folder) == {"in", *OUTPUTS.values()}
    document = json.loads(outcome.stdout)
    check_document(document)
    assert outcome.exit_code == (3 if document["verdict"] == "oom" else 0)
    assert isinstance(document, dict)
    return document


def check_document(document: dict[str, Any]) -> None:
    """The document keeps its schema, and its sums agree."""
    faults = [f"{list(fault.absolute_path)}: {fault.message[:200]}" for fault in SCHEMA_CHECK.iter_errors(document)]
    assert not faults, faults[:3]
    for rank in document["ranks"]:
        causes = rank["fragmentation"]
        assert sum(causes[cause] for cause in CAUSES) == causes["reserved"]
        assert sum(rank["peak"]["by_category"].values()) == rank["peak"]["allocated"]


def convert(folder: Path, target: str) -> bool:
    """`convert` to a target (with its options); whether it was written."""
    name, *options = target.split()
    before = names(folder)
    outcome = call("convert", folder / "in", folder / name, *options)
    assert outcome.stdout == ""
    assert names(folder) - before == ({name} if outcome.exit_code == 0 else set())
    return outcome.exit_code == 0


def verify(folder: Path) -> None:
    """`verify`; a snapshot that differs from its replay has a report, and exit code 1."""
    outcome = call("verify", folder / "in", "--json")
    if outcome.stdout:
        verdict = json.loads(outcome.stdout)["verdict"]
        assert outcome.exit_code == (0 if verdict == "equal" else 1)


def survives(data: bytes, target: str) -> None:
    with folder_with(data) as folder:
        run(folder)
        verify(folder)
        convert(folder, target)


targets = st.sampled_from(TARGETS)


# -------------------------------------------------------------------------------------------------------- traces


@given(data=mutated_bytes(), target=targets)
@patiently
def test_mutated_files(data: bytes, target: str) -> None:
    survives(data, target)


@given(document=mutated_documents(), target=targets)
@patiently
def test_mutated_documents(document: dict[str, Any], target: str) -> None:
    survives(json.dumps(document).encode(), target)


@given(document=documents(), target=targets, memory=st.sampled_from(["1", "64MiB", "8TiB"]))
@patiently
def test_valid_documents(document: dict[str, Any], target: str, memory: str) -> None:
    """Settings in these are any text, so they are given on the command line."""
    for entry in document["ranks"]:
        entry["events"] = [event for event in entry["events"] if event["op"] != "set_allocator"]
    with folder_with(json.dumps(document).encode()) as folder:
        call("run", folder / "in", "--allocator", "", "--memory", memory, "--context", "0", "--json")
        convert(folder, target)


def edited(random: Random, document: dict[str, Any]) -> dict[str, Any]:
    """The document with a few values of events changed, or events moved."""
    for _ in range(random.randrange(4)):
        events = random.choice(document["ranks"])["events"]
        event = random.choice(events)
        kind = random.randrange(4)
        if kind == 0:
            event[random.choice(list(event))] = random.choice((0, 1, -1, None, True, 0.5, "x", MOST, 1 << 63))
        elif kind == 1:
            events.insert(random.randrange(len(events)), copy.deepcopy(event))
        elif kind == 2:
            events.remove(event)
        else:
            other = random.randrange(len(events))
            events[other] = copy.deepcopy(random.choice(events))
    return document


@given(seed=SEEDS, form=st.sampled_from(["rows", "columns", "npz"]), target=targets)
@patiently
def test_extreme_numbers(seed: int, form: str, target: str) -> None:
    random = Random(seed)
    document = edited(random, extreme_document(random))
    text = json.dumps(in_columns(document) if form == "columns" else document).encode()
    if form == "npz":
        try:
            text = npz_bytes(as_trace(document))
        except LLMemError:
            return
    survives(text, target)


@given(seed=SEEDS, column=st.sampled_from(["id", "bytes", "stream", "pool", "on", "duration_ns"]), value=EDGES)
@patiently
def test_any_value_in_any_column(seed: int, column: str, value: Any) -> None:
    document = in_columns(extreme_document(Random(seed)))
    for entry in document["ranks"]:
        values = entry["events"].get(column)
        if values:
            values[seed % len(values)] = value
    with folder_with(json.dumps(document).encode()) as folder:
        run(folder)


def test_free_blocks_side_by_side_in_an_expandable_segment_come_to_an_end() -> None:
    """No allocator leaves them so: it merges them. The replay looked for the second among unmapped ones, for ever."""
    sizes = (512, 1 << 20)
    segment = {
        "address": (1 << 40) + 512,
        "bytes": sum(sizes),
        "blocks": [[None, size, 0, "inactive"] for size in sizes],
        "stream": 0,
        "pool": "large",
        "expandable": True,
        "va_address": 1 << 40,
        "va_bytes": 1 << 45,
    }
    rank = {"rank": 0, "initial": {"segments": [segment]}, "events": [{"op": "alloc", "id": 1, "bytes": 20 << 20}]}
    allocator = {"release": "2.10", "conf": "expandable_segments:True"}
    document = {"format": "memory-trace", "version": 1, "allocator": allocator, "ranks": [rank]}
    (found,) = replay(as_trace(document)).ranks
    assert (found.oom, found.peak_allocated) == (None, 20 << 20)


def test_kernels_stay_inside_their_memory() -> None:
    """As plain Python, with every access checked."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.guarded"],
        cwd=REPOSITORY,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " fits, " in done.stdout


# ----------------------------------------------------------------------------------------------------- snapshots


@given(
    name=st.sampled_from(SMALL),
    wanted=st.lists(
        st.tuples(
            st.integers(0, 10**9), st.sampled_from(["set", "set", "delete", "repeat", "swap", "nudge"]), odd_values
        ),
        max_size=4,
    ),
    target=targets,
)
@patiently
def test_mutated_snapshots(name: str, wanted: list[tuple[int, str, Any]], target: str) -> None:
    snapshot = snapshot_of(name)
    for number, kind, value in wanted:
        part = snapshot["device_traces"][0] if number % 2 else snapshot["segments"]
        at = number // 2 % len(part)
        inner = places(part[at], (at,)) or [(at,)]
        change(part, inner[number % len(inner)] if number % 3 else (at,), kind, copy.deepcopy(value))
    survives(gzip.compress(pickle.dumps(snapshot), 1, mtime=0), target)


@given(
    name=st.sampled_from(SMALL),
    flips=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.none() | st.integers(0, 10**9),
)
@patiently
def test_flipped_bytes_of_pickles(name: str, flips: list[tuple[int, int]], cut: int | None) -> None:
    data = bytearray(data_of(name))
    for place, value in flips:
        data[place % len(data)] = value
    if cut is not None:
        del data[cut % len(data) :]
    survives(bytes(data), "out.json")


# ------------------------------------------------------------------------------------------- as processes of their own

HEAD: dict[str, Any] = {"format": "memory-trace", "version": 1}


def text_of(*events: dict[str, Any], **extra: Any) -> bytes:
    return json.dumps({**HEAD, "ranks": [{"rank": 0, "events": events}], **extra}).encode()


def alloc(**changes: Any) -> dict[str, Any]:
    return {"op": "alloc", "id": 1, "bytes": 1000, **changes}


class Calls:
    """A pickle of it asks for a call."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch called",)


FREE = {"op": "free", "id": 1}
BAD_FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "no such file"),
    "empty": (b"", "empty"),
    "truncated gzip": (gzip.compress(text_of(alloc()), mtime=0)[:-9], "truncated"),
    "a type": (text_of(alloc(bytes="1000")), "event 0"),
    "free of an unknown id": (text_of(FREE), "rank 0, event 0, field 'id': free of an unknown id"),
    "double free": (text_of(alloc(), FREE, FREE), "rank 0, event 2, field 'id': id 1 was freed before (event 1)"),
    "duplicate id": (text_of(alloc(), alloc()), "rank 0, event 1, field 'id': id 1 was allocated before (event 0)"),
    "negative size": (text_of(alloc(bytes=-1)), "event 0, field 'bytes'"),
    "size of 2^63": (text_of(alloc(bytes=1 << 63)), "event 0, field 'bytes'"),
    "size of 10^400": (text_of(alloc(bytes=10**400)), "event 0"),
    "NaN": (text_of({"op": "set_memory_fraction", "fraction": float("nan")}), "JSON"),
    "no ranks": (json.dumps({**HEAD, "ranks": []}).encode(), "at least one rank"),
    "deep JSON": (b'{"a":' * 1_000_000, ""),
    "deep pickle": (b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".", ""),
    "a pickle that calls": (pickle.dumps(Calls()), "posix.system"),
    "settings": (text_of(alloc(), allocator={"conf": "max_split_size_mb:1"}), "at least"),
    "settings of an event": (
        text_of(alloc(), {"op": "set_allocator", "conf": "frob:1"}),
        "event 1, field 'conf': unknown",
    ),
    "a rank that never comes": (
        json.dumps(
            {
                **HEAD,
                "groups": {"g": [0, 1]},
                "ranks": [
                    {"rank": 0, "events": [{"op": "collective", "group": "g"}, {"op": "synchronize"}]},
                    {"rank": 1, "events": [{"op": "kernel", "duration_ns": 1}]},
                ],
            }
        ).encode(),
        "never reached by rank 1",
    ),
}


def process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", "simulator", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_input_is_one_line_and_exit_code_1(case: str, tmp_path: Path) -> None:
    data, words = BAD_FILES[case]
    if data is not None:
        (tmp_path / "in").write_bytes(data)
    before = names(tmp_path)
    done = process(tmp_path, "run", "in", "--events", "events.csv", "--snapshot", "snapshot.pickle")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--events", "no/such/folder.csv", "there is no folder"),
        ("--events", "in", "exists already"),
        ("--html", ".", "is a directory"),
        ("--snapshot", "/proc/version/x", "cannot be written"),
    ],
)
def test_outputs_that_cannot_be_written(option: str, path: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(text_of(alloc()))
    done = process(tmp_path, "run", "in", option, path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert names(tmp_path) == {"in"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("option", ["--events", "--html", "--snapshot"])
def test_a_full_disk(option: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(text_of(alloc()))
    done = process(tmp_path, "run", "in", option, "/dev/full", "-q")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: /dev/full: cannot be written: no space left on device\n"


def test_an_empty_trace_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(text_of())
    done = process(tmp_path, "run", "in", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fits: needs 0 B of ")


def test_more_streams_and_pools_than_can_be_simulated() -> None:
    pools = [{"op": "pool_create", "pool": number} for number in range(1, 400)]
    events = [*pools, *({"op": "kernel", "stream": number} for number in range(400))]
    with folder_with(text_of(*events)) as folder:
        outcome = call("run", folder / "in")
    assert outcome.exit_code == 1
    assert "rank 0: 400 streams in 400 memory pools are more than can be simulated" in outcome.stderr


# ------------------------------------------------------------------------------------------------- what Python gives


def test_a_trace_that_was_not_checked_is_checked() -> None:
    events = Events(np.array([Op.ALLOC, Op.FREE, Op.FREE], dtype=np.uint8), {"id": np.ones(3, dtype=np.int64)})
    with pytest.raises(EventError, match="event 2, field 'id': id 1 was freed before"):
        replay(Trace((RankEvents((0,), events),)))


def test_columns_that_lie_anyhow_in_memory() -> None:
    count = 50
    ops = np.tile(np.array([Op.ALLOC, Op.FREE], dtype=np.uint8), count)
    ids, sizes = np.repeat(np.arange(count), 2), np.tile(np.array([3 << 20, 0]), count)
    plain = Events(ops, {"id": ids, "bytes": sizes, "host_ns": ids})
    table = np.zeros((2 * count, 3), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2] = ids, sizes, ids
    odd_ops = np.repeat(ops, 3)[::3]
    odd_ops.flags.writeable = table.flags.writeable = False
    odd = Events(odd_ops, {"id": table[:, 0], "bytes": table[::-1, 1][::-1], "host_ns": table[:, 2]})
    results = [
        replay(Trace((RankEvents((0,), events),), release="2.13", devices=(DEFAULT_DEVICE,)), events=True)
        for events in (plain, odd)
    ]
    first, second = (result.ranks[0] for result in results)
    assert first.memory_stats == second.memory_stats
    assert first.columns is not None
    assert second.columns is not None
    assert np.array_equal(first.columns.address, second.columns.address)
