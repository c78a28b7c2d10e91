"""The one table of GPUs: names, memory, attributes, speeds, and the context that CUDA needs on each.

The rows are in `gpus.toml` beside this module, which tells what is measured and where figures come from. Whatever is
asked about a GPU (its total, how PyTorch chooses kernels on it, how long they take, what lies outside the allocator)
comes from here. A GPU that the file lacks is added with `register`. This module needs neither torch nor networkx.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from traces.errors import ConfigError

TERA: Final = 1e12
GIGA: Final = 1e9
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
#: The share of the peak that large products reach on tensor cores. The best shapes reach 86.9 % on an A100 SXM and
#: 80.3 % on an H100 SXM, whose clock its power limits (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS", bf16);
#: what models multiply is taken to reach the same part of that on both.
TENSOR_SHARE: Final = 0.75
HOPPER_SHARE: Final = TENSOR_SHARE * 80.3 / 86.9


@dataclass(frozen=True, slots=True)
class Measured:
    """A size outside the allocator as somebody measured it: MiB likely, lowest, highest; where."""

    likely: int
    low: int
    high: int
    source: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """What GPUs of one compute capability share: limits of a multiprocessor (sizes in bytes), the links of their time.

    `shared_memory_per_block` is the opt-in limit (sharedMemPerBlockOptin); without opting in it is 48 KiB everywhere.
    """

    generation: str
    max_threads_per_sm: int
    max_blocks_per_sm: int
    shared_memory_per_block: int
    shared_memory_per_sm: int
    pcie: str
    infiniband: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    `name` is that of traces and cases, ending in the size (`RTX4090-24GB`); `product` is what CUDA calls it; `arch` is
    the compute capability; `total_bytes` is what cudaMemGetInfo shows. Speeds are peaks in FLOP/s without sparsity:
    `half` for fp16 on tensor cores, `eight` for fp8 or int8; 0 where there is none. PyTorch uses tf32 only where asked.
    `memory` is the bandwidth in bytes a second; `link` is a key of `strategies.timing.links.LINKS`: what joins two of
    them in a machine. `context` is the CUDA context as measured before any kernel of a model has run; None: not known.
    """

    name: str
    product: str
    arch: tuple[int, int]
    sm_count: int
    l2_bytes: int
    total_bytes: int
    total_source: str
    half: float
    single: float
    tf32: float
    double: float
    eight: float
    memory: float
    link: str
    speed_source: str
    aliases: tuple[str, ...] = ()
    context: Measured | None = None

    @property
    def architecture(self) -> Architecture:
        """What it shares with others of its compute capability."""
        return ARCHITECTURES[self.arch]

    @property
    def threads(self) -> int:
        """How many threads it can run at once."""
        return self.sm_count * self.architecture.max_threads_per_sm

    @property
    def has_bf16(self) -> bool:
        """Whether its tensor cores multiply bf16; PyTorch emulates it where they do not, at fp32's speed."""
        return self.arch >= (8, 0)

    @property
    def reached(self) -> float:
        """The share of the tensor cores' peak that large matrix products of models reach."""
        return HOPPER_SHARE if self.arch[0] in (9, 10) else TENSOR_SHARE

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s for matrices of `dtype` as torch prints it; fp32's where it is not known."""
        if dtype == "float16" or (dtype == "bfloat16" and self.has_bf16):
            return self.half
        if dtype in ("float8_e4m3fn", "float8_e5m2", "int8") and self.eight:
            return self.eight
        return self.double if dtype == "float64" else self.single


def gpu(name: str) -> Gpu:
    """The GPU called `name`: its name, its product's name or an alias, spelled freely.

    Raises ConfigError for one that is not known.
    """
    key = _key(name)
    alone = [one for one in GPUS if _key(_stem(one)) == key]
    if key not in _NAMES and len(alone) != 1:
        raise ConfigError(f"unknown GPU {name[:60]!r}{_hint(key)}")
    return GPUS[_NAMES.get(key) or alone[0]]


