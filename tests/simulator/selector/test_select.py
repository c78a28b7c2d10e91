"""The choice of a method: the search, LLMem's Algorithm 1, what is said about it, and interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from graph.case import Case
from simulator.cli import main
from simulator.fit.plans import Judged
from simulator.fit.search import search
from simulator.reports.html import page
from simulator.reports.select import closeness, document_of, reason, render_json
from simulator.selector import select as selection
from simulator.selector.batch_search import Probe, largest, largest_rung, rungs
from simulator.selector.bounds import Work, most_tokens
from simulator.selector.candidates import Candidate, candidates, meshes, split_words
from simulator.selector.extrapolate import Line, prime_for, sizes_in
from simulator.selector.select import Asked, Outcome, Rival, Selection, chosen, ranked
from tests.places import ROOT
from tests.support.launched import model
from traces.errors import ConfigError
from traces.model import Events, Op, RankEvents, Strings, Trace

KEYS = {"model": "gpt2", "seq": 128}


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 40, 63, 64])
@pytest.mark.parametrize("offset", [-20, -3, -1, 0, 1, 5, 1000])
@pytest.mark.parametrize("first", [1, 7, 64, 100])
def test_largest_finds_the_limit_wherever_the_guess_is(limit: int, offset: int, first: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert 1 <= batch <= 64
        assert batch not in tried, "tried twice"
        tried.append(batch)
        return batch <= limit

    def guess(low: int, high: int) -> tuple[int, bool]:
        assert low == max((batch for batch in tried if batch <= limit), default=0)
        assert high == min((batch for batch in tried if batch > limit), default=65)
        return limit + offset, offset >= 0

    assert largest(fits, guess, 64, first) == limit


def test_a_right_guess_takes_one_try_more() -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 37

    assert largest(fits, lambda low, high: (37, len(tried) > 1), 4096, 7) == 37
    assert tried == [7, 37]


def test_a_guess_that_is_not_sure_is_tried() -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 38

    assert largest(fits, lambda low, high: (37, len(tried) > 2), 4096, 7) == 38
    assert tried == [7, 37, 38]


@given(st.integers(0, 300), st.integers(-50, 50), st.integers(1, 200), st.one_of(st.none(), st.integers(1, 120)))
def test_the_largest_rung_is_found_wherever_the_guess_is(limit: int, off: int, first: int, whole: int | None) -> None:
    tried: list[int] = []
    sizes = rungs(256, whole)

    def fits(batch: int) -> bool:
        assert batch not in tried or batch == tried[-1], "a capture is dear"
        tried.append(batch)
        return batch <= limit

    def guess(low: int, high: int) -> tuple[int, bool]:
        return min(max(limit + off, low), high - 1), False

    best, _ = largest_rung(sizes, fits, guess, first)
    assert best == max((one for one in sizes if one <= limit), default=0)
    assert not best or best in tried, "the answer is captured"


def test_micro_batches_that_people_use() -> None:
    assert rungs(100, None) == [1, 2, 4, 8, 16, 32, 64]
    assert rungs(4096, 60) == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]


def test_two_captures_are_enough_where_the_guesses_are_right() -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 86

    found = largest_rung(rungs(4096, None), fits, lambda low, high: (86, len(tried) > 1), 7)
    assert found == (64, 86)
    assert tried == [7, 64]


def outcome(name: str, batch: int, shares: int, **more: Any) -> Outcome:
    return Outcome(name, more.pop("keys", KEYS), shares, batch=batch, **more)


def by_llmem(**batches: int) -> Selection:
    """LLMem's choice on 4 GPUs from the largest batches of its methods."""
    asked = Asked(KEYS, ("V100-16GB",) * 4, policy="llmem")
    found = [
        outcome(one.name, batches[name], one.shares, keys=one.keys)
        for name, one in zip(("cdp", "adp", "tp", "both"), candidates(asked), strict=True)
    ]
    return ranked(asked, found, (), 0.0)


