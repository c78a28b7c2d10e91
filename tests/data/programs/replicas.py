"""Models under DDP, one after another in a process: what the reducers' works keep of them when they are gone, until the
next one's collectives. After each step allocated bytes, their peak since the last model, allocations so far. For torchrun,
two ranks."""
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
lines = []


def said(what):
    """NCCL's watchdog has looked: 100 ms."""
    torch.cuda.synchronize()
    time.sleep(float(os.environ.get("PAUSE", "0.25")))
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocated_bytes.all.peak", "allocation.all.allocated"
    lines.append(" ".join([f"rank{rank} {what}", *(str(stats[name]) for name in names)]))


def trained(name, micro=1, **settings):
    torch.cuda.reset_peak_memory_stats()
    parts = [torch.nn.Linear(700, 1300), torch.nn.Tanh(), torch.nn.Linear(1300, 2600), torch.nn.Linear(2600, 700)]
    model = DistributedDataParallel(torch.nn.Sequential(*parts).cuda(), device_ids=[rank], bucket_cap_mb=4, **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        for _ in range(micro - 1):
            with model.no_sync():
                model(torch.ones(64, 700, device="cuda")).sum().backward()
        model(torch.ones(64, 700, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        said(f"{name} step {step}")


for name, settings in {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "accumulating": {"micro": 3},
}.items():
    trained(name, **settings)
    said(f"{name} is gone")
print("\n".join(lines), flush=True)
dist.destroy_process_group()
