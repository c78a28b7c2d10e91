"""Training that others measured on real GPUs by torchtitan, torchtune and torchao, by their programs, under `record`.

    python -m tests.accuracy trainers [--torchtitan ROOT] [--torchtitan-2024 ROOT] [--torchtitan-2025 ROOT]
        [--torchtitan-h200 ROOT] [--torchtune ROOT] [--torchao ROOT] [--torchao-int8 ROOT] [--deepspeed ROOT]
        [--scratch ROOT] [--python PATH] [--results FILE] [WORD]...

Each row of `tests/data/published/trainers.csv` is a peak, in GiB as it was printed, and the options of its run; what
they leave open is in the program's own file of settings:

- torchtitan: Llama 3 8B, rank 0 of eight H100s with FSDP2, the reserved memory that it logs. ROOT is its repository at
  commit b291ad662 (2025-02-28); rows of torchao's float8 benchmarks.
- torchtitan-2024: Llama 3.1 of 8, 70 and 405 billion parameters on 8 to 512 H100s of 96 GB, by FSDP2, tensor, context
  and pipeline parallelism, the reserved memory that it logs, of rank 0, whose stage keeps most. ROOT is its repository
  at commit 9dec370 (2024-12-26); rows of its benchmarks/llama3_h100_202412_torchtitan.md, which were run without the
  allocator's setting of its scripts for one node (found by the first two rows).
- torchtitan-2025: Llama 3 8B, rank 0 of eight H100s of 96 GB, the same memory. ROOT is its repository at commit
  775a486e (2025-06-04), which torchao's tutorial of pretraining names.
- torchtitan-h200: Llama 3.1 8B in float8, rank 0 of 32 and 64 H200s, the same memory. ROOT is its repository at commit
  e7c0cae93 (2025-06-11); rows of its benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md.
- torchtune: Llama 3.2 3B, two packed samples of 4,096 tokens, one A100, the active memory that it logs. ROOT is its
  repository at commit 1814feb17 (2024-11-18); rows of its README.
- torchao: a vision transformer of 630 M parameters, bf16 autocast, compiled, 8 pictures, one RTX 4070 Ti SUPER (here by
  an RTX 4080's kernels), the allocated memory that it prints. ROOT is its repository; rows of its optimizers' README.
- torchao-int8: a Llama of 1 B parameters, weights in bf16 and 8 bits, four samples of 2,048 tokens, checkpointing, on
  the same card, the allocated memory that it logs. ROOT is its repository at commit 8c6b4f97c (2024-08-17); rows of its
  README of quantized training that are not compiled. All its tokens are on the GPU, and their number is not stated.
- deepspeed: a transformer of 6.9 B parameters, ZeRO-3, rank 0 of four H100s, with master weights and states of AdamW in
  fp32 and in bf16, the peak of allocated memory that it prints. ROOT is DeepSpeedExamples; rows of its
  training/bf16_master_weight, with random tokens instead of wikitext's.
- scratch: GPT-2 of 124 M parameters as "LLMs from scratch" trains it on an A100, plain and faster, eager and compiled,
  the reserved memory that it prints. ROOT is rasbt/LLMs-from-scratch; rows of its ch05/10_llm-training-speed, of which
  two programs are there, and others by what a step's title says.

PATH is the Python of an environment with PyTorch 2.7, its Triton, torchao (0.10 for torchtitan, 0.8 for that of 2024,
0.7 for torchtune) and what the programs require (torchtitan of 2025: PyTorch 2.8, torchao 0.12; torchao's rows: PyTorch
2.13, torchao 0.17, timm 1.0.22; DeepSpeed's: 2.13, DeepSpeed 0.19.8; of 8 bits and of scratch: PyTorch 2.6). Ours is of
the third step (of 8 bits the second, of scratch the first epoch), served as a GPU would, or with the workspace of
autograd's own cuBLAS handle beside it. Tokens, pictures and weights are made up: batches are full whatever they say.
WORD: only rows whose id has it.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.accuracy import checkpoints
from tests.accuracy.sft import FOLDER, Judged, Run, arguments_of, compared, known, of_kept, read, recorded, spread

TABLE: Final = FOLDER / "trainers.csv"
#: What our runs of the table's rows held (README there).
KEPT: Final = FOLDER / "trainers_runs.csv"
GIB: Final = 1 << 30
STEPS: Final = 3
#: Pictures of each of two kinds, for torchao's program, which trains one epoch of them, 8 at a time, and evaluates.
_PICTURES: Final = 16
#: A PNG of one pixel.
_PICTURE: Final = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGMQUDAAAACkAGE0Zn1yAAAAAElFTkSuQmCC"
#: Tokens of TinyStories' second version by Llama 2's tokenizer, of two bytes: a guess, which both rows bear out.
_STORIES: Final = 587_000_000
#: Llama 3's tokens, without those that programs add.
TOKENS: Final = 128_000
#: meta-llama/Llama-3.2-3B-Instruct, as far as its weights are asked for.
_LLAMA: Final = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip


#: Of tiktoken, as much as the programs of "LLMs from scratch" ask: a token for every four letters.
_TIKTOKEN: Final = """
class Encoding:
    def encode(self, text, allowed_special=()):
        return [hash(text[place : place + 4]) % 50_000 for place in range(0, len(text), 4)]

    def decode(self, tokens):
        return str(tokens)


