"""The benchmarks: workloads like the recordings, and figures of every part. How fast things are is not tested."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from simulator.allocator import layout as at
from simulator.engine.replay import replay
from tests.benchmarks import timing, workloads
from tests.benchmarks.__main__ import FREE_BLOCKS, PARTS, main
from tests.benchmarks.compile_all import main as compile_all
from tests.benchmarks.figures import Figure, Section, as_text
from tests.support import golden
from traces.check import check
from traces.model import Events, Int64Array, Op

IN_PROCESS = ("kernels", "replay", "free-lists", "memory")
LINES = len(workloads.step_script(first=False).rows)


def rows_of(events: Events) -> list[tuple[str, int, int]]:
    """Allocations and frees, as the recordings write them."""
    columns = zip(events.op.tolist(), events.ints("id").tolist(), events.ints("bytes").tolist(), strict=True)
    return [("m" if op == Op.ALLOC else "f", ident, size) for op, ident, size in columns if op <= Op.FREE]


def recorded_rows(name: str) -> list[tuple[str, int, int]]:
    rows = [row for row in golden.load(name).rows if row[0] in ("m", "f")]
    return [(row[0], row[1], row[2] if row[0] == "m" else 0) for row in rows]


def workspaces_of(rows: list[tuple[str, int, int]], tokens: list[int]) -> Int64Array:
    """The sizes after each attention's 64 bytes a token: the only random ones but the numbers of tokens."""
    steps = iter(tokens)
    found: list[int] = []
    count = 0
    for before, row in itertools.pairwise(rows):
        if len(found) == count:
            count += workloads.LAYERS
            current = next(steps, 0)
        if before[2] == 64 * current and row[0] == "m" and before[0] == "m":
            found.append(row[2])
    return np.array(found).reshape(-1, workloads.LAYERS)