@pytest.mark.parametrize(
    ("batches", "chosen"),
    [
        ({"cdp": 0, "adp": 10, "tp": 13, "both": 12}, "4DP"),  # 40, 13, 24
        ({"cdp": 7, "adp": 10, "tp": 13, "both": 12}, "CDP-4"),  # 42 by the bonus of 1.5
        ({"cdp": 6, "adp": 9, "tp": 36, "both": 18}, "CDP-4"),  # all 36: the order of the algorithm
        ({"cdp": 0, "adp": 2, "tp": 20, "both": 10}, "4TP"),  # 8, 20, 20: TP before DP+TP
        ({"cdp": 0, "adp": 0, "tp": 3, "both": 2}, "2DP+2TP"),
    ],
)
def test_algorithm_1(batches: dict[str, int], chosen: str) -> None:
    found = by_llmem(**batches)
    assert found.winner is not None
    assert found.winner.name == chosen


def test_algorithm_1_advises_offload_where_nothing_fits() -> None:
    found = by_llmem(cdp=0, adp=0, tp=0, both=0)
    assert found.winner is None
    assert found.advice == "CPU offload"
    assert "CPU offload" in reason(found)


def test_nothing_is_finished() -> None:
    found = ranked(Asked(KEYS, ("A100-40GB",) * 4), [], ("ddp", "tp"), 0.0)
    assert (found.winner, found.advice, reason(found)) == (None, "", "no method is finished")


def test_where_no_method_fits_the_report_has_what_would() -> None:
    asked = Asked(KEYS, ("A100-40GB",) * 4)
    found = ranked(asked, [outcome("far", 0, 4, short=9), outcome("near", 0, 4, short=5)], (), 0.0)
    tried = search(
        Case.of({"model": "gpt2"}),
        lambda case: Judged(10 << 30, 9 << 30, "oom") if not case.checkpointing else Judged(9 << 30, 9 << 30, "fits"),
    )
    found = replace(found, remedies=tried)
    assert found.nearest is not None
    assert found.nearest.name == "near"
    assert ranked(asked, [outcome("one", 8, 4, tokens_per_second=1.0)], (), 0.0).nearest is None
    written = page.render(document_of(found))
    assert "near, one sample" in written
    assert "--checkpointing" in written
    assert render_json(found)["remedies"][0]["options"] == tried.fitting[0].options


def test_throughput_ranks_and_says_why() -> None:
    asked = Asked(KEYS, ("A100-40GB",) * 4)
    outcomes = [
        outcome("slow", 8, 4, tokens_per_second=100.0),
        outcome("large", 0, 4, short=5 << 20),
        outcome("fast", 4, 4, tokens_per_second=150.0, slack=100 << 20, slack_low=-50 << 20, slack_high=200 << 20),
    ]
    found = ranked(asked, outcomes, ("late",), 0.0)
    assert [one.name for one in found.outcomes] == ["fast", "slow", "large"]
    assert reason(found) == "fast is predicted fastest: 150 tokens/s, 50% more than slow"
    assert "100.00 MiB left" in closeness(found.outcomes[0])
    assert "(-50.00 MiB to " in closeness(found.outcomes[0])
    assert render_json(found)["unfinished"] == ["late"]
    written = page.render(document_of(found))
    assert "<script" not in written
    assert "large: one sample lacks 5.00 MiB" in written