def assumed(name: str) -> str | None:
    """What to tell whoever wrote `name`, where several sizes of a GPU bear it; None where it says which one it is."""
    found = gpu(name)
    others = [one for one in GPUS if _stem(one) == _stem(found.name) and one != found.name]
    if not others or _key(name) != _key(_stem(found.name)):
        return None
    return f"GPU {name} is taken to be {found.name}; there is {' and '.join(others)} too"


def register(card: Gpu) -> None:
    """Add a GPU to the table of this process: every function finds it by its name, product and aliases.

    Raises ConfigError where a name is taken by another GPU, and for a compute capability that the table lacks.
    """
    if card.arch not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise ConfigError(f"GPU {card.name!r}: compute capability {card.arch} is not known; these are: {known}")
    keys = {_key(spelling) for spelling in (card.name, card.product, *card.aliases)}
    for key in keys:
        if _NAMES.get(key, card.name) != card.name:
            raise ConfigError(f"GPU {card.name!r}: {key!r} is a name of {_NAMES[key]}")
    GPUS[card.name] = card
    _NAMES.update(dict.fromkeys(keys, card.name))


def _key(name: str) -> str:
    """A name as it is looked up: without the maker, the family, GB, case, blanks and punctuation.

    `RTX 4090`, `GeForce RTX 4090` and `rtx4090-24` are one card, while the G of `A10G` stays.
    """
    text = re.sub(r"(?<=\d) ?gi?b$|(?<=[-_ ]\d\d)g$", "", name.casefold().strip()[:200])
    letters = "".join(letter for letter in text if letter.isalnum())
    return re.sub(r"^(?:nvidia|geforce|tesla|quadro|rtx(?=.))+", "", letters)


def _stem(name: str) -> str:
    """A card's name without its size."""
    return name.rpartition("-")[0]


def _hint(key: str) -> str:
    if re.match(r"(?:amd|radeon|instinct)|mi\d\d", key):
        return ": AMD's GPUs do not run CUDA, whose allocator and kernels are imitated here"
    near = difflib.get_close_matches(key[:60], list(_NAMES), n=1, cutoff=0.75)
    nearest = f"; the nearest is '{_NAMES[near[0]]}'" if near else ""
    return f"{nearest}; `llmem gpus` lists all, and any other goes by its size in bytes (--memory)"


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _architecture(row: Mapping[str, Any]) -> Architecture:
    block, multiprocessor = (size * _KIB for size in row["shared_kib"])
    return Architecture(
        row["generation"], row["threads"], row["blocks"], block, multiprocessor, row["pcie"], row["infiniband"]
    )


_SOURCES: Final = {
    "observed": "total of cudaMemGetInfo on such a card, ECC as shipped",
    "recorded": "total of cudaMemGetInfo on such a card, ECC as shipped; the size in the recorded training runs",
    "rule": "the share of its label that a card of the same kind shows",
}


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        product=row["product"],
        aliases=tuple(row.get("aliases", ())),
        arch=_capability(row["arch"]),
        sm_count=row["multiprocessors"],
        l2_bytes=round(row["l2_mib"] * _MIB),
        total_bytes=row["total"],
        total_source=_SOURCES.get(row["total_source"], row["total_source"]),
        memory=row["bandwidth"] * GIGA,
        link=row["link"],
        speed_source=row["speed_source"],
        context=Measured(**row["context"]) if "context" in row else None,
        **{key: flops * TERA for key, flops in row["tflops"].items()},
    )


_TABLE: Final = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))
#: By compute capability.
ARCHITECTURES: Final = {_capability(text): _architecture(row) for text, row in _TABLE["arch"].items()}
#: By the names of traces and cases; `register` adds to it.
GPUS: Final[dict[str, Gpu]] = {}
_NAMES: Final[dict[str, str]] = {}
for _name, _row in _TABLE["gpu"].items():
    register(_gpu(_name, _row))
