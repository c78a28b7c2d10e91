"""From a case to an answer, with graphs written by hand in the place of captured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graph.case import Case
from graph.model import StepGraph
from simulator.engine.min_memory import smallest_memory
from simulator.engine.replay import replay
from simulator.estimator.estimate import (
    ANSWER_KEYS,
    KEPT_GRAPHS,
    answer,
    capture_key,
    captured,
    estimate,
    forget_graphs,
)
from simulator.estimator.outside import communicators
from simulator.reports.verdict import exit_code, summary
from strategies import lower
from strategies.gemini.event_builder import EventBuilder
from tests.accuracy.recordings import Recording, recordings
from tests.support.step_graphs import Writer, training
from traces.errors import ConfigError
from traces.model import Device, RankEvents, Trace

MIB = 1 << 20
UNIT = 3 * MIB
#: Outside the allocator on a V100, whose 80 multiprocessors run 2048 threads each with 1 KiB of stack: the context has
#: 160 MiB of them and 200 (60 to 360) beside, kernels 130 (30 to 360).
V100 = {"likely": 490 * MIB, "low": 250 * MIB, "high": 880 * MIB}


def of_units(case: Case) -> StepGraph:
    """The written training run with the case's micro-batches, 3 MiB a tensor."""
    return training(case.document(), steps=case.steps, micro=case.accum, unit=UNIT)


def test_an_answer_repeats_the_case_and_adds_peaks() -> None:
    given = {"model": "m", "batch": 2, "gpu": "V100-16GB", "steps": 2}
    found = answer(given, capture=of_units)
    assert {key: found[key] for key in given} == given
    assert set(found) - set(given) <= set(ANSWER_KEYS)
    assert found["verdict"] == "fits"
    assert found["device_total"] == found["peak_reserved"] + V100["likely"]
    assert found["peak_allocated"] == 4 * UNIT  # weight, activation, gradient, state in the second backward
    assert found["peak_reserved"] == 20 * MIB  # 3 MiB come out of one segment of 20 MiB
    assert found["events"] == 6 + 3  # weight, state; two activations and gradients, of which three are freed
    assert found["seconds"] >= 0
    json.dumps(found)


def test_phases_are_those_of_the_run() -> None:
    phases = answer({"model": "m", "steps": 2}, capture=of_units)["phases"]
    assert phases == {
        "load": {"peak": UNIT, "left": UNIT},
        "fwd_first": {"peak": 2 * UNIT, "left": 2 * UNIT},
        "bwd_first": {"peak": 3 * UNIT, "left": 2 * UNIT},
        "step_first": {"peak": 3 * UNIT, "left": 3 * UNIT},
        # the gradient is there until the second step's forward has begun: the mark of a step stands before zero_grad
        "fwd_last": {"peak": 3 * UNIT, "left": 3 * UNIT},
        "bwd_last": {"peak": 4 * UNIT, "left": 3 * UNIT},
        "step_last": {"peak": 3 * UNIT, "left": 3 * UNIT},
        "end": {"peak": 3 * UNIT, "left": 3 * UNIT},
    }


def test_the_last_micro_batch_of_a_step_counts() -> None:
    """A loop that notes its peaks by step overwrites those of the first micro-batch."""

    def shrinking(case: Case) -> StepGraph:
        writer = Writer(case.document())
        writer.phase("load")
        for size in (5, 2):
            writer.phase("forward", 0)
            writer.free(writer.alloc(size * MIB))
        return writer.graph()

    found = estimate({"model": "m", "steps": 1}, capture=shrinking)
    assert found.document()["phases"]["fwd_first"]["peak"] == 2 * MIB
    assert {phase.key: phase.peak for phase in found.worst.phases}["fwd_first"] == 5 * MIB


def test_out_of_memory_has_no_peaks() -> None:
    for context in ("auto", 0):
        found = answer({"model": "m", "memory": 5 * MIB}, context=context, capture=of_units)
        assert found["verdict"] == "oom"
        assert found["peak_allocated"] is found["peak_reserved"] is found["device_total"] is found["phases"] is None


