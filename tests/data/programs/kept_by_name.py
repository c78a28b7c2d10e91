"""What ranks keep for each other in stores: a line for each answer."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
if sys.argv[1] == "nccl":
    torch.cuda.set_device(rank)


def told(what: str, found: object) -> None:
    os.write(1, f"rank {rank}: {what}: {found}\n".encode())  # a line at once: ranks share the stream


store = c10d._get_default_store()
port = int(os.environ["MASTER_PORT"]) + 1
at_port = dist.TCPStore("localhost", port, 2, rank == 0, datetime.timedelta(seconds=60))
for name, one in {"the group's": store, "prefixed": dist.PrefixStore("more", store), "at a port": at_port}.items():
    one.set(f"address/{rank}", f"of {rank}")
    told(f"{name}: get", one.get(f"address/{1 - rank}"))
    one.add("count", rank + 1)
    one.set(f"counted/{rank}", "yes")
    one.wait([f"counted/{1 - rank}"])
    told(f"{name}: add", one.add("count", 0))
    told(f"{name}: check", (one.check(["address/0", "address/1"]), one.check(["nothing"])))
    one.multi_set([f"a{rank}", f"b{rank}"], ["1", "2"])
    told(f"{name}: multi_get", one.multi_get([f"a{1 - rank}", f"b{1 - rank}"]))
    told(f"{name}: compare_set", one.compare_set("once", "", "by one"))
    one.set(f"gone{rank}", "")
    told(f"{name}: delete_key", (one.delete_key(f"gone{rank}"), one.check([f"gone{rank}"])))
    one.set_timeout(datetime.timedelta(seconds=1))
    try:
        one.get("nothing")
    except dist.DistStoreError:
        told(f"{name}: nothing", "timed out")
    one.set(f"done{rank}", "")
    one.set_timeout(datetime.timedelta(seconds=60))
    one.wait([f"done{1 - rank}"])
if sys.argv[1] == "nccl":
    group = dist.group.WORLD
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    group.barrier().wait()
    told("barrier of the group", torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    told("collectives of the group", group._get_sequence_number_for_group())
    told("its name", group.name())
dist.destroy_process_group()
