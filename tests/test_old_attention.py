"""Attention in the form of transformers 4.29: the same numbers as transformers 5 gives, from other tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, dict[str, Any]] = {
    "opt": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 50},
    "biogpt": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
    "codegen": {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "vocab_size": 50},
    "llama": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
}


@pytest.mark.parametrize("kind", SMALL)
def test_same_numbers(kind: str) -> None:
    from graph.old_attention import like_transformers_4_29

    torch.manual_seed(0)
    keys = {"vocab_size": 50, "pad_token_id": 1, **SMALL[kind]}
    config = transformers.AutoConfig.for_model(kind, **keys)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    given = {"input_ids": torch.randint(3, 50, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    expected = module(**given, use_cache=False).logits
    like_transformers_4_29(module)
    for name, buffer in module.named_buffers():
        if name.endswith("causal_mask"):  # a capture gives it no values
            buffer.copy_(torch.ones_like(buffer).tril())
    found = module(**given, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_what_is_replaced() -> None:
    from graph.old_attention import like_transformers_4_29

    config = transformers.AutoConfig.for_model("codegen", **SMALL["codegen"], attn_pdrop=0.0, resid_pdrop=0.1)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    like_transformers_4_29(module, cloned=True)
    attention = module.transformer.h[0].attn
    assert attention.causal_mask.shape == (1, 1, 64, 64)
    assert attention.causal_mask.dtype == torch.bool
    given = torch.ones(3)
    assert attention.attn_dropout(given) is not given
    assert torch.equal(attention.attn_dropout(given), given)
    assert "forward" not in attention.resid_dropout.__dict__
