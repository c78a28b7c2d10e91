"""The page in a real browser: it draws, shows the result's numbers, obeys the keyboard, and needs no network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.engine.replay import replay
from simulator.engine.result import Result
from simulator.reports.document import Bar, Chart, Document, Table
from simulator.reports.html.page import MAX_LIVES, MAX_PAGE, write, write_html
from simulator.reports.html.series import shorten
from simulator.snapshots.reader import read
from tests.benchmarks.page import MOMENT, QUERIES, SEARCH, input_times, key_times
from tests.places import DATA
from tests.support.browser import Browser, find_chromium
from tests.support.handmade import GIB, busy_trace, out_of_memory, rank_result, result, timeline
from tests.support.pictures import alive, event_of, sums
from traces.timelines.timeline import Region
from traces.units import format_bytes

#: How many of the plot's pixels are of a colour: red, green and blue within 12 of it.
COUNT_PIXELS = """
(([r, g, b]) => {
  const canvas = document.querySelector(".rank:not([hidden]) canvas");
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, copy.width, copy.height);
  const near = (i) => Math.max(Math.abs(data[i] - r), Math.abs(data[i + 1] - g), Math.abs(data[i + 2] - b)) < 12;
  let count = 0;
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && near(i)) count++;
  return count;
})(%s)
"""
ALLOCATED, RESERVED, OOM = [0x00, 0x72, 0xB2], [0xD5, 0x5E, 0x00], [0xA3, 0x00, 0x5C]
INK = [0x1B, 0x1F, 0x24]
ALLOCATED_DARK = [0x56, 0xB4, 0xE9]
OOM_DARK = [0xFF, 0x8C, 0xC6]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of this file."""
    chromium = find_chromium()
    if chromium is None:
        if os.environ.get("CI"):
            pytest.fail("CI must test the page in a browser: install Debian's `chromium` or set LLMEM_CHROMIUM")
        pytest.skip("no Chromium: install Debian's `chromium` or set LLMEM_CHROMIUM")
    with Browser(chromium, tmp_path_factory.mktemp("profile")) as started:
        yield started


def show(
    browser: Browser, tmp_path: Path, one: Result, *, width: int = 1280, height: int = 900, dark: bool = False
) -> None:
    """Write the page of a result and open it; it must be whole, fault-free and quiet."""
    path = tmp_path / "page.html"
    write_html(one, path, force=True)
    browser.view(width, height, dark=dark)
    browser.open(path)
    healthy(browser)


def healthy(browser: Browser) -> None:
    assert browser.faults() == []
    assert browser.evaluate("document.documentElement.dataset.errors ?? ''") == ""
    assert browser.until("document.documentElement.dataset.ready == 'true'"), "the page does not get ready"
    assert browser.requests() == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def drawn(browser: Browser) -> dict[str, Any]:
    """What the visible plot says that it shows."""
    data = browser.evaluate("({...document.querySelector('.rank:not([hidden]) .canvas').dataset})")
    return {key: float(value) for key, value in data.items()}


def readout(browser: Browser) -> str:
    return str(browser.evaluate("document.querySelector('.rank:not([hidden]) .readout').textContent"))


def focus(browser: Browser) -> None:
    browser.evaluate("document.querySelector('.rank:not([hidden]) .canvas').focus()")


def press_until_focus(browser: Browser, selector: str) -> None:
    for _ in range(30):
        browser.press("Tab")
        if browser.evaluate(f"document.activeElement.matches('{selector}')"):
            return
    raise AssertionError(f"Tab does not reach {selector}")


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 900, False), (1280, 900, True), (390, 844, False)])
def test_a_small_result_is_drawn(browser: Browser, tmp_path: Path, width: int, height: int, dark: bool) -> None:
    rank = rank_result(timeline(600))
    show(browser, tmp_path, result(rank, model="tiny"), width=width, height=height, dark=dark)
    assert drawn(browser) == {"drawn": 601, "from": 0, "to": 600}
    colour = ALLOCATED_DARK if dark else ALLOCATED
    assert browser.evaluate(COUNT_PIXELS % colour) > 200
    shown = browser.evaluate("document.querySelector('[data-key=peak_allocated]').textContent")
    assert shown == format_bytes(rank.peak_allocated)
    assert f"Event {rank.peak.event:,}" in readout(browser)
    assert f"allocated {format_bytes(rank.peak_allocated)}" in readout(browser)


