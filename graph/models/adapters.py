"""Low-rank adapters on a model, by peft as its users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from traces.errors import ConfigError
from traces.text import reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: peft's `task_type` by the head of the model; None for others
_TASKS: Final = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
}


def with_lora(
    module: PreTrainedModel, rank: int, targets: tuple[str, ...], head: str, device: str, place: str
) -> tuple[Any, tuple[str, ...]]:
    """`module` with LoRA of this rank on the modules of these names, alpha 16; what was assumed.

    No names: those that peft takes for the architecture, or all linear layers but the head where it has no list.
    `device`: where the adapters are made ("meta", or "cuda" on a model that is there already). Raises ConfigError if
    peft is missing or refuses.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(f"key 'lora': needs peft ({error}); pip install 'vramsim[torch]'") from None
    options: dict[str, Any] = {"r": rank, "lora_alpha": 16, "task_type": _TASKS.get(head)}
    if targets:
        options["target_modules"] = targets[0] if targets == ("all-linear",) else list(targets)
    routers = _routers(module)
    if routers and targets == ("all-linear",):
        raise ConfigError(
            f"key 'lora_targets': peft adapts every linear layer, also {', '.join(routers)} of {place}, whose output "
            "it cannot add to; name the modules"
        )
    with torch.device(device):
        try:
            adapted = get_peft_model(module, LoraConfig(**options))
            return adapted, _on_experts(adapted)
        except ValueError as error:
            if targets or "target_modules" not in str(error):
                raise refused(place, error) from None
        try:
            adapted = get_peft_model(
                module, LoraConfig(**options, target_modules="all-linear", exclude_modules=routers)
            )
        except ValueError as error:
            raise refused(place, error) from None
    but = " and ".join(("the head", *routers))
    stated = f"lora: on all linear layers but {but}, as peft has no list for this architecture"
    return adapted, (stated, *_on_experts(adapted))


def _routers(module: torch.nn.Module) -> list[str]:
    """Names of linear layers that give more than their product, as Llama 4's routers do; peft's own layers cannot."""
    kinds = {name.rpartition(".")[2]: type(part) for name, part in module.named_modules()}
    return sorted(
        name
        for name, kind in kinds.items()
        if issubclass(kind, torch.nn.Linear)
        and kind.__module__.startswith("transformers.models.")
        and kind.forward is not torch.nn.Linear.forward
    )


def _on_experts(adapted: torch.nn.Module) -> tuple[str, ...]:
    """What is trained of a mixture's experts, in words; nothing where they have no adapters."""
    trained = {name: one.numel() for name, one in adapted.named_parameters() if one.requires_grad}
    on_experts = sum(size for name, size in trained.items() if "experts" in name.split("."))
    if not on_experts:
        return ()
    return (
        f"lora: {on_experts:,} of the {sum(trained.values()):,} trained parameters are adapters of experts; "
        "'lora_targets' names other modules",
    )


def refused(place: str, error: ValueError) -> ConfigError:
    """What is said where peft does not adapt the model of `place`."""
    return ConfigError(f"key 'lora': peft cannot adapt the model of {place}: {reason(error)}")
