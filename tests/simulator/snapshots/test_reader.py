"""The reader: layouts of all releases, what is said, what is refused."""

from __future__ import annotations

import copy
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simulator
import traces
from simulator.engine.result import LOG_KINDS
from simulator.snapshots.reader import read_recording, snapshot_to_recording
from tests.support.snapshots import (
    FOLDER,
    NAMES,
    RELEASES,
    memory_stats,
    path_of,
    read_snapshot,
    snapshot_of,
    snapshot_to_trace,
    tiny,
)
from traces.check import check
from traces.errors import TraceError
from traces.model import DEFAULT_DEVICE, Op

#: What the fields of a recording of each release let one know (the newest of those that write the same fields).
GUESSES = {
    "2.1": ("2.1", "2.1"),
    "2.2": ("2.2", "2.2"),
    "2.3": ("2.3", "2.4"),
    "2.4": ("2.3", "2.4"),
    "2.5": ("2.5", "2.7"),
    "2.6": ("2.5", "2.7"),
    "2.7": ("2.5", "2.7"),
    "2.8": ("2.8", "2.8"),
    "2.9": ("2.9", "2.10"),
    "2.10": ("2.11", "2.11"),
    "2.11": ("2.11", "2.11"),
    "2.12": ("2.12", "2.12"),
    "2.13": ("2.13", "2.13"),
    "2.14": ("2.14", "2.15"),
    "2.15": ("2.14", "2.15"),
}


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_is_guessed_from_the_fields_and_said(release: str) -> None:
    recording = read_recording(path_of(f"{release}-lag"))
    oldest, newest = GUESSES[release]
    assert recording.trace.release == oldest
    assert recording.releases[0] == oldest
    assert recording.releases[-1] == newest
    assert any(oldest in note and "--release" in note for note in recording.trace.notes)


def test_a_layout_with_history_is_of_2_0() -> None:
    recording = read_recording(path_of("opt-2l_w1"))
    assert recording.trace.release == "2.0"
    assert recording.releases == ("2.0",)
    live = [block for segment in recording.ranks[0].segments for block in segment["blocks"] if block[2] != "inactive"]
    assert len(live) == 90
    assert all(0 < requested <= size for size, requested, _ in live)


def test_the_release_given_is_taken() -> None:
    trace = read_snapshot(path_of("2.11-lag"), release="2.13.0+cu130")
    assert trace.release == "2.13.0+cu130"
    assert not any("--release" in note for note in trace.notes)


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_has_its_cause(name: str) -> None:
    recording = read_recording(path_of(name))
    check(recording.trace)
    snapshot = snapshot_of(name)
    for rank, shown in zip(recording.trace.ranks, recording.ranks, strict=True):
        entries = snapshot["device_traces"][shown.rank]
        assert rank.ranks == (shown.rank,)
        log = shown.log
        assert [entries[i]["action"] for i in log.entry.tolist()] == [
            {"A": "segment_alloc", "F": "segment_free", "M": "segment_map", "U": "segment_unmap"}.get(kind, kind)
            for kind in (LOG_KINDS[k] for k in log.kind.tolist())
        ]
        skipped = sum(entry["action"] == "snapshot" for entry in entries)
        assert len(log) == len(entries) - skipped
        assert (np.diff(log.event) >= 0).all()
        assert log.event.min() >= 0
        ops = rank.events.op[log.event]
        for kind, op in (("alloc", Op.ALLOC), ("oom", Op.ALLOC), ("free_requested", Op.FREE), ("A", Op.ALLOC)):
            assert (ops[log.kind == LOG_KINDS.index(kind)] == op).all()
        allocs = log.kind == LOG_KINDS.index("alloc")
        assert (rank.events.ints("address")[log.event[allocs]] == log.address[allocs]).all()
        assert (rank.events.ints("bytes")[log.event[allocs]] == log.bytes[allocs]).all()