def test_one_verdict_over_the_range_of_what_lies_outside() -> None:
    """Of 20 MiB reserved beside a range: `tight` begins with its most and ends below its least."""
    likely, low, high = V100["likely"], V100["low"], V100["high"]
    for room, verdict, counted, oom_with in (
        (high, "fits", likely, None),
        (high - 1, "tight", likely, high),
        (likely, "tight", likely, high),
        (likely - 1, "tight", low, likely),
        (low, "tight", low, likely),
        (low - 1, "oom", likely, None),
    ):
        found = estimate({"model": "m", "memory": 20 * MIB + room, "gpu": "V100-16GB"}, capture=of_units)
        rank = found.worst
        assert (found.verdict, rank.verdict, found.document()["verdict"]) == (verdict,) * 3
        assert (sum(term.bytes for term in found.outside), rank.oom_with) == (counted, oom_with)
        assert [term.name for term in found.outside] == ["CUDA context", "loaded kernels"]
        assert rank.timeline.limit_bytes == max(0, rank.device.total_bytes - counted)
        assert rank.device_total == rank.peak_reserved + counted
        assert (rank.device_total <= rank.device.total_bytes) or verdict == "oom"
        assert exit_code(found.verdict) == (3 if verdict == "oom" else 0)
        assert replay(found.trace).ranks[0].peak_reserved == rank.peak_reserved  # the trace has it as its context


def test_the_sentence_of_a_verdict() -> None:
    def said(memory: float, **more: Any) -> str:
        case = {"model": "m", "memory": round(memory * MIB), "gpu": "V100-16GB"}
        return summary(estimate(case, capture=of_units, **more).result)

    assert said(1000) == "needs 510.00 MiB of 1000.00 MiB (490.00 MiB left)"
    assert said(530) == (
        "needs 510.00 MiB of 530.00 MiB (20.00 MiB left); outside the allocator 490.00 MiB are counted, with "
        "880.00 MiB it runs out of memory"
    )
    assert said(280).startswith("needs 270.00 MiB of 280.00 MiB (10.00 MiB left); outside the allocator 250.00 MiB")
    assert said(280).endswith("are counted, with 490.00 MiB it runs out of memory")
    assert said(260) == "needs 510.00 MiB, lacks 250.00 MiB (the GPU has 260.00 MiB)"
    assert said(260, analyse=False) == said(260)
    assert said(100, context=0) == "needs 20.00 MiB of 100.00 MiB (80.00 MiB left, no CUDA context counted)"


def test_retries_are_tight() -> None:
    """A segment of 30 MiB goes back to the device so that 33 MiB have room."""
    writer = Writer()
    writer.free(writer.alloc(30 * MIB))
    writer.alloc(33 * MIB)
    writer.alloc(11 * MIB)
    for memory, verdict in ((64, "fits"), (63, "tight"), (46, "tight"), (45, "oom")):
        case = {"model": "m", "memory": memory * MIB}
        found = estimate(case, context=0, capture=lambda _: writer.graph())
        assert (found.verdict, replay(found.trace).verdict) == (verdict, verdict)
    case = {"model": "m", "memory": 63 * MIB}
    told = summary(estimate(case, context=0, capture=lambda _: writer.graph()).result)
    assert told.endswith("; to fit, the allocator gives memory back and tries again once, which costs time")


def test_a_context_may_be_given() -> None:
    case = {"model": "m", "memory": 30 * MIB}
    for context, verdict in ((0, "fits"), (10 * MIB, "fits"), (10 * MIB + 1, "oom")):
        found = estimate(case, context=context, capture=of_units)
        assert found.verdict == verdict
        terms = [(term.name, term.bytes) for term in found.worst.outside]
        assert terms == ([("context", context)] if context else [])
    with pytest.raises(ConfigError, match="out of range"):
        estimate(case, context=-1, capture=of_units)
    with pytest.raises(ConfigError, match="does not fit a device"):
        estimate(case, context=30 * MIB + 1, capture=of_units)


def test_auto_takes_the_table() -> None:
    found = estimate({"model": "m"}, capture=of_units)
    assert found.worst.device.context_bytes == sum(term.bytes for term in found.outside) > 300 * MIB


