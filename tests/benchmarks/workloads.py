"""Events like those of the recordings (`tests/data/golden`), in any number.

`transformer` repeats the recorded program exactly: given the tokens of each step and the sizes of its workspaces it
makes the recording's own events (a test holds it to that). `uniform` draws sizes as its recording does, around a steady
number of live tensors. `free_list` keeps a pool's free list at a given length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from traces.model import CATEGORIES, Device, Events, Int64Array, Op, RankEvents, Strings, Trace

MIB: Final = 2**20
DEVICE: Final = Device("recorded GPU", 8 * 2**30)  # that of the recordings
HUGE_DEVICE: Final = Device("GPU of 8 TiB", 2**43)


@dataclass(frozen=True)
class Workload:
    """Events of one rank on one device; the first `untimed` of them only set the scene."""

    name: str
    events: Events
    device: Device = DEVICE
    untimed: int = 0

    @property
    def pairs(self) -> int:
        """How many allocations are freed in the timed part."""
        return int((self.events.op[self.untimed :] == Op.FREE).sum())

    def trace(self, conf: str, release: str) -> Trace:
        """The workload as a trace."""
        return Trace((RankEvents((0,), self.events),), conf=conf, release=release, devices=(self.device,))


# --- transformer training -----------------------------------------------------------------------------------------

LAYERS: Final = 6
HIDDEN: Final = 1024
HEADS: Final = 16
VOCABULARY: Final = 32000
HALF: Final = 2 * HIDDEN  # bytes of a vector of hidden size in 16 bits
GROUP: Final = 16  # parameters that the optimizer updates at once

#: Bytes of the parameters, in 16 bits: the embedding, each layer's matrices and vectors, the last norm.
LAYER_PARAMETERS: Final = (
    *(3 * HIDDEN * HALF, HIDDEN * HALF, 4 * HIDDEN * HALF, 4 * HIDDEN * HALF),
    *(3 * HALF, HALF, 4 * HALF, HALF, HALF, HALF, HALF, HALF),
)
PARAMETERS: Final = (VOCABULARY * HALF, *LAYERS * LAYER_PARAMETERS, HALF, HALF)
NO_WORKSPACE: Final = -1
PHASES: Final = ("setup", "forward", "backward", "optimizer")


@dataclass
class Script:
    """Events of a part of the program, with sizes as `bytes + tokens * per_token`; ids count from 0.

    A workspace takes one of the random sizes that each step draws.
    """

    rows: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    allocations: int = 0
    workspaces: int = 0

    def alloc(self, category: str, size: int = 0, *, per_token: int = 0) -> int:
        """Allocate; the id."""
        return self._alloc(category, size, per_token, NO_WORKSPACE)

    def workspace(self) -> int:
        """Allocate one of the step's workspaces; the id."""
        self.workspaces += 1
        return self._alloc("workspace", 0, 0, self.workspaces - 1)

    def _alloc(self, category: str, size: int, per_token: int, workspace: int) -> int:
        code = CATEGORIES.index(category)
        self.rows.append((Op.ALLOC, self.allocations, size, per_token, workspace, code, -1))
        self.allocations += 1
        return self.allocations - 1

    def free(self, *ids: int) -> None:
        """Free allocations in this order."""
        self.rows.extend((Op.FREE, ident, 0, 0, NO_WORKSPACE, -1, -1) for ident in ids)

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self.rows.append((Op.PHASE, -1, 0, 0, NO_WORKSPACE, -1, PHASES.index(name)))


def setup_script() -> Script:
    """The parameters."""
    script = Script()
    script.phase("setup")
    for size in PARAMETERS:
        script.alloc("parameter", size)
    return script


def step_script(*, first: bool) -> Script:
    """One training step; the first one also makes the optimizer's state."""
    script = Script()
    script.phase("forward")
    inputs = script.alloc("input", per_token=8), script.alloc("input", per_token=8)
    saved = [script.alloc("activation", per_token=HALF)]
    for _ in range(LAYERS):
        saved += _attention(script)
        saved += _mlp(script)
    logits = script.alloc("activation", per_token=2 * VOCABULARY)
    exact = script.alloc("temporary", per_token=4 * VOCABULARY)
    script.free(logits)
    loss = script.alloc("activation", 4)
    script.phase("backward")
    gradients = _backward(script, exact, saved)
    script.free(loss, *inputs)
    script.phase("optimizer")
    _optimize(script, first=first)
    script.free(*gradients)
    return script


def _norm(script: Script) -> list[int]:
    """The statistics and the output of a layer norm."""
    return [script.alloc("activation", per_token=size) for size in (4, 4, HALF)]


def _dropout_and_add(script: Script) -> list[int]:
    """Projection, dropout and the residual's addition: the mask and the sum are kept."""
    projected = script.alloc("activation", per_token=HALF)
    mask = script.alloc("activation", per_token=HIDDEN)
    dropped = script.alloc("temporary", per_token=HALF)
    script.free(projected)
    total = script.alloc("activation", per_token=HALF)
    script.free(dropped)
    return [mask, total]


