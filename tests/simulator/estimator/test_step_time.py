"""The time of captured runs: durations, the step by clocks worked by hand, memory that comes back in simulated time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph.case import Case
from simulator.engine.replay import replay
from simulator.estimator.estimate import Estimate, estimate
from simulator.estimator.step_time import GenerationTime, Stall, StepTime, of_case, stall_of
from traces.model import Column, Device, Events, Op, RankEvents, Strings, Trace

torch = pytest.importorskip("torch")

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
#: A100-80GB, from its data sheet: bf16 and fp32 FLOP/s, bytes a second.
HALF, SINGLE, MEMORY = 312e12, 19.5e12, 2039e9


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("timed") / "config.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


def trained(config: str, *, timed: bool = True, **keys: Any) -> Estimate:
    case = {"model": config, "dtype": "bf16", "batch": 2, "seq": 512, **keys}
    return estimate(case, analyse=False, time_steps=timed)


def of_last_step(found: Estimate, name: str) -> np.ndarray[Any, Any]:
    """A column of the kernels of the last iteration."""
    events = found.trace.ranks[0].events
    step = events.ints("step")
    start = int(np.flatnonzero((events.op == Op.PHASE) & (step == step.max()))[0])
    chosen = np.flatnonzero(events.op == Op.KERNEL)
    return events.ints(name)[chosen[chosen > start]]


def by_hand(found: Estimate) -> float:
    """Nanoseconds of the last iteration: a launch takes the host 8 us, the GPU works through what it was given."""
    events = found.trace.ranks[0].events
    last = int(events.ints("step").max())
    host = gpu = start = 0.0
    columns = (events.op, events.ints("duration_ns"), events.ints("step"))
    for op, duration, step in zip(*(column.tolist() for column in columns), strict=True):
        if op == Op.PHASE and step == last and not start:
            start = max(host, gpu)
        elif op == Op.KERNEL:
            host += 8000
            gpu = max(gpu, host) + duration
        elif op == Op.SYNCHRONIZE:
            host = max(host, gpu)
    return max(host, gpu) - start


@pytest.mark.parametrize("sync", [True, False])
def test_a_step_on_one_gpu_by_hand(config: str, sync: bool) -> None:
    found = trained(config, sync=sync, batch=16)
    durations = of_last_step(found, "duration_ns")
    assert len(durations) > 300
    assert durations.min() > 0
    assert isinstance(found.step, StepTime)
    assert found.step.step_ns == pytest.approx(by_hand(found), abs=1)
    assert found.step.tokens == 16 * 512
    assert found.step.step_ns >= durations.sum()


def test_kernels_last_as_the_roofline_says(config: str) -> None:
    found = trained(config, batch=16)
    flops, moved = of_last_step(found, "flops"), of_last_step(found, "bytes")
    durations = of_last_step(found, "duration_ns")
    products = flops > 0
    assert products.sum() > 80  # 7 linear layers each, forward and backward
    quick = np.maximum(flops / (0.75 * HALF), moved / (0.85 * MEMORY)) * 1e9
    slow = np.maximum(flops / (0.90 * SINGLE), moved / (0.85 * MEMORY)) * 1e9
    assert (durations >= np.floor(quick)).all()
    assert (durations <= slow + 1e4).all()
    plain = ~products
    plain[0] = False  # the inputs come from the host
    assert durations[plain] - moved[plain] / (0.85 * MEMORY) * 1e9 == pytest.approx(
        np.median(durations[plain] - moved[plain] / (0.85 * MEMORY) * 1e9), abs=2
    )
    # of a weight and token 2 FLOPs forward and 4 backward; of attention 4 times width and length forward, 10 backward
    weights = 4 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 688) + 256 * 4000
    assert flops.sum() == pytest.approx((6 * weights + 4 * 14 * 256 * 512) * 16 * 512, rel=0.001)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp1", "deepspeed-3"])
def test_memory_of_other_streams_comes_back_between_the_bounds(config: str, strategy: str) -> None:
    keys: dict[str, Any] = {"strategy": strategy, "world": 4}
    timed = trained(config, **keys)
    prompt = trained(config, timed=False, **keys)
    late = trained(config, timed=False, deferred="late", sync=False, **keys)
    assert isinstance(timed.step, StepTime)
    assert timed.step.tokens == 4 * 2 * 512
    events = timed.trace.ranks[0].events
    collectives = (events.op == Op.COLLECTIVE) & (events.ints("bytes") > 0)  # DeepSpeed broadcasts an empty list, once
    assert (events.ints("duration_ns")[collectives] > 8_400).all()  # a ring's start, and its bytes
    assert timed.worst.peak_allocated == prompt.worst.peak_allocated
    assert prompt.worst.peak_reserved <= timed.worst.peak_reserved <= late.worst.peak_reserved


def test_generation_by_hand(config: str) -> None:
    keys: dict[str, Any] = {"task": "inference", "prompt": 256, "mode": "manual", "batch": 4}
    found, longer, one = (
        estimate({"model": config, "dtype": "bf16", "new": new, **keys}, analyse=False, time_steps=True).step
        for new in (5, 9, 1)
    )
    assert isinstance(found, GenerationTime)
    assert isinstance(longer, GenerationTime)
    assert isinstance(one, GenerationTime)
    assert (found.tokens, longer.tokens, one.tokens) == (4 * 4, 8 * 4, 0)
    assert one.decode_ns == one.tokens_per_second == 0
    assert found.first_token_ns == longer.first_token_ns == pytest.approx(one.first_token_ns, rel=0.01)
    assert longer.decode_ns == pytest.approx(2 * found.decode_ns, rel=0.02)  # each token is a forward pass
    launches = 4 * 30 * 8_000  # some thirty kernels a layer: the host is slower than a GPU with so little to do
    assert launches < found.decode_ns / 4 < 3 * launches
    assert found.document()["decode_tokens_per_second"] == pytest.approx(16e9 / found.decode_ns, abs=0.1)


def streams_that_take_turns(steps: int) -> Trace:
    """In each step 60 MiB on one stream and then on another, of a device that has room for one of them."""
    rows: list[tuple[Op, int, int, int]] = []  # event, id, stream, step
    for step in range(steps):
        rows += [(Op.PHASE, -1, 0, step), (Op.KERNEL, -1, 0, -1)]
        for stream in (0, 1):
            rows += [(Op.ALLOC, 2 * step + stream, stream, -1), (Op.FREE, 2 * step + stream, stream, -1)]
    op, ids, streams, steps_of = (np.asarray(column) for column in zip(*rows, strict=True))
    columns: dict[str, Column] = {
        "id": ids.astype(np.int64),
        "stream": streams.astype(np.int64),
        "step": steps_of.astype(np.int64),
        "bytes": np.where(op == Op.ALLOC, 60 << 20, 0),
        "duration_ns": np.where(op == Op.KERNEL, 1_000_000, 0),
        "name": Strings(np.where(op == Op.PHASE, 0, -1).astype(np.int32), ("forward",)),
    }
    events = Events(op.astype(np.uint8), columns)
    return Trace((RankEvents((0,), events),), release="2.13", devices=(Device("A100-80GB", 100 << 20),))


def test_retries_of_a_steady_step_cost_the_calls_that_they_make() -> None:
    """Each request of a step frees the other stream's segment and allocates one: two retries and four calls."""
    found = stall_of(streams_that_take_turns(3))
    assert found.retries == 2
    assert found.seconds == pytest.approx(2 * 50e-6 + 4 * 200e-6)
    ample = streams_that_take_turns(3)
    assert stall_of(replace(ample, devices=(Device("A100-80GB", 200 << 20),))) == Stall()
    assert stall_of(replace(ample, devices=(Device("A100-80GB", 200 << 20),)), 100 << 20) == found
    case = Case("gpt2")
    tight, free = (
        of_case(trace, case, replay(trace, analyse=False))
        for trace in (ample, replace(ample, devices=(Device("A100-80GB", 200 << 20),)))
    )
    assert isinstance(tight, StepTime)
    assert isinstance(free, StepTime)
    assert tight.step_ns - free.step_ns == round(found.seconds * 1e9)
