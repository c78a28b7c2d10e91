"""PyTorch's words for an allocation that fails (DeviceCachingAllocator::malloc of c10/cuda/CUDACachingAllocator.cpp).

What a process holds by NVML's account is left out, as PyTorch does where NVML does not answer.
"""

from __future__ import annotations

from typing import Final

_ADVICE: Final = (
    " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting {variable}="
    "expandable_segments:True to avoid fragmentation.  See documentation for Memory Management "
    " ({page})"
)
_PAGE: Final = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
_PAGE_FROM_2_13: Final = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)


def format_size(size: int) -> str:
    """c10's format_size: `312.00 MiB`, `0 bytes`."""
    for power, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB")):
        if size <= 1024 << power or unit == "GiB":
            return f"{size} bytes" if size <= 1024 else f"{size / (1 << power):.2f} {unit}"
    raise AssertionError("unreachable")


def out_of_memory(
    size: int, *, gpu: int, total: int, free: int, allowed: int | None, allocated: int, reserved: int, minor: int
) -> str:
    """The text of torch.OutOfMemoryError for a request of `size` bytes, as rounded to what the driver was asked for.

    `gpu` is the GPU's number, `allowed` the limit of set_per_process_memory_fraction, if there is one; `minor` that of
    PyTorch's release.
    """
    variable = "PYTORCH_ALLOC_CONF" if 10 <= minor < 13 else "PYTORCH_CUDA_ALLOC_CONF"
    page = _PAGE_FROM_2_13 if minor >= 13 else _PAGE
    limit = "" if allowed is None else f"{format_size(allowed)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_size(size)}. GPU {gpu} has a total capacity of "
        f"{format_size(total)} of which {format_size(free)} is free. {limit}Of the allocated memory "
        f"{format_size(allocated)} is allocated by PyTorch, and {format_size(reserved - allocated)}"
        f"{_ADVICE.format(variable=variable, page=page)}"
    )