def _attention(script: Script) -> list[int]:
    saved = _norm(script)
    saved.append(script.alloc("activation", per_token=3 * HALF))
    parts = [script.alloc("temporary", per_token=HALF) for _ in range(3)]
    saved.append(script.alloc("activation", per_token=HALF))
    saved.append(script.alloc("activation", per_token=4 * HEADS))
    workspace = script.workspace()
    script.free(*parts, workspace)
    return saved + _dropout_and_add(script)


def _mlp(script: Script) -> list[int]:
    saved = _norm(script)
    saved += [script.alloc("activation", per_token=4 * HALF) for _ in range(2)]
    return saved + _dropout_and_add(script)


def _backward(script: Script, exact: int, saved: list[int]) -> list[int]:
    """The backward pass, which frees what the forward pass saved, last first; the gradients."""
    at_logits = script.alloc("gradient", per_token=2 * VOCABULARY)
    script.free(exact)
    gradients = [script.alloc("gradient", PARAMETERS[0])]
    at_output = script.alloc("gradient", per_token=HALF)
    script.free(at_logits, saved.pop())
    for _ in range(LAYERS):
        for matrices, bias, kept in ((_MLP_MATRICES, 4 * HALF, 8), (_ATTENTION_MATRICES, 3 * HALF, 7)):
            inside = script.alloc("gradient", per_token=4 * HALF)
            gradients += [script.alloc("gradient", size) for size in matrices]
            gradients += [_reduced(script, bias), _reduced(script, HALF)]
            gradients += [script.alloc("gradient", HALF) for _ in range(2)]
            at_input = script.alloc("gradient", per_token=HALF)
            script.free(inside, at_output)
            script.free(*reversed(saved[-kept:]))
            del saved[-kept:]
            at_output = at_input
    script.free(at_output)
    return gradients


_MLP_MATRICES: Final = (4 * HIDDEN * HALF, 4 * HIDDEN * HALF)
_ATTENTION_MATRICES: Final = (3 * HIDDEN * HALF, HIDDEN * HALF)


def _reduced(script: Script, size: int) -> int:
    """A bias gradient, summed from 64 partial sums."""
    partial = script.alloc("temporary", 64 * size)
    gradient = script.alloc("gradient", size)
    script.free(partial)
    return gradient


def _optimize(script: Script, *, first: bool) -> None:
    """Adam in 32 bits, a group of parameters at a time."""
    if first:
        for size in PARAMETERS:
            script.alloc("optimizer_state", 2 * size)
            script.alloc("optimizer_state", 2 * size)
    for start in range(0, len(PARAMETERS), GROUP):
        script.free(*[script.alloc("temporary", 2 * size) for size in PARAMETERS[start : start + GROUP]])


def training(tokens: Sequence[int] | Int64Array, workspaces: Int64Array) -> Events:
    """A training run: `tokens` of each step, and (steps x layers) bytes of its workspaces."""
    counts = np.asarray(tokens, dtype=np.int64)
    parts = []
    base = 0
    for script, steps in (
        (setup_script(), slice(0, 1)),
        (step_script(first=True), slice(0, 1)),
        (step_script(first=False), slice(1, None)),
    ):
        parts.append(_expand(script, counts[steps], workspaces[steps], base))
        base += script.allocations * len(counts[steps])
    ops, ids, sizes, categories, phases = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    begun = np.cumsum(phases == PHASES.index("forward")) - 1
    return Events(
        ops,
        {
            "id": ids,
            "bytes": sizes,
            "step": np.where(phases >= 0, begun, -1),
            "category": Strings(categories, CATEGORIES),
            "name": Strings(phases, PHASES),
        },
    )


def _expand(script: Script, tokens: Int64Array, workspaces: Int64Array, base: int) -> tuple[npt.NDArray[Any], ...]:
    """A script's ops, ids, bytes, categories and phases, once for each step."""
    ops, local, fixed, per_token, workspace, categories, phases = np.asarray(script.rows, dtype=np.int64).T
    steps = len(tokens)
    ids = np.where(local < 0, -1, base + np.arange(steps)[:, None] * script.allocations + local)
    sizes = fixed + tokens[:, None] * per_token
    used = np.flatnonzero(workspace != NO_WORKSPACE)
    if len(used):
        sizes[:, used] = workspaces
    return (
        np.tile(ops.astype(np.uint8), steps),
        ids.reshape(-1),
        sizes.reshape(-1),
        np.tile(categories.astype(np.int32), steps),
        np.tile(phases.astype(np.int32), steps),
    )


