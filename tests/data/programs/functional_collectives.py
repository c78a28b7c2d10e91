"""What functional collectives keep of their input until somebody waits for their result: bytes before, at most, after."""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("nccl")
rank, group, N = dist.get_rank(), dist.group.WORLD, 1 << 20
torch.cuda.set_device(rank)
mesh = init_device_mesh("cuda", (2,))


def c(*sizes):
    return torch.ones(*sizes, device="cuda")


def sharded(*sizes):
    return distribute_tensor(c(*sizes), mesh, [Shard(0)])


for what, call in {
    "all_gather_tensor": lambda: functional.all_gather_tensor(c(N), 0, group),
    "of columns": lambda: functional.all_gather_tensor(c(N // 4, 4), 1, group),
    "reduce_scatter_tensor": lambda: functional.reduce_scatter_tensor(c(N), "sum", 0, group),
    "all_reduce": lambda: functional.all_reduce(c(N), "sum", group),
    "all_to_all_single": lambda: functional.all_to_all_single(c(N), None, None, group),
    "broadcast": lambda: functional.broadcast(c(N), 0, group),
    "all_gather_into_tensor_coalesced": lambda: functional.all_gather_into_tensor_coalesced([c(N), c(N)], group),
    "reduce_scatter_tensor_coalesced": lambda: functional.reduce_scatter_tensor_coalesced([c(N)] * 2, "sum", [0, 0], group),
    "to Replicate": lambda: sharded(N).redistribute(mesh, [Replicate()], async_op=True),
    "to Shard": lambda: sharded(N // 4, 4).redistribute(mesh, [Shard(1)], async_op=True),
}.items():
    torch.cuda.synchronize()
    time.sleep(0.3)  # NCCL's watchdog looks
    dist.all_reduce(c(4))
    torch.cuda.reset_peak_memory_stats()
    before, count = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    made = call()
    kept = torch.cuda.memory_allocated() - before
    c(N)
    for one in made if isinstance(made, list) else [made]:
        functional.wait_tensor(one.to_local() if hasattr(one, "to_local") else one)
    figures = kept, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    took = torch.cuda.memory_stats()["allocation.all.allocated"] - count
    os.write(1, f"rank{rank} {what}: {figures} {took}\n".encode())
    del made, one
