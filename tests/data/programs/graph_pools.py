"""Inference by graphs of two sizes that share a pool, one given up; memory pools of one's own beside them."""
import torch
from gpt_model import GPT

model = GPT(vocab=512, dim=128, layers=2, heads=4, ctx=256).cuda().half().eval()
pool = torch.cuda.graph_pool_handle()
graphs = {}
with torch.no_grad():
    for length in (256, 128, 64):
        ids = torch.zeros(8, length, dtype=torch.long, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits, _ = model(ids)
        graphs[length] = graph, ids, logits
    for _ in range(3):
        for graph, ids, logits in graphs.values():
            ids.copy_(torch.randint(0, 512, tuple(ids.shape), device="cuda"))
            graph.replay()
    print(torch.cuda.is_current_stream_capturing(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    del graph, ids, logits
    graphs.pop(256)[0].reset()
    torch.cuda.empty_cache()
    print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

mine = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(mine):
    table = torch.randn(1024, 2048, device="cuda", requires_grad=True)
    held = [torch.empty(300_000, device="cuda") for _ in range(4)]
    (table * 2).sum().backward()
print(mine.use_count(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
lent = torch.cuda.MemPool(use_on_oom=True)
with torch.cuda.use_mem_pool(lent):
    big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
del big, held
graphs.clear()
torch.cuda.empty_cache()
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
del lent, mine
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