def test_regions_lie_below_the_axis_and_are_told(browser: Browser, tmp_path: Path) -> None:
    line = timeline(600)
    regions = (Region("whole step", 0, 600, 0), Region("mixing", 100, 599, 1))
    peak = int(line.allocated.argmax())
    rank = rank_result(line)
    show(browser, tmp_path, result(replace(rank, timeline=replace(line, regions=regions)), model="tiny"))
    inside = " \u203a mixing" if 100 <= peak < 599 else ""
    assert f" · whole step{inside} · allocated" in readout(browser)
    bare = browser.evaluate(COUNT_PIXELS % INK)
    show(browser, tmp_path, result(rank, model="tiny"))
    assert bare > browser.evaluate(COUNT_PIXELS % INK) + 500
    healthy(browser)


def test_a_million_events_with_out_of_memory(browser: Browser, tmp_path: Path) -> None:
    line = replace(timeline(1_000_000, limit=40 * GIB), ooms=(800_000, 800_001, 900_000))
    rank = rank_result(line, oom=out_of_memory(800_000))
    show(browser, tmp_path, result(rank))
    overview = drawn(browser)
    assert 1_000 < overview["drawn"] < 12_000
    assert browser.evaluate(COUNT_PIXELS % OOM) > 100
    assert browser.evaluate(COUNT_PIXELS % RESERVED) > 100
    focus(browser)
    browser.press("p")
    close = drawn(browser)
    assert close["to"] - close["from"] <= 50_000
    assert close["from"] <= rank.peak.event <= close["to"]
    assert f"Event {rank.peak.event:,} " in readout(browser)
    assert f"allocated {format_bytes(rank.peak_allocated)}" in readout(browser)
    healthy(browser)


