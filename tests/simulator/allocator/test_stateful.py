"""The replay against the naive model on random event sequences, and against what must hold in any state.

`HYPOTHESIS_PROFILE=thorough` looks much longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.oracles.naive_replay import naive_replay
from tests.places import ROOT
from tests.support.fast import fast_replay
from tests.support.observed import Observed, Report, Row, Setup, assert_same
from tests.support.random_events import (
    BOUNDARIES,
    DEVICES,
    FRACTIONS,
    MIB,
    RELEASES,
    STREAMS,
    TIES,
    Script,
    random_conf,
    random_rows,
    random_setup,
)

REPORTS: list[Row] = [["x"], ["s"]]
SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=3 * settings().max_examples)  # long sequences, but cheap ones


def compare(rows: list[Row], setup: Setup) -> Observed:
    """Replay `rows` and the naive model must agree on everything; the replay's view of them."""
    rows = [*rows, *REPORTS]
    expected, got = naive_replay(rows, setup), fast_replay(rows, setup)
    assert got.undefined == expected.undefined, f"{setup}: {rows}"
    if expected.undefined is not None:
        return compare(rows[: expected.undefined], setup)
    assert_same(str(setup), rows, expected, got)
    check_state(got.reports[len(rows) - 1], got, len(rows) - 1)
    return got


def check_state(snapshot: Report, observed: Observed, event: int) -> None:
    """What holds in any state: nothing overlaps, blocks fill their segment, free neighbours are one, sums agree."""
    segments = snapshot["segments"]
    ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "segments overlap or are out of order"
    for segment in segments:
        check_segment(segment)
    state = observed.states[event]
    assert state is not None
    _, reserved, allocated, active, plain, _, _ = state
    assert reserved == sum(segment["total_size"] for segment in segments)
    assert active == sum(segment["active_size"] for segment in segments)
    assert allocated == sum(segment["allocated_size"] for segment in segments)
    assert plain == sum(not segment["expandable"] for segment in segments)
    assert reserved >= active >= allocated >= 0


def check_segment(segment: dict[str, Any]) -> None:
    blocks = segment["blocks"]
    assert segment["total_size"] == sum(size for size, *_ in blocks)
    assert all(size > 0 for size, *_ in blocks)
    states = [state for _, _, state, _ in blocks]
    assert ("inactive", "inactive") not in pairwise(states), "free neighbours are not merged"
    assert segment["allocated_size"] == sum(size for size, _, state, _ in blocks if state == "allocated")
    assert segment["active_size"] == sum(size for size, _, state, _ in blocks if state != "inactive")
    assert all(requested <= size for size, requested, state, _ in blocks if state != "inactive")


@MANY
@given(SEEDS, st.sampled_from(RELEASES), st.integers(20, 600))
def test_random_sequences_equal_naive_model(seed: int, release: str, events: int) -> None:
    random = Random(seed)
    setup = random_setup(random, release)
    compare(random_rows(random, setup, events), setup)


@MANY
@given(SEEDS, st.sampled_from(("2.11", "2.12", "2.13")))
def test_ties_are_broken_as_the_naive_model_breaks_them(seed: int, release: str) -> None:
    """Few sizes, small devices, no settings: free lists full of equal blocks, in segments that come and go."""
    random = Random(seed)
    conf = random.choice(("", "expandable_segments:True", "max_split_size_mb:40"))
    setup = Setup(release, conf, random.choice((64, 100, 160, 300)) * MIB)
    script = Script(setup)
    sizes = random.sample(TIES, 3)
    streams = random.choice(((0,), (0, 1)))
    while len(script.rows) < 400:
        if random.random() < 0.02:
            script.empty_cache()
        if len(script.alive) < 60 and random.random() < 0.55:
            script.malloc(random.choice(sizes), random.choice(streams))
        else:
            script.free(random.randrange(1 << 16))
    compare(script.rows, setup)


@given(SEEDS)
def test_replay_is_deterministic(seed: int) -> None:
    random = Random(seed)
    setup = random_setup(random)
    rows = [*random_rows(random, setup, 200), *REPORTS]
    assert fast_replay(rows, setup) == fast_replay(rows, setup)


@given(SEEDS, st.integers(1, 199))
def test_what_follows_does_not_change_what_was(seed: int, cut: int) -> None:
    """A prefix of the events leads to a prefix of the states, calls and reports."""
    random = Random(seed)
    setup = random_setup(random)
    rows = random_rows(random, setup, 200)
    whole = fast_replay(rows, setup)
    if whole.undefined is not None:
        return
    part = fast_replay(rows[:cut], setup)
    assert part.states == whole.states[:cut]
    assert part.logs == whole.logs[:cut]