@pytest.mark.parametrize("name", ["2.11.0/transformer.default", "same_events/transformer.default"])
def test_transformer_is_the_recorded_program(name: str) -> None:
    recorded = recorded_rows(name)
    sizes = [size for _, _, size in recorded]
    vocabulary = 2 * workloads.VOCABULARY
    tokens = [size // vocabulary for size, then in itertools.pairwise(sizes) if then == 2 * size and size > 2**25]
    tokens = [count for count in tokens if 8 * count in sizes]
    events = workloads.training(tokens, workspaces_of(recorded, tokens))
    assert rows_of(events) == recorded
    assert len(tokens) == 7


def test_uniform_has_the_recorded_statistics() -> None:
    events = workloads.uniform(20_000, seed=1).events
    recorded = np.array([size for kind, _, size in recorded_rows("2.11.0/uniform.default") if kind == "m"])
    sizes = events.ints("bytes")[events.op == Op.ALLOC]
    assert sizes.min() >= 512
    assert sizes.max() <= 24 * 2**20
    for share in (10, 25, 50, 75, 90):
        assert np.percentile(sizes, share) == pytest.approx(np.percentile(recorded, share), abs=0.05 * sizes.max())
    live = np.cumsum(np.where(events.op == Op.ALLOC, 1, -1))[4000:]
    assert 150 < live.min() < 200 < live.max() < 250


@pytest.mark.parametrize("make", [workloads.transformer, workloads.uniform])
@pytest.mark.parametrize("count", [1, 77, 2 * LINES, 5000])
def test_workloads_are_legal_and_have_the_events_asked_for(make: Any, count: int) -> None:
    workload = make(count)
    assert len(workload.events) == count
    trace = workload.trace("", "2.13")
    check(trace)
    assert replay(trace).verdict == "fits"


@pytest.mark.parametrize("used", [None, 12])
@pytest.mark.parametrize("blocks", [10, 300])
def test_free_list_stays_as_long_as_asked_for(blocks: int, used: int | None) -> None:
    workload = workloads.free_list(blocks, 400, used=used)
    check(workload.trace("", "2.13"))
    program = timing.compiled(workload)
    machine = timing.build(workload, program, "", "2.13")
    reserved = []
    lengths: Counter[int] = Counter()
    for stop in range(workload.untimed, len(program) + 1):
        assert machine.step(stop) == at.PAUSED
        reserved.append(machine.stat(at.RESERVED_BYTES)["all"][0])
        lengths[machine.stat(at.INACTIVE_SPLIT)["all"][0]] += 1
    assert set(reserved) == {reserved[0]}
    assert set(lengths) == {blocks, blocks - 1}
    timed = workload.events.ints("bytes")[workload.untimed :]
    taken = set((-(-timed[timed > 0] // 512)).tolist())
    assert len(taken) <= (used or blocks + workloads.PROBES)
    assert len(taken) > 10


def test_every_call_of_a_kernel_is_compiled() -> None:
    compile_all()


def documents(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["--json", "--rounds", "1", *arguments])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_figures_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents(capsys, "--events", "1500", *[word for name in IN_PROCESS for word in ("--only", name)])
    assert document["about"]["events"] == 1500
    sections = {section["name"]: section for section in document["sections"]}
    assert list(sections) == list(IN_PROCESS)
    for section in sections.values():
        assert section["calibration_ns"] > 0
        for figure in section["figures"]:
            assert math.isfinite(figure["value"])
            assert figure["value"] > 0
            assert (figure["goal"] is None) == (figure["met"] is None)
    for name in ("kernels", "replay"):
        assert len(sections[name]["figures"]) == 8  # two workloads, two settings, two releases
    assert all(figure["goal"] == 140 for figure in sections["kernels"]["figures"])
    free_lists = [figure["name"] for figure in sections["free-lists"]["figures"]]
    assert [name for name in free_lists if "all in use" in name][: len(FREE_BLOCKS)] == [
        f"{blocks:,} free blocks, all in use" for blocks in FREE_BLOCKS
    ]


def test_figures_of_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents(capsys, "--events", "300", "--only", "file", "--only", "start-up")
    file, start = document["sections"]
    assert [file["name"], start["name"]] == ["file", "start-up"]
    goals = [figure["goal"] for figure in (*file["figures"], *start["figures"]) if figure["goal"] is not None]
    assert goals == [10, 4, 150, 1.5]
    assert "3,000 events" in file["title"]


def test_a_thousand_replays(capsys: pytest.CaptureFixture[str]) -> None:
    (section,) = documents(capsys, "--events", "300", "--only", "stress")["sections"]
    (figure,) = section["figures"]
    assert "30 events" in section["title"]
    assert figure["goal"] == 60
    assert figure["details"]["replays"] == 1001  # a thousand, and the trace's own settings


def test_cold_only_where_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (title, _) in list(PARTS.items()):
        monkeypatch.setitem(PARTS, name, (title, lambda _: [Figure("nothing", 1.0, "s")]))
    assert "cold" not in [section["name"] for section in documents(capsys)["sections"]]
    assert documents(capsys, "--cold")["sections"][-1]["name"] == "cold"
    assert [section["name"] for section in documents(capsys, "--only", "cold")["sections"]] == ["cold"]


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--events", "0"], ["--rounds", "-1"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_text_shows_each_figure_beside_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        Figure("fast", 70.0, "ns a pair", 140.0, {"M events/s": 28.5}),
        Figure("slow", 1234.5, "ns a pair", 140.0),
    ]
    lines = as_text(Section("kernels", "Kernels", 5.25, figures)).splitlines()
    assert lines == [
        "Kernels [calibration 5.25 ns]",
        "  fast        70 ns a pair  (goal: under 140 ns, met)  28.5 M events/s",
        "  slow     1,234 ns a pair  (goal: under 140 ns, MISSED)",
    ]
    main(["--only", "memory", "--events", "600"])
    assert "real allocator (C++): 681-867 ns a pair" in capsys.readouterr().out