def transformer(events: int, seed: int = 0) -> Workload:
    """`events` events of training a transformer: 1024 to 4096 tokens a step, about 300 live tensors."""
    random = np.random.default_rng(seed)
    steps = 2 + events // len(step_script(first=False).rows)
    tokens = 4 * random.integers(1024 // 4, 4096 // 4, steps)
    workspaces = 1024 * random.integers(1, 64, (steps, LAYERS))
    return Workload("transformer", head(training(tokens, workspaces), events))


def head(events: Events, count: int) -> Events:
    """The first `count` events."""
    columns = {
        name: Strings(column.codes[:count], column.table) if isinstance(column, Strings) else column[:count]
        for name, column in events.columns.items()
    }
    return Events(events.op[:count], columns)


# --- random sizes -------------------------------------------------------------------------------------------------

LARGEST: Final = 24 * MIB
LIVE: Final = 200


def plain_events(rows: Sequence[tuple[int, int, int]]) -> Events:
    """Rows of (op, id, bytes) as columns."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Events(
        table[:, 0].astype(np.uint8),
        {"id": np.ascontiguousarray(table[:, 1]), "bytes": np.ascontiguousarray(table[:, 2])},
    )


def uniform(events: int, seed: int = 0) -> Workload:
    """Sizes up to 24 MiB, all equally likely, freed in random order; the number of live tensors stays about 200."""
    return Workload("uniform", plain_events(list(_uniform_rows(events, np.random.default_rng(seed)))))


def _uniform_rows(events: int, random: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    sizes = random.integers(512, LARGEST + 1, events).tolist()
    coins = random.random(events).tolist()
    picks = random.random(events).tolist()
    live: list[int] = []
    count = 0
    for size, coin, pick in zip(sizes, coins, picks, strict=True):
        if not live or coin < (0.55 if len(live) < LIVE else 0.45):
            live.append(count)
            yield Op.ALLOC, count, size
            count += 1
        else:
            yield Op.FREE, _take(live, pick), 0


def _take(items: list[int], pick: float) -> int:
    """Remove and return a random item; `pick` is from 0 to 1."""
    index = int(pick * len(items))
    items[index], items[-1] = items[-1], items[index]
    return items.pop()


# --- free lists of a given length ---------------------------------------------------------------------------------

PROBES: Final = 10  # allocations alive at a time
SEPARATOR: Final = 2 * MIB


def free_list(blocks: int, events: int, *, used: int | None = None, seed: int = 0) -> Workload:
    """`blocks` free blocks of distinct sizes in the large pool, while random ones of them are taken and come back.

    One huge segment is cut into blocks of distinct sizes, in random order, with live ones between them. Every timed
    allocation finds a block that fits, by a search among all of them, and frees take turns with allocations. With
    `used` only so many of the blocks are ever taken: the search is as long, but what it meets stays in the caches.
    """
    random = np.random.default_rng(seed)
    holes = blocks + PROBES
    sizes = MIB + 512 * (1 + random.permutation(holes))
    rows = _cut(sizes.tolist())
    untimed = len(rows)
    chosen = random.permutation(holes)[:used]
    rows += _probe(sizes.tolist(), chosen.tolist(), events // 2, random)
    return Workload("free list", plain_events(rows), HUGE_DEVICE, untimed + PROBES)


def _cut(sizes: list[int]) -> list[tuple[int, int, int]]:
    """Cut one segment into free blocks of these sizes; the block behind the last one takes up all that is left."""
    used = sum(sizes) + (len(sizes) - 1) * SEPARATOR
    total = -(-(used + SEPARATOR) // SEPARATOR) * SEPARATOR
    rows: list[tuple[int, int, int]] = [(Op.ALLOC, 0, total), (Op.FREE, 0, 0)]
    for i, size in enumerate(sizes):
        rows.append((Op.ALLOC, 2 * i + 1, size))
        rows.append((Op.ALLOC, 2 * i + 2, SEPARATOR if i + 1 < len(sizes) else total - used))
    rows.extend((Op.FREE, 2 * i + 1, 0) for i in range(len(sizes)))
    return rows


def _probe(sizes: list[int], free: list[int], pairs: int, random: np.random.Generator) -> list[tuple[int, int, int]]:
    """Take some of the `free` blocks, then take another and free the oldest, over and over."""
    picks = random.random(pairs + PROBES).tolist()
    slack = random.integers(0, 512, pairs + PROBES).tolist()
    taken: deque[tuple[int, int]] = deque()  # block and id
    rows: list[tuple[int, int, int]] = []
    for number, (pick, less) in enumerate(zip(picks, slack, strict=True), start=2 * len(sizes) + 1):
        block = _take(free, pick)
        taken.append((block, number))
        rows.append((Op.ALLOC, number, sizes[block] - less))
        if len(taken) > PROBES:
            block, oldest = taken.popleft()
            free.append(block)
            rows.append((Op.FREE, oldest, 0))
    return rows
