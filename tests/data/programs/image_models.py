"""Trains each of these models of timm for two steps; prints what the allocator had.

    python image_models.py MODE NAME,NAME,...        (mode fp32, amp or channels_last, which is amp too)
"""
import gc
import sys

import timm
import torch

mode, names = sys.argv[1], sys.argv[2].split(",")
last = mode == "channels_last"
for name in names:
    model = optimizer = images = labels = loss = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        model = timm.create_model(name, pretrained=False, num_classes=10)
        size = model.default_cfg.get("input_size", (3, 224, 224))[-1]
        model = model.cuda()
        model.train()
        if last:
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            images = torch.randn(2, 3, size, size).cuda()
            if last:
                images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.zeros(2, dtype=torch.long).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mode != "fp32"):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        figures = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), made, torch.cuda.memory_allocated()
        print("R", name, mode, *figures, flush=True)
    except Exception as error:
        print("R", name, mode, type(error).__name__, flush=True)
