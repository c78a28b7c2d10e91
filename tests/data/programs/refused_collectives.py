"""Collectives that ProcessGroupNCCL refuses, and its words: what both ranks of a job ask for, then its first alone."""
import datetime
import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
HALF, INT, SHORT, BOOL, COMPLEX = torch.float16, torch.int32, torch.int16, torch.bool, torch.complex64


def c(*sizes, dtype=torch.float32):
    return torch.ones(*sizes, device="cuda", dtype=dtype)


def exchange(sent, received, rows):
    return lambda: dist.all_to_all_single(c(rows, 4), x, received, sent)


x, aside = c(8, 4), c(4, 8).t()
calls = [
    lambda: dist.all_reduce(aside), lambda: dist.broadcast(aside, 0), lambda: dist.reduce(aside, 0),
    lambda: dist.all_gather([x, x], aside), lambda: dist.reduce_scatter(aside, [x, x]),
    lambda: dist.all_to_all([aside, x], [x, x]), lambda: dist.all_reduce(c(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    lambda: dist.all_gather_into_tensor(c(17, 4), x), lambda: dist.all_gather_into_tensor(c(16, 4, dtype=INT), x),
    lambda: dist.all_gather_into_tensor(c(4, 16).t(), x), lambda: dist.all_gather_into_tensor(torch.ones(16, 4), x),
    lambda: dist.reduce_scatter_tensor(c(5, 4), x), lambda: dist.reduce_scatter_tensor(c(4, 4, dtype=HALF), x),
    lambda: dist.all_reduce(c(4, dtype=SHORT)), lambda: dist.all_to_all_single(c(4, dtype=SHORT), c(4, dtype=SHORT)),
    lambda: dist.all_reduce(c(4, dtype=COMPLEX)), lambda: dist.reduce_scatter_tensor(c(2, dtype=COMPLEX), c(4, dtype=COMPLEX)),
    lambda: dist.all_reduce(c(4, dtype=INT), dist.ReduceOp.BAND), lambda: dist.all_reduce(c(4, dtype=BOOL), dist.ReduceOp.AVG),
    lambda: dist.all_reduce(torch.eye(4).to_sparse().cuda()), lambda: dist.all_reduce(x, async_op=True).wait(datetime.timedelta(0, 5)),
    exchange([0, 0], [0, 0], 0), exchange([1, 1], [4, 4], 8), exchange([4, 4], [1, 1], 8), exchange([4], [4, 4], 8),
    exchange([4, 4], None, 8), exchange(None, None, 8), exchange(None, [3, 4], 7), lambda: dist.all_to_all_single(c(7, 4), c(7, 4), [3, 4]),
]
alone = [
    lambda: dist.gather(x, [x], 0), lambda: dist.gather(x, [x, c(8, 5)], 0), lambda: dist.scatter(x, [x], 0),
    lambda: dist.scatter(x, [x, c(9)], 0), lambda: dist.gather(c(4, dtype=SHORT), [c(4, dtype=SHORT)] * 2, 0),
]
for call in calls if rank else calls + alone:
    try:
        call()
        said = "goes on"
    except Exception as error:
        said = f"{type(error).__name__} {str(error).splitlines()[0]}"
    os.write(1, f"rank {rank}: {said}\n".encode())
