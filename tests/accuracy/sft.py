"""Fine-tuning that IBM's fms-acceleration measured on A100s, by the program that made each figure, run by `record`.

    python -m tests.accuracy sft [--table FILE] [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/sft.csv` (torch's own counter, by the Trainer; no kernels of others) becomes a run of
`tests/data/published/programs/sft.py`, launched as it was: `python`, or `accelerate launch` with FSDP. PATH is the
Python of an environment with the libraries of that time (README there); else this one's are used, whose figures differ.
Ours is the peak of allocated bytes with the workspace of autograd's own cuBLAS handle, which every real GPU has. A row
without a figure ran out of memory. WORD: only rows whose id has it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from graph.models import catalogue
from tests.places import DATA, ROOT

FOLDER: Final = DATA / "published"
#: The cuBLAS workspace of an A100.
WORKSPACE: Final = 8_519_680
LIMIT: Final = 900
#: bigcode/gpt_bigcode-santacoder, which the catalogue does not have.
SANTACODER: Final = {
    "model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "n_embd": 2048, "n_head": 16,
    "n_inner": 8192, "n_layer": 24, "n_positions": 2048, "vocab_size": 49280, "multi_query": True,
    "activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
#: `scripts/benchmarks/accelerate.yaml` of fms-acceleration (commit 876e2ed).
FSDP: Final = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
mixed_precision: 'no'
machine_rank: 0
num_machines: 1
rdzv_backend: static
same_network: true
"""


@dataclass(frozen=True)
class Compared:
    """A row, and our peak: None where the run failed (`failure`) or ran out of memory."""

    row: Mapping[str, str]
    peak: int | None
    failure: str = ""

    @property
    def error(self) -> float | None:
        """Relative error, signed; None where either has no figure."""
        theirs = int(self.row["peak_bytes"] or 0)
        return self.peak / theirs - 1 if self.peak and theirs else None

    def __str__(self) -> str:
        if self.failure:
            return f"{self.row['id']:70} FAILED: {self.failure[:160]}"
        theirs = f"{int(self.row['peak_bytes']):,}" if self.row["peak_bytes"] else "out of memory"
        ours = f"{self.peak:,}" if self.peak else "out of memory"
        error = "" if self.error is None else f"{self.error:+.4%}"
        return f"{self.row['id']:70} {ours:>16} for {theirs:>16} {error}"


def configuration(model: str) -> Mapping[str, Any]:
    """The config.json of a model of the table."""
    return SANTACODER if model.endswith("santacoder") else catalogue.configuration(catalogue.find(model) or model)


def command(row: Mapping[str, str], folder: Path) -> list[str]:
    """What was typed, with the model in `folder`."""
    words = [str(FOLDER / "programs" / "sft.py"), str(folder), "--batch", row["micro_batch"], "--seq", row["seq_len"]]
    words += ["--attn", "flash_attention_2"]
    if row["lora_rank"]:
        words += ["--lora", row["lora_rank"], row["lora_targets"].replace(" ", "")]
    if "NF4" in row["quantization"]:
        words += ["--nf4", *(["--as-loaded"] if "accelerated" in row["notes"] else [])]
    if row["n_gpus"] == "1":
        return words
    settings = folder / "accelerate.yaml"
    settings.write_text(FSDP)
    return ["--", "accelerate", "launch", "--config_file", str(settings), "--num_processes", row["n_gpus"], *words]


def compared(row: Mapping[str, str], python: str) -> Compared:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(configuration(row["model"])))
        answer = folder / "answer.json"
        words = [python, "-m", "simulator", "record", "-q", "--gpu", "A100-80GB", "--ranks", "0", "--steps", "all"]
        words += ["--json", str(answer), *command(row, folder)]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        given = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                words, cwd=folder, env=given, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return Compared(row, None, f"not done in {LIMIT} s")
        if not answer.exists():
            return Compared(row, None, (done.stderr.strip().splitlines() or ["nothing said"])[-1])
        rank = json.loads(answer.read_text())["ranks"][0]
        if rank["num_ooms"]:
            return Compared(row, None)
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return Compared(row, rank["peak_allocated"] + WORKSPACE, "" if done.returncode == 0 else str(lines[-1:]))


def summary(found: Sequence[Compared]) -> str:
    """Rows, those that ran, and how far off they are."""
    errors = np.abs([one.error for one in found if one.error is not None])
    verdicts = sum((one.peak is None) == (not one.row["peak_bytes"]) and not one.failure for one in found)
    middle = f"median {np.median(errors):.4%}, worst {errors.max():.4%}; " if len(errors) else ""
    return f"{len(errors)} rows with figures, {middle}{verdicts} of {len(found)} verdicts right"


def _known(results: Path | None) -> Iterator[tuple[str, tuple[int | None, str]]]:
    if results is not None and results.exists():
        for line in results.read_text().splitlines():
            name, peak, failure = json.loads(line)
            yield name, (peak, failure)


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy sft")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--table", type=Path, default=FOLDER / "sft.csv")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--results", type=Path, help="keep what was found, and do not run it again")
    options = parser.parse_args(arguments)
    with options.table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(word in row["id"] for word in options.words)]
    known = dict(_known(options.results))
    found = []
    for row in rows:
        one = Compared(row, *known[row["id"]]) if row["id"] in known else compared(row, options.python)
        if options.results is not None and row["id"] not in known:
            with options.results.open("a", encoding="utf-8") as file:
                print(json.dumps([row["id"], one.peak, one.failure]), file=file)
        found.append(one)
        print(one, flush=True)
    print(summary(found))
