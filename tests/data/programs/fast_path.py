"""Evaluation of PyTorch's own transformer layers without gradients: allocations, bytes, and the peak of each call."""

import torch
from torch import nn

cuda = torch.cuda
torch.zeros(1, device="cuda")


def say(what, call):
    """Run it, and say what it took: number, bytes in all, and the most above what was there."""
    cuda.reset_peak_memory_stats()
    before = cuda.memory_stats()
    result = call()
    after = cuda.memory_stats()
    number = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    taken = after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"]
    print(what, number, taken, after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"])
    del result


@torch.no_grad()
def evaluate(size, heads, dtype):
    """Layers of one kind, with and without masks, of their input and of another."""
    like = {"device": "cuda", "dtype": dtype}
    x = torch.zeros(4, 100, size, **like)
    padding = torch.zeros(4, 100, dtype=torch.bool, device="cuda")
    padding[:, 90:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(100, **like)
    layer = nn.TransformerEncoderLayer(size, heads, 4 * size, batch_first=True, **like).eval()
    gelu = {"norm_first": True, "activation": "gelu"}
    first = nn.TransformerEncoderLayer(size, heads, 4 * size, batch_first=True, **gelu, **like).eval()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attention = nn.MultiheadAttention(size, heads, batch_first=True, **like).eval()
    decoder = nn.TransformerDecoderLayer(size, heads, 4 * size, batch_first=True, **like).eval()
    print(size, heads, dtype)
    say("layer", lambda: layer(x))
    say("layer, padded", lambda: layer(x, src_key_padding_mask=padding))
    say("layer, masked", lambda: layer(x, src_mask=causal, is_causal=True))
    say("norm first", lambda: first(x))
    say("encoder", lambda: encoder(x))
    say("encoder, padded", lambda: encoder(x, src_key_padding_mask=padding))
    say("attention", lambda: attention(x, x, x, need_weights=False))
    say("weights", lambda: attention(x, x, x))
    say("weights of heads", lambda: attention(x, x, x, average_attn_weights=False))
    say("attention, padded", lambda: attention(x, x, x, key_padding_mask=padding))
    say("attention, masked", lambda: attention(x, x, x, attn_mask=causal, need_weights=False))
    say("to another", lambda: attention(x, x[:, :50], x[:, :50]))
    say("decoder", lambda: decoder(x, x[:, :30]))
    say("decoder, masked", lambda: decoder(x, x, tgt_mask=causal, tgt_is_causal=True))
    with torch.autocast("cuda"):
        say("layer, autocast", lambda: layer(x))
        say("attention, autocast", lambda: attention(x, x, x))


for kind in (torch.float32, torch.bfloat16):
    evaluate(64, 4, kind)
    evaluate(36, 6, kind)
wide = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, device="cuda").eval()
long = torch.zeros(1, 1200, 32, device="cuda")
with torch.no_grad():
    say("more than 1024 tokens, padded", lambda: wide(long, src_key_padding_mask=torch.zeros(1, 1200, device="cuda") > 0))