def speeds(*rows: tuple[str, float, int, int]) -> list[Outcome]:
    """Methods by name, tokens per second, retries of a steady step, and MiB left."""
    known = {one.name: one.keys for one in candidates(Asked(KEYS, ("A100-40GB",) * 8))}
    return [
        outcome(name, 4, 4, keys=known[name], tokens_per_second=speed, step_retries=retries, slack=left << 20)
        for name, speed, retries, left in rows
    ]


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([("fsdp1", 101.0, 7, 0), ("fsdp2", 100.0, 0, 5000)], "fsdp2"),  # retries, and deprecated
        ([("fsdp1", 101.0, 0, 0), ("fsdp2", 100.0, 0, 0)], "fsdp2"),
        ([("ddp", 100.0, 1, 0), ("hsdp", 95.0, 0, 0)], "hsdp"),  # no retries, before the plainer method
        ([("ddp", 100.0, 1, 0), ("hsdp", 80.0, 0, 0)], "ddp"),  # slower by more than can be told
        ([("fsdp2", 100.0, 0, 0), ("ddp", 95.0, 0, 0)], "ddp"),
        ([("dp=4,tp=2", 100.0, 0, 10), ("tp", 95.0, 0, 0)], "tp"),
        ([("pp=2,dp=4", 100.0, 0, 10), ("dp=4,tp=2", 95.0, 0, 0)], "dp=4,tp=2"),
        ([("dp=4,tp=2", 100.0, 0, 10), ("dp=2,tp=4", 95.0, 0, 20)], "dp=2,tp=4"),  # more room
    ],
)
def test_what_a_model_of_time_cannot_tell_apart(rows: list[tuple[str, float, int, int]], name: str) -> None:
    best = chosen(speeds(*rows))
    assert best is not None
    assert best.name == name


def test_the_report_says_why_the_fastest_is_not_chosen() -> None:
    asked = Asked(KEYS, ("A100-40GB",) * 8)
    spared = (outcome("pp", 0, 1, at_most=70.0),)
    found = ranked(asked, speeds(("fsdp1", 101.0, 7, 0), ("fsdp2", 100.0, 0, 0)), (), 0.0, spared)
    says = "fsdp2: 100 tokens/s, within 10% of the fastest, fsdp1 with 101: chosen because"
    assert reason(found) == f"{says} its steps have no allocator retries"
    found = ranked(asked, speeds(("fsdp1", 101.0, 0, 0), ("fsdp2", 100.0, 0, 0)), (), 0.0, spared)
    assert reason(found) == f"{says} it is the plainer, current method"
    assert "cannot be more than 10% faster than fsdp2 (at most 70 tokens/s" in page.render(document_of(found))
    assert render_json(found)["not_tried"] == [{"method": "pp", "at_most_tokens_per_second": 70.0}]


# --- sizes ---------------------------------------------------------------------------------------------------------


def trace_of(rows: list[tuple[Op, dict[str, Any]]], world: int = 4) -> Trace:
    op = np.asarray([one for one, _ in rows], np.uint8)
    columns: dict[str, Any] = {}
    for name, default in (("duration_ns", 0), ("stream", 0), ("bytes", 0), ("step", -1), ("on", -1), ("id", -1)):
        columns[name] = np.asarray([row.get(name, default) for _, row in rows], np.int64)
    for name in ("kind", "group", "name"):
        table = list(dict.fromkeys(row[name] for _, row in rows if name in row))
        codes = [table.index(row[name]) if name in row else -1 for _, row in rows]
        columns[name] = Strings(np.asarray(codes, np.int32), tuple(table))
    ranks = tuple(range(world))
    return Trace((RankEvents(ranks, Events(op, columns)),), groups={"all": (ranks,)})


def sizes_of(trace: Trace) -> list[int]:
    events = trace.ranks[0].events
    return events.ints("bytes")[events.op == Op.ALLOC].tolist()


def made(batch: int, *extra: int) -> Trace:
    """A weight, an activation, a loss with a part that does not grow, and workspaces of one name."""
    sizes = [("weight", 7000), ("hidden", 2048 * batch), ("loss", 4 * batch + 512), *(("work", one) for one in extra)]
    rows = [(Op.ALLOC, {"id": place, "bytes": size, "name": name}) for place, (name, size) in enumerate(sizes)]
    return trace_of(rows)


def test_a_line_through_two_traces_gives_each_size_by_name() -> None:
    line = Line.through(made(7), 7, made(3), 3)
    assert sizes_of(line.at(12)) == [7000, 2048 * 12, 4 * 12 + 512]
    assert sizes_of(line.at(1)) == [7000, 2048, 516]
    more = Line.through(made(7, 64, 128), 7, made(3, 64), 3)  # one workspace more: both stay, the others are found
    assert sizes_of(more.at(12)) == [7000, 2048 * 12, 4 * 12 + 512, 64, 128]