def get_encoding(name):
    return Encoding()
"""


@dataclass(frozen=True)
class Program:
    """How rows of a program are run: options of `record`, and the workspace that is added to what it says (bytes).

    `reserved` says whether its figures are of reserved memory, `steps` how long it trains. Of torchtitan also the
    allocator's settings, and where in its repository the program and its settings lie.
    """

    options: tuple[str, ...]
    workspace: int = 0
    conf: str = ""
    places: tuple[str, str] | None = None
    reserved: bool = False
    steps: int = STEPS


_H100: Final = ("--gpu", "H100-80GB", "--memory", "95GiB", "--on-gpu")
_LLAMA_3: Final = ("torchtitan/train.py", "torchtitan/models/llama3/train_configs")
_PAGES: Final = "expandable_segments:True"
PROGRAMS: Final = {
    "torchtitan": Program(
        ("--gpu", "H100-80GB"),
        33_554_432,
        _PAGES,
        ("torchtitan/train.py", "torchtitan/models/llama/train_configs"),
        reserved=True,
    ),
    "torchtitan-2024": Program(_H100, places=("train.py", "train_configs"), reserved=True),
    "torchtitan-2025": Program(_H100, conf=_PAGES, places=_LLAMA_3, reserved=True),
    "torchtitan-h200": Program(("--gpu", "H200-141GB", "--on-gpu"), places=_LLAMA_3, reserved=True),
    "torchtune": Program(("--gpu", "A100-80GB"), 8_519_680),
    "torchao": Program(("--gpu", "RTX4080-16GB"), 8_519_680),
    "torchao-int8": Program(("--gpu", "RTX4080-16GB", "--on-gpu"), steps=2),
    "deepspeed": Program(("--gpu", "H100-80GB", "--on-gpu")),
    "scratch": Program(("--gpu", "A100-80GB", "--on-gpu"), reserved=True, steps=60),
}


@dataclass(frozen=True)
class Compared(Judged[Run]):
    """A row, and our run of it."""

    column = "gib"

    @property
    def ours(self) -> float | None:
        """Our peak in GiB, of the kind that the row has; None where the run failed."""
        program = PROGRAMS[self.row["program"]]
        peak = self.run.reserved if program.reserved else self.run.allocated
        return None if not peak else (peak + program.workspace) / GIB

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.row['id']:42} FAILED: {self.run.failure[:160]}"
        return f"{self.row['id']:42} {self.ours:6.2f} for {float(self.row['gib']):6.2f} GiB {self.error:+.2%}"


def prepare(folder: Path) -> None:
    """Put in a folder what the programs look for: a tokenizer of as many tokens, texts, and weights that are holes."""
    letters = (bytes(word) for size in (2, 3, 4) for word in itertools.product(range(97, 123), repeat=size))
    tokens = itertools.islice(itertools.chain((bytes([byte]) for byte in range(256)), letters), TOKENS)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    texts = folder / "tests" / "assets" / "c4_test"
    texts.mkdir(parents=True)
    (texts / "data.json").write_text(400 * (json.dumps({"text": 2000 * "never the same "}) + "\n"))
    with (folder / "tinystories.bin").open("wb") as file:
        file.truncate(2 * _STORIES)
    answer = {"instruction": "say it again", "input": "", "output": 90 * "never the same "}
    (folder / "alpaca.jsonl").write_text(800 * (json.dumps(answer) + "\n"))
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    for number in range(4 * _PICTURES):
        split, kind = ("train", "validation")[number // (2 * _PICTURES)], f"kind{number % 2}"
        (place := folder / "timm" / "resisc45" / split / kind).mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(base64.b64decode(_PICTURE))
    tensors = list(checkpoints.llama(_LLAMA))
    for number, part in enumerate((tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]), 1):
        checkpoints.write(folder / f"model-0000{number}-of-00002.safetensors", part)


def prepare_scratch(row: Mapping[str, str], root: Path, folder: Path) -> None:
    """Put a program into a folder, with what a row changes of it, and a text and a tokenizer that it looks for."""
    script, *changes = row["words"].split("; ")
    text = (root / "ch05" / "10_llm-training-speed" / script).read_text()
    for change in changes:
        before, after = change.split(" -> ")
        if before not in text:
            raise ValueError(f"{script} has no {before!r}")
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    (folder / "middlemarch.txt").write_text(90_000 * "the quick brown fox ")  # as long as the book
    (folder / "tiktoken.py").write_text(_TIKTOKEN)


def command(row: Mapping[str, str], root: Path, folder: Path) -> list[str]:
    """What was typed, with what `prepare` has put in `folder`."""
    if row["program"] == "scratch":
        return ["train.py"]
    if row["program"] == "torchao":
        size = ["--model", "timm/vit_huge_patch14_224.orig_in21k", "--batch_size", "8", "--n_epochs", "1"]
        return [
            *(str(root / "benchmarks" / "benchmark_low_bit_adam.py"), *size, "--amp", "bf16", "--compile"),
            *("--n_workers", "0", *row["words"].split()),
        ]
    if row["program"] == "torchao-int8":
        size = ["--d_model", "1536", "--ffn_size", "6144", "--activation_checkpointing"]
        return [str(root / "benchmarks" / "quantized_training" / "pretrain_llama2.py"), *size, *row["words"].split()]
    if row["program"] == "deepspeed":
        place, settings, *words = root / "training" / "bf16_master_weight", *row["words"].split()
        size = ["--num_layers", "32", "--hidden_dim", "4096", "--num_heads", "32", "--vocab_size", "50257"]
        return [
            *("deepspeed", "--num_gpus=4", str(place / "train.py"), "--deepspeed_config"),
            *(str(place / "configs" / f"{settings}.json"), *size, *words),
        ]
    if row["program"] == "torchtune":
        recipe, settings, *words = row["words"].split()
        return [
            *(str(root / "recipes" / f"{recipe}.py"), "--config"),
            *(str(root / "recipes" / "configs" / "llama3_2" / f"{settings}.yaml"), f"output_dir={folder}"),
            *(f"checkpointer.checkpoint_dir={folder}", f"checkpointer.output_dir={folder}"),
            *(f"tokenizer.path={folder / 'tokenizer.model'}", "tokenizer.max_seq_len=4096", "dataset.source=json"),
            *(f"dataset.data_files={folder / 'alpaca.jsonl'}", "dataset.packed=True", "batch_size=2", "epochs=1"),
            *("gradient_accumulation_steps=1", f"metric_logger.log_dir={folder / 'log'}", *words),
        ]
    program, settings = PROGRAMS[row["program"]].places or ("", "")
    nodes, name, *words = row["words"].split()
    return [
        *("torchrun", "--nproc_per_node=8", f"--nnodes={nodes}", "--rdzv_backend", "c10d"),
        *("--rdzv_endpoint=localhost:0", str(root / program)),
        *("--job.config_file", str(root / settings / f"{name}.toml"), f"--job.dump_folder={folder}"),
        *(f"--model.tokenizer_path={folder / 'tokenizer.model'}", "--training.dataset=c4_test"),
        *("--training.steps=100", *words),
    ]


def ran(row: Mapping[str, str], root: Path, python: str) -> Run:
    """Run the program of a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if row["program"] == "scratch":
            prepare_scratch(row, root, folder)
        else:
            prepare(folder)
        program, words = PROGRAMS[row["program"]], command(row, root, folder)
        given = {"HF_DATASETS_CACHE": str(folder / "cache"), "WANDB_MODE": "disabled"}
        given |= {"PYTORCH_CUDA_ALLOC_CONF": program.conf} if program.conf else {}
        options = [*program.options, "--steps", str(program.steps), "--"]
        rank, failure = recorded([*options, *words], folder, python, root, **given)
        if rank is None or failure:
            return Run(failure=failure)
        return Run(_active(folder / "log") or rank["peak_allocated"], rank["peak_reserved"])


