"""DeepSpeed's ZeRO: recorded runs to the byte, the worked examples E4 and E5 in order, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.recorder.capture import capture
from simulator.engine.replay import replay
from simulator.engine.result import RankResult
from strategies.deepspeed import Zero, distinct, method
from strategies.lowering import Lowered, finish
from strategies.rank_events import events_of
from strategies.zero_flat import Piece, pieces
from strategies.zero_settings import settings
from tests.accuracy.recordings import Recording, recordings
from tests.support.worked_examples import Line, Told, examples, told
from traces.errors import ConfigError
from traces.model import RankEvents

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
    run = method(case, rank)
    graph = capture(run.captured_case(), method=run)
    everyone = tuple(range(case.world))
    entry = RankEvents(everyone, events_of(graph, late=case.deferred == "late"))
    trace = finish(Lowered((entry,), {"default_pg": (everyone,)}), graph, case)
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


def test_pieces_of_a_parameter_lie_in_the_shares_it_touches() -> None:
    assert pieces([5, 3, 4], 4) == [
        [Piece(0, 0, 4, 0), Piece(1, 4, 1, 0)],
        [Piece(1, 0, 3, 1)],
        [Piece(2, 0, 4, 0)],
    ]


def test_ranks_of_stage_3_are_equal() -> None:
    case = Case.of({**MLP, "strategy": "deepspeed-3", "world": 64})
    assert distinct(case) == (tuple(range(64)),)


def test_one_rank_stands_for_those_that_hold_no_more() -> None:
    # Shares of 65,600 elements: rank 1 has parts of fc1.weight (131,072) and its bias (512), rank 2 of that bias and of
    # fc2.weight (130,560).
    case = Case.of({**MLP, "strategy": "deepspeed-2", "world": 4})
    assert distinct(case) == ((0,), (1, 2), (3,))
    assert method(case, 2).rank == 1
    assert method(case, 3).rank == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"strategy": "deepspeed-2", "init": "zero.Init"}, "key 'init'"),
        ({"strategy": "deepspeed-2", "zero_extra": {"stage3_prefetch": 1}}, "'stage3_prefetch' is not modelled"),
        ({"strategy": "deepspeed-1", "autocast": "bf16", "dtype": "fp32"}, "key 'autocast'"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(Case.of({**MLP, **extra}), 0)


def test_defaults_and_their_overrides() -> None:
    case = Case.of({**MLP, "strategy": "deepspeed-3", "zero_extra": {"reduce_bucket_size": 7}})
    found = settings(case, 1)
    assert (found.overlap, found.reduce_bucket, found.prefetch, found.rank) == (True, 7, 50_000_000, 1)
    assert not settings(Case.of({**MLP, "strategy": "deepspeed-1"}), 0).overlap
