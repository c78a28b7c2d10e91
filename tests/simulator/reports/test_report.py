"""The tables and the JSON document of a replay are pure functions of its result."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from simulator.engine.ranks import format_ranks, only_ranks, parse_ranks
from simulator.engine.result import OutOfMemory, RankResult, Report, Result
from simulator.reports import terminal
from simulator.reports.document import Document, Name, Size, Table
from simulator.reports.run import CAUSES, MOST_RANKS, render_json, render_table
from simulator.reports.terminal import SHORT
from simulator.reports.verify import document_of
from simulator.reports.verify import render_json as verify_json
from simulator.snapshots.verify import Divergence, VerifiedRank, VerifyReport
from tests.places import DATA
from tests.support.handmade import GIB, MIB, out_of_memory, rank_result, result, timeline
from traces.errors import ConfigError

GOLDEN = DATA / "report"
SCHEMA = json.loads((files("simulator.reports") / "result_schema.json").read_text())


def text_of(made: Result, width: int = 80) -> str:
    file = io.StringIO()
    render_table(made, Console(width=width, file=file, color_system=None))
    return file.getvalue()


def oom_at_600() -> OutOfMemory:
    return replace(out_of_memory(600), rounded=3 * GIB + 512)


def two_kinds_of_rank() -> Result:
    names = ("model.layers.31.mlp.down_proj", "a" * 200, None, "ev\x1b[31mil [bold]markup[/]")
    worst = rank_result(timeline(900, ranks=(0, 1, 2, 5)), names=names, oom=oom_at_600())
    return result(worst, rank_result(timeline(300, ranks=range(6, 40))), conf="max_split_size_mb:128")


@pytest.mark.parametrize("width", [80, 120])
def test_golden_tables(width: int) -> None:
    assert text_of(two_kinds_of_rank(), width) == (GOLDEN / f"two_kinds_of_rank.{width}.txt").read_text()


def test_tables_fit_eighty_columns() -> None:
    for line in text_of(two_kinds_of_rank()).splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()
        assert "\x1b" not in line


def test_names_are_never_markup_nor_control_characters() -> None:
    text = text_of(two_kinds_of_rank(), 200)
    assert "[bold]markup[/]" in text
    assert "\x1b" not in text


def test_plain_when_asked_or_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    render_table(two_kinds_of_rank())
    assert "\x1b" not in capsys.readouterr().out
    terminal = io.StringIO()
    monkeypatch.setenv("NO_COLOR", "1")
    render_table(two_kinds_of_rank(), Console(force_terminal=True, width=80, file=terminal, color_system="truecolor"))
    assert "\x1b[31m" not in terminal.getvalue()
    assert "\x1b[91m" not in terminal.getvalue()


def test_names_stay_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "model.layers.31.mlp.down_proj.weight.exp_avg_sq.local"
    render_table(result(rank_result(timeline(30), names=[name])))
    assert name in capsys.readouterr().out


def test_the_report_goes_from_the_verdict_to_the_sources() -> None:
    made = rank_result(timeline(30))
    uncertain = replace(made.outside[0], low=1, high=2)
    text = text_of(result(replace(made, outside=(uncertain,))))
    parts = (
        *("fits: ", "rank ", "peak allocated", "Peak by phase", "Alive at the peak, by category"),
        *("Largest tensors alive", "Reserved memory at its peak", "Outside the allocator"),
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_an_ascii_terminal_is_served() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    render_table(two_kinds_of_rank(), Console(width=80, file=file))
    file.seek(0)
    assert "--------" in file.read()


def test_only_the_worst_of_many_ranks_are_shown() -> None:
    groups = [rank_result(timeline(40, ranks=(2 * place, 2 * place + 1), seed=place)) for place in range(20)]
    text = text_of(result(*groups))
    assert "and 24 more ranks (12 different ones), none of them worse" in text
    assert text.count("Reserved memory at its peak, by cause") == MOST_RANKS
    assert "ranks 14-15 on A100-80GB" in text
    assert "ranks 16-17" not in text


def test_many_phases_keep_the_largest() -> None:
    made = rank_result(timeline(4000, steps=30))
    text = text_of(result(made))
    assert "and 74 more phases with smaller peaks" in text
    peak = max(phase.peak for phase in made.phases)
    assert f"{peak / GIB:.2f} GiB" in text.split("Peak by phase")[1]


def test_out_of_memory_says_what_was_asked_and_what_was_free() -> None:
    text = text_of(two_kinds_of_rank(), 200)
    assert text.startswith(
        "out of memory: asked for 3.00 GiB with 512.00 MiB of 79.25 GiB left on ranks 0-2,5\n"
        "38 ranks, PyTorch 2.13, max_split_size_mb:128\n"
    )
    assert "Out of memory at event 600 (forward)" in text
    asked = "3.00 GiB (3,221,225,472 B, rounded to 3,221,225,984 B)"
    assert f"asked: {asked} on stream 0, for id 77 (model.layers.31.mlp.down_proj)" in text
    assert "free: 512.00 MiB on the GPU, 8.00 GiB in segments, the largest piece 2.00 GiB" in text
    assert "expandable_segments:True (peak reserved 74.00 GiB)" in text
    pieces = text.split("Free pieces in segments")[1]
    assert ["large", "0", "130", "7.00", "GiB", "2.00", "GiB"] in [line.split() for line in pieces.splitlines()]


def test_out_of_memory_that_no_setting_serves() -> None:
    oom = replace(oom_at_600(), remedies=(), pieces=(), largest_free=0, tried=("a:1", "b:2,c:3"))
    text = text_of(result(rank_result(timeline(900), oom=oom)))
    assert "None of the 2 settings tried serves it (a:1; b:2,c:3)." in text
    assert "largest piece" not in text


def test_out_of_memory_for_which_no_setting_was_tried() -> None:
    oom = replace(oom_at_600(), remedies=(), untried="the trace has more than 3,000,000 events")
    text = text_of(result(rank_result(timeline(900), oom=oom)), 200)
    assert "Other allocator settings were not tried: the trace has more than 3,000,000 events." in text
    assert "None of" not in text


def test_the_phases_of_a_single_step_are_shown_once() -> None:
    made = rank_result(timeline(900, steps=1))
    both = [replace(phase, key=f"{phase.name}_{end}") for phase in made.phases for end in ("first", "last")]
    twice = result(replace(made, phases=tuple(both)))
    assert text_of(twice) == text_of(result(made))
    entry = document(twice)["ranks"][0]
    assert [phase["name"] for phase in entry["all_phases"]] == ["forward", "backward", "optimizer"]
    assert sorted(entry["phases"]) == sorted(phase.key for phase in both)


@pytest.mark.parametrize(
    ("duration", "words"),
    [
        (None, None),
        (0, "0 ns"),
        (999, "999 ns"),
        (1500, "1.50 us"),
        (999_999, "1.00 ms"),
        (12_345_678_901, "12.35 s"),
        (2**62, "4611686018.43 s"),
    ],
)
def test_simulated_time(duration: int | None, words: str | None) -> None:
    text = text_of(result(replace(rank_result(timeline(30)), duration_ns=duration)))
    assert ("simulated time" in text) == (words is not None)
    if words is not None:
        (line,) = (line for line in text.splitlines() if line.startswith("simulated time"))
        assert f" {words} " in line
        assert f" {duration:,} ns " in line


def test_a_trace_without_events_and_one_without_ranks() -> None:
    assert "0 B" in text_of(result(rank_result(timeline(0), names=())))
    assert "no ranks" in text_of(result())


def test_reports_are_announced() -> None:
    made = replace(rank_result(timeline(10)), reports=(Report(3, "statistics", {"a": 1}),))
    assert "statistics at event 3" in text_of(result(made))


# ----------------------------------------------------------------------------------------------------------- JSON


def document(made: Result) -> dict[str, Any]:
    parsed = json.loads(json.dumps(render_json(made), allow_nan=False))
    jsonschema.validate(parsed, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert isinstance(parsed, dict)
    return parsed


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_json_has_one_entry_a_rank_in_ascending_order() -> None:
    made = result(rank_result(timeline(30, ranks=(3, 7))), rank_result(timeline(20, ranks=(0, 5))))
    entries = document(made)["ranks"]
    assert [(entry["rank"], entry["same_as"]) for entry in entries] == [(0, 0), (3, 3), (5, 0), (7, 3)]
    assert {**entries[3], "rank": 3} == entries[1]


def test_json_figures() -> None:
    made = two_kinds_of_rank()
    parsed = document(made)
    rank = made.ranks[0]
    assert (parsed["schema_version"], parsed["verdict"], parsed["worst_rank"]) == (1, "oom", 0)
    assert (parsed["release"], parsed["conf"]) == ("2.13", "max_split_size_mb:128")
    entry = parsed["ranks"][0]
    assert entry["memory_stats"] == rank.memory_stats
    assert entry["device_total"] == rank.peak_reserved + 750 * MIB
    assert entry["phases"]["forward_0"] == {"peak": rank.phases[0].peak, "left": rank.phases[0].left}
    assert sum(entry["peak"]["by_category"].values()) == entry["peak"]["allocated"]
    assert sum(entry["fragmentation"][cause] for cause in CAUSES) == entry["fragmentation"]["reserved"]
    assert entry["oom"]["remedies"] == [{"conf": "expandable_segments:True", "peak_reserved": 74 * GIB}]
    assert entry["oom"]["pieces"][1] == {"pool": "small", "stream": 0, "count": 20, "bytes": 3 * MIB, "largest": MIB}
    assert entry["outside"][0]["source"] == "measured on an A100, driver 550"
    assert parsed["ranks"][-1]["verdict"] == "fits"


def test_json_fits_and_carries_metadata_notes_and_reports() -> None:
    rank = replace(
        rank_result(timeline(10, timed=True)), reports=(Report(3, "snapshot", {"segments": []}),), duration_ns=9
    )
    parsed = document(result(rank, notes=("assumed release 2.13",), model="gpt2"))
    assert (parsed["verdict"], parsed["metadata"], parsed["notes"]) == (
        "fits",
        {"model": "gpt2"},
        ["assumed release 2.13"],
    )
    assert parsed["ranks"][0]["reports"] == [{"event": 3, "kind": "snapshot", "data": {"segments": []}}]
    assert parsed["ranks"][0]["duration_ns"] == 9
    assert document(result())["worst_rank"] is None


def test_the_schema_refuses_a_document_with_a_field_missing() -> None:
    parsed = document(two_kinds_of_rank())
    del parsed["ranks"][0]["memory_stats"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(parsed, SCHEMA)


# --------------------------------------------------------------------------------------------------------- verify


def verified(divergence: Divergence | None) -> VerifyReport:
    ranks = (VerifiedRank(0, 5000, 9000, 3 * GIB, 4 * GIB), VerifiedRank(1, 5100, 70, GIB, 2 * GIB, divergence))
    return VerifyReport(ranks, "2.11", "", ("release guessed",))


def test_verify_without_divergence() -> None:
    report, file = verified(None), io.StringIO()
    terminal.render(document_of(report), Console(width=80, file=file))
    assert file.getvalue().startswith("no divergence: PyTorch 2.11, default allocator settings\n")
    assert verify_json(report)["verdict"] == "equal"
    assert verify_json(report)["ranks"][1]["divergence"] is None


def test_verify_with_a_divergence() -> None:
    report, file = (
        verified(Divergence(70, "alloc of 512 bytes:\nrecorded at 0x7f00, replayed at 0x7e00")),
        io.StringIO(),
    )
    terminal.render(document_of(report), Console(width=200, file=file))
    assert "diverges" in file.getvalue()
    assert "device 1, entry 70: alloc of 512 bytes: recorded at 0x7f00, replayed at 0x7e00" in file.getvalue()
    assert json.loads(json.dumps(verify_json(report)))["ranks"][1]["divergence"]["entry"] == 70


# ---------------------------------------------------------------------------------------------------------- ranks


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranks_are_printed_as_they_are_read(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks), limit=10_000)
    assert parse_ranks(text, range(201)) == ranks
    assert len(format_ranks(sorted(ranks), limit=20)) <= 20 + len(",... (201 ranks)")


@pytest.mark.parametrize(("ranks", "text"), [([0], "0"), ([0, 1], "0-1"), ([1, 2, 3, 7, 9, 10], "1-3,7,9-10")])
def test_format_ranks(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "0-99999999999", "1 2", "3-2", "0x1", "1.0"])
def test_malformed_ranks(text: str) -> None:
    with pytest.raises(ConfigError, match="are not understood"):
        parse_ranks(text, range(4))


@pytest.mark.parametrize(("text", "missing"), [("4", 4), ("0,9", 9), ("2-5", 5), ("0-999999999", 999999999)])
def test_ranks_that_are_not_there(text: str, missing: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {missing} is not in the trace, which has ranks 0-3"):
        parse_ranks(text, range(4))


def test_only_ranks_keeps_the_order_and_narrows_timelines() -> None:
    made = two_kinds_of_rank()
    part = only_ranks(made, frozenset({5, 6}))
    assert [group.ranks for group in part.ranks] == [(5,), (6,)]
    assert [group.timeline.ranks for group in part.ranks] == [(5,), (6,)]
    assert only_ranks(made, frozenset()).ranks == ()


def test_rank_figures_come_from_the_statistics() -> None:
    rank: RankResult = rank_result(timeline(30))
    assert render_json(result(rank))["ranks"][0]["peak_reserved"] == rank.memory_stats["reserved_bytes.all.peak"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_breaks_no_number_and_no_name(width: int) -> None:
    """Every cell of a table is there in one piece, but for names, whose middle goes, and texts, wrapped at blanks."""
    numbers = ("1,234,567,890", "12.01 MiB", "100.0%")
    table = Table("", ("mesh", "count", "size", "share"), (("pp=2,fsdp2=2,tp=2", *numbers),), right=range(1, 4))
    file = io.StringIO()
    terminal.render(Document("", "", head=(table,)), Console(width=width, file=file))
    assert ["pp=2,fsdp2=2,tp=2", *numbers] == re.split(r"\s{3,}", file.getvalue().splitlines()[-1])


def test_texts_far_too_long_for_their_column_stand_below_their_row() -> None:
    options, words = " ".join(["--option value"] * 12), "; ".join(["what changes"] * 20)
    rows = ((options, "fits", Size(1 << 30), words), ("--lora 16", "tight", Size(2 << 30), "adapters"))
    table = Table("What would fit", ("options", "verdict", "needs", "what"), rows, right=(2,))
    file = io.StringIO()
    terminal.render(Document("", "", head=(table,)), Console(width=80, file=file))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    places = [next(place for place, line in enumerate(lines) if line.startswith(word)) for word in ("fits", "tight")]
    assert lines[places[0] - 2].split() == ["verdict", "needs"]
    assert lines[places[0]].split() == ["fits", "1.00", "GiB"]
    assert " ".join(" ".join(lines[places[0] + 1 : places[1]]).split()) == f"{options} {words}"
    assert [" ".join(line.split()) for line in lines[places[1] :]] == ["tight 2.00 GiB", "--lora 16", "adapters"]
    wide = io.StringIO()
    terminal.render(Document("", "", head=(table,)), Console(width=400, file=wide))
    assert "--lora 16" in next(line for line in wide.getvalue().splitlines() if "tight" in line)


@given(st.lists(st.text("abc", min_size=1, max_size=200), min_size=1, max_size=4), st.integers(30, 200))
def test_names_keep_their_ends(names: list[str], width: int) -> None:
    table = Table("", ("bytes", "tensor"), tuple((Size(1), Name(f"{name}|")) for name in names))
    file = io.StringIO()
    terminal.render(Document("", "", head=(table,)), Console(width=width, file=file))
    lines = file.getvalue().splitlines()[-len(names) :]
    for name, line in zip(names, lines, strict=True):
        shown = line.split()[-1]
        first, cut, last = shown.partition("...") if len(shown) < len(name) + 1 else (shown, "", "|")
        assert name.startswith(first.rstrip("|") if not cut else first)
        assert f"{name}|".endswith(last)
        assert len(line) <= max(width, 8 + 3 + SHORT)
