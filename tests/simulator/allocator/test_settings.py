"""Releases, allocator option strings and sizes: what PyTorch accepts is accepted, all else is one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.allocator import layout as at
from simulator.allocator import releases
from simulator.allocator.conf import (
    DEFAULT_LARGE_SEGMENT,
    LARGEST_OPTION,
    OPTIONS,
    AllocatorSettings,
    ReserveSpec,
    conf_from_environment,
    parse_conf,
    with_option,
)
from simulator.allocator.releases import parse_release
from tests.oracles.naive_settings import NaiveSettings, release_number
from tests.places import DATA
from traces.errors import ConfigError
from traces.release import DEFAULT_RELEASE, Version
from traces.units import MiB, format_bytes, parse_size

RECORDED = DATA / "alloc_conf" / "torch-2.13.0.jsonl"
RELEASES = tuple(f"2.{minor}" for minor in range(16))
CUDA_ONLY = tuple(name for name, option in OPTIONS.items() if not option.accelerator)


def parse(conf: str, release: str = "2.13", previous: AllocatorSettings | None = None) -> AllocatorSettings:
    return parse_conf(conf, parse_release(release), previous)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return check_line(caught.value)


def check_line(error: ConfigError) -> str:
    text = str(error)
    assert len(text.splitlines()) == 1
    assert len(text) < 400
    return text


# ------------------------------------------------------------------------------------------------------- releases


@pytest.mark.parametrize(
    "text", ["2.11", "2.11.0", "2.11.0+cu130", " 2.11.1 ", "v2.11.0a0+git1234", "2.11.0.dev20260101"]
)
def test_spellings_of_a_release(text: str) -> None:
    assert parse_release(text) == parse_release("2.11")


@pytest.mark.parametrize(
    "text", ["", "2", "1.13", "2.16", "2.100", "3.0", "2.x", "main", "2.11,", "-2.11", "2.1\u0661"]
)
def test_unknown_release(text: str) -> None:
    assert "from 2.0 to 2.15" in refusal(lambda: parse_release(text))


def test_a_release_is_added_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = replace(releases.RELEASES[Version(2, 15)], version=Version(2, 16), newest_scope_first=False)
    monkeypatch.setitem(releases.RELEASES, newest.version, newest)
    assert parse_release("2.16.0+cu140") == newest
    assert parse("expandable_segments_reserve:0.5", "2.16") == parse("expandable_segments_reserve:0.5", "2.15")
    assert "from 2.0 to 2.16" in refusal(lambda: parse_release("2.17"))


# ------------------------------------------------------------------------------------------------- option strings


def recorded() -> list[Any]:
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


@pytest.mark.parametrize(
    ("conf", "value", "changed"),
    [
        ("", "True", "expandable_segments:True"),
        ("max_split_size_mb:64", "True", "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:True", "False", "expandable_segments:False"),
        ("expandable_segments : True, max_split_size_mb:64", "False", "expandable_segments:False,max_split_size_mb:64"),
    ],
)
def test_an_option_takes_the_place_of_the_one_before(conf: str, value: str, changed: str) -> None:
    assert with_option(conf, "expandable_segments", value, parse_release("2.11")) == changed


def test_strings_are_read_as_torch_2_13_reads_them() -> None:
    judged = 0
    for conf, answer in recorded():
        try:
            ours: AllocatorSettings | None = parse(conf)
        except ConfigError:
            ours = None
        if answer is None or not any(name in conf for name in CUDA_ONLY):
            assert (ours is None) == (answer is None), conf
            judged += 1
        if ours is None or answer is None:
            continue
        split, rounding, threshold, expandable, segment, divisions = answer
        assert ours == replace(
            AllocatorSettings(conf=conf),
            max_split_size=min(split, at.UNLIMITED),
            max_non_split_rounding_size=min(rounding, LARGEST_OPTION),
            large_segment_size=min(segment, LARGEST_OPTION),
            garbage_collection_threshold=threshold,
            expandable_segments=bool(expandable),
            roundup_power2_divisions=tuple(divisions),
            per_process_memory_fraction=ours.per_process_memory_fraction,
            throw_on_cudamalloc_oom=ours.throw_on_cudamalloc_oom,
            graph_capture_record_stream_reuse=ours.graph_capture_record_stream_reuse,
            release_lock_on_cudamalloc=ours.release_lock_on_cudamalloc,
            pinned_use_cuda_host_register=ours.pinned_use_cuda_host_register,
            pinned_num_register_threads=ours.pinned_num_register_threads,
        )
    assert judged > 300


@pytest.mark.parametrize("release", RELEASES)
def test_the_empty_string_gives_the_defaults(release: str) -> None:
    assert parse("", release) == AllocatorSettings()
    assert parse("  ", release) == AllocatorSettings(conf="  ")


def test_each_option_lands_in_its_field() -> None:
    conf = (
        "max_split_size_mb:128, max_non_split_rounding_mb:24,large_segment_size_mb:22,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:4,expandable_segments:True,per_process_memory_fraction:0.5,"
        "throw_on_cudamalloc_oom:True,graph_capture_record_stream_reuse:True,release_lock_on_cudamalloc:True,"
        "backend:native,pinned_use_cuda_host_register:True,pinned_num_register_threads:8,"
        "pinned_use_background_threads:True,pinned_free_catch_all:False,pinned_reserve_segment_size_mb:64,"
        "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:2,expandable_segments_reserve:40G,"
        "expandable_segments_reserve_by_class:[serving:0.25,ads:8G,bad:0]"
    )
    assert parse(conf, "2.15") == AllocatorSettings(
        max_split_size=128 * MiB,
        max_non_split_rounding_size=24 * MiB,
        large_segment_size=22 * MiB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(4,) * 16,
        expandable_segments=True,
        per_process_memory_fraction=0.5,
        throw_on_cudamalloc_oom=True,
        graph_capture_record_stream_reuse=True,
        release_lock_on_cudamalloc=True,
        expandable_segments_reserve=ReserveSpec(False, 40.0),
        expandable_segments_reserve_by_class=(("serving", ReserveSpec(True, 0.25)), ("ads", ReserveSpec(False, 8.0))),
        pinned_use_cuda_host_register=True,
        pinned_num_register_threads=8,
        conf=conf,
    )


def test_reserve_in_bytes() -> None:
    assert ReserveSpec(True, 0.5).resolve(85_097_971_712) == 42_548_985_856
    assert ReserveSpec(False, 40).resolve(1) == 40 << 30
    assert ReserveSpec(False, 1e20).resolve(1) == LARGEST_OPTION


@pytest.mark.parametrize("bad", ["0", "-1", "inf", "nan", "0.5x", "G", "1e400", "five"])
def test_a_bad_reserve_is_ignored_as_in_torch(bad: str) -> None:
    assert parse(f"expandable_segments_reserve:{bad}", "2.15").expandable_segments_reserve is None


def test_the_last_of_two_wins() -> None:
    assert parse("max_split_size_mb:128,max_split_size_mb:64").max_split_size == 64 * MiB


@pytest.mark.parametrize(
    ("release", "index_of_512"),
    [("2.0", 8), ("2.9", 8), ("2.10", 2), ("2.15", 2)],
)
def test_greater_than_in_a_list(release: str, index_of_512: int) -> None:
    table = parse("roundup_power2_divisions:[256:1,512:2,>:8]", release).roundup_power2_divisions
    assert table == (1,) * 9 + (index_of_512,) + (8,) * 6


def test_intervals_between_named_ones_keep_zero() -> None:
    assert parse("roundup_power2_divisions:[2:8,16:4]").roundup_power2_divisions == (8, 8, 0, 0, 4) + (0,) * 11


@pytest.mark.parametrize(
    ("release", "least"),
    [("2.0", 21), ("2.9", 21), ("2.10", 20), ("2.15", 20)],
)
def test_smallest_max_split_size(release: str, least: int) -> None:
    assert parse(f"max_split_size_mb:{least}", release).max_split_size == least * MiB
    message = refusal(lambda: parse(f"max_split_size_mb:{least - 1}", release))
    assert f"at least {least}" in message
    assert "'max_split_size_mb'" in message


def test_large_segment_size_is_read_first_and_is_the_new_minimum() -> None:
    settings = parse("max_split_size_mb:12,large_segment_size_mb:12")
    assert (settings.large_segment_size, settings.max_split_size) == (12 * MiB, 12 * MiB)
    assert settings.max_non_split_rounding_size == 12 * MiB
    assert "at least 64" in refusal(lambda: parse("max_split_size_mb:32,large_segment_size_mb:64"))
    assert "above 10" in refusal(lambda: parse("large_segment_size_mb:10"))


@pytest.mark.parametrize("release", ["2.8", "2.10", "2.11", "2.15"])
def test_what_a_second_string_resets_and_what_it_keeps(release: str) -> None:
    first = parse(
        "max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:8,expandable_segments:True,"
        "max_non_split_rounding_mb:32,release_lock_on_cudamalloc:True",
        release,
    )
    second = parse("", release, first)
    assert second.max_split_size == at.UNLIMITED
    assert second.garbage_collection_threshold == 0
    assert second.roundup_power2_divisions == (0,) * 16
    assert second.expandable_segments
    assert second.release_lock_on_cudamalloc
    sticky = release in ("2.8", "2.10")
    assert second.max_non_split_rounding_size == (32 * MiB if sticky else DEFAULT_LARGE_SEGMENT)


def test_sticky_segment_size_brings_its_rounding_along() -> None:
    first = parse("large_segment_size_mb:64,per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True")
    second = parse("expandable_segments:False", previous=first)
    assert second.large_segment_size == second.max_non_split_rounding_size == 64 * MiB
    assert second.per_process_memory_fraction == 0.5
    assert second.throw_on_cudamalloc_oom


@pytest.mark.parametrize(
    ("conf", "near"),
    [
        ("max_split_size:128", "max_split_size_mb"),
        ("max_split_size_mb=128", "max_split_size_mb"),
        ("expandable_segment:True", "expandable_segments"),
        ("garbage_collection_treshold:0.8", "garbage_collection_threshold"),
        ("roundup_power2_division:4", "roundup_power2_divisions"),
        (",", "backend"),
    ],
)
@pytest.mark.parametrize("release", ["2.8", "2.13"])
def test_unknown_option_names_the_nearest(conf: str, near: str, release: str) -> None:
    message = refusal(lambda: parse(conf, release))
    assert "unknown allocator option" in message
    assert f"'{near}:VALUE'" in message or conf == ","


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.since > 0])
def test_an_option_of_a_later_release_names_that_release(name: str) -> None:
    since = OPTIONS[name].since
    message = refusal(lambda: parse(f"{name}:True", f"2.{since - 1}"))
    assert f"came with PyTorch 2.{since}" in message
    assert name in message


@pytest.mark.parametrize(
    ("conf", "legal"),
    [
        ("expandable_segments:true", "True or False"),
        ("expandable_segments:1", "True or False"),
        ("expandable_segments", "has no value"),
        ("expandable_segments:", "has no value"),
        ("garbage_collection_threshold:1", "above 0 and below 1"),
        ("garbage_collection_threshold:0", "above 0 and below 1"),
        ("garbage_collection_threshold:nan", "above 0 and below 1"),
        ("garbage_collection_threshold:lots", "above 0 and below 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:0", "power of two"),
        ("roundup_power2_divisions:[3:4]", "power of two"),
        ("roundup_power2_divisions:[4:3]", "power of two"),
        ("max_split_size_mb:lots", "integer number of MB"),
        ("backend:foo", "native"),
        ("backend:cudaMallocAsync", "only native is"),
        ("pinned_num_register_threads:3", "power of two up to 128"),
        ("pinned_num_register_threads:256", "power of two up to 128"),
        ("pinned_use_cuda_host_register:yes", "True or False"),
    ],
)
@pytest.mark.parametrize("release", ["2.8", "2.13"])
def test_illegal_values_name_the_legal_ones(conf: str, legal: str, release: str) -> None:
    assert legal in refusal(lambda: parse(conf, release))


@pytest.mark.parametrize(
    ("conf", "legal"),
    [
        ("per_process_memory_fraction:1.5", "from 0 to 1"),
        ("per_process_memory_fraction:-0.1", "from 0 to 1"),
        ("pinned_reserve_segment_size_mb:0", "above 0"),
        ("roundup_power2_divisions:[4:8", "']'"),
        ("expandable_segments_reserve_by_class:[a:0.5", "']'"),
    ],
)
def test_illegal_values_of_newer_options(conf: str, legal: str) -> None:
    message = refusal(lambda: parse(conf, "2.15"))
    assert legal in message or (legal == "']'" and "has no value" in message)


def test_separators_were_checked_up_to_2_9() -> None:
    assert parse("max_split_size_mb,128", "2.10").max_split_size == 128 * MiB
    assert "expected ':'" in refusal(lambda: parse("max_split_size_mb,128", "2.9"))
    assert "expected ','" in refusal(lambda: parse("max_split_size_mb:128:expandable_segments:True", "2.9"))


def test_blanks() -> None:
    assert parse(" max_split_size_mb : 1 2 8 ", "2.9").max_split_size == 128 * MiB
    assert parse("max_split_size_mb:\t128\n", "2.13").max_split_size == 128 * MiB
    refusal(lambda: parse("\tmax_split_size_mb:128", "2.9"))


def test_numbers_are_read_as_laxly_as_in_cpp() -> None:
    assert parse("max_split_size_mb:128MB", "2.9").max_split_size == 128 * MiB
    assert parse("max_split_size_mb:-1", "2.9").max_split_size == at.UNLIMITED
    assert parse("garbage_collection_threshold:0x1p-1", "2.9").garbage_collection_threshold == 0.5
    refusal(lambda: parse("max_split_size_mb:2147483648", "2.9"))  # std::stoi
    assert parse("max_split_size_mb:2147483648", "2.10").max_split_size == 2**51  # std::stoull


def test_zero_divisions_came_with_2_4() -> None:
    assert parse("roundup_power2_divisions:[4:0,>:2]", "2.4").roundup_power2_divisions[:4] == (0, 0, 2, 2)
    refusal(lambda: parse("roundup_power2_divisions:[4:0,>:2]", "2.3"))


names = st.sampled_from([*OPTIONS, "max_split_size", ""])
tokens = st.sampled_from(
    ["128", "20", "0.5", "True", "False", "native", "[", "]", "[256:1,>:8]", ">", "-1", "40G", "a"]
)
strings = st.lists(st.tuples(names, st.sampled_from([":", ",", "", "::"]), tokens), max_size=4).map(
    lambda parts: ",".join("".join(part) for part in parts)
)


@given(conf=st.one_of(st.text(max_size=80), strings), release=st.sampled_from(RELEASES))
def test_any_text_gives_settings_or_one_clear_line(conf: str, release: str) -> None:
    try:
        settings = parse(conf, release)
    except ConfigError as error:
        check_line(error)
        return
    assert settings.conf == conf
    assert 0 < settings.max_split_size <= at.UNLIMITED
    assert 10 * MiB < settings.large_segment_size <= LARGEST_OPTION
    assert 0 <= settings.garbage_collection_threshold < 1
    assert len(settings.roundup_power2_divisions) == 16
    assert parse(conf, release, settings) == settings or "large_segment_size_mb" in conf


power = st.integers(0, 20).map(lambda exponent: 2**exponent)


@given(
    split=st.integers(21, 2**31 - 1),
    threshold=st.floats(1e-6, 0.999),
    divisions=power,
    expandable=st.booleans(),
    release=st.sampled_from(RELEASES[1:]),
)
def test_settings_survive_being_written_out(
    split: int, threshold: float, divisions: int, expandable: bool, release: str
) -> None:
    conf = (
        f"max_split_size_mb:{split},garbage_collection_threshold:{threshold!r},"
        f"roundup_power2_divisions:{divisions},expandable_segments:{expandable}"
    )
    settings = parse(conf, release)
    assert settings.max_split_size == split * MiB
    assert settings.garbage_collection_threshold == threshold
    assert set(settings.roundup_power2_divisions) == {divisions}
    assert settings.expandable_segments is expandable


intervals = st.lists(st.tuples(st.integers(0, 17).map(lambda n: str(2**n)), power), min_size=1, max_size=4)


@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "max_split_size_mb": st.integers(41, 10**6),
            "max_non_split_rounding_mb": st.integers(41, 10**6),
            "large_segment_size_mb": st.integers(11, 41),
            "garbage_collection_threshold": st.floats(1e-6, 0.999),
            "expandable_segments": st.booleans(),
            "throw_on_cudamalloc_oom": st.booleans(),
            "per_process_memory_fraction": st.floats(0, 1).filter(lambda value: value == 0 or value > 1e-300),
            "roundup_power2_divisions": st.tuples(intervals, st.none() | power),
        },
    ),
    release=st.sampled_from(RELEASES),
    first=st.sampled_from(["", "max_split_size_mb:64,expandable_segments:True", "max_non_split_rounding_mb:50"]),
)
def test_legal_strings_against_a_second_reading(options: dict[str, Any], release: str, first: str) -> None:
    """`naive_settings` was written from the description of the format alone."""
    known = {name: value for name, value in options.items() if OPTIONS[name].since <= parse_release(release).minor}
    if "roundup_power2_divisions" in known:
        named, rest = known["roundup_power2_divisions"]
        items = [*named, *([(">", rest)] if rest is not None else [])]
        known["roundup_power2_divisions"] = "[" + ",".join(f"{size}:{number}" for size, number in items) + "]"
    conf = ",".join(f"{name}:{value}" for name, value in known.items())
    plain = NaiveSettings(release_number(release))
    ours = None
    for text in (first if parse_release(release).minor >= 6 else "", conf):
        plain.parse(text)
        ours = parse(text, release, ours)
    assert ours is not None
    assert ours.max_split_size == min(plain.max_split_size, at.UNLIMITED)
    assert ours.max_non_split_rounding_size == plain.max_non_split_rounding
    assert list(ours.roundup_power2_divisions) == plain.roundup_power2_divisions
    for name in (
        "large_segment_size",
        "garbage_collection_threshold",
        "expandable_segments",
        "per_process_memory_fraction",
        "throw_on_cudamalloc_oom",
    ):
        assert getattr(ours, name) == getattr(plain, name), name


def test_environment() -> None:
    everything = {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_HIP_ALLOC_CONF": "b", "PYTORCH_CUDA_ALLOC_CONF": "c"}
    for release in RELEASES:
        assert conf_from_environment(everything, parse_release(release)) == "c"
        assert conf_from_environment({}, parse_release(release)) is None
    del everything["PYTORCH_CUDA_ALLOC_CONF"]
    assert conf_from_environment(everything, parse_release("2.9")) is None
    assert conf_from_environment(everything, parse_release("2.10")) == "b"
    del everything["PYTORCH_HIP_ALLOC_CONF"]
    assert conf_from_environment(everything, parse_release("2.10")) == "a"
    assert (
        conf_from_environment(
            {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "a"}, parse_release(DEFAULT_RELEASE)
        )
        == ""
    )


# ----------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("2000000", 2_000_000),
        ("1000B", 1000),
        ("12 B", 12),
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("0.3GB", 300_000_000),
        ("1.3KiB", 1331),
        ("2TB", 2 * 10**12),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("80g", "ambiguous: write GB (1000s) or GiB"),
        ("80G", "ambiguous"),
        ("512m", "ambiguous: write MB"),
        ("80Gigs", "unknown unit"),
        ("1.5", "fraction of a byte"),
        ("24", "no unit: write 24GB or 24GiB (or 24B, which are bytes)"),
        ("1048575", "no unit"),
        ("", "not understood"),
        ("-1", "not understood"),
        ("GB", "not understood"),
        ("1e9", "not understood"),
        ("nan", "not understood"),
        ("9223372036854775808", "below 2^63"),
        ("9" * 30 + "TB", "below 2^63"),
        ("8\n0GB", "not understood"),
        ("\u0663GB", "not understood"),
    ],
)
def test_bad_sizes(text: str, why: str) -> None:
    assert why in refusal(lambda: parse_size(text))


@given(st.text(max_size=40))
def test_any_size_text_gives_a_size_or_one_clear_line(text: str) -> None:
    try:
        assert 0 <= parse_size(text) < 2**63
    except ConfigError as error:
        check_line(error)


@given(st.just(0) | st.integers(2**20, 2**63 - 1))
def test_plain_integers_are_bytes(size: int) -> None:
    assert parse_size(str(size)) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MiB - 1, "1.00 MiB"),
        (3 * MiB // 2, "1.50 MiB"),
        (85_097_971_712, "79.25 GiB"),
        (-20 * MiB, "-20.00 MiB"),
        (5 << 40, "5.00 TiB"),
        (2**63 - 1, "8192.00 PiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1024, 2**62))
def test_printed_sizes_read_back_within_their_rounding(size: int) -> None:
    text = format_bytes(size)
    assert parse_size(text) == pytest.approx(size, rel=0.006)
