"""The one table of optimizers: a case's word for each, the class behind it, its arguments, its name for transformers.

Another one is a row here: it can then be captured, written into a training script and given to a Trainer. It needs no
torch; `made` imports the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from graph.case import Case


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer: `path` is its class, `options` are arguments beside the parameters and the learning rate.

    `keys` are arguments that the case sets, by its keys; `hugging_face` is its name in transformers' `OptimizerNames`.
    """

    path: str
    hugging_face: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, case: Case) -> dict[str, Any]:
        """Its arguments in a case, without the parameters and the learning rate."""
        return {**self.options, **{name: getattr(case, key) for name, key in self.keys.items()}}

    def made(self) -> Any:
        """Its class; ImportError where the library is not installed."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


ADAMW: Final = "torch.optim.AdamW"
#: By the case's word; the first is the default.
OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "adamw": Optimizer(ADAMW, "adamw_torch"),
    "adamw-fused": Optimizer(ADAMW, "adamw_torch_fused", {"fused": True}),
    "adamw-forloop": Optimizer(ADAMW, "adamw_torch", {"foreach": False}),
    "sgd": Optimizer("torch.optim.SGD", "sgd", keys={"momentum": "sgd_momentum"}),
    "adafactor": Optimizer("torch.optim.Adafactor", "adafactor"),
    "adamw-8bit": Optimizer("bitsandbytes.optim.AdamW8bit", "adamw_8bit"),
    "adamw-foreach": Optimizer(ADAMW, "adamw_torch", {"foreach": True}),
}
