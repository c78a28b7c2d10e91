"""DeepSpeed's ZeRO: recorded runs to the byte, the worked examples E4 and E5 in order, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.errors import CaptureError
from graph.recorder.capture import capture
from simulator.engine.replay import replay
from simulator.engine.result import RankResult
from strategies import lower, registry
from strategies.lowering import finish
from strategies.parallel.deepspeed import Zero, configuration
from strategies.rank_events import events_of
from strategies.strategy import Lowered
from tests.accuracy.recordings import Recording, recordings
from tests.support.worked_examples import Line, Told, examples, told
from traces.errors import ConfigError
from traces.model import RankEvents

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")

OPT = {"model": "opt-125m", "world": "4", "dtype": "bf16", "batch": "2", "ckpt": ""}
PLAIN = {
    "overlap_comm": "default",
    "bucket": "",
    "zero_extra": "",
    "grad_accum_dtype": "",
    "init": "cpu",
    "offload": "",
    "accum": "1",
    "clip": "0.0",
    "lag": "0",
    "expandable": "False",
}
AUTO = "reduce_bucket_size=589824,stage3_prefetch_bucket_size=530841,stage3_param_persistence_threshold=7680"


def recorded(wanted: Mapping[str, str]) -> Recording:
    """The one recorded run of opt-125m on 4 ranks that has these columns, and the plain values in the others."""
    columns = {**OPT, **PLAIN, **wanted}
    found = [one for one in recordings("deepspeed") if all(one.row[key] == value for key, value in columns.items())]
    assert found, wanted
    return found[0]


def run_of_rank(case: Case, rank: int) -> RankResult:
    """A rank of a job, captured and replayed."""
    run = registry.find(case).method(case, rank)
    graph = capture(run.captured_case(), method=run)
    everyone = tuple(range(case.world))
    entry = RankEvents(everyone, events_of(graph, late=case.deferred == "late"))
    trace = finish(Lowered((entry,), {"default_pg": (everyone,)}, graph), case)
    return replay(trace).ranks[0]


@pytest.mark.parametrize(
    "wanted",
    [
        {"stage": "1"},
        {"stage": "1", "grad_accum_dtype": "fp32", "model": "tinyllama-1.1b"},
        {"stage": "2", "offload": "cpu"},
        {"stage": "2", "overlap_comm": "True"},
        {"stage": "3"},
        {"stage": "3", "zero_extra": AUTO},
    ],
    ids=lambda wanted: "-".join(wanted.values()),
)
def test_recorded_runs(wanted: dict[str, str]) -> None:
    recording = recorded(wanted)
    found = run_of_rank(Case.of(recording.case), 0)
    assert found.peak_allocated == recording.figure("peak_allocated")
    assert found.peak_reserved == recording.figure("peak_reserved")
    loaded = max(recording.figure("load_peak") or 0, recording.figure("setup_peak") or 0)
    assert found.phases[0].peak == loaded


# Worked examples -----------------------------------------------------------------------------------------------------

MLP = {
    "model": "tests.support.deepspeed_models:mlp",
    "dtype": "bf16",
    "world": 2,
    "buckets": 150_000,
    "optimizer": "adamw-fused",
    "release": "2.11",
}
ELEMENTS = 256 * 512 + 512 + 512 * 255 + 255
STAGE_3 = {"stage3_param_persistence_threshold": 300, "stage3_prefetch_bucket_size": 0}


def in_words(extra: Mapping[str, Any], rank: int) -> Told:
    """A run of the MLP as the examples tell it."""
    case = Case.of({**MLP, **extra})
    run = Zero(case, rank)
    return told(events_of(capture(run.captured_case(), method=run)))


def changes(lines: list[Line], sizes: frozenset[int]) -> list[tuple[str, int]]:
    return [(sign, size) for sign, _, size in lines if size in sizes]


def without_pairs(lines: list[tuple[str, int]], sizes: Iterable[int]) -> list[tuple[str, int]]:
    """The lines without the last birth of each size that is followed by its death."""
    left = list(lines)
    for size in sizes:
        pair = [("+", size), ("-", size)]
        at = max(place for place in range(len(left)) if left[place : place + 2] == pair)
        del left[at : at + 2]
    return left


# Beyond the examples, DeepSpeed 0.19.8 takes norms of copies in fp64, here of 128 elements of a bias (1,024 bytes), and
# reduces slices of several ranks in a flat copy of the bucket.
EXAMPLES: dict[str, tuple[dict[str, Any], int, tuple[int, ...]]] = {
    "E4-zero1": ({"strategy": "deepspeed-1"}, 0, (263_168, 1_024)),
    "E4-zero2-rank0": ({"strategy": "deepspeed-2"}, 0, (1_024,)),
    "E4-zero2-rank1": ({"strategy": "deepspeed-2"}, 1, (262_654,)),
    "E5": ({"strategy": "deepspeed-3", "zero_extra": {**STAGE_3, "stage3_max_reuse_distance": 0}}, 0, (1_024,)),
    "E5-reuse": ({"strategy": "deepspeed-3", "zero_extra": STAGE_3}, 0, (1_024,)),
}


@pytest.mark.parametrize("key", EXAMPLES)
def test_worked_examples(key: str) -> None:
    extra, rank, copies = EXAMPLES[key]
    example = examples()[key]
    run = in_words({**extra, **({"init": "zero.Init"} if key.startswith("E5") else {})}, rank)
    sizes = frozenset(size for _, _, size in example.lines("") if size > 500)
    step = changes(run.lines("step 2"), sizes)
    assert without_pairs(step, copies) == changes(example.lines("step 2"), sizes)
    setup = changes(run.lines("step 0"), sizes)
    wanted = changes(example.lines("init") or example.lines("optimizer init"), sizes)
    assert any(setup[at : at + len(wanted)] == wanted for at in range(len(setup)))


def test_streams_of_stage_3() -> None:
    # Gathers, reductions and everything else have a stream each, as in example E5.
    extra, rank, _ = EXAMPLES["E5"]
    case = Case.of({**MLP, **extra, "init": "zero.Init"})
    graph = capture(case, method=Zero(case, rank))
    streams: dict[int, set[int]] = {}
    for size, stream in zip(graph.storages.bytes.tolist(), graph.storages.stream.tolist(), strict=True):
        streams.setdefault(size, set()).add(stream)
    gathering, reducing = streams[263_168], streams[262_656]
    assert len(gathering) == len(reducing) == 1
    assert gathering != reducing
    assert streams[300_000] == {0}


# Ranks and settings --------------------------------------------------------------------------------------------------


def test_ranks_of_stage_3_are_equal() -> None:
    case = Case.of({**MLP, "strategy": "deepspeed-3", "world": 64})
    assert registry.find(case).distinct(case) == (tuple(range(64)),)


def test_one_rank_stands_for_those_that_hold_no_more() -> None:
    # Shares of 65,600 elements: rank 1 has parts of fc1.weight (131,072) and its bias (512), rank 2 of that bias and of
    # fc2.weight (130,560).
    case = Case.of({**MLP, "strategy": "deepspeed-2", "world": 4})
    assert registry.find(case).distinct(case) == ((0,), (1, 2), (3,))
    assert registry.find(case).method(case, 2).rank == 1
    assert registry.find(case).method(case, 3).rank == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"strategy": "deepspeed-2", "init": "zero.Init"}, "key 'init'"),
        ({"strategy": "deepspeed-2", "zero_extra": {"stage3_prefetch": 1}}, "'zero_extra': stage3_prefetch: "),
        ({"strategy": "deepspeed-2", "zero_extra": {"reduce_bucket_size": -1}}, "'zero_extra': reduce_bucket_size: "),
        ({"strategy": "deepspeed-1", "autocast": "bf16", "dtype": "fp32"}, "key 'autocast'"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lower(Case.of({**MLP, **extra}))


def test_what_would_be_compiled_is_refused() -> None:
    case = Case.of({**MLP, "strategy": "deepspeed-3", "zero_extra": {"zero_quantized_weights": True}})
    with pytest.raises(CaptureError, match="would compile its operator 'quantizer'"):
        capture(case, method=Zero(case, 0))


def test_further_keys_stand_above_the_buckets() -> None:
    case = Case.of({**MLP, "strategy": "deepspeed-3", "zero_extra": {"reduce_bucket_size": 7}})
    zero = configuration(case)["zero_optimization"]
    assert zero == {"stage": 3, "reduce_bucket_size": 7, "allgather_bucket_size": 150_000}


@pytest.mark.parametrize(
    ("stage", "more"),
    [(1, -2 * 256 * 512), (2, -2 * 256 * 512), (3, 2 * (ELEMENTS // 2))],
    ids=[
        "1, with room for the largest gradient",
        "2, with room for the largest gradient",
        "3, with no sums of gradients",
    ],
)
def test_what_an_optimizer_on_the_host_leaves_free(stage: int, more: int) -> None:
    # Copies in fp32 and two states of each of this rank's elements are 12 bytes.
    case = Case.of({**MLP, "strategy": f"deepspeed-{stage}"})
    here, there = (run_of_rank(replace(case, offload=where), 0).phases[-1].left for where in ("", "optimizer"))
    assert here - there == pytest.approx(12 * (ELEMENTS // 2) + more, abs=4096)


# DeepSpeed itself ----------------------------------------------------------------------------------------------------

ALONE = """
import logging, os, sys
import torch
import graph.fake_cuda.device
from graph.case import Case
from graph.errors import CaptureError
from graph.recorder.capture import capture
from strategies import registry