@pytest.mark.parametrize("name", ["2.11-lag", "2.11-three-devices", "2.11-ring-expandable", "2.13-pools", "2.11-oom"])
@pytest.mark.parametrize("ending", [".json", ".json.gz", ".npz"])
def test_a_native_copy_is_the_same_trace(tmp_path: Path, name: str, ending: str) -> None:
    trace = read_snapshot(path_of(name))
    target = tmp_path / f"copy{ending}"
    traces.write(trace, target)
    back = traces.read(target)
    assert back.devices == trace.devices
    assert (back.conf, back.release) == (trace.conf, trace.release)
    for one, other in zip(trace.ranks, back.ranks, strict=True):
        assert one.ranks == other.ranks
        assert one.initial == other.initial
        assert (one.events.op == other.events.op).all()
        for field in ("id", "bytes", "stream", "address", "pool"):
            assert (one.events.ints(field) == other.events.ints(field)).all(), field


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    for name, data in (("a.json", pickle.dumps(tiny())), ("b", gzip.compress(pickle.dumps(tiny())))):
        (tmp_path / name).write_bytes(data)
        assert len(simulator.read(tmp_path / name).ranks[0].events) == 3
        with pytest.raises(TraceError, match=rf"{name}: a torch memory snapshot.* simulator\.read takes it"):
            traces.read(tmp_path / name)
    traces.write(simulator.read(tmp_path / "b"), tmp_path / "c.json")
    assert len(simulator.read(tmp_path / "c.json").ranks[0].events) == 3
    with pytest.raises(TraceError, match=r"c\.json: a trace, not a torch memory snapshot: `run` takes it"):
        read_recording(tmp_path / "c.json")


def test_a_release_that_cannot_read_the_recorded_string_did_not_write_it() -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:32"}
    snapshot = tiny(allocator_settings=settings, external_annotations=[], device_traces=[])  # as 2.5 to 2.8 write it
    recording = snapshot_to_recording(snapshot, where="f")
    assert recording.releases == ("2.6", "2.7", "2.8")
    assert recording.trace.release == "2.6"
    with pytest.raises(TraceError, match=r"f: allocator_settings: allocator option .* came with PyTorch 2\.6"):
        snapshot_to_recording(snapshot, where="f", release="2.5")


def test_several_devices_are_several_ranks() -> None:
    recording = read_recording(path_of("2.11-three-devices"))
    assert [rank.ranks for rank in recording.trace.ranks] == [(0,), (1,), (2,)]
    assert [rank.device for rank in recording.trace.ranks] == [0, 1, 2]
    assert len({device.segment_addresses for device in recording.trace.devices}) == 3


def test_devices_without_anything_are_left_out() -> None:
    snapshot = tiny()
    snapshot["segments"][0]["device"] = 3
    snapshot["device_traces"] = [[], [], [], snapshot["device_traces"][0], []]
    assert [rank.ranks for rank in snapshot_to_trace(snapshot, where="f").ranks] == [(3,)]


@pytest.mark.parametrize("bare", [False, True])
def test_segments_alone_are_a_state_without_events(bare: bool) -> None:
    segments = snapshot_of("2.11-lag")["segments"]
    trace = snapshot_to_trace(segments if bare else {"segments": segments}, where="f")
    (rank,) = trace.ranks
    assert len(rank.events) == 0
    assert rank.initial is not None
    assert [s.address for s in rank.initial.segments] == sorted(s["address"] for s in segments)
    assert sum(s.bytes for s in rank.initial.segments) == sum(s["total_size"] for s in segments)
    states = [b.state for s in rank.initial.segments for b in s.blocks]
    assert states == [b["state"] for s in segments for b in s["blocks"]]


@pytest.mark.parametrize("snapshot", [{"segments": [], "device_traces": []}, {"segments": []}, []])
def test_an_empty_snapshot_is_an_empty_trace(snapshot: Any) -> None:
    trace = snapshot_to_trace(snapshot, where="f")
    assert [len(rank.events) for rank in trace.ranks] == [0]