def _active(folder: Path) -> int | None:
    """The largest peak of active bytes that torchtune has logged; None where it has not."""
    texts = (file.read_text() for file in folder.glob("*") if file.is_file())
    found = [float(gib) for text in texts for gib in re.findall(r"peak_memory_active:([0-9.]+)", text)]
    return round(max(found) * GIB) if found else None


def summary(found: Sequence[Judged[Run]]) -> str:
    """Rows that ran, and how far off they are."""
    errors = [one.error for one in found if one.error is not None]
    return f"{len(errors)} of {len(found)} rows ran{spread(errors)}"


def kept() -> list[str]:
    """The summaries of the runs that are kept with the table, for `python -m tests.accuracy published`."""
    found = of_kept(read(TABLE), known(KEPT), Compared)
    lines = [f"{name}: {summary([one for one in found if one.row['program'] == name])}" for name in PROGRAMS]
    return [f"training by other programs; runs kept in {KEPT.name}:", *(f"    {line}" for line in lines)]


def main(arguments: list[str]) -> None:
    """Print theirs, ours and the difference."""
    parser = arguments_of("trainers")
    for name in PROGRAMS:
        parser.add_argument(f"--{name}", type=Path, metavar="ROOT", dest=name)
    options = parser.parse_args(arguments)
    roots = {name: root.resolve() for name in PROGRAMS if (root := getattr(options, name)) is not None}
    rows = [row for row in read(TABLE) if row["program"] in roots]
    found = compared(rows, options, known, lambda row: ran(row, roots[row["program"]], options.python), Compared)
    print(summary(found))
