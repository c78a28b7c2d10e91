"""Fine-tuning that IBM's fms-acceleration measured on A100s, by the program that made each figure, run by `record`.

    python -m tests.accuracy sft [--plugins ROOT] [--table FILE] [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/sft.csv` (torch's own counter, by the Trainer, with nvidia-smi's beside it) becomes a
run of `tests/data/published/programs/sft.py`, launched as it was: `python`, or `accelerate launch` with FSDP. Rows of
GPTQ, of its loader for bitsandbytes and of its fused kernels are run by fms-acceleration's own plugins: ROOT is its
repository at commit 24bdadb, without which those rows are left out. PATH is the Python of an environment with the
libraries of that time (README there); else this one's are used, whose figures differ. Ours is the peak by the Trainer
with the workspace of autograd's own cuBLAS handle, which every real GPU has; of the whole card, reserved bytes
and what lies outside the allocator. A row without a figure ran out of memory. WORD: only rows whose id has it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec
import numpy as np

from graph.hardware.profile import profile
from graph.models import catalogue
from simulator.estimator.outside import bytes_of, process_terms
from tests.accuracy import checkpoints
from tests.places import DATA, ROOT

FOLDER: Final = DATA / "published"
TABLE: Final = FOLDER / "sft.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "sft_runs.csv"
#: Reserved bytes of the same programs under PyTorch 2.6, the nearest to theirs that `record` knows (README there).
RESERVED: Final = FOLDER / "sft_reserved.csv"
MIB: Final = 1 << 20
#: The cuBLAS workspace of an A100.
WORKSPACE: Final = 8_519_680
LIMIT: Final = 3600
_LATE: Final = f"not done in {LIMIT} s"
#: bigcode/gpt_bigcode-santacoder, which the catalogue does not have.
SANTACODER: Final = {
    "model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "n_embd": 2048, "n_head": 16,
    "n_inner": 8192, "n_layer": 24, "n_positions": 2048, "vocab_size": 49280, "multi_query": True,
    "activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
#: Rows of a matrix that share scales in TheBloke's GPTQ checkpoints (-1: all), by type of model.
GROUPS: Final = {"mistral": 128, "mixtral": -1, "llama": -1}
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


R = TypeVar("R")
C = TypeVar("C")


@dataclass(frozen=True)
class Run:
    """What a run of a row's program held, in bytes: None where it failed (`failure`) or ran out of memory."""

    allocated: int | None = None
    reserved: int | None = None
    failure: str = ""


@dataclass(frozen=True)
class Judged(Generic[R]):
    """A row of a table, and our run of it."""

    #: Where the row has their figure, in the unit of ours.
    column: ClassVar[str]

    row: Mapping[str, str]
    run: R

    @property
    def ours(self) -> float | None:
        """Our figure; None where the program failed or ran out of memory."""
        raise NotImplementedError

    @property
    def error(self) -> float | None:
        """Relative error, signed; None where either has no figure."""
        theirs = float(self.row[self.column] or 0)
        return self.ours / theirs - 1 if self.ours and theirs else None


@dataclass(frozen=True)
class Compared(Judged[Run]):
    """A row, and our run of it, by torch's own counter."""

    column = "peak_bytes"

    @property
    def ours(self) -> float | None:
        """Our peak in bytes."""
        return self.run.allocated

    @property
    def device(self) -> int | None:
        """What a card would hold: reserved memory and what lies outside the allocator."""
        return self.run.reserved + outside(self.row) if self.run.reserved else None

    @property
    def device_error(self) -> float | None:
        """Relative error of what nvidia-smi showed, signed; None where either has no figure."""
        theirs = int(self.row["nvidia_smi_bytes"] or 0)
        return self.device / theirs - 1 if self.device and theirs else None

    def __str__(self) -> str:
        if self.run.failure:
            return f"{self.row['id']:70} FAILED: {self.run.failure[:160]}"
        theirs = f"{int(self.row['peak_bytes']):,}" if self.row["peak_bytes"] else "out of memory"
        ours = f"{self.run.allocated:,}" if self.run.allocated else "out of memory"
        error = "" if self.error is None else f"{self.error:+.4%}"
        return f"{self.row['id']:70} {ours:>16} for {theirs:>16} {error}"


