"""The recorded training and inference runs as cases: one row of a table is one run of a real PyTorch.

`tests/data/training/README.md` says where the tables come from.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent.parent / "data" / "training"
TABLES: Final = ("single", "seq2seq", "inference")
PHASES: Final = ("fwd_first", "bwd_first", "pipe_first", "step_first", "fwd_last", "bwd_last", "pipe_last", "step_last")


@dataclass(frozen=True)
class Recording:
    """One recorded run: `case` as `estimate` takes it, `row` as the table has it."""

    table: str
    number: int
    case: Mapping[str, Any]
    row: Mapping[str, str]

    @property
    def fits(self) -> bool:
        """Whether the recorded run ended without running out of memory."""
        return self.row.get("verdict", "fits") == "fits"

    def figure(self, name: str) -> int | None:
        """A column of the row in bytes, or None where it is empty or absent."""
        text = self.row.get(name, "")
        return int(float(text)) if text else None

    def phases(self) -> dict[str, int]:
        """The recorded peak of each phase, by the key that results use."""
        found = {"load": self.figure("load_peak")}
        for phase in PHASES:
            what, when = phase.split("_")
            found[phase] = self.figure(f"{what}_peak_{when}")
        return {name: peak for name, peak in found.items() if peak}

    def __str__(self) -> str:
        return f"{self.table}[{self.number}] " + " ".join(f"{key}={value}" for key, value in self.case.items())


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV table, gzipped or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return list(csv.DictReader(io.StringIO(text)))


def recordings(table: str, path: Path | None = None) -> Iterator[Recording]:
    """The rows of a table (`single`, `seq2seq`, `inference`, `min_fit`) as cases."""
    rows = read_table(path or FOLDER / f"{table}.csv.gz")
    for number, row in enumerate(rows):
        if row.get("transformers", "5.23.0") == "5.23.0":
            yield Recording(table, number, _CASES[table](row), row)


def _release(row: Mapping[str, str]) -> str:
    return ".".join(row["torch"].split(".")[:2])


def _mask(text: str) -> bool | str:
    return text if text == "padded" else text == "True"


def _single(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "dtype": row["dtype"],
        "autocast": row["autocast"],
        "quant": row["quant"],
        "attn": row["attn"],
        "batch": int(row["batch"]),
        "seq": int(row["seq"]),
        "checkpointing": row["checkpointing"],
        "optimizer": row["optimizer"],
        "sgd_momentum": float(row["sgd_momentum"]),
        "lora": int(row["lora"]),
        "accum": int(row["accum"]),
        "clip": float(row["clip"]),
        "steps": int(row["steps"]),
        "use_cache": row["use_cache"] == "True",
        "attention_mask": _mask(row["attention_mask"]),
        "cudnn_sdp": row["cudnn_sdp"] == "True",
        "gpu": row["gpu"],
        "memory": int(row["memory"]) if row["memory"] else None,
        "alloc_conf": row["alloc_conf"],
        "release": _release(row),
    }


#: Catalogue names of the rows whose task is not the model's first one.
_VARIANTS: Final = {"cls": "sequence-classification", "mlm": "masked-lm", "image": "image-classification"}


def _seq2seq(row: Mapping[str, str]) -> dict[str, Any]:
    case = {
        "model": row["model"],
        "dtype": row["dtype"],
        "autocast": row["autocast"],
        "attn": row["attn"],
        "batch": int(row["batch"]),
        "seq": int(row["seq"]),
        "checkpointing": row["ckpt"],
        "optimizer": row["optimizer"],
        "use_cache": row["use_cache"] == "True",
        "attention_mask": _mask(row["attention_mask"]),
        "accum": int(row["accum"]),
        "cudnn_sdp": row["cudnn_sdp"] == "True",
        "steps": int(row["steps"]),
        "gpu": row["device"],
        "memory": int(row["mem"]) or None,
        "alloc_conf": "expandable_segments:True" if row["expandable"] == "True" else "",
        "release": _release(row),
    }
    if row["task"] == "seq2seq":
        case["dec_seq"] = int(row["dec_seq"])
    if row["task"] in _VARIANTS:
        case["head"] = _VARIANTS[row["task"]]
    return case


def _inference(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "task": "inference",
        "dtype": row["compute"],
        "quant": row["load"] if row["load"] in ("nf4", "int8") else "",
        "attn": row["attn"],
        "batch": int(row["batch"]),
        "prompt": int(row["prompt"]),
        "new": int(row["new"]),
        "cache": row["cache"],
        "mode": row["mode"],
        "double_quant": row["double_quant"] == "True",
        "cudnn_sdp": row["cudnn_sdp"] == "True",
        "gpu": row["device"],
        "memory": int(row["mem"]) or None,
        "alloc_conf": "expandable_segments:True" if row["expandable"] == "True" else "",
        "release": _release(row),
    }


def _min_fit(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "dtype": row["dtype"],
        "autocast": row["autocast"],
        "attn": row["attn"],
        "batch": int(row["batch"]),
        "seq": int(row["seq"]),
        "checkpointing": row["ckpt"],
        "optimizer": row["optimizer"],
        "lora": int(row["lora"]),
        "gpu": row["device"],
        "alloc_conf": "expandable_segments:True" if row["expandable"] == "True" else "",
        "release": _release(row),
    }


def _multi(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        **_single(row),
        "strategy": row["strategy"],
        "world": int(row["world"]),
        "deferred": "late" if row["lag"] == "1" else "prompt",
        "sync": row["sync"] == "True",
    }


#: The word of a case for what the column `offload` names.
_OFFLOADS: Final = {"": "", "cpu": "activations", "cpu-pin": "activations-pin", "hf": "checkpoints"}


def _offload(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "dtype": row["dtype"],
        "autocast": row["autocast"],
        "attn": row["attn"],
        "batch": int(row["batch"]),
        "seq": int(row["seq"]),
        "checkpointing": "selective" if row["sac"] else row["ckpt"],
        "save": row["sac"],
        "every": int(row["every"]),
        "offload": _OFFLOADS[row["offload"]],
        "loss": row["loss"],
        "accum": int(row["accum"]),
        "grad_sync": row["grad_sync"],
        "reshard_backward": row["reshard_bwd"] == "True",
        "optimizer": row["optimizer"],
        "strategy": row["strategy"],
        "world": int(row["world"]),
        "steps": int(row["steps"]),
        "cudnn_sdp": row["cudnn_sdp"] == "True",
        "gpu": row["device"],
        "memory": int(row["mem"]) or None,
        "alloc_conf": "expandable_segments:True" if row["expandable"] == "True" else "",
        "release": _release(row),
    }


def _pipeline(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "dtype": row["dtype"],
        "autocast": row["autocast"],
        "attn": row["attn"],
        "batch": int(row["mb_size"]),
        "seq": int(row["seq"]),
        "checkpointing": row["ckpt"],
        "optimizer": row["optimizer"],
        "strategy": "pp",
        "world": int(row["stages"]),
        "schedule": row["schedule"],
        "microbatches": int(row["microbatches"]),
        "return_outputs": row["return_outputs"] == "True",
        "shapes": row["shapes"],
        "deferred": "late" if row["lag"] == "1" else "prompt",
        "steps": int(row["steps"]),
        "gpu": row["device"],
        "memory": int(row["mem"]) or None,
        "alloc_conf": "expandable_segments:True" if row["expandable"] == "True" else "",
        "release": _release(row),
    }


def _deepspeed(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "dtype": row["dtype"],
        "attn": row["attn"],
        "batch": int(row["batch"]),
        "seq": int(row["seq"]),
        "checkpointing": row["ckpt"],
        "accum": int(row["accum"]),
        "clip": float(row["clip"]),
        "strategy": f"deepspeed-{row['stage']}",
        "world": int(row["world"]),
        "buckets": int(row["bucket"]) if row["bucket"] else None,
        "overlap_comm": {"True": True, "False": False}.get(row["overlap_comm"], "default"),
        "grad_accum_dtype": row["grad_accum_dtype"],
        "zero_extra": row["zero_extra"],
        "init": row["init"],
        "offload": "optimizer" if row["offload"] else "",
        "deferred": "late" if row["lag"] == "1" else "prompt",
        "steps": int(row["steps"]),
        "gpu": row["device"],
        "memory": int(row["mem"]) or None,
        "alloc_conf": "expandable_segments:True" if row["expandable"] == "True" else "",
        "release": _release(row),
    }


_CASES: Final = {
    "single": _single,
    "seq2seq": _seq2seq,
    "inference": _inference,
    "min_fit": _min_fit,
    "multi": _multi,
    "offload": _offload,
    "pipeline": _pipeline,
    "deepspeed": _deepspeed,
}