# Settings and the device


def test_settings_come_from_the_string_and_the_values() -> None:
    def conf(**settings: Any) -> str:
        return snapshot_to_trace(tiny(allocator_settings=settings, device_traces=[]), where="f").conf

    table = {str(1 << i): 0 for i in range(16)}
    assert conf(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64", max_split_size=64 << 20) == "max_split_size_mb:64"
    assert conf(PYTORCH_CUDA_ALLOC_CONF="", expandable_segments=True) == "expandable_segments:True"
    assert conf(max_split_size=40 << 20, garbage_collection_threshold=0.7) == (
        "max_split_size_mb:40,garbage_collection_threshold:0.7"
    )
    assert conf(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", expandable_segments=False) == (
        "expandable_segments:False"
    )
    assert conf(roundup_power2_divisions=table) == ""
    assert conf(roundup_power2_divisions={**table, "4": 8}).startswith("roundup_power2_divisions:[1:0,2:0,4:8,8:0,")


def test_a_switch_of_expandable_segments_shows_in_what_was_obtained() -> None:
    """Memory from cudaMalloc, though the option is on at the end: it was off at the start."""
    trace = snapshot_to_trace(tiny(allocator_settings={"expandable_segments": True}), where="f")
    assert trace.conf == "expandable_segments:False"


def test_settings_that_the_file_lacks_are_said_to_be_assumed() -> None:
    assert any("settings" in note for note in read_snapshot(path_of("2.2-lag")).notes)
    assert not any("settings" in note for note in read_snapshot(path_of("2.3-lag")).notes)


def test_the_assumed_device_is_said() -> None:
    trace = read_snapshot(path_of("2.11-lag"))
    assert trace.devices[0].total_bytes == DEFAULT_DEVICE.total_bytes
    assert trace.devices[0].placement == "recorded"
    assert any(DEFAULT_DEVICE.name in note and "assumed" in note for note in trace.notes)


def test_an_oom_entry_gives_the_device() -> None:
    trace = read_snapshot(path_of("2.13-oom"))
    assert trace.devices[0].total_bytes == 1 << 30
    ooms = sum(entry["action"] == "oom" for entry in snapshot_of("2.13-oom")["device_traces"][0])
    assert ooms == memory_stats()["2.13-oom"]["0"]["num_ooms"]
    assert (
        np.count_nonzero((trace.ranks[0].events.op == Op.ALLOC) & (trace.ranks[0].events.ints("address") < 0)) == ooms
    )


def test_a_memory_limit_is_found() -> None:
    trace = read_snapshot(path_of("2.12-fraction"))
    events = trace.ranks[0].events
    (at,) = np.flatnonzero(events.op == Op.SET_MEMORY_FRACTION)
    limit = float(events.floats("fraction")[at]) * trace.devices[0].total_bytes
    assert limit == pytest.approx(0.015 * DEFAULT_DEVICE.total_bytes, abs=20 << 20)


def test_a_larger_device_is_taken_where_the_default_is_too_small() -> None:
    snapshot = tiny()
    huge = DEFAULT_DEVICE.total_bytes + (2 << 20)
    block = {"size": huge, "requested_size": huge, "state": "active_allocated"}
    segment = {**snapshot["segments"][0], "address": 1 << 40, "total_size": huge, "segment_type": "large"}
    snapshot["segments"].insert(0, {**segment, "blocks": [block]})
    trace = snapshot_to_trace(snapshot, where="f")
    assert trace.devices[0].total_bytes == huge + (2 << 20)
    assert any("more was reserved" in note for note in trace.notes)


# Names, phases, unknown entries


def frame(name: str, filename: str, line: int = 7) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (
            [frame("empty", "/x/site-packages/torch/__init__.py"), frame("fit", "/home/me/train.py", 12)],
            "fit@train.py:12",
        ),
        ([frame("malloc", "??"), frame("f", "alloc.cpp"), frame("step", "C:\\work\\run.py", 3)], "step@run.py:3"),
        ([frame("add", "/v/torch/_ops.py"), frame("forward", "/v/transformers/m.py", 9)], "forward@m.py:9"),
        ([frame("to", "/v/torch/nn/module.py", 4), frame("run", "/usr/lib/python3.11/runpy.py")], "to@module.py:4"),
        ([frame("f", "x.cpp")], None),
        ([], None),
        ([{"name": 1}], None),
        ("no frames", None),
    ],
)
def test_an_allocation_is_named_by_the_innermost_frame_of_the_user(frames: Any, expected: str | None) -> None:
    snapshot = tiny()
    snapshot["device_traces"][0][1]["frames"] = frames
    trace = snapshot_to_trace(snapshot, where="f")
    assert trace.ranks[0].events.strings("name").get(0) == expected