def test_of_one_trace_grows_what_is_a_multiple_of_its_batch() -> None:
    rows = [
        (Op.ALLOC, {"id": 0, "bytes": 1001, "name": "a"}),  # 7 x 143
        (Op.ALLOC, {"id": 1, "bytes": 1000, "name": "b"}),
    ]
    assert sizes_of(Line.of(trace_of(rows), 7).at(14)) == [2002, 1000]


def test_the_first_batch_divides_no_size_of_the_model() -> None:
    bloom = {"vocab_size": 250880, "hidden_size": 1024, "bos_token_id": 7, "sub": {"width": 11 * 64}, "name": "x"}
    assert sizes_in(bloom) == [250880, 1024, 704]
    assert prime_for(sizes_in(bloom)) == 13  # 250880 = 7 x 35840, 704 = 11 x 64


def test_every_split_of_the_gpus_is_a_candidate() -> None:
    assert meshes(2) == []
    assert meshes(4) == [
        {"dp": 2, "tp": 2},
        {"fsdp2": 2, "tp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "fsdp2": 2},
        {"pp": 2, "tp": 2},
    ]
    whole = meshes(16)
    assert {"pp": 2, "fsdp2": 4, "tp": 2} in whole
    assert all(np.prod(list(axes.values())) == 16 and axes.get("tp", 1) <= 8 for axes in whole)
    names = [one.name for one in candidates(Asked(KEYS, ("A100-40GB",) * 4))]
    assert len(names) == len(set(names)) == 19
    mixed = {one.name: one.keys for one in candidates(Asked({**KEYS, "autocast": "bf16"}, ("A100-40GB",) * 4))}
    assert (mixed["ddp"].get("dtype"), mixed["ddp"]["autocast"]) == (None, "bf16")
    assert (mixed["deepspeed-3"]["dtype"], mixed["deepspeed-3"]["autocast"]) == ("bf16", "")
    shares = {one.name: one.shares for one in candidates(Asked(KEYS, ("A100-40GB",) * 4))}
    assert (shares["dp=2,tp=2"], shares["pp=2,fsdp2=2"], shares["pp=2,tp=2"], shares["fsdp2"]) == (2, 2, 1, 4)


# --- methods by name -----------------------------------------------------------------------------------------------


def names_of(methods: str = "", exclude: str = "", world: int = 8) -> list[str]:
    asked = Asked(
        KEYS, ("A100-40GB",) * world, methods=split_words(methods, world), exclude=split_words(exclude, world)
    )
    return [one.name for one in candidates(asked)]


def test_likely_methods_come_first() -> None:
    found = names_of()
    assert found[:5] == ["ddp", "fsdp2", "zero1", "hsdp", "tp"]
    kinds = ["pp" in name.replace("=", ",").split(",") for name in found]
    assert kinds == sorted(kinds), "pipelines last"
    assert found.index("fsdp1") > found.index("fsdp2")


@pytest.mark.parametrize(
    ("methods", "exclude", "names"),
    [
        ("fsdp2,ddp", "", ["ddp", "fsdp2"]),
        ("fsdp", "", ["fsdp2"]),
        ("zero-3", "", ["deepspeed-3"]),
        ("fsdp2=4,tp=2,ddp,tp=4,pp=2", "", ["ddp", "fsdp2=4,tp=2", "tp=4,pp=2"]),
        ("fsdp2=4,tp=2,dp=2,tp=4", "", ["dp=2,tp=4", "fsdp2=4,tp=2"]),
        ("fsdp2-nr", "", ["fsdp2-nr"]),  # not tried by itself
        ("deepspeed", "deepspeed-2", ["deepspeed-1", "deepspeed-3"]),
        ("zero", "deepspeed", ["zero1"]),
        ("", "pp,tp,megatron,deepspeed,fsdp1,tp-sp,fsdp2-offload", ["ddp", "fsdp2", "zero1", "hsdp"]),
    ],
)
def test_methods_by_name(methods: str, exclude: str, names: list[str]) -> None:
    assert sorted(names_of(methods, exclude)) == sorted(names)


def test_excluding_an_axis_leaves_out_its_meshes() -> None:
    assert not [name for name in names_of(exclude="pp") if name == "pp" or "pp=" in name]
    assert not [name for name in names_of(exclude="pipelines") if name == "pp" or "pp=" in name]
    assert not [name for name in names_of(exclude="meshes") if "=" in name]


# --- what cannot win ------------------------------------------------------------------------------------------------


def test_no_method_is_faster_than_its_bound(tmp_path: Path) -> None:
    """Of methods that are searched to the end, by the work of one that has the whole model on every GPU."""
    pytest.importorskip("torch")
    names = ("ddp", "fsdp1", "tp", "pp=2,dp=2", "dp=2,tp=2")
    keys = {"model": model(tmp_path), "seq": 64, "memory": 1 << 30}
    asked = Asked(keys, ("T4-16GB",) * 4, methods=names)
    ddp, *others = candidates(asked)
    first = selection.search(ddp, asked)
    assert first.work is not None
    assert first.work.seconds > 0
    for one in others:
        micro = int(one.keys.get("microbatches", 1))
        most = most_tokens(one, micro, 64, [first.work], selection.clock_of(asked))
        assert 0 < selection.search(one, asked).tokens_per_second <= most


def test_bounds_of_pipelines_and_of_tensor_parallelism() -> None:
    asked = Asked(KEYS, ("A100-40GB",) * 8)
    one = {candidate.name: candidate for candidate in candidates(asked)}
    clock = selection.clock_of(asked)
    whole = Work(0.5)
    assert most_tokens(one["fsdp1"], 1, 100, [], clock) == float("inf")
    assert most_tokens(one["fsdp1"], 1, 100, [whole], clock) == 8 * 100 / 0.5
    assert most_tokens(one["pp"], 8, 100, [whole], clock) == pytest.approx(8 * 100 / 0.5 * 8 / 15)
    assert most_tokens(one["pp=2,dp=4"], 6, 100, [whole], clock) == pytest.approx(8 * 100 / 0.5 * 6 / 7)
    sent = Work(0.6, 1e9, 8)  # of tp; its kernels are not the least
    wait = 1 / 240e9 * 1e9  # 300 GB/s of NVLink 3, of which 80 % are reached
    assert most_tokens(one["dp=4,tp=2"], 1, 100, [whole, sent], clock) == pytest.approx(800 / (0.5 + 2 * wait))
    assert most_tokens(one["dp=2,tp=4"], 1, 100, [whole, sent], clock) == pytest.approx(800 / (0.5 + 6 * wait))


def test_what_cannot_win_is_not_searched(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    captured: list[int] = []
    fits = Probe.fits

    def noted(self: Probe, batch: int) -> bool:
        captured.append(batch)
        return fits(self, batch)

    monkeypatch.setattr(Probe, "fits", noted)
    asked = Asked({"model": small, "seq": 128, "memory": 1 << 30}, ("T4-16GB",) * 2)
    fsdp1 = next(one for one in candidates(asked) if one.name == "fsdp1")
    known = selection.search(fsdp1, asked)
    assert known.fits
    captured.clear()
    assert selection.search(fsdp1, asked, Rival(floor=100.0, fastest=90.0)).at_most == 90.0
    assert captured == []
    spared = selection.search(fsdp1, asked, Rival(floor=1e12, near=1021))
    assert captured == [1021]
    assert known.tokens_per_second <= spared.at_most < 1e12
    assert selection.search(fsdp1, asked, Rival(floor=1.0, near=1021)).batch == known.batch


# --- end to end ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model of two layers as a config.json."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 1000, "n_positions": 128}), "utf-8")
    return str(tmp_path / "config.json")


def few(names: tuple[str, ...]) -> Callable[[Asked], tuple[Candidate, ...]]:
    return lambda asked: tuple(one for one in candidates(asked) if one.name in names)


def test_the_batch_found_is_the_largest(small: str) -> None:
    """At the batch that was found every rank fits, at twice as much some rank does not, and so it is with the largest
    and one more: all are captured here.
    """
    pytest.importorskip("torch")
    from simulator.estimator.estimate import estimate

    options = ["--memory", "1600MiB", "--seq", "128", "--margin", "0", "--jobs", "1", "--json"]
    options += ["--methods", "ddp,zero1,fsdp2,pp"]
    shown = CliRunner().invoke(main, ["select", small, "--gpus", "2", "--gpu", "T4-16GB", *options])
    document = json.loads(shown.stdout)
    assert {one["method"] for one in document["methods"]} == {"ddp", "zero1", "fsdp2", "pp"}
    aside = sum(term["bytes"] for term in document["outside"])
    for one in document["methods"]:
        whole = {**one["case"], "memory": 1600 << 20}
        assert one["verdict"] == estimate(whole, analyse=False).verdict != "oom", "a margin of 0 is the estimate itself"
        assert one["tried"][str(one["batch"])], "the answer itself was captured"
        assert one["batch"] & (one["batch"] - 1) == 0, "a power of two"
        sizes = {one["batch"]: True, 2 * one["batch"]: False, one["largest"]: True, one["largest"] + 1: False}
        for batch, fits in sizes.items():
            found = estimate({**one["case"], "batch": batch}, context=aside, analyse=False)
            assert (found.verdict != "oom") == fits, one


def test_a_global_batch_is_divided(small: str, tmp_path: Path) -> None:
    """23 samples would fit DDP, 24 the pipeline: of 120 it takes a part that divides them."""
    pytest.importorskip("torch")
    room = sum(term.bytes for term in selection.outside(Asked(KEYS, ("T4-16GB",) * 2), 1)) + (100 << 20)
    options = ["--memory", f"{room}B", "--seq", "128", "--margin", "0", "--jobs", "1", "--json"]
    words = [
        "select",
        small,
        "--gpus",
        "2",
        "--gpu",
        "T4-16GB",
        "--global-batch",
        "120",
        "--methods",
        "ddp,pp",
        *options,
    ]
    words += ["--config", str(tmp_path / "c")]
    shown = CliRunner().invoke(main, words)
    found = {one["method"]: one for one in json.loads(shown.stdout)["methods"]}
    assert [(one["batch"], one["accum"], one["samples"]) for one in found.values()] == [(20, 3, 120), (20, 1, 120)]
    assert found["pp"]["case"]["microbatches"] == 6
    assert (tmp_path / "c/launch.sh").read_text("utf-8").count("--nproc-per-node=2") == 1


def test_what_a_method_lacks(tmp_path: Path) -> None:
    """DDP needs 478 MiB of reserved memory by `llmem estimate` on a large GPU; it has 400."""
    pytest.importorskip("torch")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 6, "n_embd": 512, "n_head": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 8000, "n_positions": 512}), "utf-8")
    keys = {"model": str(tmp_path / "config.json"), "seq": 512, "dtype": "bf16"}
    asked = Asked(keys, ("T4-16GB",) * 2, margin=0, methods=("ddp",))
    aside = sum(term.bytes for term in selection.outside(asked, 1))
    found = selection.select(replace(asked, keys={**keys, "memory": aside + (400 << 20)}), jobs=1)
    assert found.winner is None
    assert found.nearest is not None
    assert found.nearest.limit == 400 << 20
    assert found.nearest.short == 78 << 20


