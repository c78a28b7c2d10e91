"""GPUs and links with the speeds that their makers state: what `strategies.timing` reckons with.

FLOP/s are dense (no sparsity), with multiply and add as two; tensor cores accumulate in fp32. Bandwidths are bytes a
second, of links one way for one GPU. Decimal prefixes throughout, as the data sheets use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from traces.errors import ConfigError

TERA: Final = 1e12
GIGA: Final = 1e9
#: The share of the peak that large products reach on tensor cores. The best shapes reach 86.9 % on an A100 SXM and
#: 80.3 % on an H100 SXM, whose clock its power limits (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS", bf16);
#: what models multiply is taken to reach the same part of that on both.
TENSOR_SHARE: Final = 0.75
HOPPER_SHARE: Final = TENSOR_SHARE * 80.3 / 86.9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's peak FLOP/s by kind of number, its memory's bandwidth, the link between GPUs in a machine, the source.

    `half`: fp16 and bf16 on tensor cores; where `brain` is false, bf16 is not, and has fp32's speed.
    `tf32` is 0 where the card has none; PyTorch uses it only where asked. `reached` is the share of the tensor cores'
    peak that large matrix products of models reach.
    """

    half: float
    single: float
    tf32: float
    double: float
    eight: float  # fp8 or int8 on tensor cores; 0: none
    memory: float
    link: str
    source: str
    brain: bool = True
    reached: float = TENSOR_SHARE

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s for matrices of `dtype` as torch prints it; fp32's where it is not known."""
        if dtype == "float16" or (dtype == "bfloat16" and self.brain):
            return self.half
        if dtype in ("float8_e4m3fn", "float8_e5m2", "int8") and self.eight:
            return self.eight
        if dtype == "float64":
            return self.double
        return self.single


def _gpu(
    half: float, single: float, tf32: float, double: float, eight: float, memory: float, link: str, source: str, *,
    brain: bool = True, reached: float = TENSOR_SHARE,
) -> Gpu:  # fmt: skip
    """A card in TFLOP/s and GB/s."""
    return Gpu(
        half=half * TERA,
        single=single * TERA,
        tf32=tf32 * TERA,
        double=double * TERA,
        eight=eight * TERA,
        memory=memory * GIGA,
        link=link,
        source=f"NVIDIA {source}",
        brain=brain,
        reached=reached,
    )