def test_metadata_of_the_user_is_a_name() -> None:
    snapshot = tiny()
    snapshot["device_traces"][0][1].update(user_metadata="weights\n" + "x" * 500, frames=[frame("f", "a.py")])
    name = snapshot_to_trace(snapshot, where="f").ranks[0].events.strings("name").get(0)
    assert name is not None
    assert name.startswith("weights?xx")
    assert len(name) == 120


def test_recorded_stacks_give_names() -> None:
    names = read_snapshot(path_of("2.11-stacks")).ranks[0].events.strings("name")
    assert any(name.startswith("alloc@record.py:") for name in names.table)


def test_unknown_actions_are_counted() -> None:
    snapshot = tiny()
    for _ in range(3):
        snapshot["device_traces"][0].insert(2, {"action": "teleport"})
    snapshot["device_traces"][0].insert(0, {"action": "snapshot", "addr": 0, "size": 0, "stream": 0})
    recording = snapshot_to_recording(snapshot, where="f")
    assert "skipped 3 entries of unknown action 'teleport'" in recording.trace.notes
    assert recording.ranks[0].skipped == {"teleport": 3}
    assert recording.ranks[0].log.entry.tolist() == [1, 2, 6, 7, 8]


def test_marks_of_phases_become_phases_and_others_do_not() -> None:
    def mark(name: str, time: int, stage: str = "START") -> dict[str, Any]:
        return {"name": name, "device": 0, "stage": stage, "time_us": time}

    annotations = [
        mark("## forward ##", 1),
        mark("nccl:all_reduce", 2),
        mark("## forward ##", 2, "END"),
        mark("Optimizer.step#AdamW.step", 3),
        mark("## optimizer ##", 3),
        mark("forward", 4),
        {"stage": "START"},
    ]
    events = snapshot_to_trace(tiny(external_annotations=annotations), where="f").ranks[0].events
    found = [
        (Op(op).name, events.strings("name").get(i), int(events.ints("step")[i])) for i, op in enumerate(events.op)
    ]
    assert found == [
        ("PHASE", "forward", 0),
        ("ALLOC", None, -1),
        ("PHASE", "optimizer", 0),
        ("ALLOC", None, -1),
        ("PHASE", "forward", 1),
        ("FREE", None, -1),
    ]


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_a_kind_of_entry_that_was_not_recorded_is_filled_in(left_out: str) -> None:
    """`skip_actions` of `_record_memory_history` (2.11) leaves kinds out."""
    snapshot = snapshot_of("opt-125m_fp32_sdpa_b2_s512_sgd_A100")
    full = snapshot_to_recording(copy.deepcopy(snapshot), where="f")
    snapshot["device_traces"][0] = [e for e in snapshot["device_traces"][0] if e["action"] != left_out]
    partial = snapshot_to_recording(snapshot, where="f")
    assert (partial.trace.ranks[0].events.op == full.trace.ranks[0].events.op).all()
    assert (partial.trace.ranks[0].events.ints("id") == full.trace.ranks[0].events.ints("id")).all()
    assert len(partial.ranks[0].log) == len(snapshot["device_traces"][0])


