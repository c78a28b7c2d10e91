"""A graph of convolutions and a matrix product with cuDNN's search on: its workspaces end with its stream."""

import torch

torch.backends.cudnn.benchmark = True
net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(64 * 1024, 10))
net = net.cuda().eval().requires_grad_(False)
images = torch.randn(16, 3, 32, 32, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    net(images)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    found = net(images)
graph.replay()
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
del found, graph
torch.cuda.empty_cache()
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
torch.nn.functional.linear(images.flatten(1), torch.randn(64, 3072, device="cuda"))
