"""Trains a small GPT-2 on batches of several lengths; prints the peaks of each step."""
import json
import torch
from transformers import GPT2Config, GPT2LMHeadModel

LENGTHS = [70, 33, 128, 20, 111, 64, 128, 50]
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000, n_positions=128, use_cache=False))
model = model.to(device="cuda", dtype=torch.bfloat16).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
peaks = []
inputs = {}
for length in LENGTHS:
    inputs["input_ids"] = torch.zeros(4, length, dtype=torch.int64).to("cuda")
    loss = model(input_ids=inputs["input_ids"], labels=inputs["input_ids"]).loss
    loss.backward()
    optimizer.step()
    peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()])
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    del loss
print(json.dumps(peaks))
