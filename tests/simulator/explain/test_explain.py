"""`explain` as a whole: snapshots, the command and its reports."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from simulator.cli import main
from simulator.explain.explain import explain
from simulator.explain.snapshot import of_snapshot
from tests.simulator.explain.posted import FOLDER
from tests.support.out_of_memory_forms import caching_allocator
from tests.support.snapshots import NAMES, memory_stats, path_of, snapshot_of
from traces.errors import TraceError

SAID = {"asked": "2.00 GiB", "total": "79.11 GiB", "free": "5.94 MiB", "allocated": "70.00 GiB"}
SAID |= {"unallocated": "9.00 GiB", "gpu": "3"}
FAILED = [name for name in NAMES if "oom" in name]


def ran(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(main, ["explain", *arguments], input=text)


@pytest.mark.parametrize("name", FAILED)
def test_a_snapshot_agrees_with_what_torch_counted(name: str) -> None:
    (found,) = of_snapshot(snapshot_of(name), name)
    segments = snapshot_of(name)["segments"]
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = sum(segment["active_size"] for segment in segments)
    assert found.times == memory_stats()[name]["0"]["num_ooms"]
    assert found.held == sum(segment["total_size"] for segment in segments)
    assert found.allocated == active
    assert sum(one.bytes for one in found.tensors) == active
    assert found.largest == max(block["size"] for block in blocks if block["state"] == "inactive")
    assert explain(pickle.dumps(snapshot_of(name)), name).messages[0][1].cause == "fragmentation"


def test_a_limit_shows_in_a_snapshot_as_memory_that_was_free() -> None:
    ((found, judged),) = explain(pickle.dumps(snapshot_of("2.12-fraction")), "it").messages
    assert judged.cause == "fraction"
    assert (found.free or 0) > (found.asked or 0) > 0


def test_tensors_are_named_by_the_line_that_asked() -> None:
    snapshot = snapshot_of("2.13-oom")
    block = max(
        (block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] != "inactive"),
        key=lambda block: block["size"],
    )
    frame = {"filename": "/home/me/train.py", "line": 88, "name": "forward"}
    asked = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["addr"] == block["address"]]
    asked[-1]["frames"] = [frame]
    (found,) = of_snapshot(snapshot, "it")
    assert {one.name: one.bytes for one in found.tensors}["forward@train.py:88"] == block["size"]


def test_nothing_fails_in_a_snapshot() -> None:
    with pytest.raises(TraceError, match="no allocation fails"):
        of_snapshot(snapshot_of("2.11-stacks"), "it")


def test_a_log_of_four_ranks() -> None:
    shown = ran(str(FOLDER / "four_ranks.log"))
    assert shown.exit_code == 0
    assert "rank 0, GPU 0, line 16" in shown.stdout
    assert "24.61 GiB of other processes" in shown.stdout
    assert "10.77 GiB in pieces of what PyTorch holds + 1.12 GiB free >= 3.91 GiB asked for" in shown.stdout
    found = json.loads(ran(str(FOLDER / "four_ranks.log"), "--json").stdout)["messages"]
    causes = {one["rank"]: one["cause"] for one in found}
    assert causes == {0: "other_process", 1: "fragmentation", 2: "fragmentation", 3: "fragmentation"}
    assert "| rank 2, GPU 2, line 18 |" in ran(str(FOLDER / "four_ranks.log"), "--markdown").stdout


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_pasted_text(arguments: tuple[str, ...]) -> None:
    shown = ran(*arguments, text=caching_allocator("2.10", SAID))
    assert shown.exit_code == 0
    assert "fragmentation" in shown.stdout
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in shown.stdout


def test_a_snapshot_from_a_file_and_from_a_pipe() -> None:
    name = "2.13-oom"
    shown = ran(str(path_of(name)), "--json")
    piped = CliRunner().invoke(main, ["explain", "--json"], input=pickle.dumps(snapshot_of(name)))
    assert shown.exit_code == piped.exit_code == 0
    assert json.loads(shown.stdout) == json.loads(piped.stdout)


@pytest.mark.parametrize("text", ["", "all went well\n"])
def test_no_message_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(text)
    shown = ran(str(tmp_path / "train.log"))
    assert shown.exit_code == 1
    assert shown.stderr.count("\n") == 1
    assert "train.log: no out-of-memory message" in shown.stderr


def test_what_is_no_snapshot_is_one_line() -> None:
    shown = CliRunner().invoke(main, ["explain"], input=b"\x80\x04garbage")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("error: the text: ")
    assert shown.stderr.count("\n") == 1