@pytest.mark.parametrize("dark", [False, True])
def test_the_demand_stands_above_the_limit(browser: Browser, tmp_path: Path, dark: bool) -> None:
    trace = busy_trace(4_000)
    whole = replay(trace, memory=1 << 42).ranks[0]
    found = replay(trace, memory=whole.peak_reserved // 2, context=0, picture=True)
    show(browser, tmp_path, found, dark=dark)
    shown = drawn(browser)
    assert (shown["from"], shown["to"]) == (0, whole.events)  # not where it fails
    assert browser.evaluate(COUNT_PIXELS % (OOM_DARK if dark else OOM)) > 400
    assert "on a GPU without end" in browser.evaluate("document.querySelector('.plot .legend').textContent")
    focus(browser)
    browser.press("End")
    assert drawn(browser)["to"] == whole.events
    assert f"Event {found.ranks[0].events - 1:,}" in readout(browser)
    healthy(browser)


def test_the_keyboard_moves_and_zooms(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, result(rank_result(timeline(1_000))))
    press_until_focus(browser, ".canvas")
    browser.press("Home")
    assert readout(browser).startswith("Event 0 ")
    browser.press("ArrowRight")
    assert readout(browser).startswith("Event 1 ")
    browser.press("ArrowLeft")
    assert readout(browser).startswith("Event 0 ")
    browser.press("+")
    assert drawn(browser)["to"] - drawn(browser)["from"] == 500
    browser.press("-")
    assert drawn(browser)["to"] - drawn(browser)["from"] == 1_000
    browser.press("+")
    browser.press("0")
    assert (drawn(browser)["from"], drawn(browser)["to"]) == (0, 1_000)
    browser.press("End")
    assert readout(browser).startswith("Event 999 ")
    assert browser.evaluate("document.querySelector('.u-cursor-x').style.transform") != ""
    for _ in range(40):
        browser.press("+")
    assert drawn(browser)["to"] - drawn(browser)["from"] == 4
    healthy(browser)


def test_the_mouse_reads_and_zooms(browser: Browser, tmp_path: Path) -> None:
    line = timeline(100)
    show(browser, tmp_path, result(rank_result(line)))
    box = browser.evaluate("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    left, top, width, height = (box[key] for key in ("left", "top", "width", "height"))
    middle = top + height / 2
    browser.drag((left + width * 0.4045, middle))
    assert readout(browser).startswith("Event 40 ")
    assert f"reserved {format_bytes(int(line.reserved[40]))}" in readout(browser)
    browser.drag((left + width * 0.2, middle), (left + width * 0.6, middle))
    assert drawn(browser)["from"] == pytest.approx(20, abs=0.5)
    assert drawn(browser)["to"] == pytest.approx(60, abs=0.5)
    browser.evaluate("[...document.querySelectorAll('.tools button')].find(b => b.textContent == 'All').click()")
    assert (drawn(browser)["from"], drawn(browser)["to"]) == (0, 100)
    healthy(browser)


def test_ranks_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    ranks = [rank_result(timeline(500 + place, ranks=[2 * place, 2 * place + 1], seed=place)) for place in range(5)]
    show(browser, tmp_path, result(*ranks))
    assert browser.evaluate("document.querySelectorAll('.rank:not([hidden])').length") == 1
    assert browser.evaluate("document.querySelectorAll('.multiples button').length") == 5
    browser.evaluate(
        "(s => { s.value = 3; s.dispatchEvent(new Event('change')); })(document.querySelector('#chooser select'))"
    )
    browser.settle()
    assert drawn(browser)["to"] == 503
    shown = "document.querySelector('.rank:not([hidden]) [data-key=peak_reserved]').dataset.bytes"
    assert int(browser.evaluate(shown)) == ranks[3].peak_reserved
    browser.evaluate("document.querySelectorAll('.multiples button')[1].click()")
    browser.settle()
    assert drawn(browser)["to"] == 501
    assert browser.evaluate("document.querySelector('#chooser select').value") == "1"
    healthy(browser)


def test_time_and_height_can_be_changed(browser: Browser, tmp_path: Path) -> None:
    line = timeline(2_000, timed=True)
    assert line.time_ns is not None
    show(browser, tmp_path, result(rank_result(line)))
    before = browser.evaluate(COUNT_PIXELS % ALLOCATED)
    browser.evaluate("[...document.querySelectorAll('.tools label')].find(l => l.textContent == 'by time').click()")
    browser.settle()
    assert drawn(browser)["to"] == line.time_ns[-1]
    browser.evaluate("[...document.querySelectorAll('.tools label')].find(l => l.textContent == 'fit height').click()")
    browser.settle()
    assert browser.evaluate(COUNT_PIXELS % ALLOCATED) != before
    healthy(browser)


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"
    line = timeline(50)
    line = replace(line, phases=tuple(replace(span, name=evil) for span in line.phases))
    show(browser, tmp_path, result(rank_result(line, names=[evil]), notes=[evil], model=evil))
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.title") == f"{shorten(evil, 80)}: fits"
    assert evil in browser.evaluate("document.querySelector('td.long ~ td').closest('section').textContent")


def test_a_policy_stops_what_slips_through(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, result(rank_result(timeline(50))))
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=https://example.invalid/x.png>')")
    browser.evaluate("fetch('https://example.invalid/').catch(() => 0)")
    browser.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
    browser.settle()
    assert browser.evaluate("window.ran ?? 0") == 0
    assert "blocked" in browser.evaluate("document.documentElement.dataset.errors")


def test_a_trace_without_events(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, result(rank_result(timeline(0))))
    assert readout(browser) == "No events."
    focus(browser)
    for key in ("ArrowRight", "+", "p", "0"):
        browser.press(key)
    healthy(browser)


def test_it_prints_in_ink(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, result(rank_result(timeline(500))), dark=True)
    assert browser.pdf().startswith(b"%PDF")
    healthy(browser)
    assert browser.evaluate("document.documentElement.dataset.print ?? 'screen'") == "screen"


# Categories, blocks and modules ---------------------------------------------------------------------------------------

PARAMETER, PARAMETER_DARK = [0x44, 0x77, 0xAA], [0x5A, 0x8F, 0xC4]
TAPE = "document.querySelector('.rank:not([hidden]) .tape')"


@pytest.fixture(scope="module")
def pictured() -> Result:
    """A replay with its picture: twelve phases, four categories, forty layers."""
    return replay(busy_trace(4_000, live=600), picture=True)


def block(browser: Browser) -> str:
    return str(browser.evaluate("document.querySelector('.rank:not([hidden]) .moments .readout').textContent"))


def tape_pixels(browser: Browser, colour: list[int]) -> int:
    return int(browser.evaluate(COUNT_PIXELS.replace(") canvas", ") .tape") % colour))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_categories_are_stacked(browser: Browser, tmp_path: Path, pictured: Result, width: int, dark: bool) -> None:
    show(browser, tmp_path, pictured, width=width, dark=dark)
    colour = PARAMETER_DARK if dark else PARAMETER
    assert browser.evaluate(COUNT_PIXELS % colour) > 500
    assert tape_pixels(browser, colour) > 500
    words = browser.evaluate("document.querySelector('.legend').textContent")
    assert all(name in words for name in ("parameter", "activation", "gradient", "temporary", "reserved"))
    browser.evaluate("[...document.querySelectorAll('.tools label')].find(l => l.textContent == 'by category').click()")
    browser.settle()
    assert browser.evaluate(COUNT_PIXELS % colour) < 50
    healthy(browser)


def test_the_readout_has_the_categories(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    for category, count in pictured.ranks[0].peak.by_category.items():
        assert f"{category} {format_bytes(count)}" in readout(browser)


def test_the_keyboard_walks_through_the_blocks(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    picture = pictured.ranks[0].picture
    assert picture is not None
    press_until_focus(browser, ".tape")
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    peak = event_of(picture, "peak allocated")
    segments = alive(picture.segments, peak)
    browser.press("Home")
    assert f"at +0 B of segment 1 of {len(segments)}" in block(browser)
    first = alive(picture.blocks, peak)[0]
    assert format_bytes(int(picture.blocks.bytes[first])) in block(browser)
    assert picture.names[int(picture.blocks.name[first])] in block(browser)
    browser.press("ArrowRight")
    assert f"at +{format_bytes(int(picture.blocks.bytes[first]))} of segment 1" in block(browser)
    browser.press("ArrowLeft")
    assert "at +0 B of segment 1 " in block(browser)
    browser.press("ArrowDown")
    assert "at +0 B of segment 2 " in block(browser)
    assert format_bytes(int(picture.segments.bytes[segments[1]])) in block(browser)
    browser.press("ArrowUp")
    browser.press("g")
    assert block(browser).startswith("Free")
    browser.press("PageDown")
    later = next(moment for moment in picture.moments if moment.event > peak)
    reserved = sums(picture, later.event)[2]
    assert f"reserved {format_bytes(reserved)} in {len(alive(picture.segments, later.event))} segments" in facts(
        browser
    )
    assert f"event {later.event:,}" in facts(browser)
    assert later.labels[0] in browser.evaluate("document.querySelector('.moments select').selectedOptions[0].text")
    assert tape_pixels(browser, PARAMETER) > 500
    healthy(browser)


def facts(browser: Browser) -> str:
    return str(browser.evaluate("document.querySelector('.rank:not([hidden]) .moments .facts').textContent"))


def shown_event(browser: Browser) -> int:
    return int(browser.evaluate("document.querySelector('.rank:not([hidden]) .moments').dataset.event"))


def test_any_event_can_be_shown(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    """By a click, a key, or its number: the sums are the counters' after just that event."""
    show(browser, tmp_path, pictured)
    line = pictured.ranks[0].timeline

    def agrees(event: int) -> None:
        browser.settle()
        assert shown_event(browser) == event
        assert f"allocated {format_bytes(int(line.allocated[event]))} " in facts(browser)
        assert f"reserved {format_bytes(int(line.reserved[event]))} " in facts(browser)

    focus(browser)
    browser.press("End")
    browser.press("Enter")
    agrees(len(line) - 1)
    browser.press(",")
    agrees(len(line) - 2)
    box = browser.evaluate("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    events, left = float(len(line)), 0.0
    for share in (0.1234, 0.5071, 0.8888):
        at = (box["left"] + box["width"] * share, box["top"] + 200)
        browser.drag(at, at)
        event = shown_event(browser)
        assert event == pytest.approx(left + share * events, abs=events / box["width"] + 1)
        agrees(event)
        focus(browser)
        browser.press("+")  # clicks go on in a part of it
        events, left = drawn(browser)["to"] - drawn(browser)["from"], drawn(browser)["from"]
    browser.evaluate(
        "(n => { n.value = 1717; n.dispatchEvent(new Event('change')); })"
        "(document.querySelector('.moments input[type=number]'))"
    )
    agrees(1717)
    healthy(browser)


def test_the_icicle_adds_up_and_obeys_the_keyboard(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    picture = pictured.ranks[0].picture
    assert picture is not None
    said = "document.querySelector('.flames .readout').textContent"
    press_until_focus(browser, ".flame")
    assert f"{format_bytes(pictured.ranks[0].peak_allocated)}, 100.0 %" in browser.evaluate(said)
    for _ in range(3):
        browser.press("ArrowDown")
    assert browser.evaluate(said).startswith("model \u203a layers \u203a 40 \u00d7 layers.*")
    browser.press("ArrowDown")
    name = browser.evaluate(said).split(" · ")[0].split(" \u203a ")[-1]
    peak = event_of(picture, "peak allocated")
    used = [i for i in alive(picture.blocks, peak).tolist() if picture.blocks.freed[i] > peak]
    mine = [i for i in used if picture.names[int(picture.blocks.name[i])].split(".")[3] == f"{name}: aten"]
    assert f" · {format_bytes(sum(int(picture.blocks.bytes[i]) for i in mine))}, " in browser.evaluate(said)
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('.flame').dataset.top") == name
    assert browser.evaluate("Number(document.querySelector('.alive').dataset.found)") == len(mine)
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('.flame').dataset.top") == "40 \u00d7 layers.*"
    browser.evaluate("document.querySelector('.flames input').click()")  # layers one by one
    browser.settle()
    assert int(browser.evaluate("document.querySelector('.flame').dataset.nodes")) > 40
    healthy(browser)


def search(browser: Browser, text: str) -> int:
    """How many tensors in use a search finds."""
    element = "document.querySelector('.alive input')"
    browser.evaluate(f"{element}.value = {text!r}; {element}.dispatchEvent(new Event('input'))")
    browser.settle()
    return int(browser.evaluate("document.querySelector('.alive').dataset.found"))


def test_tensors_are_found_by_name_category_and_size(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    picture = pictured.ranks[0].picture
    assert picture is not None
    blocks = picture.blocks
    used = alive(blocks, event_of(picture, "peak allocated"))
    names = [picture.names[code] for code in blocks.name[used].tolist()]
    categories = [picture.categories[code] for code in blocks.category[used].tolist()]
    assert search(browser, "") == len(used)
    assert search(browser, "Layers.7.") == sum("layers.7." in name for name in names)
    assert search(browser, "gradient") == categories.count("gradient")
    assert search(browser, ">1MiB") == int((blocks.bytes[used] >= 1 << 20).sum())
    both = sum(c == "gradient" and b >= 1 << 20 for c, b in zip(categories, blocks.bytes[used].tolist(), strict=True))
    assert search(browser, "gradient >1MiB") == both
    assert search(browser, "no such tensor") == 0
    healthy(browser)


def test_a_tensor_that_is_chosen_is_marked_everywhere(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    search(browser, "layers.7.")
    browser.evaluate("document.querySelector('.alive tbody button').click()")
    browser.settle()
    name = browser.evaluate("document.querySelector('.alive tr.chosen button').textContent")
    assert "layers.7." in name
    assert name in block(browser)
    assert browser.evaluate("document.querySelector('.life-bar').hidden") is False
    life = browser.evaluate("document.querySelector('.life-bar').getBoundingClientRect().width")
    assert life > 3
    browser.evaluate("document.querySelector('.alive tr.chosen button').click()")
    browser.settle()
    assert browser.evaluate("document.querySelector('.life-bar').hidden") is True
    healthy(browser)


def test_the_pointer_is_told_what_lies_below_it(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    said = "document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent"
    assert browser.evaluate(said) == ""
    hover = "(e => e.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: %d, clientY: %d})))(%s)"
    for selector, words in ((".tape", "of segment"), (".flame", "% of"), (".u-over", "allocated")):
        element = f"document.querySelector('{selector}')"
        browser.evaluate(f"{element}.scrollIntoView()")
        box = browser.evaluate(f"{element}.getBoundingClientRect().toJSON()")
        browser.evaluate(hover % (box["left"] + 40, box["top"] + 10, element))
        assert words in browser.evaluate(said), selector
        edge = browser.evaluate(
            "(b => [b.left, b.right, innerWidth])(document.querySelector('.tip').getBoundingClientRect())"
        )
        assert 0 <= edge[0] <= edge[1] <= edge[2]
    healthy(browser)


def test_the_wheel_zooms_and_dragging_moves_along(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured)
    box = browser.evaluate("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    left, width, middle = box["left"], box["width"], box["top"] + box["height"] / 2
    turn = f"{{deltaY: -200, clientX: {left + width / 4}, clientY: {middle}, cancelable: true}}"
    for _ in range(3):
        browser.evaluate(f"document.querySelector('.u-over').dispatchEvent(new WheelEvent('wheel', {turn}))")
    close = drawn(browser)
    events = len(pictured.ranks[0].timeline)
    assert close["to"] - close["from"] < events / 4
    assert close["from"] < events / 4 < close["to"]
    browser.drag((left + width * 0.75, middle), (left + width * 0.25, middle))
    moved = drawn(browser)
    assert moved["to"] - moved["from"] == pytest.approx(close["to"] - close["from"])
    assert moved["from"] - close["from"] == pytest.approx((close["to"] - close["from"]) / 2, rel=0.05)
    healthy(browser)


def test_a_recording_with_stacks_is_drawn_by_stack(browser: Browser, tmp_path: Path) -> None:
    found = replay(read(DATA / "snapshots" / "opt-2l_w1.pickle.gz"), picture=True, analyse=False)
    show(browser, tmp_path, found)
    assert browser.evaluate("document.title").startswith("opt-2l_w1.pickle.gz")
    words = browser.evaluate("document.querySelector('.plot .legend').textContent")
    assert all(name in words for name in ("parameter", "optimizer state", "activation", "temporary"))
    press_until_focus(browser, ".flame")
    said = "document.querySelector('.flames .readout').textContent"
    browser.press("ArrowDown")
    assert browser.evaluate(said).startswith("<module> sweep.py:105 · ")
    assert search(browser, "hybrid_adam.py") > 2
    healthy(browser)


@pytest.fixture(scope="module")
def million() -> Result:
    """A replay of a million events with its picture."""
    return replay(busy_trace(1_000_000, live=6_000), picture=True)


@pytest.mark.parametrize("runs", [1, 2])
def test_a_million_events_open_with_blocks(browser: Browser, tmp_path: Path, million: Result, runs: int) -> None:
    path = tmp_path / "page.html"
    if runs == 1:
        write_html(million, path)
    else:
        write(Document("both", "The same twice.", results=(("before", million), ("after", million))), path)
    assert path.stat().st_size <= MAX_PAGE + MAX_LIVES
    browser.view(1280, 900)
    browser.open(path)
    healthy(browser)
    assert int(browser.evaluate(f"{TAPE}.dataset.blocks")) > 1_000
    assert browser.evaluate(COUNT_PIXELS % PARAMETER) > 500


def test_a_million_events_answer_keys(browser: Browser, tmp_path: Path, million: Result) -> None:
    show(browser, tmp_path, million)
    for key in ("+", "PageDown", "ArrowRight", "0", "p", "Enter"):
        key_times(browser, key)
    assert drawn(browser)["drawn"] > 100
    healthy(browser)


def test_any_of_a_million_events_is_shown_and_found(browser: Browser, tmp_path: Path, million: Result) -> None:
    show(browser, tmp_path, million)
    values = [str(event) for event in range(20_000, 1_000_000, 49_000)]
    input_times(browser, MOMENT, "change", values)
    assert shown_event(browser) == int(values[-1])
    browser.evaluate("document.querySelector('.alive input[type=checkbox]').click()")
    input_times(browser, SEARCH, "input", QUERIES)
    assert int(browser.evaluate("document.querySelector('.alive').dataset.found")) > 400_000
    healthy(browser)


def test_every_event_is_drawn_close_up(browser: Browser, tmp_path: Path, million: Result) -> None:
    """The overview has one event in twenty; a part of it has all, with the counters' values."""
    show(browser, tmp_path, million)
    line = million.ranks[0].timeline
    focus(browser)
    browser.press("p")
    while drawn(browser)["to"] - drawn(browser)["from"] > 300:
        browser.press("+")
    assert drawn(browser)["drawn"] >= drawn(browser)["to"] - drawn(browser)["from"]
    here = int(readout(browser).split(" ")[1].replace(",", ""))
    assert here == million.ranks[0].peak.event
    for _ in range(40):
        browser.press("ArrowLeft")
        here -= 1
        assert readout(browser).startswith(f"Event {here:,} ")
        assert f"allocated {format_bytes(int(line.allocated[here]))} " in readout(browser)
        assert f"reserved {format_bytes(int(line.reserved[here]))} " in readout(browser)
    browser.press("0")
    assert drawn(browser)["to"] == 1_000_000
    healthy(browser)


def test_two_million_events_open(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, replay(busy_trace(2_000_000, live=6_000), picture=True, analyse=False))
    assert int(browser.evaluate(f"{TAPE}.dataset.blocks")) > 1_000


def test_pictures_print_in_ink(browser: Browser, tmp_path: Path, pictured: Result) -> None:
    show(browser, tmp_path, pictured, dark=True)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tape_pixels(browser, PARAMETER) > 500
    assert tape_pixels(browser, PARAMETER_DARK) < 50
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tape_pixels(browser, PARAMETER_DARK) > 500
    healthy(browser)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_sheet_is_drawn(browser: Browser, tmp_path: Path, pictured: Result, width: int) -> None:
    bars = tuple(Bar(name, (("parameter", GIB), ("activation", 2 * GIB)), mark=4.0 * GIB) for name in ("fsdp2", "ddp"))
    parts = (Chart("Peaks", bars), Table("Methods", ("method", "batch"), (("fsdp2", 8), ("ddp", 1))))
    sheet = Document(
        "opt-1.3b",
        "fsdp2 is fastest.",
        badge="fits",
        head=parts,
        results=(("fsdp2", pictured), ("ddp", pictured)),
    )
    write(sheet, tmp_path / "sheet.html")
    browser.view(width, 900, dark=False)
    browser.open(tmp_path / "sheet.html")
    healthy(browser)
    wide = browser.evaluate("document.querySelector('.bars rect.c-activation').getBoundingClientRect().width")
    whole = browser.evaluate("document.querySelector('.bars svg').getBoundingClientRect().width")
    assert wide == pytest.approx(whole / 2, rel=0.01)
    browser.evaluate("document.querySelectorAll('.multiples button')[1].click()")
    browser.settle()
    assert browser.evaluate("document.querySelector('.rank:not([hidden]) h2').textContent").startswith("ddp")
    assert tape_pixels(browser, PARAMETER) > 100
    healthy(browser)


def test_a_sheet_without_results(browser: Browser, tmp_path: Path) -> None:
    write(Document("nothing", "Nothing was finished."), tmp_path / "sheet.html")
    browser.view(1280, 900)
    browser.open(tmp_path / "sheet.html")
    assert browser.faults() == []
    assert browser.evaluate("document.querySelector('h1').textContent") == "nothing"
    assert browser.evaluate("document.scripts.length") == 0