def configuration(model: str) -> Mapping[str, Any]:
    """The config.json of a model of the table."""
    if model.endswith("santacoder"):
        return SANTACODER
    name = model.removeprefix("TheBloke/").removesuffix("-GPTQ")
    plain = {"Llama-2-70B": "meta-llama/Llama-2-70b-hf", "Mistral-7B-v0.1": "mistralai/Mistral-7B-v0.1"}
    model = plain.get(name, f"mistralai/{name}") if name != model else model
    return catalogue.configuration(catalogue.find(model) or model)


def tokens(model: str) -> int:
    """The length of a model's tokenizer with the pad token that fms-hf-tuning adds.

    Llama's and Mistral's have 32,000 tokens, as their embeddings; santacoder's 49,157 for its 49,280 rows.
    """
    return (49_157 if model.endswith("santacoder") else int(configuration(model)["vocab_size"])) + 1


def plugins_of(row: Mapping[str, str]) -> str:
    """The file of fms-acceleration's settings by which a row was made; empty where it was made without."""
    name = row["notes"].partition("framework_config=")[2].partition(";")[0]
    if name in ("none", "baseline-peft-bnb"):
        return ""
    return f"{name.replace('bnb', 'bnb-nf4')}-sample-configuration.yaml"


def is_gptq(row: Mapping[str, str]) -> bool:
    """Whether the row's weights are AutoGPTQ's; such rows compute in fp16."""
    return row["method"] == "gptq-lora"


def command(row: Mapping[str, str], folder: Path, plugins: Path) -> list[str]:
    """What was typed, with the model in `folder` and fms-acceleration's repository at `plugins`."""
    words = [str(FOLDER / "programs" / "sft.py"), str(folder), "--batch", row["micro_batch"], "--seq", row["seq_len"]]
    words += ["--attn", "flash_attention_2", "--vocab", str(tokens(row["model"]))]
    if row["lora_rank"]:
        words += ["--lora", row["lora_rank"], row["lora_targets"].replace(" ", "")]
    if "NF4" in row["quantization"]:
        words.append("--nf4")
    if is_gptq(row):
        words.append("--fp16")
    if file := plugins_of(row):
        words += ["--plugins", str(plugins / "sample-configurations" / file)]
    if row["n_gpus"] == "1":
        return words
    settings = folder / "accelerate.yaml"
    settings.write_text(FSDP)
    return ["--", "accelerate", "launch", "--config_file", str(settings), "--num_processes", row["n_gpus"], *words]


def ran(row: Mapping[str, str], python: str, plugins: Path) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = configuration(row["model"])
        (folder / "config.json").write_text(json.dumps(model))
        if is_gptq(row):
            checkpoints.write_gptq(folder, model, GROUPS[str(model["model_type"])])
        options = ["--gpu", "A100-80GB", "--steps", "all", "--context", "auto"]
        modules = sorted(plugins.glob("plugins/*/src")) if plugins_of(row) else ()
        rank, failure = recorded([*options, *command(row, folder, plugins)], folder, python, *modules)
        if rank is None or (failure and not rank["num_ooms"]):
            return Run(failure=failure)
        if rank["num_ooms"]:
            return Run()
        return Run(counted(json.loads((folder / "out" / "train_results.json").read_text())), rank["peak_reserved"])


def counted(metrics: Mapping[str, Any]) -> int:
    """A peak as transformers' TrainerMemoryTracker counts it, and the workspace of autograd's own cuBLAS handle.

    The tracker does not see what is allocated between the Trainer's making and its training, as the adapters that
    plugins put on a rank's GPU there.
    """
    before = int(metrics["before_init_mem_gpu"]) + int(metrics["init_mem_gpu_alloc_delta"])
    return before + int(metrics["train_mem_gpu_alloc_delta"]) + int(metrics["train_mem_gpu_peaked_delta"]) + WORKSPACE


def record(words: Sequence[str], folder: Path, python: str, *paths: Path, **environment: str) -> CompletedProcess[str]:
    """`record WORDS`, run in `folder` by another Python. Raises TimeoutExpired after `LIMIT` seconds, SystemExit where
    there is no such Python.

    `paths` are searched for modules too; `environment` is added to this process's.
    """
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT), *map(str, paths))))
    asked = [python, "-m", "simulator", "record", "-q", *words]
    given = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment}
    if shutil.which(python) is None:
        sys.exit(f"error: --python {python}: is no program")
    return subprocess.run(asked, cwd=folder, env=given, capture_output=True, text=True, timeout=LIMIT, check=False)