def test_the_smallest_device() -> None:
    """Twelve MiB are alive at once; smaller segments than 20 MiB do not exist for tensors of 3 MiB."""
    found = answer({"model": "m", "steps": 2}, min_memory=True, context=0, capture=of_units)
    assert found["min_fit"] == 20 * MIB
    case = {"model": "m", "steps": 2, "gpu": "V100-16GB"}
    beside = answer(case, min_memory=True, capture=of_units)["min_fit"]
    assert beside == 20 * MIB + V100["likely"]
    assert answer({**case, "memory": beside}, capture=of_units)["verdict"] == "tight"


def test_the_smallest_device_below_what_is_reserved() -> None:
    """A free segment goes back before memory runs out: 30 MiB, which 33 MiB do not fit, though 64 MiB were reserved."""
    writer = Writer()
    writer.free(writer.alloc(30 * MIB))
    writer.alloc(33 * MIB)
    writer.alloc(11 * MIB)
    trace = lower(writer.graph())
    assert estimate({"model": "m"}, capture=lambda _: writer.graph()).worst.peak_reserved == 64 * MIB
    assert smallest_memory(trace) == 46 * MIB  # 11 and 33 MiB, rounded to segments of 2 MiB
    assert smallest_memory(trace, step=MIB) == 46 * MIB


def test_the_smallest_device_of_a_trace_that_does_not_fit_its_own() -> None:
    assert smallest_memory(lower(training({"model": "m", "memory": 2 * MIB}))) == 20 * MIB


def test_bad_cases_are_refused_before_the_capture() -> None:
    def never(case: Case) -> StepGraph:
        raise AssertionError(case)

    bad: list[tuple[dict[str, Any], str]] = [
        ({"model": "m", "bathc": 1}, "nearest is 'batch'"),
        ({"model": "m", "gpu": "A101"}, "unknown GPU 'A101'"),
        ({"model": "m", "alloc_conf": "max_split_size:1"}, "max_split_size"),
        ({"model": "m", "release": "1.9"}, "1.9"),
    ]
    for case, message in bad:
        with pytest.raises(ConfigError, match=message):
            estimate(case, capture=never)


def test_cases_that_differ_in_memory_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Case] = []

    def counted(case: Case) -> StepGraph:
        made.append(case)
        return of_units(case)

    monkeypatch.setattr("simulator.estimator.estimate.capture_of", lambda case, progress, method: counted(case))
    forget_graphs()
    documents: list[dict[str, Any]] = [
        {"model": "m"},
        {"model": "m", "memory": 5 * MIB},
        {"model": "m", "alloc_conf": "per_process_memory_fraction:0.0001"},
        {"model": "m", "deferred": "late"},
        {"model": "m", "gpu": "A100"},
    ]
    found = [answer(document) for document in documents]
    assert len(made) == 1
    assert [one["verdict"] for one in found] == ["fits", "oom", "oom", "fits", "fits"]
    assert found[2]["alloc_conf"] == documents[2]["alloc_conf"]  # the graph is shared, the case is each one's own
    answer({"model": "m", "batch": 2})
    assert len(made) == 2
    for batch in range(3, 4 + KEPT_GRAPHS):
        captured(Case.of({"model": "m", "batch": batch}))
    captured(Case.of({"model": "m"}))
    assert made[-1].batch == 1  # the first graph had to go
    forget_graphs()


def test_capture_keys() -> None:
    def key(**more: Any) -> str:
        return capture_key(Case.of({"model": "m", **more}))

    assert key() == key(memory=1 << 30) == key(release="2.13.0") == key(gpu="NVIDIA A100-SXM4-80GB")
    distinct = [key(), key(batch=2), key(release="2.11"), key(gpu="H100"), key(optimizer="sgd"), key(steps=4)]
    assert len(set(distinct)) == len(distinct)


# Real captures, beside recorded runs ----------------------------------------------------------------------------------


