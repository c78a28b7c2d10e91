"""The naive model equals the recordings of the compiled allocator: every column, device call and report."""

from __future__ import annotations

import pytest

from tests.oracles.naive_replay import naive_replay
from tests.oracles.naive_settings import NaiveSettings
from tests.support import golden
from tests.support.observed import Setup, assert_same

# What 2.9.1 does not know: `large_segment_size_mb` and `per_process_memory_fraction`.
UNKNOWN_TO_2_9 = ("log-uniform.segments64", "stress.process-fraction", "transformer.segments64-expandable")


@pytest.mark.parametrize("name", golden.names())
def test_naive_model_equals_recording(name: str) -> None:
    recording = golden.load(name)
    assert_same(name, recording.rows, recording.observed, naive_replay(recording.rows, recording.setup))


@pytest.mark.parametrize(
    ("release", "name"),
    [
        (release, name)
        for release in ("2.9.1", "2.12.1", "2.14.1", "2.15.0")
        for name in golden.names("2.11.0/")
        if release != "2.9.1" or not name.endswith(UNKNOWN_TO_2_9)
    ],
)
def test_releases_differ_exactly_where_a_recording_of_their_own_says_so(release: str, name: str) -> None:
    workload = name.removeprefix("2.11.0/")
    recording = golden.load(name)
    setup = Setup(
        release,
        recording.setup.conf,
        recording.setup.total_bytes,
        recording.setup.va_base,
        recording.setup.placement,
    )
    got = naive_replay(recording.rows, setup)
    same = True
    try:
        assert_same(name, recording.rows, recording.observed, got)
    except AssertionError:
        same = False
    recorded_as = "2.15.0" if release == "2.14.1" else release
    assert same == (f"{recorded_as}/{workload}" not in golden.names())


def test_comparison_sees_one_wrong_number() -> None:
    recording = golden.load("2.11.0/toggles.default")
    got = naive_replay(recording.rows, recording.setup)
    report = got.reports[len(recording.rows) - 1]
    report["inactive_split"]["small_pool"][3] += 1
    with pytest.raises(AssertionError, match=r"toggles.default: event 1502 .*inactive_split.small_pool\[3\]: is"):
        assert_same(recording.name, recording.rows, recording.observed, got)
    state = got.states[40]
    assert state is not None
    got.states[40] = (*state[:3], state[3] + 512, *state[4:])
    with pytest.raises(AssertionError, match=r"toggles.default: event 40 .*: active is"):
        assert_same(recording.name, recording.rows, recording.observed, got)


@pytest.mark.parametrize(
    ("release", "conf", "table"),
    [
        ("2.11", "roundup_power2_divisions:[1:8,16:4,256:2,>:1]", [8, 0, 0, 0, 4, 0, 0, 0, 2] + [1] * 7),
        ("2.9", "roundup_power2_divisions:[1:8,16:4,256:2,>:1]", [8, 0, 0, 0, 4, 0, 0, 0] + [1] * 8),
        ("2.11", "roundup_power2_divisions:[4:2,8:4]", [2, 2, 2, 4] + [0] * 12),
        ("2.11", "roundup_power2_divisions:8", [8] * 16),
    ],
)
def test_naive_settings_read_division_lists(release: str, conf: str, table: list[int]) -> None:
    major, minor = release.split(".")
    settings = NaiveSettings((int(major), int(minor)))
    settings.parse(conf)
    assert settings.roundup_power2_divisions == table
