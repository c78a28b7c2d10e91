"""The training scripts that are written for cases, run by `record`, beside the estimates of those cases: one program.

    python -m tests.accuracy scripts [NAME]...

NAME is one of `CASES` (default: all). Allocations and frees are compared one by one, from the first forward on, when
the inputs are on the device: how a script brings weights to the device is its own (under FSDP2 rank 0 alone loads
them). What loading leaves is compared as sizes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import strategies
import traces
from graph.case import Case
from simulator.launch.configuration import files
from tests.places import ROOT
from tests.support import warm
from tests.support.launched import model
from traces.model import Events, Op

CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "single": {"clip": 1.0},
    "mixed": {"autocast": "bf16", "checkpointing": "nonreentrant", "attention_mask": True, "optimizer": "adamw-fused"},
    "adapted": {"lora": 4, "checkpointing": "reentrant", "dtype": "bf16"},
    "quantized": {"quant": "nf4", "lora": 4, "dtype": "bf16"},
    "in-backward": {"step_in_backward": True, "optimizer": "sgd"},
    "selective": {"checkpointing": "selective", "save": "matmul,attn"},
    "activations": {"offload": "activations"},
    "loss-in-parts": {"loss": "chunk8", "autocast": "bf16"},
    "loss-in-parts-adapted": {"loss": "chunk8-ckpt", "lora": 4, "dtype": "bf16", "batch": 1},
    "accumulated": {"accum": 2, "clip": 1.0},
    "accumulated-fp16": {"accum": 2, "autocast": "fp16"},
    "compiled": {"compile": "default", "autocast": "bf16"},
    "compiled-adapted": {"compile": "default", "lora": 4, "checkpointing": "nonreentrant", "dtype": "bf16"},
    "compiled-blocks": {"compile": "default", "compile_blocks": True, "accum": 2, "clip": 1.0},
    "compiled-ddp": {"compile": "default", "strategy": "ddp", "world": 2},
    "compiled-fsdp2": {"compile": "default", "strategy": "fsdp2", "world": 2},
    "ddp": {"strategy": "ddp", "world": 2},
    "ddp-view": {"strategy": "ddp-view", "world": 2},
    "zero1": {"strategy": "zero1", "world": 2},
    "fsdp1": {"strategy": "fsdp1", "world": 2, "autocast": "bf16"},
    "fsdp2": {"strategy": "fsdp2", "world": 2},
    "fsdp2-accumulated": {"strategy": "fsdp2", "world": 2, "accum": 2, "grad_sync": "last", "clip": 1.0},
    "fsdp2-offload": {"strategy": "fsdp2-offload", "world": 2},
    "tp": {"strategy": "tp", "world": 2},
    "tp-sp": {"strategy": "tp-sp", "world": 2},
    "hsdp": {"mesh": {"dp": 2, "fsdp2": 2}, "autocast": "bf16", "clip": 1.0},
    "fsdp2,tp": {"mesh": {"fsdp2": 2, "tp": 2}},
    "deepspeed-2": {"strategy": "deepspeed-2", "world": 2},
    "deepspeed-3": {"strategy": "deepspeed-3", "world": 2, "dtype": "bf16"},
}
#: What all have; no script waits for the device where a phase ends.
_SMALL: Final = {"batch": 2, "seq": 16, "sync": False}


@dataclass(frozen=True)
class Steps:
    """What one rank did after loading: a row (bytes, stream) for each allocation and (-1, which one, or its bytes where
    loading made it) for each free; and the sizes that loading left."""

    rows: list[tuple[int, ...]]
    left: Counter[int]


def steps(events: Events) -> Steps:
    """The steps of a rank, from the first allocation in its first phase `forward` that is no input."""
    ident, size, stream = events.ints("id"), events.ints("bytes"), events.ints("stream")
    names, categories = events.strings("name"), events.strings("category")
    marks = np.flatnonzero(events.op == Op.PHASE).tolist()
    begin = next(row for row in marks if names.get(row) == "forward")
    alloc = np.flatnonzero(events.op == Op.ALLOC).tolist()
    begin = next(row for row in alloc if row > begin and categories.get(row) != "input")
    order: dict[int, int] = {}
    sizes: dict[int, int] = {}
    left: Counter[int] = Counter()
    rows: list[tuple[int, ...]] = []
    for row in np.flatnonzero((events.op == Op.ALLOC) | (events.op == Op.FREE)).tolist():
        key, made = int(ident[row]), events.op[row] == Op.ALLOC
        if made:
            sizes[key] = int(size[row])
        if row < begin:
            left[sizes[key]] += 1 if made else -1
        elif made:
            order[key] = len(order)
            rows.append((sizes[key], int(stream[row])))
        else:
            rows.append((-1, 0, order[key]) if key in order else (-1, 1, sizes[key]))
    return Steps(rows, +left)


def estimated(case: Case) -> Steps:
    """Rank 0 of the case's estimate."""
    return _of(strategies.lower(case))


