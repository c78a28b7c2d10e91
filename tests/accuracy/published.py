"""Peaks that others measured on real GPUs and printed, beside the simulation of the same run.

    python -m tests.accuracy published [--table FILE] [--where KEY=VALUE]... [--jobs N] [--judged]

Each row of the table is read into a case by its columns alone: what a column says, what it leaves open and how that was
decided (`assumed`). A row that no case can say is listed with the reason. Figures are of the metric that was printed,
as on a GPU: of torch's counters the same counter, of the device's own the reserved memory with the context. Last comes
what was kept of rows that are run as programs. KEY is a key of a case (VALUE exactly) or a column of the table (VALUE
anywhere in it). `--judged`: only the rows with a goal.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.accuracy import (
    adapters,
    adapters_images,
    axolotl,
    fitcheck,
    galvatron,
    guide,
    litgpt,
    notebooks,
    pipelines,
    sft,
    speedrun,
    trainers,
)
from tests.places import DATA, ROOT

#: The whole collection, where it stands beside the project, and the part of it that the project has.
COLLECTION: Final = ROOT.parent / "shared" / "published" / "peaks.csv"
TABLE: Final = DATA / "published" / "peaks.csv"
#: Tokens of Alpaca's longest sample, by Llama 2's tokenizer.
ALPACA: Final = 1304
#: median and worst relative error that are allowed for the judged rows
GOAL: Final = (0.03, 0.10)
MIB: Final = 1 << 20
Row = Mapping[str, str]


class LeftOutError(Exception):
    """Why no case says what a row says."""


@dataclass
class Reading:
    """A row as a case, with what was assumed for it."""

    row: Row
    case: dict[str, Any] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def assume(self, text: str, **keys: Any) -> None:
        """Set keys that the row does not say, and why."""
        self.case.update(keys)
        if text not in self.assumed:
            self.assumed.append(text)


@dataclass(frozen=True)
class Compared:
    """One row: bytes that were printed and those that are simulated (None where `left_out` says why)."""

    row: Row
    case: Mapping[str, Any]
    assumed: tuple[str, ...]
    simulated: int | None = None
    left_out: str = ""

    @property
    def measured(self) -> int:
        """What was printed, in bytes."""
        return int(self.row["peak_bytes"] or 0)

    @property
    def error(self) -> float | None:
        """Relative error, signed."""
        return None if self.simulated is None or not self.measured else self.simulated / self.measured - 1

    @property
    def judged(self) -> bool:
        """Whether the goal is for this row: one GPU, grade A, torch's own counter, by fitcheck or torchtune."""
        source = self.row["source"].casefold()
        return (
            self.row["grade"] == "A"
            and self.row["n_gpus"] == "1"
            and _counter(self.row) == "allocated"
            and any(name in source for name in ("fitcheck", "torchtune"))
        )


# ------------------------------------------------------------------------------------------ columns to keys


def _has(text: str, *words: str) -> bool:
    return any(word in text.casefold() for word in words)


def _plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum() or letter == ".")


def model_of(text: str) -> str:
    """The catalogue's name for a model as somebody printed it; LeftOutError if it has none.

    Owners, words in brackets, case, blanks and what follows the name (`-chat`, `-Instruct`, a size once more) are
    passed by: the longest name of the catalogue that the text begins with.
    """
    from graph.models import catalogue

    text = re.sub(r"\(.*?\)", "", text).strip()
    known = catalogue.find(text) or catalogue.find(text.rpartition("/")[2])
    if known:
        return known
    word = _plain(text.rpartition("/")[2])
    spelled = {_plain(name): name for name in catalogue.names()}
    spelled |= {_plain(e["repository"].rpartition("/")[2]): name for name, e in catalogue.entries().items()}
    begins = [name for name in spelled if name and word.startswith(name)] or [n for n in spelled if n.startswith(word)]
    if not begins or not word:
        raise LeftOutError(f"no configuration of {text!r} in the catalogue")
    return spelled[max(begins, key=len) if word.startswith(begins[0]) else min(begins, key=len)]


def _model(reading: Reading) -> None:
    from graph.models import catalogue

    name = model_of(reading.row["model"])
    reading.case["model"] = name
    note = catalogue.entries()[name].get("note", "")
    if "not in transformers" in note:
        reading.assume(f"model: {note}")
    if _has(reading.row["model"], "sequence classification"):
        reading.case["head"] = "sequence-classification"


