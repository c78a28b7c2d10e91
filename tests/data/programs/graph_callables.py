"""Parts of a network as graphed callables, data-dependent control flow between them (PyTorch's notes on CUDA graphs)."""
import torch
import torch.nn as nn

N, D_in, H, D_out = 256, 1024, 512, 128
module1 = nn.Linear(D_in, H).cuda()
module2 = nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, D_out)).cuda()
module3 = nn.Linear(H, D_out).cuda()
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD([*module1.parameters(), *module2.parameters(), *module3.parameters()], lr=0.1)

x = torch.randn(N, D_in, device="cuda")
h = torch.randn(N, H, device="cuda", requires_grad=True)
module1 = torch.cuda.make_graphed_callables(module1, (x,))
module2, module3 = torch.cuda.make_graphed_callables((module2, module3), ((h,), (h,)))

for step in range(6):
    optimizer.zero_grad(set_to_none=True)
    tmp = module1(torch.randn(N, D_in, device="cuda"))
    tmp = module2(tmp) if step % 2 else module3(tmp)
    loss = loss_fn(tmp, torch.randn(N, D_out, device="cuda"))
    loss.backward()
    optimizer.step()
    print(step, loss.item())