# What is refused


def changed(*keys: Any, **values: Any) -> dict[str, Any]:
    """The small snapshot with the item at `keys` updated; a value of ... takes the key away."""
    snapshot = tiny()
    item: Any = snapshot
    for key in keys:
        item = item[key]
    item.update(values)
    for key in [key for key, value in item.items() if value is ...]:
        del item[key]
    return snapshot


ENTRY = ("device_traces", 0)
SEGMENT = ("segments", 0)
BLOCK = ("segments", 0, "blocks", 1)


@pytest.mark.parametrize(
    ("snapshot", "says"),
    [
        (None, "no list 'segments'"),
        (7, "no list 'segments'"),
        ({}, "no list 'segments'"),
        (changed(segments={}), "key 'segments': must be a list"),
        (changed(device_traces=5), "key 'device_traces': must be a list"),
        (changed(device_traces=[5]), "device 0: its trace must be a list"),
        (changed(device_traces=[[5]]), "device 0, entry 0: must be a dict"),
        (changed(segments=[5]), "segment 0: must be a dict"),
        (changed(*ENTRY, 1, action=...), "device 0, entry 1: key 'action': must be text"),
        (changed(*ENTRY, 1, action=[]), "device 0, entry 1: key 'action': must be text"),
        (changed(*ENTRY, 1, addr=...), "device 0, entry 1: key 'addr': missing"),
        (changed(*ENTRY, 1, addr="0x7f"), "device 0, entry 1: key 'addr': must be an integer"),
        (changed(*ENTRY, 1, size=-1), "device 0, entry 1: key 'size': must be an integer"),
        (changed(*ENTRY, 1, size=0), "device 0, entry 1: key 'size': must be an integer"),
        (changed(*ENTRY, 1, size=1 << 70), "device 0, entry 1: key 'size': must be an integer"),
        (changed(*ENTRY, 1, size=float("nan")), "device 0, entry 1: key 'size': must be an integer"),
        (changed(*ENTRY, 1, size=True), "device 0, entry 1: key 'size': must be an integer"),
        (changed(*ENTRY, 1, stream=-5), "device 0, entry 1: key 'stream': must be an integer"),
        (changed(*ENTRY, 1, addr=(1 << 62) - 5), "device 0, entry 1: key 'addr'"),
        (changed(*ENTRY, 1, pool_id=(1, 2, 3)), "device 0, entry 1: key 'pool_id': must be two integers"),
        (changed(*ENTRY, 1, action="oom"), "device 0, entry 1: key 'device_free': missing"),
        (changed(*SEGMENT, address=...), "segment 0: key 'address': missing"),
        (changed(*SEGMENT, address=-1), "segment 0: key 'address': must be an integer"),
        (changed(*SEGMENT, total_size=1), "segment 0: its blocks sum to"),
        (changed(*SEGMENT, total_size=1.0), "segment 0: key 'total_size': must be an integer"),
        (changed(*SEGMENT, device=-1), "segment 0: key 'device'"),
        (changed(*SEGMENT, device=10**9), "segment 0: key 'device'"),
        (changed(*SEGMENT, segment_type="medium"), "segment 0: key 'segment_type'"),
        (changed(*SEGMENT, segment_pool_id="00"), "segment 0: key 'segment_pool_id'"),
        (changed(*SEGMENT, blocks=...), "segment 0: key 'blocks': missing"),
        (changed(*BLOCK, state="lost"), "segment 0, block 1: key 'state'"),
        (changed(*BLOCK, state=["inactive"]), "segment 0, block 1: key 'state'"),
        (changed(*BLOCK, size=-1024), "segment 0, block 1: key 'size'"),
        (changed(*BLOCK, address=5), "segment 0, block 1: key 'address'"),
        (changed(*BLOCK, requested_size=5000), "segment 0, block 1: key 'requested_size'"),
        (changed(*BLOCK, requested_size="x"), "segment 0, block 1: key 'requested_size'"),
        (changed(allocator_settings=[]), "allocator_settings: must be a dict"),
        (changed(allocator_settings={"max_split_size": "x"}), "key 'max_split_size'"),
        (changed(allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "a\nb"}), "key 'PYTORCH_CUDA_ALLOC_CONF'"),
        (changed(allocator_settings={"garbage_collection_threshold": float("nan")}), "garbage_collection_threshold"),
        (changed(allocator_settings={"roundup_power2_divisions": {"1": 3}}), "powers of two"),
        # contradictions
        (changed(*ENTRY, 0, size=4 << 20), "entry 0: there is no segment of 4194304 bytes"),
        (changed(*ENTRY, 1, addr=0x7F0000000800), "entry 1: the address 0x7f0000000800 is not in use"),
        (changed(*ENTRY, 3, addr=0x7F0000000400), "entry 3: the block at 0x7f0000000400 is not waiting to be freed"),
        (changed(*ENTRY, 4, addr=0x7E0000000000), "entry 4: the address 0x7e0000000000 is in no segment"),
        (changed(*ENTRY, 4, addr=0x7F0000000400), "entry 4: the address 0x7f0000000400 is in use already"),
        (changed(*ENTRY, 4, size=1500), "entry 4: the address 0x7f0000000000 has only 1024 bytes free"),
        (changed(*ENTRY, 4, addr=0x7F0000000600), "entry 4: the block at 0x7f0000000600 lies inside"),
        (changed(*ENTRY, 2, action="segment_free"), "entry 2: the 600 bytes at 0x7f0000000400 overlap"),
        (changed(*ENTRY, 2, action="segment_map"), "entry 2: the 600 bytes at 0x7f0000000400 are not all mapped"),
        (changed(*ENTRY, 2, action="segment_alloc"), "entry 2: there is no segment"),
    ],
)
def test_bad_layouts_are_one_line_that_says_where(snapshot: Any, says: str) -> None:
    with pytest.raises(TraceError) as caught:
        snapshot_to_trace(snapshot, where="f.pickle")
    text = str(caught.value)
    assert text.startswith("f.pickle: ")
    assert says in text
    assert "\n" not in text