def recorded(case: Case, folder: Path, start: warm.Run) -> Steps:
    """Rank 0 of the case's script, which `record` runs in `folder`. Raises AssertionError with what it said if not."""
    done = run(case, folder, "--steps", "all", "-o", str(folder / "trace.npz"), start=start)
    assert done.returncode == 0, done.stderr[-2000:]
    return _of(traces.read(folder / "trace.npz"))


def run(case: Case, folder: Path, *options: str, start: warm.Run = warm.cold) -> subprocess.CompletedProcess[str]:
    """What `record` says of rank 0 of the case's script, which is written to `folder`, with these options."""
    for name, text in files(case).items():
        (folder / name).write_text(text)
    environment = {**os.environ, "STEPS": str(case.steps), "RANDOM_WEIGHTS": "1", "PYTHONPATH": str(ROOT)}
    if case.alloc_conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = case.alloc_conf
    launched = "torchrun" in (folder / "launch.sh").read_text()
    program = ["--", "torchrun", f"--nproc-per-node={case.world}", "train.py"] if launched else ["train.py"]
    asked = ["--gpu", case.gpu, "--ranks", "0", "--force", *options]
    command = [sys.executable, "-m", "simulator", "record", *asked, *program]
    return start(command, cwd=folder, env=environment)


def _of(trace: traces.Trace) -> Steps:
    return steps(next(rank.events for rank in trace.ranks if 0 in rank.ranks))


def difference(ours: Steps, script: Steps) -> str:
    """What differs first, in one line; empty where nothing does. The script's rank ends later: its tear-down frees."""
    if ours.left != script.left:
        return f"loading leaves {dict(ours.left - script.left)} more, {dict(script.left - ours.left)} less"
    for place, (mine, theirs) in enumerate(zip(ours.rows, script.rows, strict=False)):
        if mine != theirs:
            return f"event {place}: estimate {mine}, script {theirs}"
    rest = script.rows[len(ours.rows) :]
    return "" if len(script.rows) >= len(ours.rows) and all(row[0] == -1 for row in rest) else "one ends early"


def compared(names: list[str], folder: Path, start: warm.Run = warm.cold) -> Iterator[tuple[str, int, str]]:
    """(name, events of the estimate's steps, what differs) of each case."""
    for name in names:
        case = Case.of({**_SMALL, "model": model(folder / "model"), **CASES[name]})
        (folder / name).mkdir()
        ours = estimated(case)
        yield name, len(ours.rows), difference(ours, recorded(case, folder / name, start))


def main(arguments: list[str]) -> None:
    """Print which scripts do what was estimated."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy scripts", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(arguments).names or list(CASES)
    equal = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, count, differs in compared(names, Path(scratch)):
            equal += not differs
            print(f"{name:16}{count:>7} events  {differs or 'equal'}", flush=True)
    print(f"{equal} of {len(names)} equal")