@given(SEEDS, st.integers(1, 1 << 20))
def test_addresses_move_with_the_base(seed: int, shift: int) -> None:
    """Only the order of addresses matters: another base shifts every address and changes nothing else."""
    random = Random(seed)
    setup = random_setup(random)
    rows = random_rows(random, setup, 150)
    moved = replace(setup, va_base=setup.va_base + shift * 2 * MIB)
    before, after = fast_replay(rows, setup), fast_replay(rows, moved)
    assert before.undefined == after.undefined
    for old, new in zip(before.states, after.states, strict=True):
        assert old is not None
        assert new is not None
        expected = old[0] if old[0] <= 0 else old[0] + shift * 2 * MIB
        assert new == (expected, *old[1:])


class AllocatorMachine(RuleBasedStateMachine):
    """Events one by one, so that a failure shrinks to the few that matter."""

    @initialize(
        release=st.sampled_from(RELEASES),
        conf=SEEDS,
        total=st.sampled_from(DEVICES),
        placement=st.sampled_from(("first-fit", "bump", "driver")),
    )
    def start(self, release: str, conf: int, total: int, placement: str) -> None:
        setup = Setup(release, random_conf(Random(conf), release), total, placement=placement)
        self.script = Script(setup)
        self.checked = 0

    sizes = st.sampled_from((*BOUNDARIES, *TIES)) | st.integers(0, 1 << 28)
    streams = st.sampled_from(STREAMS)
    positions = st.integers(0, 50)

    @rule(bytes_=sizes, stream=streams, times=st.integers(1, 4))
    def malloc(self, bytes_: int, stream: int, times: int) -> None:
        for _ in range(times):
            self.script.malloc(bytes_, stream)

    @rule(bytes_=st.sampled_from(TIES), times=st.integers(1, 8))
    def malloc_on_default_stream(self, bytes_: int, times: int) -> None:
        for _ in range(times):
            self.script.malloc(bytes_, 0)

    @rule(position=positions, times=st.integers(1, 4))
    def free(self, position: int, times: int) -> None:
        for _ in range(times):
            self.script.free(position)

    @rule(position=positions, stream=streams)
    def record_stream(self, position: int, stream: int) -> None:
        self.script.record_stream(position, stream)

    @rule(hold=st.booleans())
    def hold_events(self, hold: bool) -> None:
        self.script.add("e", int(hold))

    @rule(stream=streams)
    def complete_events(self, stream: int) -> None:
        self.script.add("d", stream)

    @rule(stream=st.none() | streams)
    def synchronize(self, stream: int | None) -> None:
        self.script.add("y", stream)

    @rule(position=positions)
    def complete_free(self, position: int) -> None:
        self.script.complete_free(position)

    @rule()
    def empty_cache(self) -> None:
        self.script.empty_cache()

    @rule(conf=SEEDS)
    def set_allocator(self, conf: int) -> None:
        script = self.script
        script.set_allocator(random_conf(Random(conf), script.setup.release, script.settings))

    @rule(fraction=st.sampled_from(FRACTIONS) | st.floats(0.0, 1.0))
    def set_memory_fraction(self, fraction: float) -> None:
        self.script.add("g", fraction)

    @rule(bytes_=st.integers(0, 1 << 30))
    def other_process(self, bytes_: int) -> None:
        self.script.add("u", bytes_)

    @rule(no_split=st.booleans(), use_on_oom=st.booleans())
    def pool_create(self, no_split: bool, use_on_oom: bool) -> None:
        self.script.pool_create(no_split, use_on_oom)

    @rule(position=positions)
    def pool_begin(self, position: int) -> None:
        self.script.pool_begin(position)

    @rule(position=positions)
    def pool_end(self, position: int) -> None:
        self.script.pool_end(position)

    @rule(position=positions)
    def pool_release(self, position: int) -> None:
        self.script.pool_release(position)

    @rule(report=st.sampled_from(("s", "x", "a", "p")))
    def report_or_reset(self, report: str) -> None:
        self.script.add(report)

    @precondition(lambda self: hasattr(self, "script") and len(self.script.rows) >= self.checked + 40)
    @invariant()
    def agree_so_far(self) -> None:
        self.checked = len(self.script.rows)
        compare(self.script.rows, self.script.setup)

    def teardown(self) -> None:
        if hasattr(self, "script"):
            compare(self.script.rows, self.script.setup)


TestAllocatorMachine = AllocatorMachine.TestCase


@pytest.mark.skipif(bool(os.environ.get("NUMBA_DISABLE_JIT")), reason="everything runs without the compiler already")
def test_kernels_agree_without_the_compiler() -> None:
    """Some sequences and parts of two recordings, with the kernels as plain Python."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "ignore"}
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.without_jit"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12", "sequences", "and", "2", "recordings", "agree"]
