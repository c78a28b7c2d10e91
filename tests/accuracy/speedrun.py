"""modded-nanogpt's speedruns on H100s, whose logs hold the whole program and what it printed, run by `record`.

    python -m tests.accuracy speedrun --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/speedrun.csv` is a log below `records/` of KellerJordan/modded-nanogpt (ROOT): the
program and its Triton kernels, then `torch.cuda.max_memory_allocated()` and `max_memory_reserved()` at its end, in MiB.
The program runs as it is, on made-up tokens, for 14 steps instead of hundreds, which go through all stages of its
schedule as those do. PATH is the Python of an environment with PyTorch and Triton of that release; FlashAttention-3's
`flash_attn_interface`, which the program takes from the Hub, is on its path (README there). WORD: only rows whose id
has it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tests.accuracy.sft import FOLDER, Judged, keeping, of_kept, of_root, output, read, spread

TABLE: Final = FOLDER / "speedrun.csv"
#: What our runs of the table's rows printed (README there).
KEPT: Final = FOLDER / "speedrun_runs.csv"
#: Between the program, the file of its kernels and what it printed.
_END: Final = "=" * 100
_KERNELS: Final = f"{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n"
#: How many steps its schedule has, and those behind it: theirs, and ours.
_STEPS: Final = (
    (r"(num_scheduled_iterations: int =) \d+", r"\1 12"),
    (r"(num_extension_iterations: int =) \d+", r"\1 2"),
)
#: What stands for the Hub.
_HUB: Final = """\
import types

import flash_attn_interface


def get_kernel(name, **_):
    assert name.endswith("flash-attn3")
    return types.SimpleNamespace(flash_attn_interface=flash_attn_interface)
"""
#: The number that begins a text, how many others there are, texts' median length and the deviation of its logarithm.
_BEGIN, _TOKENS, _MEDIAN, _DEVIATION = 50256, 50256, 400, 1.0
#: Tokens of each file, which begins with 256 numbers, and how many there are of it: the next one is opened early.
_FILES: Final = {"train": (30_000_000, 8), "val": (40_000_000, 2)}
_MAGIC, _VERSION = 20240520, 1


@dataclass(frozen=True)
class Printed:
    """Peaks in MiB: None where it failed (`failure`)."""

    allocated: float | None = None
    reserved: float | None = None
    failure: str = ""


known: Final = keeping(Printed)


@dataclass(frozen=True)
class Compared(Judged[Printed]):
    """A row, and our run of it."""

    column = "allocated"

    @property
    def ours(self) -> float | None:
        """What ours allocated at most."""
        return self.run.allocated

    @property
    def reserved_error(self) -> float | None:
        """Relative error of what is reserved at most, signed; None where it failed."""
        return self.run.reserved / float(self.row["reserved"]) - 1 if self.run.reserved else None

    def __str__(self) -> str:
        if self.error is None or self.reserved_error is None:
            return f"{self.row['id']:30} FAILED: {self.run.failure[:160]}"
        reserved = f"{self.run.reserved:,.0f} for {float(self.row['reserved']):,.0f} {self.reserved_error:+.2%}"
        allocated = f"{self.ours:,.0f} for {float(self.row['allocated']):,.0f} MiB {self.error:+.2%}"
        return f"{self.row['id']:30} allocated {allocated}, reserved {reserved}"


def programs(log: str) -> dict[str, str]:
    """The files that a log begins with, with few steps: the program and its kernels."""
    program, _, kernels = log.partition(_END)[0].partition(_KERNELS)
    for theirs, ours in _STEPS:
        program = re.sub(theirs, ours, program)
    return {"train_gpt.py": program, "triton_kernels.py": kernels}


def write_tokens(file: Path, number: int) -> None:
    """So many tokens of texts that begin as GPT-2's do."""
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(0, _TOKENS, number, dtype=np.uint16)
    lengths = drawn.lognormal(np.log(_MEDIAN), _DEVIATION, number // 100).astype(np.int64) + 20
    begins = np.concatenate(([0], np.cumsum(lengths)))
    tokens[begins[begins < number]] = _BEGIN
    header = np.zeros(256, np.int32)
    header[:3] = _MAGIC, _VERSION, number
    file.write_bytes(header.tobytes() + tokens.tobytes())


def ran(row: Mapping[str, str], root: Path, python: str) -> Printed:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = (root / "records" / row["log"]).read_text(encoding="utf-8")
        for file, text in {**programs(log), "kernels.py": _HUB}.items():
            (folder / file).write_text(text)
        (data := folder / "data" / "fineweb10B").mkdir(parents=True)
        for kind, (number, files) in _FILES.items():
            write_tokens(first := data / f"fineweb_{kind}_000000.bin", number)
            for copy in range(1, files):
                (data / f"fineweb_{kind}_{copy:06}.bin").hardlink_to(first)
        words = ["--gpu", "H100-80GB", "--on-gpu", "--ranks", "0", "--steps", "all", "--", "torchrun"]
        text, failure = output([*words, "--nproc-per-node", row["gpus"], "train_gpt.py"], folder, python)
    found = re.search(r"^peak memory allocated: (\d+) MiB reserved: (\d+) MiB$", text, re.MULTILINE)
    return Printed(float(found[1]), float(found[2])) if found else Printed(failure=failure or "no figures")


def summary(found: Sequence[Compared]) -> str:
    """Rows that ran, and how far off they are."""
    ran = [one for one in found if one.error is not None]
    reserved = spread(one.reserved_error for one in ran)
    return f"{len(ran)} of {len(found)} rows ran, allocated{spread(one.error for one in ran)}; reserved{reserved}"


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    told = summary(of_kept(read(TABLE), known(KEPT), Compared))
    return [f"modded-nanogpt's speedruns on H100s; runs kept in {KEPT.name}:", f"    {told}"]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    print(summary(of_root("speedrun", arguments, read(TABLE), known, ran, Compared)))
