"""The choice of a method: the search, LLMem's Algorithm 1, what is said about it, and interruption."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from simulator import selection
from simulator.cli import main
from simulator.report_select import closeness, reason, render_html, render_json
from simulator.selection import Asked, Outcome, Selection, between, candidates, largest, ranked
from traces.model import Events, Op, RankEvents, Strings, Trace

KEYS = {"model": "gpt2", "seq": 128}


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 40, 63, 64])
@pytest.mark.parametrize("offset", [-20, -3, -1, 0, 1, 5, 1000])
@pytest.mark.parametrize("sure", [True, False])
def test_largest_finds_the_limit_wherever_the_guess_is(limit: int, offset: int, sure: bool) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert 1 <= batch <= 64
        assert batch not in tried, "tried twice"
        tried.append(batch)
        return batch <= limit

    assert largest(fits, lambda: (limit + offset, sure), 64) == limit


def test_a_right_guess_takes_two_tries_more() -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 37

    assert largest(fits, lambda: (37, True), 4096) == 37
    assert tried == [8, 37, 38]


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


def test_throughput_ranks_and_says_why() -> None:
    asked = Asked(KEYS, ("A100-40GB",) * 4)
    outcomes = [
        outcome("slow", 8, 4, tokens_per_second=100.0),
        outcome("large", 0, 4, short=5, remedies=("expandable_segments:True",)),
        outcome("fast", 4, 4, tokens_per_second=150.0, slack=100 << 20, slack_low=-50 << 20, slack_high=200 << 20),
    ]
    found = ranked(asked, outcomes, ("late",), 0.0)
    assert [one.name for one in found.outcomes] == ["fast", "slow", "large"]
    assert reason(found) == "fast is predicted fastest: 150 tokens/s, 50% more than slow"
    assert "100.00 MiB left" in closeness(found.outcomes[0])
    assert "lack 50.00 MiB" in closeness(found.outcomes[0])
    assert render_json(found)["unfinished"] == ["late"]
    page = render_html(found)
    assert "<script" not in page
    assert "it would fit with expandable_segments:True" in page


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


def test_sizes_between_two_traces() -> None:
    first, last = (trace_of([(Op.ALLOC, {"id": 0, "bytes": size}), (Op.FREE, {"id": 0})]) for size in (2048, 8192))
    made = between(first, last, 2.0)
    assert made is not None
    assert made.ranks[0].events.ints("bytes").tolist() == [14336, 0]
    assert between(first, trace_of([(Op.ALLOC, {"id": 0, "bytes": 1})]), 0.5) is None


# --- end to end ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model of two layers as a config.json."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 1000, "n_positions": 128}), "utf-8")
    return str(tmp_path / "config.json")


def few(names: tuple[str, ...]) -> Callable[[Asked], tuple[selection.Candidate, ...]]:
    whole = selection.candidates
    return lambda asked: tuple(one for one in whole(asked) if one.name in names)


def test_the_batch_found_is_the_largest(small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from simulator.estimation import estimate

    monkeypatch.setattr(selection, "candidates", few(("ddp", "fsdp2")))
    options = ["--memory", "1600MiB", "--seq", "128", "--global-batch", "4000", "--jobs", "1", "--json"]
    words = ["select", small, "--gpus", "2", "--gpu", "T4-16GB", *options, "--config", str(tmp_path / "c")]
    shown = CliRunner().invoke(main, [*words, "--margin", "0"])
    document = json.loads(shown.stdout)
    assert {one["method"] for one in document["methods"]} == {"ddp", "fsdp2"}
    best = document["methods"][0]
    assert best["verdict"] == "fits"
    assert best["batch"] * best["accum"] == 2000
    aside = sum(term["bytes"] for term in document["outside"])
    top = max(int(batch) for batch, fits in best["tried"].items() if fits)
    for batch, verdict in ((top, "fits"), (top + 1, "oom")):
        if best["tried"].get(str(batch)) is not None:
            case = {**best["case"], "batch": batch, "accum": 1}
            assert estimate(case, context=aside, analyse=False).verdict == verdict
    assert (tmp_path / "c/launch.sh").read_text("utf-8").count("--nproc-per-node=2") == 1


def test_gpus_of_two_sizes_are_limited_by_the_smaller(small: str) -> None:
    asked = Asked({**KEYS, "model": small}, ("A100-80GB", "A100-40GB"))
    ddp = next(one for one in candidates(asked) if one.name == "ddp")
    assert ddp.keys["memory"] == [85_097_971_712, 42_298_834_944]


def test_interruption_keeps_what_is_finished(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "candidates", few(("ddp", "fsdp2")))

    def one(candidate: selection.Candidate, asked: Asked) -> dict[str, Any]:
        if candidate.name == "fsdp2":
            signal.raise_signal(signal.SIGINT)
        return {"outcome": outcome("ddp", 3, 2, tokens_per_second=9.0, step_seconds=1.0)}

    monkeypatch.setattr(selection, "_one", one)
    shown = CliRunner().invoke(main, ["select", small, "--gpus", "2", "--gpu", "T4", "--jobs", "1", "--json"])
    assert shown.exit_code == 130
    document = json.loads(shown.stdout)
    assert (document["winner"], document["unfinished"]) == ("ddp", ["fsdp2"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "T4,T4", "--gpus", "3"], "one for each GPU"),
        (["--strategy", "ddp"], "what select finds"),
        (["--gpu", "Z9"], "unknown GPU"),
        (["--margin", "1"], "margin of 1"),
        (["--dtype", "fp61"], "--dtype"),
    ],
)
def test_wrong_questions_are_refused_at_once(words: list[str], says: str) -> None:
    shown = CliRunner().invoke(main, ["select", "gpt2", *words])
    assert shown.exit_code in (1, 2)
    assert says in shown.output + shown.stderr
