"""Attention and masks in the form of transformers 4.29: the numbers of transformers 5, from other tensors."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import graph.fake_cuda  # noqa: E402, F401 - before any backward
from graph.errors import CaptureError  # noqa: E402

transformers = pytest.importorskip("transformers")

SMALL: dict[str, dict[str, Any]] = {
    "opt": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 50},
    "biogpt": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
    "codegen": {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "vocab_size": 50},
    "bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "hidden_size": 32, "num_heads": 4},
    "llama": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
}


@pytest.mark.parametrize("kind", SMALL)
def test_same_numbers(kind: str) -> None:
    from graph.models.transformers_4_29.attention import like_transformers_4_29
    from graph.models.transformers_4_29.masks import like_transformers_4_29 as old_masks

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
    own = vars(sys.modules[type(module).__module__])["create_causal_mask"]
    with old_masks(kind, module):
        found = module(**given, use_cache=False).logits
    assert vars(sys.modules[type(module).__module__])["create_causal_mask"] is own
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def copies(cloned: bool) -> tuple[int, int]:
    """How many copies a checkpointed CodeGen makes in forward and in backward."""
    from graph.models.transformers_4_29.attention import like_transformers_4_29

    config = transformers.AutoConfig.for_model("codegen", **SMALL["codegen"], attn_pdrop=0.0, resid_pdrop=0.1)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": True})
    module.enable_input_require_grads()
    like_transformers_4_29(module, cloned=cloned)
    with Copies() as forward:
        loss = module(torch.ones(1, 8, dtype=torch.long), use_cache=False).logits.sum()
    with Copies() as backward:
        loss.backward()
    return forward.number, backward.number


def test_dropout_without_chance_copies_also_in_checkpoints() -> None:
    (forward, backward), (more, again) = copies(False), copies(True)
    assert more - forward == 3  # embeddings, and attention's weights in two layers
    assert again - backward == 2


def test_what_is_replaced() -> None:
    from graph.models.transformers_4_29.attention import like_transformers_4_29

    config = transformers.AutoConfig.for_model("codegen", **SMALL["codegen"])
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    like_transformers_4_29(module)
    attention = module.transformer.h[0].attn
    assert attention.causal_mask.shape == (1, 1, 64, 64)
    assert attention.causal_mask.dtype == torch.bool


def test_indexing_of_torch_2_0_has_a_node_for_whole_dimensions() -> None:
    from graph.models.transformers_4_29.attention import _WholeSlices

    given = torch.arange(120.0).view(2, 3, 4, 5).requires_grad_()
    for index in ((slice(None), slice(1, None), 0), (..., slice(None), slice(None, None, 2)), (0, None, ..., slice(2))):
        with _WholeSlices():
            found = given[index]
        assert torch.equal(found, given[index])
    with _WholeSlices():
        last = given[:, :, :, ::2].grad_fn
    nodes = 0
    while type(last).__name__ == "SliceBackward0":
        last, nodes = last.next_functions[0][0], nodes + 1
    assert nodes == 4


def test_a_class_that_transformers_wrote_anew_is_an_error() -> None:
    """CodeGen's attention of 5.24 has nothing that could be replaced."""
    from graph.models.transformers_4_29.attention import like_transformers_4_29

    anew: Any = type("CodeGenAttention", (torch.nn.Module,), {})
    with pytest.raises(CaptureError, match=r'CodeGenAttention of transformers .*: install "transformers<5.24"'):
        like_transformers_4_29(anew())
