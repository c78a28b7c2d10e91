"""Fourier transforms of tensors that lie in several ways: allocations, and the peak of each call, with its strides."""

import time

import torch

torch.zeros(1, device="cuda")
fft = torch.fft


def memory():
    """Number of allocations, bytes now and at the peak; autograd's thread has let go of what it had."""
    time.sleep(0.002)
    figures = torch.cuda.memory_stats()
    return [figures[name] for name in ("allocation.all.allocated", "allocated_bytes.all.current", "allocated_bytes.all.peak")]


def say(name, call):
    """Run it, and say what it took and how its result lies."""
    torch.cuda.reset_peak_memory_stats()
    number, held, _ = memory()
    try:
        result = call()
    except RuntimeError as error:
        print(name, error)
        return None
    after = memory()
    print(name, after[0] - number, after[2] - held, *result.shape, "by", *result.stride(), str(result.dtype)[6:])
    return result


def lying(how, shape, dtype):
    """A tensor of a shape: by its name, strided, part of a larger one, or expanded."""
    if how == "transposed":
        return torch.empty(shape[::-1], dtype=dtype, device="cuda").permute(*range(len(shape))[::-1])
    if how == "gaps":
        return torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype, device="cuda")[..., ::2]
    if how == "offset":
        return torch.empty(torch.Size(shape).numel() + 1, dtype=dtype, device="cuda")[1:].view(shape)
    if how == "expanded":
        return torch.empty(1, *shape[1:], dtype=dtype, device="cuda").expand(shape)
    return torch.empty(shape, dtype=dtype, device="cuda")


def both(name, function, source):
    """A transform and its derivative."""
    source.requires_grad_()
    out = say(name, lambda: function(source))
    if out is not None:
        gradient = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cuda")
        say(name + ", backward", lambda: torch.autograd.grad(out, source, gradient)[0])


REAL = {
    "fft": fft.fft,
    "rfft": lambda x: fft.rfft(x, norm="ortho"),
    "rfft longer": lambda x: fft.rfft(x, n=60),
    "ihfft": lambda x: fft.ihfft(x, dim=0),
    "ifft2": lambda x: fft.ifft2(x).real,
    "rfft2 of the first": lambda x: fft.rfft2(x, dim=(0, 1)),
    "rfftn": fft.rfftn,
}
COMPLEX = {
    "fft": fft.fft,
    "fft of the first": lambda x: fft.fft(x, dim=0, norm="forward"),
    "irfft": lambda x: fft.irfft(x, n=40),
    "hfft": fft.hfft,
    "fftn": fft.fftn,
    "irfft2 of the first": lambda x: fft.irfft2(x, dim=(0, 1)),
    "irfftn": fft.irfftn,
}
for how in ("plain", "transposed", "gaps", "offset", "expanded"):
    for shape in ((2, 3, 16, 32), (4, 5, 6, 7, 8)):
        for name, function in REAL.items():
            both(f"{name} {how} {len(shape)}", function, lying(how, shape, torch.float32))
        for name, function in COMPLEX.items():
            both(f"complex {name} {how} {len(shape)}", function, lying(how, shape, torch.complex64))
for name in ("fft", "rfft"):
    both(f"half {name}", REAL[name], lying("gaps", (6, 64), torch.float16))
    say(f"half {name} of 20", lambda: REAL[name](lying("plain", (6, 20), torch.float16)))  # noqa: B023
    say(f"bfloat16 {name}", lambda: REAL[name](lying("plain", (6, 64), torch.bfloat16)))  # noqa: B023
for centered in (True, False):
    for window in (None, torch.empty(64, device="cuda")):
        options = {"hop_length": 16, "window": window, "center": centered, "return_complex": True}
        both(f"stft {centered} {window is None}", lambda x: torch.stft(x, 64, **options), lying("plain", (3, 800), torch.float32))  # noqa: B023, E501
