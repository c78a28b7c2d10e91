"""Runs the allocator's kernels as plain Python: a few random sequences and the beginnings of two recordings.

`NUMBA_DISABLE_JIT=1 python -m tests.support.without_jit`; `tests/simulator/allocator/test_stateful.py` starts it.
"""

from __future__ import annotations

from random import Random

from tests.oracles.naive_replay import naive_replay
from tests.support import golden
from tests.support.fast import fast_replay
from tests.support.observed import Observed, Row, assert_same
from tests.support.random_events import RELEASES, random_rows, random_setup

REPORTS: list[Row] = [["x"], ["s"]]


def check_sequence(seed: int) -> None:
    """A random sequence, up to where PyTorch leaves undefined what follows."""
    random = Random(seed)
    setup = random_setup(random, RELEASES[-1 - seed % 4])
    rows = [*random_rows(random, setup, 120), *REPORTS]
    stop = naive_replay(rows, setup).undefined
    rows = rows[:stop]
    assert_same(f"seed {seed}", rows, naive_replay(rows, setup), fast_replay(rows, setup))


def check_recording(name: str, events: int) -> None:
    """The first events of a recording."""
    recording = golden.load(name)
    rows = recording.rows[:events]
    observed = recording.observed
    part = Observed(observed.states[:events], observed.calls[:events], reports=observed.reports)
    assert_same(name, rows, part, fast_replay(rows, recording.setup))


def main() -> None:
    """Check everything, and say what was checked; an AssertionError tells the first difference."""
    sequences = range(12)
    for seed in sequences:
        check_sequence(seed)
    recordings = ("2.15.0/streams.small-device", "2.12.1/stress.expandable")
    for name in recordings:
        check_recording(name, 300)
    print(f"{len(sequences)} sequences and {len(recordings)} recordings agree")


if __name__ == "__main__":
    main()
