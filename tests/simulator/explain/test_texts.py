"""Out-of-memory messages of every release are found in texts, with every figure that they say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.explain.message import OutOfMemory, Process
from simulator.explain.texts import parse
from simulator.recording.message import out_of_memory
from tests.simulator.explain.posted import ROWS, printed, size
from tests.support.out_of_memory_forms import caching_allocator, written

#: Figures as a row has them, and as a message.
NAMES = {"this_process": "own"}
GIB = 1 << 30


def only(text: str) -> OutOfMemory:
    (found,) = parse(text)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["address"].removeprefix("https://github.com/") or row["form"])
def test_a_posted_text_is_read_whole(row: dict[str, Any]) -> None:
    found = only(written(row))
    for name, text in row["figures"].items():
        expected = size(text) or (None if name == "this_process" else size(text))
        assert getattr(found, NAMES.get(name, name)) == expected, name
    said = {NAMES.get(name, name) for name in row["figures"]}
    for name in ("asked", "total", "free", "allowed", "allocated", "reserved", "unallocated", "private", "own"):
        assert name in said or getattr(found, name) is None, f"{name} is not said"
    assert [one.pid for one in found.processes] == [pid for pid, _ in row.get("processes", []) if pid != "this"]
    assert [one.bytes for one in found.processes] == [
        size(text) or None for pid, text in row.get("processes", []) if pid != "this"
    ]
    assert found.rank == row.get("rank")
    if isinstance(row.get("gpu"), int):
        assert found.gpu == row["gpu"]


SIZES = st.integers(0, 1 << 47).map(printed)
FIGURES = st.fixed_dictionaries(
    {name: SIZES for name in ("asked", "total", "free", "allocated", "reserved", "unallocated")}
    | {"gpu": st.integers(0, 15)},
    optional={"allowed": SIZES},
)
PROCESSES = st.lists(st.tuples(st.one_of(st.integers(1, 4_194_304), st.just("this")), SIZES), max_size=4)
FORMS = ("cached", "1.4", "1.10", "2.1", "2.2", "2.6", "2.9", "2.10")
OLD = ("cached", "1.4", "1.10")


def expected_of(form: str, said: dict[str, Any], processes: list[tuple[int | str, str]]) -> dict[str, Any]:
    """What a message of a form says, by the names of `OutOfMemory`."""
    left_out = {"cached": "reserved", "1.4": "unallocated", "1.10": "unallocated"}.get(form, "reserved")
    figures = {name: size(text) for name, text in said.items() if name not in ("gpu", left_out)}
    listed = [] if form in OLD else processes
    own = next((size(text) for pid, text in listed if pid == "this"), None)
    others = tuple(Process(pid, size(text) or None) for pid, text in listed if isinstance(pid, int))
    return {**figures, "gpu": said["gpu"], "own": own or None, "processes": others}


@given(form=st.sampled_from(FORMS), said=FIGURES, processes=PROCESSES, private=st.none() | SIZES)
def test_any_figures_are_read_back(
    form: str, said: dict[str, Any], processes: list[tuple[int | str, str]], private: str | None
) -> None:
    if private is not None and form not in OLD:
        said = {**said, "private": private}
    found = only(caching_allocator(form, said, processes))
    for name, value in expected_of(form, said, processes).items():
        assert getattr(found, name) == value, name


PREFIXES = (
    "[rank{}]: ",
    "[default{}]:",
    "[1,{}]<stderr>:",
    "(VllmWorker rank={} pid=77) ERROR 06-05 06:18:13 [a.py:4] ",
)


@given(
    ranks=st.lists(st.tuples(st.sampled_from(FORMS), FIGURES), min_size=1, max_size=5),
    prefix=st.sampled_from(PREFIXES),
    data=st.data(),
)
def test_ranks_mixed_in_one_log_come_apart(
    ranks: list[tuple[str, dict[str, Any]]], prefix: str, data: st.DataObject
) -> None:
    lines = {
        rank: ["Traceback (most recent call last):", '  File "train.py", line 88', caching_allocator(form, said)]
        for rank, (form, said) in enumerate(ranks)
    }
    log = []
    while any(lines.values()):
        rank = data.draw(st.sampled_from([rank for rank, left in lines.items() if left]))
        log.append(prefix.format(rank) + lines[rank].pop(0))
    found = {one.rank: one for one in parse("\n".join(log))}
    assert sorted(found) == list(range(len(ranks)))  # type: ignore[type-var]
    for rank, (form, said) in enumerate(ranks):
        for name, value in expected_of(form, said, []).items():
            assert getattr(found[rank], name) == value, (rank, name)


@given(
    total=st.integers(GIB, 1 << 40),
    figures=st.tuples(*[st.integers(0, 1 << 40)] * 4),
    allowed=st.none() | st.integers(GIB, 1 << 40),
    minor=st.integers(1, 15),
)
def test_what_our_own_allocator_says_is_read_back(
    total: int, figures: tuple[int, int, int, int], allowed: int | None, minor: int
) -> None:
    asked, free, allocated, unallocated = figures
    text = out_of_memory(
        asked,
        gpu=minor % 8,
        total=total,
        free=free,
        allowed=allowed,
        allocated=allocated,
        reserved=allocated + unallocated,
        minor=minor,
    )
    found = only(text)
    expected = (asked, total, free, allocated, unallocated)
    got = (found.asked, found.total, found.free, found.allocated, found.unallocated)
    assert got == tuple(size(printed(figure)) for figure in expected)
    assert found.allowed == (None if allowed is None else size(printed(allowed)))


SAID = {"asked": "2.00 GiB", "total": "79.11 GiB", "free": "5.94 MiB", "allocated": "70.00 GiB"}
SAID |= {"unallocated": "9.00 GiB", "gpu": "3"}


def test_the_same_message_again_is_counted_and_has_its_rank() -> None:
    text = caching_allocator("2.6", SAID)
    found = only(f"started\n{text}\n[rank3]: {text}\nwhile handling that:\n[rank3]: {text}\n")
    assert (found.rank, found.times, found.line) == (3, 3, 2)


def test_other_figures_are_another_message() -> None:
    one, two = caching_allocator("2.6", SAID), caching_allocator("2.6", {**SAID, "free": "6.94 MiB"})
    assert [message.times for message in parse(f"{one}\n{two}\n{one}")] == [2, 1]


def test_a_terminal_broke_a_message_of_one_rank_amid_lines_of_others() -> None:
    text = caching_allocator("2.6", SAID)
    at = text.index("5.94")
    other = caching_allocator("1.4", {**SAID, "reserved": "79.00 GiB"})
    first, second = parse(f"[rank3]: {text[:at]}\n{text[at:]}\n[rank1]: Traceback\nstep 9 {other}")
    assert (first.rank, first.free) == (3, size("5.94 MiB"))
    assert (second.rank, second.reserved) == (None, size("79.00 GiB"))


def test_what_follows_an_out_of_memory_is_none_itself() -> None:
    text = caching_allocator("2.6", SAID)
    after = "E1 api.py:869] failed (exitcode: -9) local_rank: 0 (pid: 4102)\nSignal 9 (SIGKILL) received by PID 4102"
    assert only(f"{text}\n{after}").source == "allocator"
    assert only(after.splitlines()[0]).source == "host"


def test_a_message_in_a_box_is_whole() -> None:
    words = caching_allocator("1.10", {**SAID, "reserved": "79.00 GiB"}).split(" ")
    lines = [" ".join(words[place : place + 6]) for place in range(0, len(words), 6)]
    boxed = only("\n".join(f"│ {line:<60} │" for line in lines))
    assert (boxed.allocated, boxed.reserved) == (size("70.00 GiB"), size("79.00 GiB"))


def test_a_message_that_is_cut_says_what_it_can() -> None:
    text = caching_allocator("2.6", SAID)
    found = only(text[: text.index(" of which")])
    assert (found.asked, found.total, found.free, found.allocated) == (size("2.00 GiB"), size("79.11 GiB"), None, None)


@pytest.mark.parametrize(
    ("text", "party"),
    [
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'", "NCCL"),
        (
            "torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in",
            "the CUDA runtime",
        ),
        ("CUDA driver error: out of memory", "the CUDA runtime"),
        ("torch.OutOfMemoryError: CUDA out of memory. See documentation for Memory Management", "PyTorch"),
        ("line 28:  8156 Killed                  python3 main.py --epochs 400", "the system"),
    ],
)
def test_who_was_refused(text: str, party: str) -> None:
    found = only(text)
    assert (found.party, found.times) == (party, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 9 loss 2.0",
        "If out-of-memory error occurs during cudagraph capture, consider decreasing `gpu_memory_utilization`",
        "Killed the old job by hand",
        "MPS backend out of memory. Tried to allocate 12.00 MB on private pool.",
    ],
)
def test_no_message(text: str) -> None:
    assert parse(text) == ()


def test_colours_and_quotations_are_no_part_of_it() -> None:
    text = caching_allocator("2.6", SAID)
    assert only(f"> > \x1b[31m{text}\x1b[0m").asked == only(text).asked == size("2.00 GiB")


@given(st.text() | st.text("0123456789,. GiB(;[]:rank"))
def test_any_text_is_read(text: str) -> None:
    for found in parse(text + "\nTried to allocate " + text):
        assert found.line >= 1
