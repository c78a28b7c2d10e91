"""Quantization that training pretends, with scales and zero points that are learnt: what each call and its backward take."""

import itertools

import torch

DEVICE = "cuda"


def told(*what):
    stats = torch.cuda.memory_stats()
    figures = (stats[f"allocat{key}"] for key in ("ion.all.allocated", "ed_bytes.all.peak", "ed_bytes.all.current"))
    print(*what, *figures, flush=True)
    torch.cuda.reset_peak_memory_stats()


def trained(by_channel, source, scale, zero_point):
    if by_channel:
        made = torch._fake_quantize_learnable_per_channel_affine(source, scale, zero_point, 1, -128, 127, 1.0)
    else:
        made = torch._fake_quantize_learnable_per_tensor_affine(source, scale, zero_point, -128, 127)
    told("forward")
    made.sum().backward()
    told("backward")


LAYOUTS = [((64, 32), torch.contiguous_format), ((16, 64, 8, 8), torch.channels_last), ((5, 64, 9, 8), None)]
for dtype, (shape, layout), by_channel in itertools.product(
    (torch.float32, torch.bfloat16, torch.float16), LAYOUTS, (False, True)
):
    for of_scale in sorted({dtype, torch.float32}, key=str):
        source = torch.randn(*shape, device=DEVICE).to(dtype)
        source = (source.to(memory_format=layout) if layout else source.transpose(2, 3)).requires_grad_()
        count = shape[1] if by_channel else 1
        scale = torch.ones(count, device=DEVICE, dtype=of_scale, requires_grad=True)
        zero_point = torch.zeros(count, device=DEVICE, dtype=of_scale, requires_grad=True)
        told(str(dtype), shape, layout, by_channel, of_scale)
        try:
            trained(by_channel, source, scale, zero_point)
        except RuntimeError as error:
            told(str(error).split("\n")[0])
