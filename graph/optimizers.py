"""The one table of optimizers: a case's word for each, the class behind it, its arguments, its name for transformers.

Another one is a row here, or comes from anywhere by `register`: it can then be captured, written into a training script
and given to a Trainer. It needs no torch; `made` imports the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.case import Case


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer: `path` is its class, `options` are arguments beside the parameters and the learning rate.

    `keys` are arguments that the case sets, by its keys; `hugging_face` is its name in transformers' `OptimizerNames`;
    `aliases` are further names that a case may have for it.
    """

    path: str
    hugging_face: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def of_bitsandbytes(self) -> bool:
        """Whether bitsandbytes has it."""
        return self.path.startswith("bitsandbytes.")

    def arguments(self, case: Case) -> dict[str, Any]:
        """Its arguments in a case, without the parameters and the learning rate."""
        return {**self.options, **{name: getattr(case, key) for name, key in self.keys.items()}}

    def made(self) -> Any:
        """Its class; ImportError where the library is not installed."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


ADAMW: Final = "torch.optim.AdamW"
#: By the case's word; the first is the default.
OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "adamw": Optimizer(ADAMW, "adamw_torch"),
    "adamw-fused": Optimizer(ADAMW, "adamw_torch_fused", {"fused": True}),
    "adamw-forloop": Optimizer(ADAMW, "adamw_torch", {"foreach": False}),
    "sgd": Optimizer("torch.optim.SGD", "sgd", keys={"momentum": "sgd_momentum"}),
    "adafactor": Optimizer("torch.optim.Adafactor", "adafactor"),
    "adamw-8bit": Optimizer("bitsandbytes.optim.AdamW8bit", "adamw_8bit", aliases=("adamw_bnb_8bit",)),
    "paged-adamw-8bit": Optimizer("bitsandbytes.optim.PagedAdamW8bit", "paged_adamw_8bit"),
    "paged-adamw-32bit": Optimizer("bitsandbytes.optim.PagedAdamW32bit", "paged_adamw_32bit", aliases=("paged_adamw",)),
    "lion-8bit": Optimizer("bitsandbytes.optim.Lion8bit", "lion_8bit"),
    "paged-lion-8bit": Optimizer("bitsandbytes.optim.PagedLion8bit", "paged_lion_8bit"),
    "paged-lion-32bit": Optimizer("bitsandbytes.optim.PagedLion32bit", "paged_lion_32bit"),
    "adamw-foreach": Optimizer(ADAMW, "adamw_torch", {"foreach": True}),
}


def register(name: str, optimizer: Optimizer) -> None:
    """Add an optimizer to the table of this process. Raises ConfigError where the name is taken."""
    if name in spellings():
        raise ConfigError(f"optimizer {name!r} is there already; give yours another name")
    OPTIMIZERS[name] = optimizer


def spellings() -> dict[str, str]:
    """The optimizer that each name stands for: the case's, transformers' (the first that has it), other names."""
    found: dict[str, str] = {}
    for name, one in OPTIMIZERS.items():
        for word in (name, one.hugging_face, *one.aliases):
            found.setdefault(word, name)
    return found