def test_gpus_of_two_sizes_are_limited_by_the_smaller(small: str) -> None:
    asked = Asked({**KEYS, "model": small}, ("A100-80GB", "A100-40GB"))
    ddp = next(one for one in candidates(asked) if one.name == "ddp")
    assert ddp.keys["memory"] == [85_097_971_712, 42_298_834_944]


def test_interruption_keeps_what_is_finished(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "candidates", few(("ddp", "fsdp2")))

    def one(candidate: Candidate, *_: Any) -> dict[str, Any]:
        if candidate.name == "fsdp2":
            signal.raise_signal(signal.SIGINT)
        return {"outcome": outcome("ddp", 3, 2, tokens_per_second=9.0, step_seconds=1.0)}

    monkeypatch.setattr(selection, "_one", one)
    shown = CliRunner().invoke(main, ["select", small, "--gpus", "2", "--gpu", "T4", "--jobs", "1", "--json"])
    assert shown.exit_code == 130
    document = json.loads(shown.stdout)
    assert (document["winner"], document["unfinished"]) == ("ddp", ["fsdp2"])


def slow_work(documents: Any, _: Any) -> list[dict[str, Any]]:
    """In a worker: the first method has an answer at once, the others take long."""
    candidate = documents[0][0]
    if candidate.name != "ddp":
        Path(os.environ["STARTED"], candidate.name).touch()
        time.sleep(60)
    return [{"outcome": outcome(candidate.name, 3, 2, tokens_per_second=9.0, step_seconds=1.0)}]


