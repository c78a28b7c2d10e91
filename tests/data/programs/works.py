"""What works of asynchronous collectives and messages keep, until they are waited for, or seen to be complete by NCCL's
watchdog: after each step allocated bytes, their peak since the last, allocations so far. For torchrun, two ranks."""
import os
import random
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
lines = []


def said(what):
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocated_bytes.all.peak", "allocation.all.allocated"
    lines.append(" ".join([f"rank{rank} {what}", *(str(stats[name]) for name in names)]))
    torch.cuda.reset_peak_memory_stats()


def new(mib):
    return torch.ones(mib << 18, device="cuda")


def two(mib):
    return [new(mib) for _ in range(world)]


def on_first(made):
    return made if rank == 0 else None


def some_time():
    """The watchdog looks meanwhile: 100 ms, or as many operators as a host may issue in that time."""
    time.sleep(random.uniform(0.2, 0.3) * float(os.environ.get("PAUSE", "1")))
    for _ in range(2100):
        small.add_(1)


KINDS = {
    "all_reduce": lambda: (given := new(8), None, dist.all_reduce(given, async_op=True)),
    "broadcast": lambda: (given := new(8), None, dist.broadcast(given, 0, async_op=True)),
    "reduce": lambda: (given := new(8), None, dist.reduce(given, 0, async_op=True)),
    "reduce_scatter_tensor": lambda: (
        given := new(8), out := new(4), dist.reduce_scatter_tensor(out, given, async_op=True)),
    "all_gather_into_tensor": lambda: (
        given := new(4), out := new(8), dist.all_gather_into_tensor(out, given, async_op=True)),
    "all_to_all_single": lambda: (given := new(8), out := new(8), dist.all_to_all_single(out, given, async_op=True)),
    "all_gather": lambda: (given := new(4), out := two(4), dist.all_gather(out, given, async_op=True)),
    "reduce_scatter": lambda: (given := two(4), out := new(4), dist.reduce_scatter(out, given, async_op=True)),
    "all_to_all": lambda: (given := two(4), out := two(4), dist.all_to_all(out, given, async_op=True)),
    "gather": lambda: (given := new(4), out := on_first(two(4)), dist.gather(given, out, async_op=True)),
    "scatter": lambda: (given := on_first(two(4)), out := new(4), dist.scatter(out, given, async_op=True)),
    "isend, irecv": lambda: (
        given := new(4), None, dist.isend(given, 1) if rank == 0 else dist.irecv(given, 0)),
    "batch_isend_irecv": lambda: (
        given := new(4), out := new(8),
        dist.batch_isend_irecv([dist.P2POp(dist.isend, given, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)])),
}
#: Those whose future a program cannot wait for on every rank.
NO_FUTURE = "gather", "scatter", "isend, irecv", "batch_isend_irecv"
said("nothing")
small = torch.ones(1, device="cuda")
for way in ("wait", "wait for the future", "do not wait"):
    for name, issue in KINDS.items():
        given, out, work = issue(); said(f"{name} is issued")
        given = None; said(f"{name} without what was given")
        if way == "wait":
            for one in work if isinstance(work, list) else [work]:
                one.wait()
            del one
        elif way == "wait for the future" and name not in NO_FUTURE:
            work.get_future().wait()
        said(f"{name}: {way}")
        out = None; said(f"{name} without what came out")
        work = None; said(f"{name} without its work")
        new(1); said("another tensor")
        dist.all_reduce(small); said("another collective")
        if way != "wait":
            some_time()
            dist.all_reduce(small); said("another collective, some time later")
for kept in (False, True):
    together = new(8)
    work = dist.all_reduce(together, async_op=True)
    del together
    work = work if kept else None
    some_time(); said("some time later")
    new(1); said("another tensor")
    dist.all_reduce(small); said("another collective")
    work = None; said("without the work")
for at_once in (True, False):
    several = [new(2) for _ in range(3)]
    with _coalescing_manager(device=torch.device("cuda", rank), async_ops=not at_once) as manager:
        for one in several:
            dist.all_reduce(one)
    said("several as one")
    del several, one; said("several as one without them")
    if not at_once:
        manager.wait()
    said("several as one have ended")
    del manager; said("several as one without their work")
print("\n".join(lines), flush=True)
dist.destroy_process_group()