#: By the names of traces and cases.
GPUS: Final[Mapping[str, Gpu]] = {
    "V100-16GB": _gpu(125, 15.7, 0, 7.8, 0, 900, "nvlink2", "V100 data sheet (2020), SXM2", brain=False),
    "V100-32GB": _gpu(125, 15.7, 0, 7.8, 0, 900, "nvlink2", "V100 data sheet (2020), SXM2", brain=False),
    "T4-16GB": _gpu(65, 8.1, 0, 0.25, 130, 320, "pcie3", "T4 data sheet (2019)", brain=False),
    "A10-24GB": _gpu(125, 31.2, 62.5, 0.49, 250, 600, "pcie4", "A10 data sheet (2022)"),
    "A100-40GB": _gpu(312, 19.5, 156, 9.7, 624, 1555, "nvlink3", "A100 data sheet (2021), SXM"),
    "A100-80GB": _gpu(312, 19.5, 156, 9.7, 624, 2039, "nvlink3", "A100 data sheet (2021), SXM"),
    "RTX3090-24GB": _gpu(71, 35.6, 35.6, 0.56, 284, 936, "pcie4", "GA102 white paper (2020), table 2"),
    "RTX4090-24GB": _gpu(165.2, 82.6, 82.6, 1.3, 330.3, 1008, "pcie4", "Ada white paper (2022), table 2"),
    "L4-24GB": _gpu(121, 30.3, 60, 0.47, 242.5, 300, "pcie4", "L4 data sheet (2023), halved for no sparsity"),
    "H100-80GB": _gpu(
        989.4, 66.9, 494.7, 33.5, 1978.9, 3352, "nvlink4", "H100 white paper (2022), SXM5", reached=HOPPER_SHARE
    ),
    "H200-141GB": _gpu(
        989.4, 66.9, 494.7, 33.5, 1978.9, 4800, "nvlink4", "H200 data sheet (2024), SXM", reached=HOPPER_SHARE
    ),
    "B200-192GB": _gpu(
        2250, 75, 1125, 37, 4500, 7700, "nvlink5", "HGX B200 data sheet (2025), a GPU's eighth", reached=HOPPER_SHARE
    ),
}


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two GPUs: seconds a step takes beside its bytes, bytes a second one way, the share that is reached.

    A step is one hop of a ring or a level of a tree.
    """

    alpha: float
    bandwidth: float
    efficiency: float
    source: str

    @property
    def beta(self) -> float:
        """Seconds a byte."""
        return 1 / (self.bandwidth * self.efficiency)


_TUNING: Final = "steps: hwLat of NCCL's src/graph/tuning.cc (Simple protocol)"
_SHARE: Final = "share reached: about what nccl-tests show for large messages"


def _link(alpha_us: float, gigabytes: float, efficiency: float, what: str) -> Link:
    return Link(alpha_us * 1e-6, gigabytes * GIGA, efficiency, f"{what}; {_TUNING}; {_SHARE}")


LINKS: Final[Mapping[str, Link]] = {
    "nvlink2": _link(3.4, 150, 0.85, "6 links of 25 GB/s (V100)"),
    "nvlink3": _link(3.4, 300, 0.80, "12 links of 25 GB/s (A100)"),
    "nvlink4": _link(3.4, 450, 0.80, "18 links of 25 GB/s (H100)"),
    "nvlink5": _link(3.4, 900, 0.80, "18 links of 50 GB/s (B200)"),
    "pcie3": _link(5.7, 15.75, 0.75, "16 lanes of 8 GT/s"),
    "pcie4": _link(5.7, 31.5, 0.75, "16 lanes of 16 GT/s"),
    "pcie5": _link(5.7, 63.0, 0.75, "16 lanes of 32 GT/s"),
    "infiniband-edr": _link(14.0, 12.5, 0.90, "100 Gb/s for each GPU"),
    "infiniband-hdr": _link(14.0, 25.0, 0.90, "200 Gb/s for each GPU"),
    "infiniband-ndr": _link(14.0, 50.0, 0.90, "400 Gb/s for each GPU"),
    "ethernet-10": _link(30.0, 1.25, 0.90, "10 Gb/s, TCP; the step is twice that of InfiniBand"),
}


def gpu(name: str) -> Gpu:
    """The speeds of a GPU by its name in traces. Raises ConfigError for one that the table lacks."""
    _check(GPUS, name, "GPU")
    return GPUS[name]


def link(name: str) -> Link:
    """A link by name. Raises ConfigError for one that the table lacks."""
    _check(LINKS, name, "link")
    return LINKS[name]


def _check(table: Mapping[str, object], name: str, what: str) -> None:
    if name not in table:
        near = difflib.get_close_matches(name, list(table), n=1, cutoff=0.0)[0]
        raise ConfigError(f"no speeds are known of {what} {name!r}; the nearest is {near}, all are: {', '.join(table)}")


#: Generations by GPU: PCIe, and the InfiniBand that machines of its time have for each GPU.
_GENERATIONS: Final[Mapping[str, tuple[str, str]]] = {
    "V100": ("pcie3", "infiniband-edr"),
    "T4": ("pcie3", "infiniband-edr"),
    "H100": ("pcie5", "infiniband-ndr"),
    "H200": ("pcie5", "infiniband-ndr"),
    "B200": ("pcie5", "infiniband-ndr"),
}


def ways(name: str, interconnect: str = "") -> tuple[str, str]:
    """Links of a GPU inside a machine and between machines, by a word for what joins them (upper or lower case).

    The words are nvlink, pcie, infiniband, ethernet and the names of links; without one, the usual machine's. Raises
    ConfigError for other words, and for nvlink where the GPU has none.
    """
    own = gpu(name).link
    pcie, infiniband = _GENERATIONS.get(name.partition("-")[0], ("pcie4", "infiniband-hdr"))
    word = interconnect.strip().lower()
    if word == "nvlink" and not own.startswith("nvlink"):
        raise ConfigError(f"interconnect nvlink: {name} has none; give pcie, infiniband or ethernet")
    named = {"": own, "nvlink": own, "pcie": pcie, "infiniband": infiniband, "ethernet": "ethernet-10"}
    inside = named.get(word, word)
    if inside not in LINKS:
        near = difflib.get_close_matches(word, [*named, *LINKS], n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"interconnect {interconnect[:40]!r} is not known; the nearest is {near}; there are nvlink, pcie,"
            f" infiniband, ethernet, {', '.join(LINKS)}"
        )
    across = inside if inside.startswith(("infiniband", "ethernet")) else infiniband
    return inside, across
