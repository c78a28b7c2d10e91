"""Every collective of torch.distributed that takes tensors, and after each: allocated bytes, their peak since the last,
allocations so far and reserved bytes. For torchrun, two ranks."""
import os

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
lines = []


def said(what):
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocated_bytes.all.peak", "allocation.all.allocated", "reserved_bytes.all.current"
    lines.append(" ".join([f"rank{rank} {what}", *(str(stats[name]) for name in names)]))
    torch.cuda.reset_peak_memory_stats()


def zeros(count, dtype=torch.float32):
    return torch.zeros(count, dtype=dtype, device="cuda")


N = 1 << 20
x, flags = zeros(N), zeros(N, torch.bool)
apart, whole = [zeros(N) for _ in range(world)], zeros(N * world)
chunks = list(whole.chunk(world))
said("tensors")
dist.all_reduce(x); said("all_reduce")
dist.all_reduce(flags); said("all_reduce of booleans")
dist.broadcast(x, 0); said("broadcast")
dist.reduce(x, 0); said("reduce")
dist.all_gather(apart, x); said("all_gather")
dist.all_gather(chunks, x); said("all_gather into chunks")
dist.all_gather_into_tensor(whole, x); said("all_gather_into_tensor")
dist.reduce_scatter(x, apart); said("reduce_scatter")
dist.reduce_scatter_tensor(x, whole); said("reduce_scatter_tensor")
dist.gather(x, apart if rank == 0 else None, dst=0); said("gather")
dist.scatter(x, apart if rank == 0 else None, src=0); said("scatter")
dist.all_to_all(chunks, apart); said("all_to_all")
dist.all_to_all_single(whole.clone(), whole); said("all_to_all_single")
work = dist.all_gather(apart, x, async_op=True); said("all_gather begins")
work.wait(); said("all_gather ends")
del work; said("all_gather is dropped")
work = dist.all_reduce(x, async_op=True); said("all_reduce begins")
work.wait(); del work; said("all_reduce is dropped")
uneven = [zeros(N * (place + 1)) for place in range(world)]; said("uneven tensors")
dist.all_gather(uneven, uneven[rank].clone()); said("all_gather of uneven tensors")
dist.reduce_scatter(uneven[rank].clone(), uneven); said("reduce_scatter of uneven tensors")
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x, 0)
said("send, recv")
both = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, apart[0], 1 - rank)]
for work in dist.batch_isend_irecv(both):
    work.wait()
del work, both; said("batch_isend_irecv")
ranks = list(range(world))
made = all_gather_tensor(x, 0, ranks) + 1; said("all_gather_tensor")
made = reduce_scatter_tensor(whole, "sum", 0, ranks) + 1; said("reduce_scatter_tensor, functional")
made = all_reduce(x, "sum", ranks) + 1; said("all_reduce, functional")
dist.all_reduce(zeros(N, torch.complex64)); said("all_reduce of complex numbers")
print("\n".join(lines), flush=True)
dist.destroy_process_group()
