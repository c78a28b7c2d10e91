"""How fast the page of a long replay answers, in a headless Chromium: wall time, drawing included."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from simulator.engine.replay import replay
from simulator.reports.html.page import write_html
from tests.benchmarks.figures import Figure
from tests.support.browser import Browser, find_chromium
from tests.support.handmade import busy_trace

#: Milliseconds that each of some values of an input takes until the page is drawn anew.
_INPUT: Final = """
(async ([selector, name, values]) => {
  const input = document.querySelector(selector), took = [];
  for (const value of values) {
    input.value = value;
    const start = performance.now();
    input.dispatchEvent(new Event(name));
    await new Promise((drawn) => setTimeout(drawn));
    took.push(performance.now() - start);
  }
  return took;
})(%s)
"""
#: Milliseconds that each of ten presses of a key takes in the plot.
_KEY: Final = """
(async (key) => {
  const canvas = document.querySelector(".rank:not([hidden]) .canvas"), took = [];
  for (let i = 0; i < 10; i++) {
    const start = performance.now();
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await new Promise((drawn) => setTimeout(drawn));
    took.push(performance.now() - start);
  }
  return took;
})(%r)
"""
_LOADED: Final = "performance.getEntriesByType('navigation')[0].loadEventEnd"
MOMENT: Final = ".moments input[type=number]"
SEARCH: Final = ".alive input[type=search]"
QUERIES: Final = ("layers.3", "gradient", ">1MiB", "layers.12 activation", "nothing", "")


def input_times(browser: Browser, selector: str, name: str, values: Sequence[str]) -> list[float]:
    """Give an input each of these values, with the event `name`; milliseconds of each."""
    took: list[float] = browser.evaluate(_INPUT % json.dumps([selector, name, values]))
    return took


def key_times(browser: Browser, key: str) -> list[float]:
    """Press a key in the plot, ten times; milliseconds of each."""
    took: list[float] = browser.evaluate(_KEY % key)
    return took


def answers(events: int) -> list[Figure]:
    """Load, keys, any moment and searches, of pages with this many events and twice as many.

    Raises RuntimeError where there is no Chromium.
    """
    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError("no Chromium: install Debian's `chromium` or set LLMEM_CHROMIUM")
    with tempfile.TemporaryDirectory() as folder, Browser(chromium, Path(folder) / "profile") as browser:
        browser.view(1280, 900)
        return [one for count in (events, 2 * events) for one in _of_page(browser, Path(folder), count)]


def _of_page(browser: Browser, folder: Path, events: int) -> Iterator[Figure]:
    path = folder / f"{events}.html"
    write_html(replay(busy_trace(events, live=6_000), picture=True), path)
    browser.open(path)
    yield Figure(f"{events:,} events, page", path.stat().st_size / 1e6, "MB")
    yield Figure(f"{events:,} events, load", browser.evaluate(_LOADED), "ms")
    for key in ("+", "PageDown", "ArrowRight", "0", "p"):
        yield _median(f"{events:,} events, key {key}", key_times(browser, key), None)
    places = [str(place) for place in range(events // 50, events, events // 21)]
    yield _median(f"{events:,} events, any moment", input_times(browser, MOMENT, "change", places), 100)
    browser.evaluate("document.querySelector('.alive input[type=checkbox]').click()")
    yield _median(f"{events:,} events, search", input_times(browser, SEARCH, "input", QUERIES), 200)


def _median(name: str, took: Sequence[float], goal: float | None) -> Figure:
    return Figure(name, statistics.median(took), "ms", goal, {"at the most": max(took)})
