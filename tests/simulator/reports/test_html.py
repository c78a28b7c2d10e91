"""The page of a result: its numbers, its size, what hostile names can do (nothing), and how it is written."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.comparison.compare import compare, side_of_replay
from simulator.engine.replay import replay
from simulator.engine.result import Result
from simulator.estimator import estimate as estimation
from simulator.estimator.devices import device
from simulator.reports import compare as comparison
from simulator.reports import select
from simulator.reports.document import Bar, Chart, Document, Section, Size, Table
from simulator.reports.html import page as pages
from simulator.reports.html.lives import lives
from simulator.reports.html.overlay import COLUMNS, LINES, overlay
from simulator.reports.html.page import MAX_LIVES, MAX_PAGE, MAX_RANKS, document_of, render, write, write_html
from simulator.reports.html.series import MAX_OOMS, pack, series, shorten
from simulator.reports.run import CAUSES
from simulator.selector.select import Asked, Outcome, Selection
from simulator.snapshots.reader import read
from tests.places import DATA
from tests.support.handmade import GIB, busy_trace, out_of_memory, rank_result, result, timeline
from tests.support.step_graphs import stub
from traces.errors import OutputError
from traces.model import Int64Array
from traces.timelines.timeline import Region
from traces.units import format_bytes

#: The page's scripts and the data; the lives of each rank's blocks come on top.
SCRIPTS = len(pages._SCRIPTS) + 1
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\u202e\x00"


class Page(HTMLParser):
    """What a browser would make of a page, as far as the tests ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, int] = {}
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        if found.get("data-key") and found.get("data-bytes"):
            self.figures.setdefault(str(found["data-key"]), int(str(found["data-bytes"])))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def unpack(text: str) -> list[int]:
    """The plain inverse of `pack`."""
    values, total, code, shift = [], 0, 0, 0
    for byte in base64.b64decode(text):
        code |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            total += -(code + 1) // 2 if code % 2 else code // 2
            values.append(total)
            code = shift = 0
    return values


def render_html(found: Result) -> str:
    return render(document_of(found))


