"""Low-rank adapters on a model, by peft as its users call it."""

from __future__ import annotations

from typing import Any, Final

import torch

from traces.errors import ConfigError

#: peft's `task_type` by the head of the model
_TASKS: Final = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "masked-lm": None,
    "image-classification": None,
}


def with_lora(module: Any, rank: int, head: str, device: str, place: str) -> Any:
    """`module` with LoRA of this rank on the modules that peft takes for its architecture, alpha 16.

    `device`: where the adapters are made ("meta", or "cuda" on a model that is there already). Raises ConfigError if
    peft is missing or knows no modules for the architecture.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(f"key 'lora': needs peft ({error}); pip install 'llmem[torch]'") from None
    try:
        with torch.device(device):
            return get_peft_model(module, LoraConfig(r=rank, lora_alpha=16, task_type=_TASKS[head]))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"key 'lora': peft cannot adapt the model of {place}: {reason}") from None
