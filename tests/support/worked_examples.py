"""The worked examples of tests/data/worked_examples.txt, their MLP as a skeleton, and a run in the same words.

A strategy's test builds its events from `mlp()`, turns them into lines by `told`, and compares these with an example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from graph.model import Role
from strategies.gemini.skeleton import Skeleton
from tests.places import DATA
from tests.support.sketch import Sketch
from traces.model import Events, Op

FILE = DATA / "worked_examples.txt"
Line = tuple[str, str, int]  # "+" or "-", name, bytes
SHAPES: dict[str, tuple[int, ...]] = {"w1": (512, 256), "b1": (512,), "w2": (255, 512), "b2": (255,)}
MODULES = {"": "MLP", "fc1": "Linear", "fc2": "Linear"}
NAMES = {"w1": "fc1.weight", "b1": "fc1.bias", "w2": "fc2.weight", "b2": "fc2.bias"}
SHORT = {long: short for short, long in NAMES.items()}


@dataclass
class Example:
    """An example: lines by part ("init", "step 2 backward", ...), streams of births by name, and its totals."""

    title: str
    parts: dict[str, list[Line]] = field(default_factory=dict)
    streams: dict[str, str] = field(default_factory=dict)
    waiting: set[tuple[str, str]] = field(default_factory=set)  # (part, name) of deaths that wait
    persistent: tuple[int, int] = (0, 0)
    peak: tuple[int, int, int] = (0, 0, 0)
    peaks: dict[str, tuple[int, int, str]] = field(default_factory=dict)

    def lines(self, prefix: str) -> list[Line]:
        """The lines of all parts whose name begins so, in order."""
        return [line for part, lines in self.parts.items() if part.startswith(prefix) for line in lines]


@cache
def examples() -> dict[str, Example]:
    """All examples by key, such as `E2-rank0`."""
    found: dict[str, Example] = {}
    part = ""
    for line in FILE.read_text("utf-8").splitlines():
        if match := re.match(r"\[(\S+)\] (.*)", line):
            example = found[match[1]] = Example(match[2])
        elif line.startswith("@"):
            part = line[1:]
            example.parts[part] = []
        elif line.startswith("="):
            _total(example, line[2:].split())
        elif line[:1] in "+-" and line:
            name, size, stream, *event = line[1:].split()
            example.parts[part].append((line[0], name, int(size)))
            example.streams[name] = stream
            if event:
                example.waiting.add((part, name))
    return found


def _total(example: Example, words: Sequence[str]) -> None:
    if words[0] == "persistent":
        example.persistent = (int(words[1]), int(words[2]))
    elif words[0] == "peak":
        example.peak = (int(words[1]), int(words[2]), int(words[3]))
    else:
        example.peaks[words[0]] = (int(words[1]), int(words[2]), words[3])


def mlp(dtype: str = "float32", steps: int = 2) -> Skeleton:
    """The MLP's training: gradients are ready b2, w2, b1, w1, each right after its birth; no activations."""
    sketch = Sketch()
    p = {short: sketch.parameter(NAMES[short], shape, dtype) for short, shape in SHAPES.items()}
    held: dict[str, int] = {}
    for step in range(steps):
        sketch.step(step)
        sketch.phase("forward")
        for short in ("w1", "b1", "w2", "b2") if held else ():
            sketch.free(held[short])
        for layer in "12":
            module = f"fc{layer}"
            sketch.enter(module)
            sketch.operator("aten.addmm.default", module, (p[f"b{layer}"], p[f"w{layer}"]))
            sketch.leave(module)
        sketch.phase("backward")
        for layer in "21":
            sketch.operator("aten.mm.default", f"fc{layer}", (p[f"w{layer}"],), Role.BACKWARD)
            for short in (f"b{layer}", f"w{layer}"):
                held[short] = sketch.gradient(p[short])
                sketch.ready(p[short], held[short])
        sketch.phase("optimizer")
    sketch.phase("end")
    for short in ("w1", "b1", "w2", "b2"):
        sketch.free(held[short])
    return sketch.skeleton(MODULES)


@dataclass
class Told:
    """A run in the words of the examples. `late` keeps waiting deaths until the host waits."""

    parts: dict[str, list[Line]] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    waiting: set[tuple[str, str]] = field(default_factory=set)
    live: int = 0
    blocks: int = 0
    late: int = 0
    peaks: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    late_peak: int = 0

    @property
    def peak(self) -> tuple[int, int]:
        """Requested bytes and bytes in blocks of 512 at the peak of the whole run."""
        return max(one[0] for one in self.peaks.values()), max(one[1] for one in self.peaks.values())

    def lines(self, prefix: str, *, without: Sequence[str] = ()) -> list[Line]:
        """The lines of all parts whose name begins so, but those whose name begins with one of `without`."""
        parts = (lines for part, lines in self.parts.items() if part.startswith(prefix))
        return [line for lines in parts for line in lines if not line[1].startswith(tuple(without) or ("\0",))]


def told(events: Events, prefixes: Mapping[str, str] | None = None) -> Told:
    """Replay events by order alone: no allocator, requested bytes and blocks of 512.

    Parts are "init", then "step N forward" and so on; N counts from 1. `prefixes` puts a word before the names of a
    category ("gradient" -> "g."); the names of parameters in them are shortened (fc1.weight: w1).
    """
    before = {"gradient": "g.", **(prefixes or {})}
    run = Told({"init": []})
    ids, sizes, steps = events.ints("id"), events.ints("bytes"), events.ints("step")
    streams, names, categories = events.ints("stream"), events.strings("name"), events.strings("category")
    alive: dict[int, tuple[str, int]] = {}
    recorded: set[int] = set()
    pending = 0
    part = "init"
    for index, code in enumerate(events.op.tolist()):
        number = int(ids[index])
        if code == Op.PHASE:
            part = f"step {int(steps[index]) + 1} {names.get(index)}"
            run.parts.setdefault(part, [])
        elif code == Op.ALLOC:
            size = int(sizes[index])
            name = before.get(categories.get(index) or "", "") + _short(names.get(index) or "")
            alive[number] = (name, size)
            run.parts[part].append(("+", name, size))
            run.streams[name] = int(streams[index])
            run.live += size
            run.blocks += _block(size)
            run.late_peak = max(run.late_peak, run.blocks + pending)
            key = "-".join(part.split()[:2])
            if run.live > run.peaks.get(key, (0, 0, ""))[0]:
                run.peaks[key] = (run.live, run.blocks, f"+{name}")
        elif code == Op.FREE:
            name, size = alive.pop(number)
            run.parts[part].append(("-", name, size))
            run.live -= size
            run.blocks -= _block(size)
            if number in recorded:
                run.waiting.add((part, name))
                pending += _block(size)
        elif code == Op.RECORD_STREAM:
            recorded.add(number)
        elif code == Op.SYNCHRONIZE:
            pending = 0
    return run


def _short(name: str) -> str:
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name


def _block(size: int) -> int:
    return -(-size // 512) * 512
