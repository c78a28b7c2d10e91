"""What pipelines keep of their messages: memory after each step and its peak, by schedule, in two ranks."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
CHUNKS, CHUNK, WIDTH = 8, 4, 128


def stage(number, count):
    layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    given = torch.empty(CHUNK, 16, WIDTH, device=device, requires_grad=number > 0)
    made = torch.empty(CHUNK, 16, WIDTH, device=device, requires_grad=True)
    return PipelineStage(layers, number, count, device, input_args=(given,), output_args=(made,))


def run(name, mine, count):
    stages = [stage(number, count) for number in mine]
    kind = getattr(schedules, f"Schedule{name}")
    schedule = kind(stages if count > 2 else stages[0], CHUNKS, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([p for one in stages for p in one.submod.parameters()])
    data = torch.randn(CHUNKS * CHUNK, 16, WIDTH, device=device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        schedule.step(*((data,) if 0 in mine else ()), **({"target": data} if count - 1 in mine else {}))
        figures = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        print(" ".join(map(str, (f"rank{rank}", name, *figures))) + "\n", end="", flush=True)


for name in ("GPipe", "1F1B"):
    run(name, [rank], 2)
for name in ("Interleaved1F1B", "LoopedBFS"):
    run(name, [rank, rank + 2], 4)
dist.destroy_process_group()
