"""Links between GPUs with the speeds that their makers state: what `strategies.timing.clock` reckons with.

Bandwidths are bytes a second one way for one GPU, with decimal prefixes as the data sheets use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from graph.hardware.gpus import GIGA, gpu
from traces.errors import ConfigError


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


def link(name: str) -> Link:
    """A link by name. Raises ConfigError for one that the table lacks."""
    if name not in LINKS:
        near = difflib.get_close_matches(name, list(LINKS), n=1, cutoff=0.0)[0]
        raise ConfigError(f"no speeds are known of link {name!r}; the nearest is {near}, all are: {', '.join(LINKS)}")
    return LINKS[name]


def ways(name: str, interconnect: str = "") -> tuple[str, str]:
    """Links of a GPU inside a machine and between machines, by a word for what joins them (upper or lower case).

    The words are nvlink, pcie, infiniband, ethernet and the names of links; without one, the usual machine's. Raises
    ConfigError for other words, and for nvlink where the GPU has none.
    """
    card = gpu(name)
    own, pcie, infiniband = card.link, card.architecture.pcie, card.architecture.infiniband
    word = interconnect.strip().lower()
    if word == "nvlink" and not own.startswith("nvlink"):
        raise ConfigError(f"interconnect nvlink: {card.name} has none; give pcie, infiniband or ethernet")
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