def int64(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


@given(st.lists(st.integers(0, 1 << 60)))
def test_pack_can_be_unpacked(values: list[int]) -> None:
    assert unpack(pack(int64(values))) == values


def test_pack_takes_few_bytes() -> None:
    assert pack(int64([0, -1, 1])) == base64.b64encode(bytes([0, 1, 4])).decode()
    assert len(base64.b64decode(pack(np.arange(1000)))) == 1000


def test_a_series_of_no_points_has_ends_and_peaks() -> None:
    line = timeline(5_000)
    index = unpack(series(line, (), 0).document["event"])
    assert {0, len(line) - 1, int(line.reserved.argmax())} <= set(index)
    assert len(index) <= 8


def test_series_holds_marks_phases_and_exact_values() -> None:
    line = replace(timeline(30_000), ooms=(12_345,))
    document = series(line, (777,), 2_000).document
    index = unpack(document["event"])
    assert {777, 12_345, *(span.start for span in line.phases)} <= set(index)
    unit = document["unit"]
    assert unit % 512 == 0
    allocated = [value * unit for value in unpack(document["allocated"])]
    assert allocated == line.allocated[index].tolist()
    above = [value * unit for value in unpack(document["above"])]
    assert above == (line.active - line.allocated)[index].tolist()
    assert unpack(document["phases"]["stop"]) == [span.stop for span in line.phases]


def test_series_holds_regions() -> None:
    regions = (Region("outer", 3, 90, 0), Region("inner", 5, 20, 1), Region("inner", 30, 31, 1))
    found = series(replace(timeline(30_000), regions=regions), (), 2_000).document["regions"]
    columns = [unpack(found[name]) for name in ("name", "start", "stop", "depth")]
    assert [Region(found["names"][name], *rest) for name, *rest in zip(*columns, strict=True)] == list(regions)
    assert series(replace(timeline(30_000), regions=regions * 200), (), 2_000).document["regions"]["count"] == 0


def test_series_caps_marks_and_phases() -> None:
    line = replace(timeline(8_000, steps=1_000), ooms=tuple(range(4_000)))
    document = series(line, (), 1_000).document
    assert len(document["ooms"]) == MAX_OOMS
    assert document["phases"]["count"] == 0
    assert document["phasesLeftOut"] == len(line.phases)


def test_figures_are_those_of_the_result() -> None:
    rank = rank_result(timeline(5_000))
    page = Page(render_html(result(rank, model="llama")))
    assert page.figures["peak_allocated"] == rank.peak_allocated
    assert page.figures["peak_reserved"] == rank.peak_reserved
    assert page.figures["device_total"] == rank.device_total
    assert page.figures["limit"] == rank.timeline.limit_bytes
    assert page.data["ranks"][0]["peak"] == {
        "event": rank.peak.event,
        "bytes": rank.peak_allocated,
        "text": format_bytes(rank.peak_allocated),
    }
    for word in (
        "llama",
        "activation",
        CAUSES["stranded"],
        "CUDA context",
        "forward",
        format_bytes(rank.peak_reserved),
    ):
        assert word in page.text


def test_fragmentation_rows_sum_to_reserved() -> None:
    text = render_html(result(rank_result(timeline(5_000))))
    card = text[text.index("Reserved memory at its peak") :].split("</table>")[0]
    parts = [int(count.replace(",", "")) for count in re.findall(r'title="([\d,]+) bytes"', card)]
    assert sum(parts) == rank_result(timeline(5_000)).fragmentation.reserved


def test_out_of_memory_is_told() -> None:
    line = replace(timeline(2_000), ooms=(1_500,))
    page = Page(render_html(result(rank_result(line, oom=out_of_memory(1_500)))))
    assert "Asked for 3.00 GiB with 512.00 MiB of 79.25 GiB left" in page.text
    assert "expandable_segments:True" in page.text
    assert page.data["ranks"][0]["ooms"] == [1_500]
    without = replace(out_of_memory(1_500), remedies=())
    assert "Other allocator settings were not tried" in render_html(result(rank_result(line, oom=without)))
    tried = replace(without, tried=("max_split_size_mb:128",))
    assert "does not serve it (max_split_size_mb:128)" in render_html(result(rank_result(line, oom=tried)))


def test_hostile_text_is_only_text() -> None:
    line = timeline(100)
    line = replace(line, phases=tuple(replace(span, name=HOSTILE) for span in line.phases))
    rank = rank_result(line, names=[HOSTILE], oom=replace(out_of_memory(3), name=HOSTILE, phase=HOSTILE))
    rank = replace(rank, device=replace(rank.device, name=HOSTILE))
    page = Page(render_html(result(rank, conf=HOSTILE, notes=[HOSTILE], model=HOSTILE, **{HOSTILE: HOSTILE})))
    plain = Page(render_html(result(rank_result(timeline(100), oom=out_of_memory(3)), model="x")))
    kinds = {tag for tag, _ in page.tags}
    assert kinds <= {tag for tag, _ in plain.tags} | {"bdi", "ul", "li"}
    assert len(page.scripts) == len(plain.scripts) == SCRIPTS + 1
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert HOSTILE in page.data["ranks"][0]["names"]


def test_long_names_may_break_and_stay_whole() -> None:
    names = ("expandable_segments:True", "a.b_<c>.9")
    page = Page(
        render(Document("A", "b", sections=(Section("s", (Table("t", ("name",), tuple((n,) for n in names)),)),)))
    )
    assert all(name in page.text for name in names)
    assert [tag for tag, _ in page.tags].count("wbr") == 3  # not before a digit


def test_policy_allows_the_scripts_of_the_page_and_no_network() -> None:
    page = Page(render_html(result(rank_result(timeline(10)))))
    policy = next(str(a["content"]) for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[2:]]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    sources = [attributes.get("src") or attributes.get("href") for _, attributes in page.tags]
    assert {source for source in sources if source} == {"data:,"}


def test_a_million_events_make_a_small_page() -> None:
    line = timeline(1_000_000, timed=True)
    text = render_html(result(rank_result(line)))
    assert len(text) < 1_500_000
    data = Page(text).data["ranks"][0]
    kept = unpack(data["event"])
    assert int(line.allocated.argmax()) in kept
    assert int(line.reserved.argmax()) in kept
    assert unpack(data["time"])[-1] == line.time_ns[-1]  # type: ignore[index]


def test_many_ranks_make_a_small_page_and_are_counted() -> None:
    ranks = [rank_result(timeline(20_000, ranks=[place], seed=place % 5)) for place in range(MAX_RANKS + 20)]
    text = render_html(result(*ranks))
    page = Page(text)
    assert len(text) < 3_000_000
    assert len(page.data["ranks"]) == MAX_RANKS
    assert f"The {MAX_RANKS} worst of {MAX_RANKS + 20} distinct ranks are drawn" in page.text


def test_results_without_events_or_ranks() -> None:
    page = Page(render_html(result(rank_result(timeline(0)))))
    assert page.figures["peak_allocated"] == 0
    assert page.data["ranks"][0]["points"] == 0
    assert "The trace has no ranks." in render_html(result())


def test_the_page_is_a_function_of_the_result() -> None:
    one = result(rank_result(timeline(3_000)), model="m")
    assert render_html(one) == render_html(one)


def test_write_html(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    one = result(rank_result(timeline(50)), model="lone \ud800 surrogate")
    write_html(one, path)
    assert path.read_bytes().startswith(b"<!doctype html>")
    with pytest.raises(OutputError, match="force"):
        write_html(one, path)
    write_html(result(rank_result(timeline(60)), model="second"), path, force=True)
    assert "second" in path.read_text("utf-8")
    with pytest.raises(OutputError):
        write_html(one, tmp_path / "nowhere" / "page.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_shorten() -> None:
    assert shorten("a" * 160) == "a" * 160
    short = shorten("a" * 500 + "b")
    assert len(short) <= 160
    assert short.endswith("b")


# Categories, blocks and modules ---------------------------------------------------------------------------------------


def test_categories_over_time_sum_to_allocated() -> None:
    found = replay(busy_trace(3_000), picture=True)
    data = Page(render_html(found)).data["ranks"][0]
    index = unpack(data["event"])
    held = {part["name"]: int64(unpack(part["bytes"])) * part["unit"] for part in data["categories"]}
    assert set(held) == {"parameter", "activation", "gradient", "temporary"}
    assert sum(held.values()).tolist() == found.ranks[0].timeline.allocated[index].tolist()
    at = index.index(found.ranks[0].peak.event)
    assert {name: int(column[at]) for name, column in held.items()} == dict(found.ranks[0].peak.by_category)


def lives_of(text: str) -> tuple[dict[str, Any], dict[str, dict[str, Int64Array]]]:
    """The plain inverse of `lives`: what the JSON says, and the columns by group."""
    data = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(data[:4], "little")
    head, at = json.loads(data[4 : 4 + length]), 4 + length
    found: dict[str, dict[str, Int64Array]] = {}
    for group, said in head["columns"].items():
        for name, size in said["bytes"].items():
            values = int64(unpack(base64.b64encode(data[at : at + size]).decode()))
            assert len(values) == said["count"]
            found.setdefault(group, {})[name] = values
            at += size
    assert at == len(data)
    return head, found


def test_the_lives_of_blocks_are_those_of_the_picture() -> None:
    rank = replay(busy_trace(3_000), picture=True).ranks[0]
    picture = rank.picture
    assert picture is not None
    head, columns = lives_of(lives(rank, picture))
    blocks, kinds, held = columns["blocks"], columns["kinds"], picture.blocks
    assert (blocks["address"] * 512).tolist() == held.address.tolist()
    assert (blocks["bytes"] * 512 - blocks["slack"]).tolist() == held.requested.tolist()
    assert (blocks["born"] + blocks["life"]).tolist() == held.died.tolist()
    assert (blocks["born"] + blocks["life"] - blocks["wait"]).tolist() == held.freed.tolist()
    names = [head["names"][kinds["name"][kind]] for kind in blocks["kind"].tolist()]
    assert names == [picture.names[code] for code in held.name.tolist()]
    categories = [head["categories"][kinds["category"][kind]] for kind in blocks["kind"].tolist()]
    assert categories == [picture.categories[code] for code in held.category.tolist()]
    assert (columns["segments"]["bytes"] * 512).tolist() == picture.segments.bytes.tolist()
    assert [one["event"] for one in head["moments"]] == [one.event for one in picture.moments]


def test_whole_stacks_are_on_the_page() -> None:
    rank = replay(read(DATA / "snapshots" / "opt-2l_w1.pickle.gz"), picture=True, analyse=False).ranks[0]
    assert rank.picture is not None
    head, columns = lives_of(lives(rank, rank.picture))
    stacks = ["\n".join(head["frames"][frame] for frame in stack) for stack in head["stacks"]]
    kinds = columns["kinds"]["stack"][columns["blocks"]["kind"]].tolist()
    shown = [stacks[stack] if stack >= 0 else None for stack in kinds]
    wanted = [rank.picture.frames[code] if code >= 0 else None for code in rank.picture.blocks.frames.tolist()]
    assert shown == wanted
    own = [frame for frame, foreign in zip(head["frames"], head["foreign"], strict=True) if not foreign]
    assert any(frame.endswith("gemini_run.py:310:measure") for frame in own)
    assert not any("/torch/" in frame for frame in own)


def test_ranks_beyond_the_room_are_drawn_without_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replay(busy_trace(2_000), picture=True).ranks[0]
    assert one.picture is not None
    monkeypatch.setattr(pages, "MAX_LIVES", 3 * len(lives(one, one.picture)))
    shown = Page(render_html(result(*(replace(one, ranks=(place,)) for place in range(5)))))
    assert [bool(text) for text in shown.scripts[1:6]] == [True, True, True, False, False]


def test_many_ranks_with_pictures_stay_small_and_stand_side_by_side() -> None:
    one = replay(busy_trace(40_000, live=3_000), picture=True).ranks[0]
    text = render_html(result(*(replace(one, ranks=(place,)) for place in range(MAX_RANKS))))
    assert len(text) <= MAX_PAGE + MAX_LIVES
    assert text.count("role=listitem") == MAX_RANKS
    assert format_bytes(one.peak_reserved) in text[text.index("Side by side") :].split("</svg>")[1]


def test_endless_and_hostile_paths_stay_text() -> None:
    trace = busy_trace(2_000, names=[".".join("a" * place) for place in range(1, 2_000)] + [HOSTILE, "9" * 9_000])
    page = Page(render_html(replay(trace, picture=True)))
    assert len(page.scripts) == SCRIPTS + 1
    assert not any(tag == "img" for tag, _ in page.tags)


def test_a_sheet_sets_methods_side_by_side() -> None:
    one = replay(busy_trace(500), picture=True)
    document = Document(
        "opt-1.3b",
        "fsdp2 is fastest.",
        named=True,
        badge="fits",
        facts=("4 GPUs",),
        head=(
            Chart("Peaks", (Bar("fsdp2", (("parameter", 1 << 30), ("slack", 2 << 30)), mark=4 << 30, remark=HOSTILE),)),
            Table(
                "Methods",
                ("method", "peak", "fits"),
                (("fsdp2", Size(3 << 30), "yes"), (HOSTILE, 7, None)),
                styles={0: "good"},
            ),
        ),
        results=(("fsdp2", one), ("ddp", one)),
        notes=("a note",),
    )
    page = Page(render(document))
    assert len(page.scripts) == SCRIPTS + 2
    assert not any(tag == "img" for tag, _ in page.tags)
    assert [rank["label"] for rank in page.data["ranks"]] == ["fsdp2", "ddp"]
    for word in ("Fits", "fsdp2 is fastest.", "4 GPUs", "3.00 GiB", "a note"):
        assert word in page.text
    widths = [
        attributes["width"] for tag, attributes in page.tags if tag == "rect" and "c-" in str(attributes.get("class"))
    ][:2]
    assert widths == ["25.00%", "50.00%"]  # the scale ends at the limit


def test_write_sheet(tmp_path: Path) -> None:
    write(Document("t", "l"), tmp_path / "a.html")
    with pytest.raises(OutputError, match="force"):
        write(Document("t", "l"), tmp_path / "a.html")


def test_a_selection_is_set_side_by_side() -> None:
    asked = Asked({"model": "opt-1.3b"}, ("V100-16GB",) * 4)
    outcomes = (
        Outcome(
            "fsdp2", {}, 4, batch=8, peak_allocated=GIB, peak_reserved=2 * GIB, limit=4 * GIB, tokens_per_second=10
        ),
        Outcome("ddp", {}, 4, peak_allocated=5 * GIB, peak_reserved=5 * GIB, limit=4 * GIB, short=GIB),
        Outcome("pp", {}, 1, error="layers < stages"),
    )
    page = Page(render(select.document_of(Selection(asked, outcomes, seconds=1.0))))
    assert page.scripts == []
    for word in ("opt-1.3b on 4 x V100-16GB", "micro-batch 8", "lacks 1.00 GiB", "layers < stages", "Fits"):
        assert word in page.text
    widths = [attributes["width"] for tag, attributes in page.tags if tag == "rect"]
    assert widths[:3] == ["20.00%", "20.00%", "100.00%"]


def test_a_selection_draws_methods_over_time() -> None:
    outcomes = tuple(Outcome(name, {}, 2, batch=1, tokens_per_second=1) for name in ("ddp", "tp"))
    found = Selection(Asked({"model": "m"}, ("T4-16GB",) * 2), outcomes)
    ranks = rank_result(timeline(300)), rank_result(timeline(400, seed=1), names=[HOSTILE])
    page = Page(
        render(
            select.document_of(
                found, tuple((one.name, result(rank)) for one, rank in zip(outcomes, ranks, strict=True))
            )
        )
    )
    assert [rank["label"] for rank in page.data["ranks"]] == ["ddp", "tp"]
    assert "Memory over time, on one axis" in page.text
    for rank in ranks:
        assert f"{format_bytes(rank.peak_reserved)} reserved at most" in page.text


def test_methods_are_drawn_beside_what_lies_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimation, "captured", lambda case, progress=None, method=None: stub(case))
    keys = {"model": "m", "gpu": "T4-16GB"}
    outcomes = (Outcome("single", keys, 1, batch=2, worst=(0,), tokens_per_second=1.0),)
    ((name, found),) = select.drawn(Selection(Asked({"model": "m"}, ("T4-16GB",), context=3 * GIB), outcomes))
    assert (name, found.verdict) == ("single", "fits")
    assert found.ranks[0].timeline.limit_bytes == device("T4-16GB").total_bytes - 3 * GIB
    assert found.ranks[0].picture is not None


@pytest.mark.parametrize(("retries", "badge"), [(0, "fits"), (2, "tight")])
def test_the_badge_and_the_sentence_are_the_verdict(retries: int, badge: str) -> None:
    rank = rank_result(timeline(30))
    written = render_html(result(replace(rank, memory_stats={**rank.memory_stats, "num_alloc_retries": retries})))
    page = Page(written)
    assert f'<span class="badge {badge}">{badge.capitalize()}</span>' in written
    assert "Needs 39.20 GiB of 79.25 GiB (40.05 GiB left)" in page.text
    assert ("tries again 2 times" in page.text) == (retries == 2)


@pytest.mark.parametrize("pictured", [False, True])
def test_a_comparison_is_set_side_by_side(pictured: bool) -> None:
    runs = [busy_trace(500, live=live) for live in (50, 100)]
    replays = [replay(trace, picture=pictured) for trace in runs]
    sides = [side_of_replay(*one, name) for one, name in zip(zip(replays, runs, strict=True), "ab", strict=True)]
    page = Page(render(comparison.document_of(compare(sides[0], sides[1]))))
    assert len(page.scripts) == (SCRIPTS + 2 if pictured else 0)
    assert ("Memory over time, on one axis" in page.text) is pictured
    if pictured:
        assert [rank["label"] for rank in page.data["ranks"]] == ["before: a", "after: b"]
    for side, trace in zip(sides, runs, strict=True):
        assert format_bytes(side.most("peak_allocated") or 0) in page.text
        assert replay(trace).ranks[0].peak_allocated == side.most("peak_allocated")
    assert "Alive at the peak, by category" in page.text


# Runs on one axis -----------------------------------------------------------------------------------------------------


def heights(html: str, kind: str, place: int) -> list[tuple[int, int]]:
    """The corners of a line of the drawing, x and bytes per mille of its top."""
    path = re.findall(rf'<path class={kind} d="([^"]*)"', html)[place]
    x, found = 0, []
    for letter, value in re.findall(r"([HV])(\d+)", path):
        if letter == "H":
            x = int(value)
        else:
            found.append((x, LINES - int(value)))
    return found


def test_runs_of_equal_phases_are_aligned_by_phase() -> None:
    ranks = [rank_result(timeline(events, seed=seed)) for seed, events in enumerate((3_000, 90_000))]
    html = overlay([("a", ranks[0]), ("b", ranks[1])])
    assert "aligned phase by phase" in html
    top = 1.04 * max(rank.timeline.limit_bytes for rank in ranks)
    for place, rank in enumerate(ranks):
        drawn = heights(html, "line", place)
        assert max(y for _, y in drawn) == pytest.approx(LINES * rank.peak_reserved / top, abs=1)
        drawn = heights(html, "area", place)[:-1]  # the last corner closes the area
        x, y = max(drawn, key=lambda corner: corner[1])
        assert y == pytest.approx(LINES * rank.peak_allocated / top, abs=1)
        # both runs have their phases at the same places: those of the longer one
        longer = ranks[1].timeline
        span = next(i for i, one in enumerate(rank.timeline.phases) if one.start <= rank.peak.event < one.stop)
        edges = [COLUMNS * edge / len(longer) for edge in (longer.phases[span].start, longer.phases[span].stop)]
        assert edges[0] - 1 <= x <= edges[1]


def test_runs_of_other_phases_are_aligned_by_their_share() -> None:
    ranks = [rank_result(timeline(1_000, steps=steps)) for steps in (1, 2)]
    html = overlay([("a", ranks[0]), ("b", ranks[1])])
    assert "aligned event by event" in html
    ranks[1] = rank_result(timeline(2_000, steps=2))
    html = overlay([("a", ranks[0]), ("b", ranks[1])])
    assert "aligned by their share of all events" in html
    for place, rank in enumerate(ranks):
        there = rank.peak.event * COLUMNS // len(rank.timeline)
        highest = max(y for x, y in heights(html, "area", place) if x == there)
        assert highest == pytest.approx(LINES * rank.peak_allocated / (1.04 * rank.timeline.limit_bytes), abs=1)


def test_one_run_or_none_has_no_axis_to_share() -> None:
    one = rank_result(timeline(10))
    assert overlay([]) == overlay([("a", one)]) == overlay([("a", one), ("b", rank_result(timeline(0)))]) == ""


def test_millions_of_events_on_one_axis_take_little_room() -> None:
    rank = rank_result(timeline(1_000_000))
    html = overlay([(HOSTILE, rank)] * 6)
    assert len(html) < 200_000
    assert "<img" not in html


def test_the_case_of_an_estimate_is_told() -> None:
    one = replace(
        result(rank_result(timeline(10))),
        metadata={"model": "m", "case": {"model": "m", "batch": 4, "mesh": {"tp": 2}}, "assumptions": ["a", HOSTILE]},
    )
    page = Page(render_html(one))
    assert "model m, batch 4, mesh tp 2" in page.text
    assert "a; </script>" in page.text
    assert not any(tag == "img" for tag, _ in page.tags)


def test_many_ranks_of_both_sides_are_drawn() -> None:
    one = result(*(rank_result(timeline(20, ranks=[place])) for place in range(50)))
    page = Page(render(Document("t", "l", results=(("before", one), ("after", one)))))
    labels = [rank["label"].partition(":")[0] for rank in page.data["ranks"]]
    assert labels == ["before"] * (MAX_RANKS // 2) + ["after"] * (MAX_RANKS // 2)
    assert "The 32 worst event sequences of each are drawn; 36 others peak lower." in page.text


def test_what_a_failed_run_would_need_is_in_the_page() -> None:
    trace = busy_trace(4_000)
    whole = replay(trace, memory=1 << 42).ranks[0]
    found = replay(trace, memory=whole.peak_reserved // 2, context=0)
    failed = found.ranks[0]
    assert failed.oom is not None
    assert failed.events < whole.events
    (rank,) = Page(render_html(found)).data["ranks"]
    demand = rank["demand"]
    assert (rank["events"], demand["events"]) == (failed.events, whole.events)
    assert max(unpack(demand["reserved"])) * demand["unit"] == demand["peak"] == whole.peak_reserved
    assert max(unpack(demand["allocated"])) * demand["unit"] == whole.peak_allocated
    assert demand["phases"]["count"] > rank["phases"]["count"]
    assert [one["demand"] for one in Page(render_html(replay(trace))).data["ranks"]] == [None]
    unasked = replay(trace, memory=whole.peak_reserved // 2, context=0, analyse=False)
    assert [one["demand"] for one in Page(render_html(unasked)).data["ranks"]] == [None]
