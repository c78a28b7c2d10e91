"""Memory that Hetu-Galvatron measured on eight GPUs, by its own profiler's commands, run by `record`.

    python -m tests.accuracy galvatron --root ROOT [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/galvatron.csv` is one command of `galvatron/models/llama_hf/scripts/profile_memory.sh`
(Llama-2-7B cut to 1, 2 or 4 layers; FSDP1 FULL_SHARD, tensor and sequence parallelism, pipelines; flash-attn, Apex) and
what torch's counters said to the first and to the last rank in the fifth step: bytes allocated after the backward, kept
by the forward, and the peak. ROOT is the repository at commit 81bb003; PATH the Python of an environment with what it
requires (README there).

Ours is with the workspace of autograd's own cuBLAS handle, which every real GPU has. Peaks of ranks with the language
model's head are lower than theirs: PyTorch 2.1's Inductor, which was theirs, makes one tensor of the size of the logits
more in the backward of the compiled loss than releases that `record` knows.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.accuracy.sft import FOLDER, MIB, WORKSPACE, failure_of, keeping, of_kept, of_root, read, record

TABLE: Final = FOLDER / "galvatron.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "galvatron_runs.csv"
_MODEL: Final = Path("galvatron") / "models" / "llama_hf"
_GPUS: Final = 8
#: The profiler names its figures so; the peak's is what it is above the bytes after the backward.
_NAMES: Final = {"left": "ms", "kept": "act", "peak": "act_peak"}
_RANKS: Final = {"first": 0, "last": _GPUS - 1}


@dataclass(frozen=True)
class Run:
    """Bytes on the first and on the last rank: after the backward, kept by the forward, at most; 0 where it failed."""

    left_first: int = 0
    kept_first: int = 0
    peak_first: int = 0
    left_last: int = 0
    kept_last: int = 0
    peak_last: int = 0
    failure: str = ""


known: Final = keeping(Run)
FIGURES: Final = tuple(one.name for one in fields(Run) if one.type == "int")


@dataclass(frozen=True)
class Compared:
    """A row, and our run of it."""

    row: Mapping[str, str]
    run: Run

    def error(self, figure: str) -> float:
        """Relative error of a figure, signed."""
        ours: int = asdict(self.run)[figure]
        return ours / int(self.row[figure]) - 1

    def __str__(self) -> str:
        if self.run.failure:
            return f"{self.row['id']:40} FAILED: {self.run.failure[:160]}"
        ours = asdict(self.run)
        told = (f"{figure} {ours[figure] / MIB:,.2f} for {int(self.row[figure]) / MIB:,.2f} MiB" for figure in FIGURES)
        return f"{self.row['id']:40} {'; '.join(told)}"


def command(row: Mapping[str, str]) -> list[str]:
    """What the profiler typed."""
    return [
        *("python", "-m", "torch.distributed.launch", "--nnodes", "1", "--nproc_per_node", str(_GPUS)),
        *("train_dist_random.py", "--set_experts_manually", "0", "--profile_mode", "static", "--profile_unit", "all"),
        *("--model_size", "llama-7b", "--hidden_size", "4096", "--num_attention_heads", "32", "--vocab_size", "32000"),
        *("--set_model_config_manually", "0", "--set_layernum_manually", "1", "--set_seqlen_manually", "1"),
        *("--global_train_batch_size", "8", "--epochs", "10", "--lr", "0.0001", "--adam_weight_decay", "0.01"),
        *("--dropout_prob", "0.1", "--check_loss", "0", "--profile", "1", "--save_profiled_memory", "1"),
        *("--profile_forward", "0", "--initialize_on_meta", "1", "--global_tp_consec", "1", "--sdp", "1"),
        *("--chunks", "1", "--pipeline_type", "gpipe", "--default_dp_type", "zero3", "--mixed_precision", "bf16"),
        *("--shape_order", "SBH", "--use-flash-attn", "--sequence-parallel", "--num_hidden_layers", row["layers"]),
        *("--seq_length", "4096", "--pp_deg", row["pp"], "--global_tp_deg", row["tp"]),
        *("--global_checkpoint", row["checkpoint"], "--vocab_tp", row["vocabulary_tp"]),
    ]


def ran(row: Mapping[str, str], root: Path, python: str) -> Run:
    """Run the command of a row, in a copy of the program's folder: the profiler writes into it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "llama_hf"
        shutil.copytree(root / _MODEL, folder, ignore=shutil.ignore_patterns("memory_profiling_*"))
        (Path(name) / "dropout_layer_norm.py").touch()  # flash-attn's norms: built beside it, as the guide has it
        ranks = ",".join(str(rank) for rank in _RANKS.values())
        options = ["--gpu", "A100-80GB", "--steps", "all", "--ranks", ranks, "--"]
        done = record([*options, *command(row)], folder, python, root, Path(name))
        written = list((folder / "configs").glob("memory_profiling_*_all.json"))
        found: dict[str, Any] = dict(_found(json.loads(written[0].read_text()))) if written else {}
    if len(found) < len(FIGURES):
        return Run(failure=failure_of(done))
    return Run(**found)


def _found(document: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, int]]:
    """Our figures by name, of what the profiler wrote, in MiB."""
    named = {name: value * MIB for setting in document.values() for name, value in setting.items()}
    for place, rank in _RANKS.items():
        ours = {
            figure: value
            for figure, theirs in _NAMES.items()
            for name, value in named.items()
            if name.endswith(f"_rank{rank}_{theirs}")
        }
        if len(ours) == len(_NAMES):
            left = int(ours["left"]) + WORKSPACE
            yield from ((f"left_{place}", left), (f"kept_{place}", int(ours["kept"])))
            yield f"peak_{place}", left + int(ours["peak"])


def summary(found: Sequence[Compared]) -> list[str]:
    """Commands that ran, and how far off each figure is, of both ranks."""
    ran = [one for one in found if not one.run.failure]
    lines = [f"{len(ran)} of {len(found)} commands ran"]
    for figure, told in (("left", "after the backward"), ("kept", "kept by the forward"), ("peak", "peak")):
        sizes = np.abs([one.error(name) for one in ran for name in FIGURES if name.startswith(figure)])
        if len(sizes):
            within = np.count_nonzero(sizes < 1e-4)
            far = f"median {np.median(sizes):.3%}, worst {sizes.max():.2%}"
            lines.append(f"{told}: {within} of {len(sizes)} within 0.01 %, {far}")
    return lines


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    return [f"Hetu-Galvatron's profiler; runs kept in {KEPT.name}:", *(f"    {line}" for line in summary(found))]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    found = of_root("galvatron", arguments, read(TABLE), known, ran, Compared)
    print("\n".join(summary(found)))
