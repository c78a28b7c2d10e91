"""Makes `traces/samples/ranks.json`: two steps of fully sharded training on four GPUs, with plausible numbers.

    python -m tests.support.make_samples

A transformer of a few layers, its fp32 parameters sharded over the ranks, gathered in bf16 on a stream of their own
one layer ahead, as FSDP does; rank 3 has longer sequences than the others, which wait for it in the collectives.
Sizes follow from the shapes, times from 100 TFLOP/s and 200 GB/s. A test holds the file to what this writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tests.places import ROOT

SAMPLE: Final = ROOT / "traces" / "samples" / "ranks.json"

RANKS: Final = 4
LAYERS: Final = 3
HIDDEN: Final = 1024
LAYER_PARAMETERS: Final = 12 * HIDDEN * HIDDEN + 13 * HIDDEN
COMPUTE, GATHER, REDUCE = 0, 1, 2  # streams

#: Activations kept for the backward, as multiples of batch x sequence x hidden in bf16.
ACTIVATIONS: Final = {"norm1": 1, "qkv": 3, "attention": 1, "norm2": 1, "up": 4, "gelu": 4}


@dataclass
class Script:
    """The events of one rank, and the ids in use by name."""

    events: list[dict[str, Any]] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def add(self, op: str, **fields: Any) -> None:
        self.events.append({"op": op, **fields})

    def alloc(self, name: str, size: int, category: str, stream: int = COMPUTE) -> None:
        self.ids[f"{category} {name}"] = self.count
        where = {"stream": stream} if stream else {}
        self.add("alloc", id=self.count, bytes=size, **where, category=category, name=name)
        self.count += 1

    def free(self, name: str, category: str) -> None:
        self.add("free", id=self.ids.pop(f"{category} {name}"))

    def use(self, name: str, category: str, stream: int) -> None:
        self.add("record_stream", id=self.ids[f"{category} {name}"], stream=stream)

    def compute(self, name: str, flops: int) -> None:
        self.add("kernel", stream=COMPUTE, duration_ns=flops // 100_000, name=name, flops=flops)

    def meet(self, kind: str, name: str, stream: int, size: int) -> None:
        took = 20_000 + size * (RANKS - 1) // RANKS // 200
        self.add("collective", stream=stream, group="fsdp", kind=kind, bytes=size, duration_ns=took, name=name)


def gather(script: Script, layer: int, time: str) -> None:
    """All-gather one layer's parameters in bf16 on the gather stream."""
    name = f"layers.{layer}.{time}.parameters"
    script.alloc(name, 2 * LAYER_PARAMETERS, "communication", GATHER)
    script.meet("all_gather", name, GATHER, 2 * LAYER_PARAMETERS)


@contextlib.contextmanager
def gathered(script: Script, layer: int, time: str, ahead: int | None) -> Iterator[None]:
    """Use one layer's gathered parameters on the compute stream, while those of the next layer come; then drop them."""
    name = f"layers.{layer}.{time}.parameters"
    script.add("wait_stream", stream=COMPUTE, on=GATHER)
    if ahead is not None:
        gather(script, ahead, time)
    yield
    script.use(name, "communication", COMPUTE)
    script.free(name, "communication")


def forward(script: Script, tokens: int) -> None:
    gather(script, 0, "forward")
    for layer in range(LAYERS):
        with gathered(script, layer, "forward", ahead=layer + 1 if layer + 1 < LAYERS else None):
            script.alloc(f"layers.{layer}.input", 2 * tokens * HIDDEN, "activation")
            for name, width in ACTIVATIONS.items():
                script.alloc(f"layers.{layer}.{name}", 2 * tokens * HIDDEN * width, "activation")
            script.compute(f"layers.{layer}", 2 * LAYER_PARAMETERS * tokens)