def _method(reading: Reading) -> None:
    method = reading.row["method"].casefold()
    word = re.sub(r"\(.*?\)", "", method).strip()
    if word not in ("full", "pretrain", "lora", "qlora"):
        raise LeftOutError(f"no case has the method {word!r}")
    if _has(reading.row["strategy"], "float8"):
        raise LeftOutError("float8 products are not simulated")
    if word in ("lora", "qlora"):
        if not reading.row["lora_rank"]:
            reading.assume("LoRA: rank 8, not stated", lora=8)
        else:
            reading.case["lora"] = int(reading.row["lora_rank"])
        targets = _targets(reading.row["lora_targets"], reading.case["model"])
        if targets:
            reading.case["lora_targets"] = targets
        else:
            reading.assume("LoRA: on the modules that peft takes, not stated")


#: Names of modules by what a LoRA target is called, for each way of building a layer.
_LLAMA: Final = {
    "query": ("q_proj",), "q": ("q_proj",), "key": ("k_proj",), "k": ("k_proj",), "value": ("v_proj",),
    "v": ("v_proj",), "projection": ("o_proj",), "o": ("o_proj",), "head": ("lm_head",), "output": ("lm_head",),
    "mlp": ("gate_proj", "up_proj", "down_proj"), "gate": ("gate_proj",), "up": ("up_proj",), "down": ("down_proj",),
    "w1": ("up_proj",), "w2": ("gate_proj",),
    "c_attn": ("q_proj", "k_proj", "v_proj"), "c_proj": ("o_proj", "down_proj"),
}  # fmt: skip
_PHI: Final = {**_LLAMA, "projection": ("dense",), "o": ("dense",), "mlp": ("fc1", "fc2")}
_NEOX: Final = {
    "query": ("query_key_value",), "value": ("query_key_value",), "key": ("query_key_value",), "head": ("embed_out",),
    "projection": ("attention.dense",), "mlp": ("dense_h_to_4h", "dense_4h_to_h"),
}  # fmt: skip


def _targets(text: str, model: str) -> list[str]:
    """The modules that adapters are on, by their names in transformers."""
    from graph.models import catalogue

    if not text or text == "null":
        return []
    if text.startswith("["):
        return [str(one) for one in json.loads(text)]
    named = {"gpt_neox": _NEOX, "phi": _PHI}.get(str(catalogue.configuration(model)["model_type"]), _LLAMA)
    words = [word for word in re.split(r"[,\s]+", text.casefold()) if word]
    if words[0] == "default":
        words = ["c_attn"]
    return list(dict.fromkeys(name for word in words for name in named.get(word, (word,))))


def _precision(reading: Reading) -> None:
    text = reading.row["dtype"].casefold()
    half = "bf16" if _has(text, "bf16", "bfloat16") else "fp16" if "fp16" in text else ""
    if "mixed" in text or "amp" in text:
        reading.case |= {"dtype": "fp32", "autocast": half}
    else:
        reading.case["dtype"] = half or "fp32"
    if "mixed" in text:
        reading.assume("FSDP's mixed precision as autocast over fp32 weights")
    quantized = reading.row["quantization"].casefold()
    if quantized in ("", "none", "no"):
        if "qlora" in reading.row["method"]:
            reading.assume("quantization not stated: bitsandbytes' nf4", quant="nf4")
        return
    if "nf4" in quantized:
        double = _has(quantized, "dq", "double")
        reading.case |= {"quant": "nf4", "compute": half or "fp16", "double_quant": double}
    elif "int8" in quantized and "gptq" not in quantized:
        reading.case["quant"] = "int8"
    else:
        raise LeftOutError(f"the quantization {reading.row['quantization']!r} is not simulated")
    if "torchao" in quantized:
        reading.assume("bitsandbytes' nf4 instead of torchao's", double_quant=True)
    if not _has(reading.row["framework"], "transformers", "hf"):
        reading.assume("what is not quantized is in fp32, as peft prepares it; the source leaves it in 16 bits")


def _number(text: str) -> int | None:
    found = re.search(r"\d[\d,]*", text)
    return int(found[0].replace(",", "")) if found else None


