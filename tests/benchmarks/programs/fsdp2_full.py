"""Full fine-tuning of a large model with FSDP2, bf16 parameters and AdamW: torchrun --nproc-per-node 8 fsdp2_full.py"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parent / (sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-70b")
SEQUENCE = 4096


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16, use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(3):
        tokens = torch.randint(0, 128256, (1, SEQUENCE)).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {torch.cuda.max_memory_reserved()} bytes reserved", flush=True)
    dist.destroy_process_group()


main()
