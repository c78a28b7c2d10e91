"""The small models of the worked examples, as functions that a case can name (`tests.support.worked_models:mlp`)."""

from __future__ import annotations

import torch
from torch import nn

TOKENS = 64


class MLP(nn.Module):
    """Linear 256 -> 512, ReLU, Linear 512 -> 255: 262,399 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList([nn.Linear(256, 512), nn.Linear(512, 255)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 256] -> [tokens, 255]."""
        out: torch.Tensor = self.fc[1](torch.relu(self.fc[0](x)))
        return out


class Block(nn.Module):
    """Linear 256 -> 512, ReLU, Linear 512 -> 256."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(256, 512)
        self.fc2 = nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 256] -> [tokens, 256]."""
        out: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return out


class Blocks(nn.Module):
    """Four blocks; `checkpointing`: "", "reentrant" or "nonreentrant"."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 256] -> [tokens, 256]; the input needs a gradient, as the first of many layers' would."""
        from torch.utils.checkpoint import checkpoint

        x.requires_grad_()
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return x


def total(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is one value for all."""
    return out.sum()


class Entered(MLP):
    """The MLP on an input that needs a gradient, as that of a layer among others does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 256] -> [tokens, 255]."""
        return super().forward(x.requires_grad_())


def mlp() -> tuple[nn.Module, torch.Tensor, object]:
    """The MLP of the examples on 64 tokens."""
    return MLP(), torch.empty(TOKENS, 256), total


def blocks() -> tuple[nn.Module, torch.Tensor, object]:
    """Four blocks on 64 tokens."""
    return Blocks(""), torch.empty(TOKENS, 256), total


def blocks_reentrant() -> tuple[nn.Module, torch.Tensor, object]:
    """Four blocks with reentrant checkpointing of each."""
    return Blocks("reentrant"), torch.empty(TOKENS, 256), total


def blocks_nonreentrant() -> tuple[nn.Module, torch.Tensor, object]:
    """Four blocks with non-reentrant checkpointing of each."""
    return Blocks("nonreentrant"), torch.empty(TOKENS, 256), total


def mlp_entered() -> tuple[nn.Module, torch.Tensor, object]:
    """The MLP of the examples on 64 tokens that need a gradient."""
    return Entered(), torch.empty(TOKENS, 256), total


def mlp_lora() -> tuple[nn.Module, torch.Tensor, object]:
    """The MLP in bf16 with LoRA of rank 8 on its first layer, as peft makes it."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(MLP().to(torch.bfloat16), LoraConfig(r=8, lora_alpha=16, target_modules=["fc.0"]))
    return adapted, torch.empty(TOKENS, 256, dtype=torch.bfloat16), total