def _sizes(reading: Reading) -> None:
    row = reading.row
    for key, column in (("batch", "micro_batch"), ("seq", "seq_len")):
        number = _number(row[column])
        if number is None and key == "seq" and _has(row[column], "alpaca"):
            reading.assume(f"{row[column]}: {ALPACA} tokens, the longest of it as LitGPT's tables say", seq=ALPACA)
            continue
        if number is None:
            raise LeftOutError(f"{column} is not stated ({row[column] or 'empty'!s})")
        reading.case[key] = number
        if row[column] != str(number):
            reading.assume(f"{column} {number} throughout, for {row[column]!r}")
    if _has(row["notes"], "longest"):
        reading.assume("the longest batch has all its samples at seq_len")


_OPTIMIZERS: Final = (("8bit", "adamw-8bit"), ("fused", "adamw-fused"), ("adafactor", "adafactor"), ("sgd", "sgd"))


def _optimizer(reading: Reading) -> None:
    text = reading.row["optimizer"].casefold()
    reading.case["optimizer"] = next((name for word, name in _OPTIMIZERS if word in text), "adamw")
    if "momentum" in text:
        reading.assume("momentum 0.9", sgd_momentum=0.9)
    if "backward" in text:
        reading.case["step_in_backward"] = True


def _checkpointing(reading: Reading) -> None:
    text = reading.row["act_checkpointing"].casefold()
    if not text or text.startswith("off"):
        return
    if "default" in text:
        reading.assume("activation checkpointing not stated: none")
    elif "selective" in text:
        reading.assume(
            "selective checkpointing keeps all products and attention", checkpointing="selective", save="matmul,attn"
        )
    else:
        reading.case["checkpointing"] = "nonreentrant"
        if "offload" in text:
            reading.case["offload"] = "checkpoints"


def _attention(reading: Reading) -> None:
    row = reading.row
    text, framework = row["attention"].casefold(), row["framework"].casefold()
    eager = text.startswith("eager")
    reading.case["attn"] = "eager" if eager else "sdpa"
    if "/" in text or "instead of" in text:
        reading.assume(f"attention: {row['attention']}")
    if "flex" in text:
        reading.assume("packed: flex attention saves what flash attention saves; its block mask is small")
    if (not eager and _has(text, "flash-attn", "mem-efficient", "flex")) or _has(framework, "litgpt", "torchtune"):
        reading.case["repeat_kv"] = not eager  # so did they, or fused kernels would not have taken grouped heads


def _compiled(reading: Reading) -> None:
    if _has(reading.row["compile"], "yes", "true") or _has(reading.row["compile"], "thunder"):
        reading.assume("eager: what a compiler fuses is kept here")


def _loss(reading: Reading) -> None:
    if _has(reading.row["notes"], "chunked"):
        reading.assume("head and loss over 8 chunks, each part's logits dropped at once", loss="chunk8")


def _loop(reading: Reading) -> None:
    """What a source's own training loop does."""
    row = reading.row
    framework = (row["framework"] + row["source"]).casefold()
    if "fitcheck" in framework:
        reading.case["outputs"] = "step"  # its measure.py: `out = model(...)` in a function of one step
        reading.assume("torch's release not stated: 2.13")
    elif "plain torch loop" in framework:
        reading.assume("a plain loop: outputs live until the next ones", outputs="next")
    if "hf trainer" in framework and "2022" in framework:
        reading.assume("today's transformers and the oldest release there is (2.0)", release="2.0")
    if _has(row["framework"], "torchtune", "litgpt", "ms-swift") or "Qwen" in row["source"]:
        what = "adapters in fp32; " if reading.case.get("lora") else ""
        reading.assume(f"{what}transformers' layers instead of {row['framework'].split()[0]}'s")


def _release(reading: Reading) -> None:
    found = re.findall(r"(\d+\.\d+)", reading.row["torch_version"])
    if not found or "release" in reading.case:
        return
    release = found[-1] if "~" in reading.row["torch_version"] else found[0]
    if float(release.split(".")[0]) >= 2:
        reading.case["release"] = release
        if "~" in reading.row["torch_version"]:
            reading.assume(f"torch {release}, for {reading.row['torch_version']!r}")


#: Cards without a profile, by one of the same architecture, with GiB.
_STAND_INS: Final = {
    "rtx3060": ("RTX3090", 12), "rtx4060": ("RTX4090", 8), "l40s": ("RTX4090", 48), "a6000": ("RTX3090", 48),
    "a10g": ("A10", 24),
}  # fmt: skip


