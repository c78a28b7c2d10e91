"""What process groups tell of their backends, and what is built on it: by backend that the program asks for."""
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)


def tell(*words):
    print(" ".join(map(str, (f"rank{rank}", *words))) + "\n", end="", flush=True)


dist.init_process_group("nccl")
for backend in ("nccl", None, "gloo", "cpu:gloo,cuda:nccl"):
    group = dist.new_group([0, 1], backend=backend)
    tell(backend, dist.get_backend(group), dist.get_backend_config(group), [one.type for one in group._device_types])

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000).cuda(), device_ids=[rank])
model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
model(torch.randn(8, 1000, device="cuda")).sum().backward()
tell("FP16_COMPRESS", torch.cuda.max_memory_allocated())

sharded = torch.nn.Linear(1000, 1000)
fully_shard(sharded)
optimizer = torch.optim.AdamW(sharded.parameters())
sharded(torch.randn(2, 1000, device="cuda")).sum().backward()
optimizer.step()
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
state = get_optimizer_state_dict(sharded, optimizer, options=options)
set_optimizer_state_dict(sharded, optimizer, state, options=options)
tell("state is set")