functions, environment, hook = dict(vars(torch.nn.functional)), dict(os.environ), sys.excepthook
assert "deepspeed" not in sys.modules
for stage in (1, 3):
    case = Case.of({case!r} | {{"strategy": f"deepspeed-{{stage}}"}})
    one = registry.find(case).method(case, 0)
    first = capture(one.captured_case(), method=one)
    again = capture(one.captured_case(), method=one)
    assert first.storages.bytes.tolist() == again.storages.bytes.tolist()
assert dict(vars(torch.nn.functional)) == functions
assert dict(os.environ) == environment
assert sys.excepthook is hook
assert not torch.distributed.is_initialized()
assert not any(name.startswith("torch._inductor.compile_fx") for name in sys.modules)
from deepspeed.runtime.zero import Init
assert Init.param_id == 0
assert not logging.getLogger("DeepSpeed").disabled
"""


def test_nothing_is_left_behind_and_nothing_is_said() -> None:
    source = ALONE.format(case=MLP)
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"deepspeed is not installed.*pip install 'vramsim\[deepspeed\]'"):
        lower(Case.of({**MLP, "strategy": "deepspeed-1"}))


def test_another_deepspeed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of({**MLP, "strategy": "deepspeed-1"})
    one = registry.find(case).method(case, 0)
    monkeypatch.delattr("deepspeed.runtime.zero.utils.get_lst_from_rank0")
    with pytest.raises(CaptureError, match=r"DeepSpeed 0.* is not laid out as expected: .*get_lst_from_rank0"):
        capture(case, method=one)