def backward(script: Script, tokens: int) -> None:
    gather(script, LAYERS - 1, "backward")
    for layer in reversed(range(LAYERS)):
        with gathered(script, layer, "backward", ahead=layer - 1 if layer > 0 else None):
            script.alloc(f"layers.{layer}.grad", 2 * LAYER_PARAMETERS, "gradient")
            script.alloc(f"layers.{layer}.grad_up", 8 * tokens * HIDDEN, "temporary")
            script.compute(f"layers.{layer}.backward", 4 * LAYER_PARAMETERS * tokens)
            script.free(f"layers.{layer}.grad_up", "temporary")
            for name in reversed(ACTIVATIONS):
                script.free(f"layers.{layer}.{name}", "activation")
            script.free(f"layers.{layer}.input", "activation")
        reduce(script, layer)


def reduce(script: Script, layer: int) -> None:
    """Reduce-scatter one layer's gradients in fp32 on a stream of their own; each rank keeps its shard."""
    name = f"layers.{layer}.reduce"
    script.alloc(name, 4 * LAYER_PARAMETERS, "communication", REDUCE)
    script.add("wait_stream", stream=REDUCE, on=COMPUTE)
    script.use(f"layers.{layer}.grad", "gradient", REDUCE)
    script.free(f"layers.{layer}.grad", "gradient")
    script.alloc(f"layers.{layer}.shard", 4 * LAYER_PARAMETERS // RANKS, "gradient", REDUCE)
    script.meet("reduce_scatter", name, REDUCE, 4 * LAYER_PARAMETERS)
    script.free(name, "communication")


def optimizer(script: Script, step: int) -> None:
    shard = 4 * LAYER_PARAMETERS // RANKS
    script.add("wait_stream", stream=COMPUTE, on=REDUCE)
    for layer in range(LAYERS):
        if step == 0:
            script.alloc(f"layers.{layer}.exp_avg", shard, "optimizer_state")
            script.alloc(f"layers.{layer}.exp_avg_sq", shard, "optimizer_state")
        script.compute(f"layers.{layer}.adamw", 4 * shard)
    script.add("synchronize")
    for layer in range(LAYERS):
        script.free(f"layers.{layer}.shard", "gradient")


def events(tokens: int) -> list[dict[str, Any]]:
    """Loading and two training steps of a rank whose batches have so many tokens."""
    script = Script()
    script.add("phase", name="load")
    for layer in range(LAYERS):
        script.alloc(f"layers.{layer}", 4 * LAYER_PARAMETERS // RANKS, "parameter")
    for step in range(2):
        script.add("phase", name="forward", step=step)
        script.alloc("tokens", 8 * tokens, "input")
        forward(script, tokens)
        script.add("phase", name="backward", step=step)
        backward(script, tokens)
        script.free("tokens", "input")
        script.add("phase", name="optimizer", step=step)
        optimizer(script, step)
    return script.events


def sample() -> dict[str, Any]:
    """The whole trace."""
    return {
        "format": "memory-trace",
        "version": 1,
        "metadata": {
            "producer": "tests/support/make_samples.py",
            "model": f"transformer, {LAYERS} layers, hidden {HIDDEN}",
            "strategy": "fsdp",
            "batch": "4 x 1024 tokens; rank 3: 4 x 1536",
        },
        "allocator": {"release": "2.13"},
        "devices": [{"name": "V100-16GB", "total_bytes": 16_935_419_904, "launch_ns": 5000}],
        "groups": {"fsdp": list(range(RANKS))},
        "ranks": [
            {"rank": [0, 1, 2], "device": 0, "events": events(4 * 1024)},
            {"rank": 3, "device": 0, "events": events(4 * 1536)},
        ],
    }


def text() -> bytes:
    """The sample as it stands in the file: one event a line."""

    def line(value: object) -> str:
        return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()

    document = sample()
    lines = [f"{line(name)}: {line(value)}" for name, value in document.items() if name != "ranks"]
    ranks = []
    for entry in document["ranks"]:
        rows = ",\n    ".join(line(row) for row in entry["events"])
        ranks.append(f'{{"rank": {line(entry["rank"])}, "device": 0, "events": [\n    {rows}]}}')
    body = ",\n  ".join(ranks)
    return ("{" + ",\n ".join([*lines, '"ranks": [\n  ' + body]) + "]}\n").encode()


if __name__ == "__main__":
    SAMPLE.write_bytes(text())