def _gpu(reading: Reading) -> None:
    from graph.hardware.gpus import GPUS

    text = _plain(reading.row["gpu"])
    for word, (card, gib) in _STAND_INS.items():
        if word in text:
            reading.assume(f"{reading.row['gpu']} by a {card}'s kernels", gpu=card, memory=gib << 30)
            return
    names = {
        _plain(alias): name for name, card in GPUS.items() for alias in (name, name.rpartition("-")[0], *card.aliases)
    }
    size = re.search(r"(\d+) ?GB", reading.row["gpu"])
    found = [one for one in names if one in text]
    if not found:
        reading.assume("GPU not stated: an A100 of 80 GB", gpu="A100-80GB")
        return
    name = names[max(found, key=len)]
    sized = f"{name.split('-')[0]}-{size[1]}GB" if size else name
    reading.case["gpu"] = sized if sized in GPUS else name


def _spread(reading: Reading) -> None:
    """Several GPUs, by the words that the column `strategy` begins with."""
    row = reading.row
    world, text = int(row["n_gpus"] or 1), row["strategy"].casefold()
    if world == 1 and "deepspeed" not in text:
        return
    if re.search(r" x |\+|dp|tp|pp", text.replace("fsdp", "").replace("ddp", "").replace("-way", "")):
        raise LeftOutError(f"no single method of a case is {row['strategy']!r}")
    known = {"fsdp2": "fsdp2", "fsdp": "fsdp1", "ddp": "ddp", "deepspeed zero-3": "deepspeed-3"}
    reading.case["strategy"] = next((name for word, name in known.items() if text.startswith(word)), "")
    if not reading.case["strategy"]:
        raise LeftOutError(f"no single method of a case is {row['strategy']!r}")
    reading.case["world"] = world


_COLUMNS: Final[tuple[Callable[[Reading], None], ...]] = (
    _model, _method, _precision, _sizes, _optimizer, _checkpointing, _attention, _compiled, _loss, _loop, _release,
    _gpu, _spread,
)  # fmt: skip


def _counter(row: Row) -> str:
    """What a row's metric counts: allocated, reserved, device; "" where it is no peak."""
    metric = row["metric"].casefold()
    if "verdict" in metric:
        return ""
    if "nvml" in metric or "smi" in metric:
        return "device"
    return "allocated" if _has(metric, "max_memory_allocated", "active_bytes") else "reserved"


#: What runs the rows of a table as they were run, by how its source begins.
_OWN_PROGRAMS: Final = {
    "LitGPT config_hub": "LitGPT's own programs: `python -m tests.accuracy litgpt`",
    "LitGPT tutorials": "LitGPT's own programs: `python -m tests.accuracy litgpt`",
    "HF transformers docs perf_train_gpu_one": "a Trainer as it was: `python -m tests.accuracy guide`",
    "torchtitan benchmark": "torchtitan's own program: `python -m tests.accuracy trainers`",
}


def read(row: Row) -> Reading:
    """A row as a case; LeftOutError says why it cannot be one."""
    if _has(row["optimizer"], "hybrid"):
        raise LeftOutError("LLMem's own runs: `python -m tests.accuracy table2`, `python -m tests.accuracy.choice`")
    for source, programs in _OWN_PROGRAMS.items():
        if row["source"].startswith(source):
            raise LeftOutError(programs)
    if not _counter(row) or not row["peak_bytes"]:
        raise LeftOutError("no peak was printed")
    reading = Reading(row)
    for column in _COLUMNS:
        column(reading)
    if _counter(row) == "reserved" and "reserved" not in row["metric"].casefold():
        reading.assume("the tool is not stated: reserved memory")
    return reading


# ------------------------------------------------------------------------------------------------ comparing


def compared(row: Row) -> Compared:
    """A row beside its simulation."""
    try:
        reading = read(row)
    except LeftOutError as reason:
        return Compared(row, {}, (), left_out=str(reason))
    from traces.errors import LLMemError

    reading.case["steps"] = 2
    try:
        simulated, added = _simulated(reading.case, _counter(row))
    except LLMemError as error:
        if "has no attn 'sdpa'" in str(error) and reading.case["attn"] == "sdpa":
            return compared({**row, "attention": f"eager (instead of {row['attention']})"})
        return Compared(row, reading.case, tuple(reading.assumed), left_out=str(error))
    if simulated is None:
        return Compared(row, reading.case, tuple(reading.assumed), left_out="simulated: out of memory")
    return Compared(row, reading.case, (*reading.assumed, *added), simulated)