def recorded(
    words: Sequence[str], folder: Path, python: str, *paths: Path, **environment: str
) -> tuple[Mapping[str, Any] | None, str]:
    """What `record` says of rank 0 (None: nothing), and why it failed, if it did."""
    answer = folder / "answer.json"
    try:
        done = record(["--ranks", "0", "--json", str(answer), *words], folder, python, *paths, **environment)
    except subprocess.TimeoutExpired:
        return None, _LATE
    if not answer.exists():
        return None, (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return json.loads(answer.read_text())["ranks"][0], failure_of(done) if done.returncode else ""


def output(words: Sequence[str], folder: Path, python: str, *paths: Path, **environment: str) -> tuple[str, str]:
    """What a program prints under `record`, and why it failed, if it did."""
    try:
        done = record(words, folder, python, *paths, **environment)
    except subprocess.TimeoutExpired:
        return "", _LATE
    return done.stdout, failure_of(done) if done.returncode else ""


def failure_of(done: CompletedProcess[str]) -> str:
    """The last error that a program, or `record`, has printed; its exit code where there is none."""
    errors = (line for line in reversed(done.stderr.splitlines()) if "Error" in line or line.startswith("error: "))
    return next(errors, f"exit code {done.returncode}")


def outside(row: Mapping[str, str]) -> int:
    """Bytes that lie outside PyTorch's allocator, as `--context auto` has them."""
    return bytes_of(process_terms([profile("A100-80GB", row["torch_version"])], "auto", groups=int(row["n_gpus"]) > 1))


def told_of_device(one: Compared) -> str:
    """A row's line of what nvidia-smi showed: ours with what lies outside the allocator, theirs, the difference."""
    theirs, ours = int(one.row["nvidia_smi_bytes"]), one.device or 0
    left = theirs - (one.run.reserved or 0)
    return (
        f"{one.row['id']:70} {ours / MIB:>7,.0f} for {theirs / MIB:>7,.0f} MiB {one.device_error:+.1%};"
        f" beside our reserved bytes it has {left / MIB:,.0f}"
    )


def summary(found: Sequence[Compared]) -> list[str]:
    """Rows, those that ran, and how far off they are: by torch's counter, on the card, and by verdict."""
    ran = [one for one in found if not one.run.failure]
    lines = [f"{len(ran)} of {len(found)} rows ran"]
    for name, errors in (
        ("torch's counter", [one.error for one in ran if one.error is not None]),
        ("nvidia-smi", [one.device_error for one in ran if one.device_error is not None]),
    ):
        if errors:
            sizes = np.abs(errors)
            lines.append(f"{name}: {len(errors)} rows, median {np.median(sizes):.4%}, worst {sizes.max():.4%}")
    right = sum((one.run.allocated is None) == (not one.row["peak_bytes"]) for one in ran)
    ooms = [one for one in ran if not one.row["peak_bytes"]]
    missed = sum(one.run.allocated is not None for one in ooms)
    lines.append(f"verdicts: {right} of {len(ran)} right; of {len(ooms)} that ran out of memory {len(ooms) - missed}")
    return lines


def kept() -> list[str]:
    """The summary of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    table, runs = read(TABLE), known(KEPT)
    found = of_kept(table, runs, Compared)
    reserved = {row["id"]: int(row["reserved"]) for row in read(RESERVED)}
    return [f"fms-acceleration, {len(table)} rows, each with a program; runs kept in {KEPT.name}:"] + [
        f"    {line}" for line in [*summary(found), *of_that_machine(table, reserved)]
    ]


def of_that_machine(table: Sequence[Mapping[str, str]], reserved: Mapping[str, int]) -> list[str]:
    """What nvidia-smi showed beside `reserved` bytes (by a row's id), by number of GPUs, and how even that is.

    One figure for each number of GPUs, the middle of its rows, stands for all that lies outside PyTorch's allocator on
    the machine that measured; the errors are those of nvidia-smi's figure with it.
    """
    lines = []
    for gpus in sorted({row["n_gpus"] for row in table}):
        rows = [row for row in table if row["n_gpus"] == gpus and row["id"] in reserved and row["nvidia_smi_bytes"]]
        if not rows:
            continue
        theirs = np.array([int(row["nvidia_smi_bytes"]) for row in rows])
        ours = np.array([reserved[row["id"]] for row in rows])
        beside = np.median(theirs - ours)
        errors = np.abs((ours + beside) / theirs - 1)
        middle, most, worst = np.quantile(errors, (0.5, 0.9, 1))
        lines.append(
            f"nvidia-smi, {gpus} GPU{'s' * (gpus != '1')}, {len(rows)} rows: {beside / MIB:,.0f} MiB beside what"
            f" PyTorch 2.6 reserves; with it median {middle:.2%}, 90 % within {most:.2%}, worst {worst:.2%}"
        )
    return lines


def read(table: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def keeping(kind: type[R]) -> Callable[[Path], dict[str, R]]:
    """What reads the runs that `keep` has put into a file, by the id of their row: of a dataclass whose fields have
    defaults, which stand for what is empty there."""

    def known(results: Path) -> dict[str, R]:
        rows = ({name: text for name, text in row.items() if text} for row in read(results))
        return {row["id"]: msgspec.convert(row, kind, strict=False) for row in rows}

    return known


known: Final = keeping(Run)


def spread(errors: Iterable[float | None]) -> str:
    """Median and worst of relative errors, behind a colon; nothing where there are none."""
    sizes = np.abs([error for error in errors if error is not None])
    return f": median {np.median(sizes):.2%}, worst {sizes.max():.2%}" if len(sizes) else ""


def arguments_of(table: str) -> argparse.ArgumentParser:
    """What every table takes whose rows are run by others' programs."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.accuracy {table}")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--results", type=Path, help="keep what was found, and do not run it again")
    return parser


def compared(
    rows: Iterable[Mapping[str, str]],
    options: argparse.Namespace,
    known: Callable[[Path], Mapping[str, R]],
    ran: Callable[[Mapping[str, str]], R],
    beside: Callable[[Mapping[str, str], R], C],
) -> list[C]:
    """Each row whose id has the words, `beside` its run, as they are printed one after the other.

    A run is one that `options.results` keeps, by `known`, else a new one, which is added there.
    """
    results: Path | None = options.results
    runs = known(results) if results is not None and results.exists() else {}
    found = []
    for row in rows:
        if not all(word in row["id"] for word in options.words):
            continue
        run = runs.get(row["id"])
        if run is None:
            run = ran(row)
            if results is not None:
                keep(results, row["id"], run)
        found.append(beside(row, run))
        print(found[-1], flush=True)
    return found


def of_root(
    name: str,
    arguments: list[str],
    rows: Iterable[Mapping[str, str]],
    known: Callable[[Path], Mapping[str, R]],
    ran: Callable[[Mapping[str, str], Path, str], R],
    beside: Callable[[Mapping[str, str], R], C],
) -> list[C]:
    """`compared`, as `python -m tests.accuracy NAME` asks for it with `--root` of the repository that has the programs.

    `ran(row, root, python)` runs a row's.
    """
    parser = arguments_of(name)
    parser.add_argument("--root", type=Path, required=True)
    options = parser.parse_args(arguments)
    root = options.root.resolve()

    def run(row: Mapping[str, str]) -> R:
        try:
            return ran(row, root, options.python)
        except FileNotFoundError as missing:
            sys.exit(f"error: {missing.filename}: no such file; --root names the repository that has the programs")

    return compared(rows, options, known, run, beside)


def of_kept(
    rows: Iterable[Mapping[str, str]], runs: Mapping[str, R], beside: Callable[[Mapping[str, str], R], C]
) -> list[C]:
    """Each row that has a run, by its id, `beside` it."""
    return [beside(row, runs[row["id"]]) for row in rows if row["id"] in runs]


def keep(results: Path, name: str, run: object) -> None:
    """Add a run, of a dataclass, to a file: its row's id, and its fields by their names."""
    new = not results.exists()
    with results.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["id", *vars(run)])
        writer.writerow([name, *vars(run).values()])


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    parser = arguments_of("sft")
    parser.add_argument("--plugins", type=Path, metavar="ROOT")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args(arguments)
    plugins = Path() if options.plugins is None else options.plugins.resolve()
    rows = [row for row in read(options.table) if options.plugins is not None or not plugins_of(row)]
    found = compared(rows, options, known, lambda row: ran(row, options.python, plugins), Compared)
    print("\nThe whole card, by nvidia-smi:")
    for one in found:
        if one.device_error is not None:
            print(told_of_device(one))
    print("\n" + "\n".join(summary(found)))
