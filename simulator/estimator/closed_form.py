"""Closed-form estimates beside a simulation: LLMem's equations and DNNMem's sum for the case that was simulated.

The equations and every choice that the papers leave open are in `strategies.gemini.equations`; here is what they get:

- shapes are those of the model's parameters, tied ones once; layers are counted by the numbers in their names;
- logits are 2 bytes an element where the case's loss keeps the weights' 16-bit type (transformers-4.29), else 4;
- m_base is what the report sets aside outside the allocator;
- LLMem: `ddp` is CDP, methods that shard are ADP over their ranks, `tp` is TP, meshes are DP+TP by their axes. Its
  setting (fp16, Adam, full checkpointing, chunks) is part of the equations, whatever the case says;
- DNNMem: weights and gradients in the weights' type, Adam's states too (Gemini's: fp32);
  on several GPUs each holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from strategies import registry
from strategies.strategy import Kind
from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.case import Case
    from strategies.gemini.equations import Description

#: What may stand beside the simulation.
ESTIMATORS: Final = ("llmem", "dnnmem")


@dataclass(frozen=True)
class ClosedForm:
    """An estimator's peak of the device in bytes, by the paper's terms."""

    name: str
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum of the terms."""
        return sum(self.terms.values())

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"total": self.total, "terms": dict(self.terms)}


def closed_forms(case: Case, names: Iterable[str], base: int) -> tuple[ClosedForm, ...]:
    """The estimates of `names` for a case, with `base` bytes outside the allocator.

    Raises ConfigError for an unknown name, for inference, and for a model that the equations cannot describe.
    """
    asked = tuple(dict.fromkeys(name.lower() for name in names))
    for name in asked:
        if name not in ESTIMATORS:
            raise ConfigError(f"estimator {name[:40]!r} is not known; there are: simulation, {', '.join(ESTIMATORS)}")
    if not asked:
        return ()
    if case.task != "train":
        raise ConfigError(f"estimator {asked[0]}: its equations are of training; leave it out for inference")
    model = described(case)
    return tuple(ClosedForm(name, _terms(name, model, case, base)) for name in asked)


def described(case: Case) -> Description:
    """What the equations need to know of a case's model."""
    from graph.models.sources import build
    from strategies.gemini.equations import HALF, SINGLE, Description

    short = case.loss == "transformers-4.29" and case.dtype in ("fp16", "bf16")
    tensors = [(name, tuple(one.shape)) for name, one in build(case).module.named_parameters()]
    return Description.of(tensors, logits_bytes=HALF if short else SINGLE)


def _terms(name: str, model: Description, case: Case, base: int) -> Mapping[str, int]:
    from strategies.gemini.equations import HALF, SINGLE, dnnmem_peak, llmem_peak

    if name == "dnnmem":
        size = SINGLE if case.dtype == "fp32" else HALF
        states = SINGLE if registry.find(case).half_weights else size
        return dnnmem_peak(model, case.batch, case.seq, size=size, state_size=states, base=base).terms
    data, tensor = split(case)
    sharded = tensor > 1 or Kind.WHOLE not in registry.find(case).kinds(case)
    return llmem_peak(model, case.batch, case.seq, dp=data, tp=tensor, base=base, sharded=sharded).terms


def split(case: Case) -> tuple[int, int]:
    """(dp, tp) of a case as LLMem has them: the tensor axis, and all the rest of its GPUs."""
    alone = case.world if Kind.TENSOR in registry.find(case).kinds(case) else 1
    tensor = case.mesh.get("tp", 1) if case.mesh else alone
    return max(1, case.world // tensor), tensor