def _simulated(case: Mapping[str, Any], counter: str) -> tuple[int | None, tuple[str, ...]]:
    """Bytes by the counter (allocated ones of the last step), and what of them is not the allocator's, in words."""
    from simulator import replay
    from simulator.engine.on_gpu import on_gpu
    from simulator.estimator.estimate import estimate, phase_figures

    found = estimate(case, context="auto" if counter == "device" else 0, analyse=False)
    if found.verdict == "oom":
        return None, ()
    if counter == "device":
        outside = sum(term.bytes for term in found.outside)
        return found.worst.device_total, (f"with {outside / MIB:.0f} MiB outside the allocator",)
    there = replay(on_gpu(found.trace), analyse=False).ranks[0]
    if counter == "reserved":
        return there.peak_reserved, ()
    steady = [figures["peak"] for name, figures in phase_figures(there).items() if name.endswith("_last")]
    return max(steady, default=there.peak_allocated), ()


def rows(path: Path) -> list[Row]:
    """The rows of the table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def matches(one: Compared, where: Iterable[str]) -> bool:
    """Whether a row is one of those asked for."""
    asked = [text.partition("=") for text in where]
    return all(
        str(one.case.get(key)) == value or value.casefold() in one.row.get(key, "\0").casefold()
        for key, _, value in asked
    )


def _chosen(table: list[Row], where: list[str], judged: bool) -> Iterator[Row]:
    for row in table:
        try:
            case = read(row).case
        except LeftOutError:
            case = {}
        one = Compared(row, case, ())
        if matches(one, where) and (one.judged or not judged):
            yield row


def _settings(case: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items() if key not in ("model", "steps"))


def told(one: Compared) -> str:
    """A few lines: what was printed, what is simulated, the error, the case and what was assumed."""
    head = f"{one.row['source']}: {one.row['model']}, {one.row['metric']}, grade {one.row['grade']}"
    if one.error is None:
        return f"{head}\n    left out: {one.left_out}"
    line = (
        f"    measured {one.measured / MIB:,.0f} MiB, simulated {(one.simulated or 0) / MIB:,.0f} MiB: {one.error:+.1%}"
    )
    assumed = [f"    assumed: {text}" for text in one.assumed]
    return "\n".join([head, line, f"    {one.case['model']} {_settings(one.case)}", *assumed])


def summary(found: list[Compared]) -> list[str]:
    """Median and worst error: of the judged rows beside the goal, and of the others by source."""
    lines = []
    judged = [abs(one.error) for one in found if one.judged and one.error is not None]
    if judged:
        median, worst = float(np.median(judged)), max(judged)
        met = "met" if median <= GOAL[0] and worst <= GOAL[1] else "MISSED"
        lines.append(f"judged: {len(judged)} rows, median {median:.2%}, worst {worst:.2%}; "
                     f"goal {GOAL[0]:.0%} / {GOAL[1]:.0%}: {met}")  # fmt: skip
    missing = sum(one.judged and one.error is None for one in found)
    if missing:
        lines.append(f"judged rows left out: {missing}: MISSED")
    by_source: dict[str, list[float]] = {}
    for one in found:
        if not one.judged and one.error is not None:
            by_source.setdefault(f"{one.row['source']} ({_counter(one.row)}, grade {one.row['grade']})", []).append(
                one.error
            )
    for source, errors in by_source.items():
        sizes = np.abs(errors)
        lines.append(f"others: {source}: {len(errors)} rows, median {np.median(sizes):.1%}, worst {sizes.max():.1%}")
    lines.append(f"left out: {sum(one.error is None for one in found)} of {len(found)} rows")
    return lines


def main(arguments: list[str]) -> None:
    """Print rows, simulation and errors."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy published")
    parser.add_argument("--table", type=Path, default=COLLECTION if COLLECTION.is_file() else TABLE)
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--judged", action="store_true", help="only the rows with a goal")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    if not options.table.is_file():
        sys.exit(f"{options.table}: no such table; --table names a copy of the published peaks")
    chosen = list(_chosen(rows(options.table), options.where, options.judged))
    print(f"{options.table}: {len(chosen)} rows")
    found = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for one in pool.map(compared, chosen):
            found.append(one)
            print(told(one), flush=True)
    print("\n" + "\n".join(summary(found)))
    print("\nkept from runs of their own programs (`python -m tests.accuracy NAME`):")
    tables = (
        *(sft, fitcheck, notebooks, guide, adapters, adapters_images, litgpt, trainers, speedrun, pipelines),
        *(galvatron, axolotl),
    )
    print("\n".join(line for table in tables for line in table.kept()))
