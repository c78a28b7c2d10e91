"""The replay equals the recordings of the compiled allocator: every address, column, device call and report.

`--recordings FOLDER` adds every recording below a folder of one's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import golden
from tests.support.fast import fast_replay
from tests.support.observed import assert_same

OWN = {release: set(golden.names(f"{release}/")) for release in ("2.9.1", "2.12.1", "2.15.0")}
# What 2.9.1 does not know: `large_segment_size_mb` and `per_process_memory_fraction`.
UNKNOWN_TO_2_9 = {"log-uniform.segments64", "stress.process-fraction", "transformer.segments64-expandable"}


def shared_with(release: str) -> list[str]:
    """Recordings of 2.11.0 that hold for another release: it has none of its own of the same events."""
    workloads = [name.removeprefix("2.11.0/") for name in golden.names("2.11.0/")]
    unknown = UNKNOWN_TO_2_9 if release == "2.9.1" else set()
    return [w for w in workloads if f"{release}/{w}" not in OWN[release] and w not in unknown]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "recording_of_ones_own" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--recordings")
        none = pytest.param("", id="none", marks=pytest.mark.skip(reason="--recordings names no folder"))
        paths = [*Path(folder).rglob("*.jsonl"), *Path(folder).rglob("*.jsonl.gz")] if folder else []
        metafunc.parametrize("recording_of_ones_own", sorted(map(str, paths)) if folder else [none])


def check(name: str, release: str | None = None) -> None:
    """Replay a recording, as another release if one is named, and compare everything."""
    recording = golden.load(name)
    setup = recording.setup if release is None else replace(recording.setup, release=release)
    assert_same(name, recording.rows, recording.observed, fast_replay(recording.rows, setup))


@pytest.mark.parametrize("name", golden.names())
def test_replay_equals_recording(name: str) -> None:
    check(name)


@pytest.mark.parametrize(
    ("release", "workload"), [(release, workload) for release in OWN for workload in shared_with(release)]
)
def test_replay_of_other_releases_equals_shared_recording(release: str, workload: str) -> None:
    check(f"2.11.0/{workload}", release)


@pytest.mark.parametrize("name", sorted(OWN["2.15.0"]))
def test_replay_as_2_14_equals_recording_of_2_15(name: str) -> None:
    check(name, "2.14.1")


def test_recording_of_ones_own(recording_of_ones_own: str) -> None:
    check(recording_of_ones_own)


def test_all_recordings_are_there() -> None:
    counts = {release: len(golden.names(f"{release}/")) for release in ("2.9.1", "2.11.0", "2.12.1", "2.15.0")}
    assert counts == {"2.9.1": 6, "2.11.0": 67, "2.12.1": 66, "2.15.0": 25}
    assert len(golden.names("same_events/")) == 27
