"""Streams and events by the names that any device has: memory made on one stream, used and freed on others."""

import torch

assert isinstance(torch.cuda.Stream(), torch.Stream)
side, third = torch.Stream(device="cuda"), torch.cuda.Stream()
ready = torch.Event(device="cuda")
weight = torch.randn(1024, 1024, device="cuda")
held = []
for step in range(6):
    with side as current:
        assert torch.cuda.current_stream().stream_id == current.stream_id == side.stream_id
        batch = torch.empty(512 + 64 * step, 1024, device="cuda")
        with third:
            noise = torch.rand_like(batch)
        assert torch.accelerator.current_stream() == side
        ready.record(side)
    torch.accelerator.current_stream().wait_event(ready)
    torch.accelerator.current_stream().wait_stream(third)
    for tensor in (batch, noise):
        tensor.record_stream(torch.accelerator.current_stream())
    held.append((batch + noise) @ weight)
    del batch, noise
    if step == 3:
        torch.accelerator.set_stream(third)
        held.clear()
    print(step, torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved())
torch.accelerator.synchronize()
torch.accelerator.empty_cache()
print(torch.accelerator.memory_reserved())