def test_ctrl_c_while_workers_are_busy(small: str, tmp_path: Path) -> None:
    """As a terminal does it: parent, fork server and workers get the signal; the answer that is there is printed."""
    script = (
        "import simulator.selector.select as s; from simulator.cli import main;"
        "from simulator.estimator.jobs import local_pool;"
        "from tests.simulator.selector.test_select import few, slow_work;"
        "s._work = slow_work; s._pool = lambda jobs: local_pool(jobs);"
        f"s.candidates = few(('ddp', 'fsdp2', 'zero1')); main(['select', {small!r}, '--gpus', '2', '--gpu', 'T4',"
        " '--jobs', '2', '--json'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "STARTED": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 100
        while not {"fsdp2", "zero1"} <= {path.name for path in tmp_path.iterdir()} and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        printed, said = process.communicate(timeout=30)  # ends when the last worker has closed it
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "note: interrupted: 1 of 3 methods are finished\n")
    document = json.loads(printed)
    assert (document["winner"], sorted(document["unfinished"])) == ("ddp", ["fsdp2", "zero1"])


def test_keys_of_a_method_are_left_out_of_the_others() -> None:
    found = {one.name: one.keys for one in candidates(Asked({**KEYS, "schedule": "GPipe"}, ("A100-40GB",) * 4))}
    assert {name for name, keys in found.items() if "schedule" in keys} == {name for name in found if "pp" in name}
    assert all(keys["seq"] == KEYS["seq"] for keys in found.values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "T4,T4", "--gpus", "3"], "one for each GPU"),
        (["--gpus", "4", "--methods", "fsdp2x"], "did you mean 'fsdp2'?"),
        (["--gpus", "4", "--methods", "fsdp2,piplines"], "did you mean 'pipelines'?"),
        (["--gpus", "4", "--strategy", "gemini"], "not one of these GPUs'"),
        (["--gpus", "4", "--methods", "fsdp2=2,tp=4"], "fsdp2=2,tp=4 has 8 ranks, but world is 4"),
        (["--gpus", "2", "--exclude", "nosuch"], "'nosuch'"),
        (["--gpus", "2", "--methods", "ddp", "--exclude", "ddp"], "no method is left"),
        (["--per-device-train-batch-size", "4"], "--per-device-train-batch-size is what select finds"),
        (["--prompt", "4"], "--prompt: only with --task: 'inference'"),
        (["--gpu", "Z9"], "unknown GPU"),
        (["--margin", "1"], "margin of 1"),
        (["--dtype", "fp61"], "--dtype"),
    ],
)
def test_wrong_questions_are_refused_at_once(words: list[str], says: str) -> None:
    shown = CliRunner().invoke(main, ["select", "gpt2", *words])
    assert shown.exit_code in (1, 2)
    assert says in shown.output + shown.stderr


def test_a_model_that_no_method_can_take_is_one_error() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="model 'nosuch' is neither in the catalogue"):
        selection.select(Asked({"model": "nosuch"}, ("A100-80GB",) * 2), jobs=1)
