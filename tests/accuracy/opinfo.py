"""PyTorch's own operator database (OpInfo) on the fake device, beside what a CUDA build allocated.

    python -m tests.accuracy opinfo [NAME]... [--dtype float32|bfloat16] [--strided] [--recorded FILE] [--results FILE]

`--strided`: of operands with gaps between their elements, as slices of larger tensors have them (float32).

Four samples an operator, forward and backward: bytes (each allocation rounded up to 512) and number of allocations.
The recordings are tests/data/opinfo (README there); every value that was read back from the device was 0 in them. What
follows from such zeros is counted apart: there the shapes of results are compared with the CPU's, whose values are
right.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import signal
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

import graph.fake_cuda.device as fake
from graph.fake_cuda import sdpa
from graph.hardware.profile import profile
from graph.recorder.program import ProgramRecorder
from tests.places import DATA
from traces.release import installed_release

FOLDER: Final = DATA / "opinfo"
SAMPLES: Final = 4  # of an operator
LIMIT: Final = 20  # seconds for an operator
#: Operators whose recording follows from values that were read back as 0.
BY_VALUE: Final = (
    *("argwhere", "combinations", "index_put", "masked_fill", "masked_scatter"),
    *("masked_select", "nonzero", "prod", "repeat_interleave", "nn.functional.ctc_loss"),
)

#: [bytes, number], of those in BY_VALUE also whether shapes are the CPU's (1); or why there is none.
Outcome: TypeAlias = list[int] | str


class Counter:
    """An allocator that adds up what it is asked for, by one thread."""

    def __init__(self) -> None:
        self.bytes = self.number = 0
        self.lock = contextlib.nullcontext()

    def malloc(self, size: int, stream: int) -> int:
        """One more."""
        self.bytes += -(-size // 512) * 512
        self.number += size > 0
        return self.number

    def free(self, number: int) -> None:
        """Deaths are not counted."""

    def record_stream(self, number: int, stream: int) -> None:
        """Nor is use on other streams."""


@dataclass
class Found:
    """Ours beside theirs: counts, and a line for what differs."""

    equal: int = 0
    differ: int = 0
    died: int = 0
    by_value: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line."""
        judged = self.equal + self.differ + self.died
        share = self.equal / judged if judged else 1.0
        return (
            f"{self.equal} of {judged} samples equal ({share:.1%}), {self.differ} differ, {self.died} die; "
            f"{self.by_value} more were recorded with zeros for values and have the CPU's shapes here"
        )


def database() -> Iterator[tuple[str, Any]]:
    """Operators by name and variant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    for op in op_db:
        yield op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""), op


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Those in an argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def run(name: str, op: Any, dtype: torch.dtype, counter: Counter, *, strided: bool) -> list[Outcome] | None:
    """What the first samples of an operator allocate; None where it does not run on CUDA."""
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
    if not op.supports_dtype(dtype, "cuda"):
        if strided:
            return None
        dtype, differentiable = torch.int64, False
        if not op.supports_dtype(dtype, "cuda"):
            return None
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=False)
    chosen = [sample for _, sample in zip(range(SAMPLES), samples, strict=False)]
    given = [gaps for sample in chosen if (gaps := _with_gaps(sample)) is not None] if strided else chosen
    return [_sample(op, sample, differentiable, counter, checked=name in BY_VALUE) for sample in given]


def _with_gaps(sample: Any) -> Any:
    """The sample with operands that are not contiguous; None where the database cannot make them."""
    with contextlib.suppress(Exception):
        return sample.noncontiguous()
    return None


def _there(value: torch.Tensor) -> torch.Tensor:
    """A copy on the device with the same strides."""
    if value.layout is not torch.strided or value.is_contiguous() or not all(value.stride()):
        return value.detach().cuda()
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


def _sample(op: Any, sample: Any, differentiable: bool, counter: Counter, *, checked: bool) -> Outcome:
    """Forward and backward of one sample; `checked`: and whether results have the shapes that they have on the CPU."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        there = _there(value)
        return there.requires_grad_(True) if differentiable and there.is_floating_point() else there

    given = sample.transform(moved)
    before = counter.bytes, counter.number
    try:
        result = op.op(given.input, *given.args, **given.kwargs)
        if differentiable:
            sums = [one.abs().sum() if one.is_complex() else one.sum() for one in tensors(result) if one.requires_grad]
            if sums:
                torch.autograd.backward(sum(sums))  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:140]}"
    after = [counter.bytes - before[0], counter.number - before[1]]
    if checked:
        host = op.op(sample.input, *sample.args, **sample.kwargs)
        shapes, right = ([tuple(one.shape) for one in tensors(value)] for value in (result, host))
        after.append(int(shapes == right))
    return after


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """An error after LIMIT seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measured(names: frozenset[str], dtype: torch.dtype, *, strided: bool = False) -> dict[str, Any]:
    """What every operator (of `names`, if any are given) allocates on the fake device, by name."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(), fake.fake_cuda(profile("A100-80GB", installed_release())) as runtime:
        warnings.simplefilter("ignore")
        sdpa.install(runtime)
        counter = Counter()
        runtime.observer = ProgramRecorder(runtime, counter)  # type: ignore[arg-type]
        # the database asks the device what it supports
        operators = [(name, op) for name, op in database() if not names or name in names]
        for name, op in operators:
            with _limited():
                found[name] = run(name, op, dtype, counter, strided=strided)
    return found


def compared(recorded: Mapping[str, Any], ours: Mapping[str, Any]) -> Found:
    """Every sample that the recording has figures for, where we have tried the operator."""
    found = Found()
    for name, theirs in recorded.items():
        for number, figures in enumerate(theirs if isinstance(theirs, list) and name in ours else ()):
            mine = (ours[name] or [])[number : number + 1]
            if isinstance(figures, str):
                continue
            if not mine or isinstance(mine[0], str):
                found.died += 1
                found.lines.append(f"{name} {number}: {mine[0] if mine else 'no such sample'}")
            elif mine[0][:2] == figures:
                found.equal += 1
            elif mine[0][2:] == [1]:
                found.by_value += 1
            else:
                found.differ += 1
                found.lines.append(f"{name} {number}: {_told(mine[0])} for {_told(figures)}")
    return found


def _told(figures: list[int]) -> str:
    return f"{figures[0]:,} bytes in {figures[1]}"


def recording(name: str) -> dict[str, Any]:
    """What the recorder said, by operator: `name` is that of a dtype, perhaps with `-strided`.

    It is that of the installed release, where there is one; else that of 2.13.
    """
    of_release = FOLDER / f"{name}-{installed_release()}.json.gz"
    path = of_release if of_release.exists() else FOLDER / f"{name}.json.gz"
    samples: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return samples


def main(arguments: list[str]) -> None:
    """Run the operators and print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy opinfo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--strided", action="store_true", help="operands with gaps")
    parser.add_argument("--recorded", type=Path, help="another recording, JSON")
    parser.add_argument("--results", type=Path, help="where to write what was found here")
    options = parser.parse_args(arguments)
    if options.strided and options.dtype != "float32" and options.recorded is None:
        parser.error("--strided is recorded with --dtype float32 alone: name another recording by --recorded")
    name = options.dtype + ("-strided" if options.strided else "")
    theirs = recording(name) if options.recorded is None else json.loads(options.recorded.read_text())
    ours = measured(frozenset(options.names), getattr(torch, options.dtype), strided=options.strided)
    if options.results is not None:
        options.results.write_text(json.dumps(ours))
    found = compared(theirs, ours)
    print(*found.lines, found.summary, sep="\n")
