"""Convolutions with cuDNN's search for the best algorithm: the first of each kind gives back what is cached."""

import torch

torch.backends.cudnn.benchmark = True
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 32, 3, stride=2, padding=1)
).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for size in (96, 64, 96, 48):
    net(torch.randn(16, 3, size, size, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
