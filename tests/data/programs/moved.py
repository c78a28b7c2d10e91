"""A model in FSDP2 that is put on the host between steps, as trainers of reinforcement learning put it: peaks, bytes in
use and allocations."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(3)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(32, 1000, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for place in ("cpu", "cuda"):
        model.to(place)
        stats = torch.cuda.memory_stats()
        told = stats["allocated_bytes.all.peak"], torch.cuda.memory_allocated(), stats["allocation.all.allocated"]
        os.write(1, f"rank{dist.get_rank()} {place} {told}\n".encode())
