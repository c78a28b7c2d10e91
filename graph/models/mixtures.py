"""Mixtures of experts whose experts run one by one: how many tokens each gets, as a router has no values here.

Most models of transformers run all experts as one grouped product, whose memory does not depend on the shares; DBRX,
Switch Transformers, NLLB-MoE and LongCat ask for the tokens of one expert after the other (`torch.where` of its row of
a one-hot mask), layer by layer and again in recomputation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from graph.case import Case
from traces.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Keys of configurations that say how many experts there are, and the part of a configuration that may hold them.
_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PART: Final = "ffn_config"


def shares(case: Case, config: PreTrainedConfig) -> tuple[float, ...]:
    """Each expert's share of the tokens (they sum to 1); empty for a model without experts.

    Raises ConfigError where the case gives another number of shares than there are experts.
    """
    parts = (config, getattr(config, _PART, None))
    count = next((found for part in parts for name in _COUNTS if (found := getattr(part, name, None))), 0)
    if not count:
        return ()
    if case.experts and len(case.experts) != count:
        raise ConfigError(f"key 'experts': {len(case.experts)} shares for the {count} experts of the model")
    given = case.experts or (1.0,) * int(count)
    return tuple(share / sum(given) for share in given)


class Routed:
    """Says how many elements of a tensor are not zero: the experts that are hit, and the tokens of one after another.

    Of flags for experts those with a share are set, of other flags all. A mask of numbers is the next expert's; over
    all experts such masks have as many ones as one has elements.
    """

    def __init__(self, shares: tuple[float, ...]) -> None:
        self.experts = len(shares)
        self.hit = [share for share in shares if share > 0]
        self.turn = 0

    def __call__(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's elements that are not zero."""
        count = tensor.numel()
        if tensor.dtype is torch.bool:
            return len(self.hit) if tensor.shape in ((self.experts,), (self.experts + 1,)) else count
        before = sum(self.hit[: self.turn])
        found = round((before + self.hit[self.turn]) * count) - round(before * count)
        self.turn = (self.turn + 1) % len(self.hit)
        return found
