"""A whole training step in one CUDA graph, as PyTorch's notes on CUDA graphs show it: warmup, capture, replays."""
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from gpt_model import GPT

gpt = "gpt" in sys.argv
if gpt:
    model = GPT(vocab=512, dim=128, layers=2, heads=4, ctx=128).cuda()
    static_input = torch.randint(0, 512, (4, 128), device="cuda")
    static_target = torch.randint(0, 512, (4, 128), device="cuda")
else:
    model = nn.Sequential(nn.Linear(1024, 512), nn.Dropout(0.2), nn.Linear(512, 64), nn.Dropout(0.1)).cuda()
    static_input = torch.randn(256, 1024, device="cuda")
    static_target = torch.randn(256, 64, device="cuda")
adam = "adam" in sys.argv
optimizer = (torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True) if adam
             else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def loss_of():
    with torch.autocast("cuda", torch.bfloat16, enabled=gpt, cache_enabled=False):
        return model(static_input, static_target)[1] if gpt else F.mse_loss(model(static_input), static_target)


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_of().backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    static_loss = loss_of()
    static_loss.backward()
    optimizer.step()

for step in range(5):
    if gpt:
        static_input.copy_(torch.randint(0, 512, (4, 128), device="cuda"))
    else:
        static_input.copy_(torch.randn(256, 1024, device="cuda"))
    graph.replay()
    print(step, static_loss.item())
