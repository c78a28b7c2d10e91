"""Trains a small model of each of these types of transformers for two steps; prints what the allocator had.

    python language_models.py MODE TYPE,TYPE,...        (mode fp32, amp or bf16)
"""
import gc
import sys
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 256),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 256},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"rotary_dim": 32, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def small(config, depth=0):
    for name, size in SIZES.items():
        try:
            now = getattr(config, name)
            if type(now) is int or (now is None and name in ("pad_token_id", "head_dim")):
                latent = hasattr(config, "qk_rope_head_dim")  # its keys have parts of their own sizes, for all heads
                if not latent or name not in ("head_dim", "num_key_value_heads"):
                    setattr(config, name, size)
                elif name == "num_key_value_heads":
                    setattr(config, name, 4)
        except Exception:  # there is none, or it is each layer's own
            pass
    try:
        kinds = list(dict.fromkeys(config.layer_types))
        config.layer_types = [kinds[0], kinds[-1]]
    except Exception:
        pass
    for name in dir(config):
        if name.endswith("_config") and depth < 2 and hasattr(getattr(config, name, None), "to_dict"):
            small(getattr(config, name), depth + 1)
    return config


mode, kinds = sys.argv[1], sys.argv[2].split(",")
for kind in kinds:
    model = optimizer = tokens = out = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        model = AutoModelForCausalLM.from_config(small(AutoConfig.for_model(kind)), dtype=dtype)
        if sum(parameter.numel() for parameter in model.parameters()) > 3e8:
            print("R", kind, mode, "large", flush=True)
            continue
        model = model.cuda()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            tokens = torch.randint(3, 900, (2, 96)).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mode == "amp"):
                out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        figures = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), made, torch.cuda.memory_allocated()
        print("R", kind, mode, *figures, flush=True)
    except Exception as error:
        print("R", kind, mode, type(error).__name__, flush=True)
