"""The recorded training and inference runs as cases: one row of a table is one run of a real PyTorch.

`tests/data/training/README.md` says where the tables come from.
"""

from __future__ import annotations

import csv
import gzip
import importlib.metadata
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.places import DATA
from traces.release import installed_release, version_of

FOLDER: Final = DATA / "training"
#: What all tables but `releases` were recorded with.
TRANSFORMERS: Final = "5.23.0"
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
    """The rows of a table (a key of `COLUMNS`) as cases; of `releases` those of the installed libraries."""
    rows = read_table(path or FOLDER / f"{table}.csv.gz")
    for number, row in enumerate(rows):
        if _installed(row) if table == "releases" else row.get("transformers", TRANSFORMERS) == TRANSFORMERS:
            yield Recording(table, number, case_of(table, row), row)


def _installed(row: Mapping[str, str]) -> bool:
    """Whether a row was recorded with the installed torch and transformers; patch releases do not count."""
    try:
        transformers = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        transformers = TRANSFORMERS
    ours = installed_release(), str(version_of(transformers))
    return ours == (str(version_of(row["torch"])), str(version_of(row["transformers"])))


def _truth(text: str) -> bool:
    return text == "True"


def _bytes(text: str) -> int | None:
    """Empty and 0: the card's own memory."""
    return int(text or 0) or None


#: The key of a case that a column of another name is.
_KEYS: Final = {
    "ckpt": "checkpointing",
    "device": "gpu",
    "mem": "memory",
    "expandable": "alloc_conf",
    "torch": "release",
    "lag": "deferred",
    "sac": "save",
    "reshard_bwd": "reshard_backward",
    "mb_size": "batch",
    "stages": "world",
    "stage": "strategy",
    "bucket": "buckets",
    "load": "quant",
    "compute": "dtype",
}

_WHOLE: Final = "batch seq accum steps lora world every prompt new mb_size stages microbatches"
_TRUTHS: Final = "use_cache cudnn_sdp sync double_quant reshard_bwd return_outputs"

#: What the text in a column means; without an entry it stands for itself.
_VALUES: Final[Mapping[str, Callable[[str], Any]]] = {
    **dict.fromkeys(_WHOLE.split(), int),
    **dict.fromkeys(("sgd_momentum", "clip"), float),
    **dict.fromkeys(_TRUTHS.split(), _truth),
    **dict.fromkeys(("memory", "mem"), _bytes),
    "attention_mask": lambda text: text if text == "padded" else _truth(text),
    "expandable": lambda text: "expandable_segments:True" if _truth(text) else "",
    "torch": lambda text: ".".join(text.split(".")[:2]),
    "lag": lambda text: "late" if text == "1" else "prompt",
    "offload": {"": "", "cpu": "activations", "cpu-pin": "activations-pin", "hf": "checkpoints"}.__getitem__,
    "stage": "deepspeed-{}".format,
    "bucket": lambda text: int(text) if text else None,
    "overlap_comm": lambda text: "default" if text == "default" else _truth(text),
    "load": lambda text: text if text in ("nf4", "int8") else "",
}

_SINGLE: Final = (
    "model dtype autocast quant attn batch seq checkpointing optimizer sgd_momentum lora accum clip steps use_cache "
    "attention_mask cudnn_sdp gpu memory alloc_conf torch"
)
_REST: Final = "model attn device expandable torch"

#: The columns of each table that its cases are made of.
COLUMNS: Final[Mapping[str, str]] = {
    "single": _SINGLE,
    "releases": _SINGLE,
    "multi": f"{_SINGLE} strategy world lag sync",
    "seq2seq": f"{_REST} dtype autocast batch seq ckpt optimizer use_cache attention_mask accum cudnn_sdp mem steps",
    "inference": f"{_REST} compute load batch prompt new cache mode double_quant cudnn_sdp mem",
    "min_fit": f"{_REST} dtype autocast batch seq ckpt optimizer lora",
    "offload": f"{_REST} dtype autocast batch seq ckpt sac every offload loss accum grad_sync reshard_bwd optimizer "
    "strategy world steps cudnn_sdp mem",
    "pipeline": f"{_REST} dtype autocast mb_size seq ckpt optimizer stages schedule microbatches return_outputs shapes "
    "lag steps mem",
    "deepspeed": f"{_REST} dtype batch seq ckpt accum clip stage world bucket overlap_comm grad_accum_dtype zero_extra "
    "init lag steps mem",
}

#: Catalogue names of the rows of seq2seq whose task is not the model's first one.
_VARIANTS: Final = {"cls": "sequence-classification", "mlm": "masked-lm", "image": "image-classification"}


def case_of(table: str, row: Mapping[str, str]) -> dict[str, Any]:
    """The case that a row of a table is."""
    case = {_KEYS.get(name, name): _VALUES.get(name, str)(row[name]) for name in COLUMNS[table].split()}
    if table == "seq2seq" and row["task"] == "seq2seq":
        case["dec_seq"] = int(row["dec_seq"])
    elif table == "seq2seq":
        case["head"] = _VARIANTS[row["task"]]
    elif table == "inference":
        case["task"] = "inference"
    elif table == "offload" and row["sac"]:
        case["checkpointing"] = "selective"
    elif table == "pipeline":
        case["strategy"] = "pp"
    elif table == "deepspeed":
        case["offload"] = "optimizer" if row["offload"] else ""
    return case