def recorded(table: str, **wanted: Any) -> tuple[dict[str, Any], Recording]:
    """The first recording of a table whose case has the wanted values, and its answer."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    row = next(row for row in recordings(table) if all(row.case[key] == value for key, value in wanted.items()))
    return answer(row.case, min_memory=table == "min_fit", context=0), row


def test_micro_batches_of_a_recorded_run() -> None:
    found, row = recorded("single", model="opt-125m", accum=2)
    assert found["peak_allocated"] == pytest.approx(row.figure("peak_allocated"), rel=5e-3)
    for key, peak in row.phases().items():
        assert found["phases"][key]["peak"] == pytest.approx(peak, rel=5e-3), key


@pytest.mark.parametrize(
    "setting", [{"checkpointing": "nonreentrant"}, {"alloc_conf": "expandable_segments:True"}], ids=str
)
def test_the_smallest_device_of_a_recorded_run(setting: dict[str, str]) -> None:
    """Bisected with the real allocator, which had to give back segments and try again."""
    found, row = recorded("min_fit", model="opt-125m", dtype="bf16", **setting)
    assert row.row["retries"] != "0"
    assert found["min_fit"] == pytest.approx(row.figure("min_fit"), rel=1e-2)
    assert found["min_fit"] < found["peak_reserved"]


def test_a_recorded_run_out_of_memory() -> None:
    pytest.importorskip("torch")
    row = next(row for row in recordings("single") if not row.fits and row.case["model"].startswith("opt"))
    found = answer(row.case, context=0)
    assert (found["verdict"], found["peak_allocated"]) == ("oom", None)


def test_a_model_of_one_s_own(tmp_path: Path) -> None:
    """A configuration of two small layers: what is there after loading is its parameters, in blocks of 512 bytes."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = {
        **{"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "ffn_dim": 256},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 128},
        **{"word_embed_proj_dim": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer({"model": str(tmp_path / "config.json"), "seq": 64, "batch": 2, "optimizer": "sgd"})
    layer = [64 * 64] * 4 + [64] * 4 + [64] * 4 + [64 * 256, 256, 256 * 64, 64]
    parameters = [1000 * 64, 130 * 64, *layer, *layer, 64, 64]  # embeddings, layers, final norm; the head is tied
    rounded = sum(-(-size * 4 // 512) * 512 for size in parameters)
    assert found["phases"]["load"] == {"peak": rounded, "left": rounded}
    assert found["peak_reserved"] % (2 * MIB) == 0


@pytest.mark.parametrize(
    ("met", "count"),
    [
        ((), 0),
        (("dp",), 1),
        (("dp", "tp", "own"), 2),  # of rank 1 and 2, in two groups with others
        (("dp", "dp:0>1", "dp:1>0"), 1),  # messages inside a group are the group's
        (("dp:0>1",), 1),
    ],
)
def test_communicators_are_groups_that_meet(met: tuple[str, ...], count: int) -> None:
    out = EventBuilder()
    for name in met:
        out.collective("all_reduce", name, 1 << 20, stream=0)
    pair = ((0, 1),)
    groups = {"dp": ((0, 1, 2),), "tp": ((0,), (1, 2)), "own": ((0,),), "dp:0>1": pair, "dp:1>0": pair}
    trace = Trace((RankEvents((0, 1, 2), out.events()),), devices=(Device("a", 1 << 30),), groups=groups)
    assert communicators(trace) == count


def test_every_kind_of_rank_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that do the same on cards of different sizes: one of them runs out of memory."""

    def two(case: Case, **options: Any) -> Trace:
        single = lower(training())
        (entry,) = single.ranks
        parted = (replace(entry, ranks=(0, 2)), replace(entry, ranks=(1,), device=1))
        groups = {"dp": ((0, 1, 2),), "tp": ((0,), (1, 2)), "own": ((0,),)}
        return replace(single, ranks=parted, devices=(Device("a", 1 << 30), Device("b", MIB)), groups=groups)

    monkeypatch.setattr("simulator.estimator.estimate.trace_of", two)
    whole = estimate({"model": "m", "strategy": "ddp", "world": 3}, analyse=False)
    assert not any(term.name.startswith("NCCL") for term in whole.outside)  # groups that never meet
    found = whole.document()
    assert (found["verdict"], found["peak_allocated"]) == ("oom", None)
    assert [(kind["ranks"], kind["verdict"], kind["peak_allocated"]) for kind in found["ranks"]] == [
        ([0, 2], "fits", 4 * UNIT),
        ([1], "oom", None),
    ]
    assert found["ranks"][0]["phases"]["load"] == {"peak": UNIT, "left": UNIT}
