"""nn.DataParallel on a machine with one GPU, as older scripts have it: batches come by a copy on a stream of its own."""

import torch

model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)))
model = model.cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    inputs, labels = torch.randn(256 + 64 * step, 512), torch.zeros(256 + 64 * step, dtype=torch.long)
    if step == 3:  # already there
        inputs = inputs.cuda()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels.cuda(non_blocking=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