def test_overlapping_segments_are_refused() -> None:
    snapshot = tiny()
    other = copy.deepcopy(snapshot["segments"][0])
    other["address"] += 1 << 20
    for block in other["blocks"]:
        block["address"] += 1 << 20
    snapshot["segments"].append(other)
    with pytest.raises(TraceError, match="device 0: the segments at 0x7f0000000000 and 0x7f0000100000 overlap"):
        snapshot_to_trace(snapshot, where="f")


def test_lists_in_many_places_are_refused() -> None:
    """A file of a megabyte could otherwise ask for a million passes over a million entries."""
    snapshot = tiny()
    snapshot["device_traces"] = snapshot["device_traces"] * 2
    with pytest.raises(TraceError, match="the same list more than once"):
        snapshot_to_trace(snapshot, where="f")
    snapshot = tiny()
    snapshot["segments"].append({**snapshot["segments"][0], "address": 1 << 40})
    with pytest.raises(TraceError, match="the same list more than once"):
        snapshot_to_trace(snapshot, where="f")


def test_a_missing_file_and_a_truncated_one_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.pickle: cannot be read: no such file"):
        read_snapshot(tmp_path / "none.pickle")
    short = tmp_path / "short.pickle.gz"
    short.write_bytes(path_of("2.11-lag").read_bytes()[:3000])
    with pytest.raises(TraceError, match=r"short\.pickle\.gz: .*truncated"):
        read_snapshot(short)


def test_the_recordings_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000
