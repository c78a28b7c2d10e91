"""Snapshots that we write open where torch's own do."""

from __future__ import annotations

import copy
import gzip
import pickle
import pickletools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from simulator.snapshots.reader import read_recording
from tests.support.snapshots import NAMES, cut, path_of, snapshot_of, tiny
from tests.support.viewer import check_viewer
from traces.errors import OutputError
from traces.snapshot.writer import plain, write_snapshot


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ending", [".pickle", ".pickle.gz"])
def test_a_real_snapshot_goes_through_unchanged(tmp_path: Path, name: str, ending: str) -> None:
    target = tmp_path / f"copy{ending}"
    write_snapshot(snapshot_of(name), target)
    data = target.read_bytes()
    if ending.endswith(".gz"):
        data = gzip.decompress(data)
    assert pickle.loads(data) == snapshot_of(name)
    assert data[:2] == b"\x80\x04"


def test_what_is_written_is_read() -> None:
    one = read_recording(path_of("2.11-lag"))
    assert check_viewer(snapshot_of("2.11-lag")) == []
    assert one.trace.ranks


def test_numbers_of_numpy_become_plain(tmp_path: Path) -> None:
    snapshot = tiny()
    segment = snapshot["segments"][0]
    segment["address"] = np.int64(segment["address"])
    segment["is_expandable"] = np.bool_(False)
    segment["blocks"] = tuple(segment["blocks"])
    snapshot["device_traces"][0][1]["size"] = np.uint32(1000)
    snapshot["settings"] = {"a": np.float64(0.5), "b": np.arange(2), "c": None}
    target = tmp_path / "s.pickle"
    write_snapshot(snapshot, target)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(target.read_bytes())}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}
    loaded = pickle.loads(target.read_bytes())
    assert loaded["settings"] == {"a": 0.5, "b": [0, 1], "c": None}
    assert type(loaded["segments"][0]["address"]) is int
    assert type(loaded["segments"][0]["is_expandable"]) is bool


def test_other_types_are_not_written(tmp_path: Path) -> None:
    for value in (b"bytes", {1, 2}, object(), 1j):
        with pytest.raises(OutputError, match="only plain data"):
            write_snapshot({"segments": [value]}, tmp_path / "s.pickle")
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(OutputError, match="nested too deeply"):
        write_snapshot({"segments": deep}, tmp_path / "s.pickle")
    while deep:
        deep = deep[0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_when_told_to(tmp_path: Path) -> None:
    target = tmp_path / "s.pickle"
    target.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write_snapshot(tiny(), target)
    assert target.read_text() == "mine"
    write_snapshot(tiny(), target, force=True)
    assert pickle.loads(target.read_bytes()) == tiny()


def test_equal_snapshots_are_equal_files(tmp_path: Path) -> None:
    for name in ("a.pickle.gz", "b.pickle.gz"):
        write_snapshot(tiny(), tmp_path / name)
    assert (tmp_path / "a.pickle.gz").read_bytes() == (tmp_path / "b.pickle.gz").read_bytes()


# The viewer's rules


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("opt-2l")])
def test_torch_s_own_snapshots_open_in_the_viewer(name: str) -> None:
    assert check_viewer(snapshot_of(name)) == []


def test_cut_snapshots_open_too() -> None:
    for name in ("2.11-lag", "2.11-expandable-oom"):
        snapshot = snapshot_of(name)
        (entries,) = snapshot["device_traces"]
        for dropped in range(0, len(entries), 97):
            assert check_viewer(cut(snapshot, [dropped])) == []


def broken(what: str) -> dict[str, Any]:
    snapshot = copy.deepcopy(tiny())
    (segment,), (entries,) = snapshot["segments"], snapshot["device_traces"]
    if what == "no segments":
        del snapshot["segments"]
    elif what == "no trace for the device":
        segment["device"] = 1
    elif what == "no stream":
        del segment["stream"]
    elif what == "no state":
        del segment["blocks"][0]["state"]
    elif what == "no addr":
        del entries[1]["addr"]
    elif what == "bytes":
        segment["name"] = b"x"
    elif what == "large number":
        segment["address"] = 1 << 64
    elif what == "pending free":
        del entries[4]
    elif what == "block outside":
        entries[1]["addr"] = entries[3]["addr"] = entries[4]["addr"] = 1 << 40
    elif what == "segment elsewhere":
        entries[0]["addr"] = 1 << 40
    elif what == "blocks do not sum":
        segment["total_size"] += 512
    elif what == "category":
        entries[1]["category"] = "activation"
    return snapshot


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no segments", "must be lists"),
        ("no trace for the device", "no trace of device 1"),
        ("no stream", "segment 0: missing stream"),
        ("no state", "segment 0: missing blocks: state"),
        ("no addr", "device 0, entry 1: missing addr"),
        ("bytes", "only plain data"),
        ("large number", "more than 8 bytes"),
        ("pending free", "entry 3: the block at 0x7f0000000000 is not in use"),
        ("block outside", "in no segment"),
        ("segment elsewhere", "there is no segment"),
        ("blocks do not sum", "blocks sum to"),
        ("category", "category 'unknown'"),
    ],
)
def test_what_would_keep_the_viewer_from_opening_is_said(what: str, says: str) -> None:
    problems = check_viewer(broken(what))
    assert problems
    assert says in problems[0]
    assert all("\n" not in problem for problem in problems)


# torch's own functions


@pytest.fixture(scope="module")
def viz() -> ModuleType:
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    module: ModuleType = _memory_viz
    return module


@pytest.mark.parametrize("name", ["2.11-lag", "2.11-expandable-oom", "2.13-pools", "2.11-ring"])
def test_torch_s_functions_read_what_we_write(tmp_path: Path, viz: ModuleType, name: str) -> None:
    target = tmp_path / "s.pickle"
    write_snapshot(plain(snapshot_of(name)), target)
    written = pickle.loads(target.read_bytes())
    original = snapshot_of(name)
    for function in (viz.segsum, viz.trace):
        assert function(written) == function(original)
    for function in (viz.segment_plot, viz.trace_plot):
        assert "<html" in function(written) or "<!DOCTYPE" in function(written)
