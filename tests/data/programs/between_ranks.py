"""What ranks say to each other by every collective, on the device that is given: a line for each answer."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

device = sys.argv[1]
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank)


def one(number: float) -> torch.Tensor:
    return torch.tensor([number], device=device)


def told(what: str, found: object) -> None:
    os.write(1, f"rank {rank}: {what}: {found}\n".encode())  # a line at once: ranks share the stream


for source in range(world):
    number = one(rank + 5)
    dist.broadcast(number, source)
    told(f"broadcast of {source}", number.tolist())
for op in ("SUM", "MAX", "MIN", "PRODUCT"):
    number = one(rank + 5)
    dist.all_reduce(number, op=getattr(dist.ReduceOp, op))
    told(op, number.tolist())
number = one(rank + 0.5)
dist.all_reduce(number)
told("sum of floats", number.tolist())
number = one(rank + 5)
dist.reduce(number, 1)
if rank == 1:
    told("reduce", number.tolist())
parts = [torch.empty(1, dtype=torch.long, device=device) for _ in range(world)]
dist.all_gather(parts, one(rank + 5))
told("all_gather", torch.cat(parts).tolist())
whole = torch.empty(world, dtype=torch.long, device=device)
dist.all_gather(list(whole.chunk(world)), one(rank + 5))
told("all_gather into parts of one", whole.tolist())
dist.all_gather_into_tensor(whole, one(rank + 6))
told("all_gather_into_tensor", whole.tolist())
gathered = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(world)] if rank == 1 else None
dist.gather(one(rank + 5), gathered, 1)
if gathered:
    told("gather", torch.cat(gathered).tolist())
row = torch.zeros(2, dtype=torch.long, device=device)
dist.scatter(row, [torch.arange(2, device=device) + 10 * k for k in range(world)] if rank == 0 else None, 0)
told("scatter", row.tolist())

sizes = torch.tensor([1 + rank, 2], device=device)
theirs = torch.empty_like(sizes)
dist.all_to_all_single(theirs, sizes)
taken = torch.empty(int(theirs.sum()), dtype=torch.long, device=device)
given = torch.arange(3 + rank, device=device) + 100 * rank
dist.all_to_all_single(taken, given, theirs.tolist(), sizes.tolist())
told("all_to_all_single", taken.tolist())

buffer = torch.empty(8, dtype=torch.int32, device=device)
if rank == 0:
    buffer[:3] = torch.tensor([2, 3, 4], dtype=torch.int32)
    dist.send(buffer, 1)
    dist.send_object_list(["x", {"sizes": [3]}], 1)
if rank == 1:
    dist.recv(buffer, 0)
    told("recv", buffer[:3].tolist())
    objects = [None, None]
    dist.recv_object_list(objects, 0)
    told("recv_object_list", objects)
right, left = one(rank), one(-1)
for work in dist.batch_isend_irecv(
    [dist.P2POp(dist.irecv, left, (rank - 1) % world), dist.P2POp(dist.isend, right, (rank + 1) % world)]
):
    work.wait()
told("from the left", left.tolist())

objects = [{"of": rank}, "second"] if rank == 0 else [None, None]
dist.broadcast_object_list(objects, 0)
told("broadcast_object_list", objects)
everybodys = [None] * world
dist.all_gather_object(everybodys, "x" * (rank + 1))
told("all_gather_object", everybodys)
collected = [None] * world if rank == 1 else None
dist.gather_object(rank, collected, 1)
told("gather_object", collected)
mine = [None]
dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, 0)
told("scatter_object_list", mine)

told("functional", functional.all_reduce(one(rank + 5), "sum", dist.group.WORLD).tolist())
host = torch.tensor([rank + 5])
dist.all_reduce(host, group=dist.new_group(backend="gloo"))
told("on the host", host.tolist())
pair = dist.new_group([0, 1])
number = one(rank + 7)
dist.broadcast(number, 0, group=pair)
told("in a group", number.tolist())
dist.destroy_process_group()
