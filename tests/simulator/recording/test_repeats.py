"""By default a program ends when two of its steps did the same, and not before."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from simulator.allocator.releases import parse_release  # noqa: E402
from simulator.recording.allocator import LiveAllocator  # noqa: E402
from simulator.recording.repeats import Found, OneGpu, Progress, Repeats  # noqa: E402
from tests.simulator.recording.test_record import answer, folder_of, record  # noqa: E402
from traces.model import Device  # noqa: E402

#: A loop; what it does in a step is put in.
LOOP = """
import torch

net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(net.parameters())
other = torch.optim.SGD([torch.zeros(8, device="cuda", requires_grad=True)])
kept = []
for step in range(9):
    {step}
    optimizer.zero_grad()
torch.save(net.state_dict(), "end.pt")
"""
BACKWARD = "net(torch.ones(8, 64, device='cuda')).sum().backward()"
PASS = "net(torch.ones({rows}, 64, device='cuda')).sum().backward(); optimizer.step(); other.step()"


def ends(step: str, folder: Path) -> int:
    """After how many steps the program ends that does so in each."""
    done = record(folder_of(folder, {"train.py": LOOP.format(step=step)}), "train.py")
    assert done.returncode == 0, done.stderr
    found = answer(folder)
    early = found["steps"] < 9
    assert [("--steps all" in notice) for notice in found["notices"]] == [True] * early
    assert ("is reached with --steps all" in done.stderr) == early
    assert early != (folder / "end.pt").exists()
    return int(found["steps"])


@pytest.mark.parametrize(
    ("step", "steps"),
    [
        (f"[{BACKWARD} for _ in range(3)]; {PASS.format(rows=8)}", 3),  # the first makes the optimizer's state
        (PASS.format(rows="8 + 64 * max(4 - step, 0)"), 6),  # the first four differ
        (PASS.format(rows="100 * (step % 5) + 1"), 9),  # no two one after another are alike
        (PASS.format(rows=8) + "; kept.append(torch.ones(200, device='cuda'))", 9),  # a leak: alike, but more is kept
        (PASS.format(rows=8).replace("other.step()", "step < 5 or other.step()"), 8),  # after the sixth step
    ],
)
def test_the_run_ends_when_steps_repeat(step: str, steps: int, tmp_path: Path) -> None:
    assert ends(step, tmp_path) == steps


def test_all_steps_are_run_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"train.py": LOOP.format(step=PASS.format(rows=8))})
    done = record(folder, "--steps", "all", "train.py")
    assert (answer(folder)["steps"], answer(folder)["notices"]) == (9, []), done.stderr
    assert (folder / "end.pt").exists()


def test_steps_are_compared_whole() -> None:
    live = LiveAllocator(Device("A100-80GB", 8 << 30), parse_release("2.13"), "", MemoryError)
    repeats = Repeats(live)

    def step(*sizes: int, last: list[int]) -> list[int]:
        for ident in last:
            live.free(ident)
        return [live.malloc(size) for size in sizes]

    kept = step(1000, 5000, last=[])
    assert not repeats()
    for same in (False, True):  # the first to free what another left is like none before it
        kept = step(1000, 5000, last=kept)
        assert (repeats() is not None) == same
    kept = step(5000, 1000, last=kept)
    assert not repeats()  # another order
    kept = step(5000, 1000, last=kept)  # frees in another order
    assert not repeats()


def stepped(repeats: Repeats, live: LiveAllocator, sizes: Iterable[int]) -> list[Found | None]:
    """What is found after each step, which makes one tensor of so many bytes and drops the one before."""
    kept, found = live.malloc(1), []
    for size in sizes:
        made = live.malloc(size)
        live.free(kept)
        kept = made
        found.append(repeats())
    return found


def test_steps_may_take_turns() -> None:
    """As a GAN's two optimizers, or a policy that is updated every third step; not so two that were alike by chance."""
    live = LiveAllocator(Device("A100-80GB", 8 << 30), parse_release("2.13"), "", MemoryError)
    sizes = [4000, 9000, 4000, 2000, *[1000, 2000, 3000] * 6]
    found = stepped(Repeats(live), live, sizes)
    assert next(place for place, one in enumerate(found) if one is not None) == 4 + 3 + 12
    assert found[19] == Found(3, 12, exactly=True)


def test_steps_that_ask_for_the_same_are_enough_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held may differ from step to step; but a new peak begins the count again."""
    count = iter(range(1000))
    monkeypatch.setattr(OneGpu, "_held", lambda self: np.array([next(count)]))
    for bump, last in ((0, 22), (10, 31)):
        live = LiveAllocator(Device("A100-80GB", 8 << 30), parse_release("2.13"), "", MemoryError)
        repeats = Repeats(live)
        found = stepped(repeats, live, [5000] * bump)
        if bump:
            live.free(live.malloc(50 << 20))  # between two steps, so that the next is another one
        found += stepped(repeats, live, [5000] * 40)
        assert next(place for place, one in enumerate(found) if one is not None) >= last - 1
        assert found[-1] is not None
        assert not found[-1].exactly


def test_progress_comes_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0, 22.5])
    monkeypatch.setattr("simulator.recording.repeats.time.monotonic", lambda: next(clock))
    live = LiveAllocator(Device("A100-80GB", 8 << 30), parse_release("2.13"), "", MemoryError)
    live.malloc(3 << 20)
    progress = Progress(live, " of which no two were alike")
    for number in range(1, 5):
        progress(number)
    said = "recording: {} steps of which no two were alike, at most 3.00 MiB allocated"
    assert capsys.readouterr().err.splitlines() == [said.format(2), said.format(4)]
