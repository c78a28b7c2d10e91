"""Fourier transforms as PyTorch has cuFFT do them: copies, passes of at most three dimensions, and how results lie.

cuFFT's workspaces come from PyTorch's allocator too, for the time of a pass. Recordings have none; their likely size on
a GPU is that of 480 passes over one dimension on an H100 (tests/data/gpu), over more the signal twice: with that PEFT's
FourierFT has the memory that was measured on an L40S (docs/explanation/accuracy.md).
Source: aten/src/ATen/native/cuda/SpectralOps.cpp and CuFFTPlanCache.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: Dimensions of one pass (`cufft_max_ndim`).
_MOST: Final = 3
_HALVES: Final = (torch.float16, torch.complex32)
#: The largest prime factor of a length that cuFFT has kernels for (its manual), and lengths that one kernel transforms:
#: of complex numbers, of real ones (powers of two) in single and in double precision, and of real ones at all.
_LARGEST_FACTOR: Final = 127
_ONE_KERNEL: Final = 16_384
_IN_DOUBLE: Final = 4_096
_ANY_LENGTH: Final = 256
#: Of a length with a larger factor (Bluestein's algorithm), longer than this.
_LONG: Final = 4_096


def _complex_to_complex(
    runtime: Runtime, source: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool
) -> torch.Tensor:
    """`_fft_c2c_cufft`: passes from the innermost dimensions on, to and fro between two tensors."""
    if not dim:
        return source.clone()
    out, working, left = source.new_empty(source.shape), source, list(dim)
    while True:
        _outermost_first(left, working)
        out = _executed(runtime, out, working, source.shape, left[-_MOST:])
        del left[-_MOST:]
        if not left:
            return _normalized(out, normalization, source.shape, dim)
        out, working = source.new_empty(source.shape) if working is source else working, out


def _real_to_complex(
    runtime: Runtime, source: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool
) -> torch.Tensor:
    """`_fft_r2c_cufft`: one half of the last dimension; the other one is its mirror image."""
    last, full = dim[-1], source.shape
    half = [size // 2 + 1 if place == last else size for place, size in enumerate(full)]
    if source.dtype == torch.bfloat16 and not _in_bfloat16(runtime, full, dim):
        source = source.float()
    transformed = _half_of_bfloat16 if source.dtype == torch.bfloat16 else _half_transformed
    out, spare = transformed(runtime, source, dim, half, half if onesided else full)
    _normalized(out, normalization, full, dim)
    return out if onesided or out.shape[last] == full[last] else spare.resize_(full)


def _in_bfloat16(runtime: Runtime, sizes: Sequence[int], dim: Sequence[int]) -> bool:
    """Whether cuFFT transforms bfloat16 itself, where PyTorch takes it at all (2.15 does, 2.13 not)."""
    return runtime.profile.arch >= (8, 0) and _in_one_pass(dim) and _powers_of_two(sizes[place] for place in dim)


def _half_of_bfloat16(
    runtime: Runtime, source: torch.Tensor, dim: Sequence[int], half: Sequence[int], sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transform, by complex numbers of half precision in single ones, and what has room for `sizes`."""
    proxy, working = source.new_empty(half, dtype=torch.complex32), _aligned(source, dim[-1])
    proxy = _executed(runtime, proxy, working, half, dim)
    out = torch.view_as_complex(torch.view_as_real(proxy).view(torch.bfloat16).float())
    return out, out if list(sizes) == list(half) else out.new_empty(sizes)


def _half_transformed(
    runtime: Runtime, source: torch.Tensor, dim: Sequence[int], half: Sequence[int], sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transform in a tensor that has room for `sizes`, and what it was last made of."""
    out, working = source.new_empty(sizes, dtype=source.dtype.to_complex()), _aligned(source, dim[-1])
    if _in_one_pass(dim):
        return _executed(runtime, out, working, sizes, dim), working
    out, left = _executed(runtime, out, working, sizes if len(dim) == 1 else half, dim[-1:]), list(dim[:-1])
    if left:
        working = out.new_empty(sizes)
    while left:
        out, working = working, out
        _outermost_first(left, working)
        out = _executed(runtime, out, working, half, left[-_MOST:])
        del left[-_MOST:]
    return out, working


def _aligned(source: torch.Tensor, last: int) -> torch.Tensor:
    """A real tensor that begins where one of complex numbers could, or a copy of it."""
    if source.storage_offset() % 2 == 0:
        return source
    return source.movedim(last, -1).clone(memory_format=torch.contiguous_format).movedim(-1, last)


def _complex_to_real(
    runtime: Runtime, source: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> torch.Tensor:
    """`_fft_c2r_cufft`: of a copy, since cuFFT may write over what it reads."""
    sizes = [last_dim_size if place == dim[-1] else size for place, size in enumerate(source.shape)]
    out = source.new_empty(sizes, dtype=source.dtype.to_real())
    if _in_one_pass(dim) or len(dim) == 1:
        working, passed = source.clone(memory_format=torch.contiguous_format), dim
    else:
        working, passed = _complex_to_complex(runtime, source, dim[:-1], 0, False), dim[-1:]
    out = _executed(runtime, out, working, sizes, passed)
    del working
    return _normalized(out, normalization, sizes, dim)


def _in_one_pass(dim: Sequence[int]) -> bool:
    """`use_optimized_cufft_path`."""
    return len(dim) <= _MOST and tuple(dim[:2]) != (0, 1)


def _normalized(out: torch.Tensor, normalization: int, sizes: Sequence[int], dim: Sequence[int]) -> torch.Tensor:
    """`_fft_apply_normalization`: scaled where it lies, by a factor that is not 1."""
    return out.mul_(0.5) if normalization and prod(sizes[place] for place in dim) != 1 else out


def _outermost_first(dims: list[int], tensor: torch.Tensor) -> None:
    """Sort dimensions by their strides, the largest first."""
    strides = tensor.stride()
    dims.sort(key=lambda place: -strides[place])


def _executed(
    runtime: Runtime, out: torch.Tensor, source: torch.Tensor, sizes: Sequence[int], dim: Sequence[int]
) -> torch.Tensor:
    """`_exec_fft`: one pass over dimensions `dim`, from `source` to `out`, which has then `sizes`."""
    order = _batch_first(source, dim)
    batch = source.ndim - len(dim)
    signal = [source.shape[place] for place in dim]
    count = prod(source.shape[place] for place in order[:batch])
    given = source.permute(order).reshape(count, *signal)
    results = [sizes[place] for place in dim]
    whole = [max(pair) for pair in zip(signal, results, strict=True)]
    out.resize_([count, *results])
    _check_half(given, whole)
    if _must_be_copied(given, [count, *whole]):
        given = given.clone(memory_format=torch.contiguous_format)
    both = given.is_complex() and out.is_complex()
    runtime.tell("scratch", "cuFFT", workspace(whole, count, out.dtype.to_complex().itemsize, both))
    strides, step = [0] * source.ndim, out.stride(0)
    for place in reversed(order[:batch]):
        strides[place], step = step, step * sizes[place]
    for number, place in enumerate(dim):
        strides[place] = out.stride(1 + number)
    return torch.as_strided_(out, list(sizes), strides, out.storage_offset())


def workspace(lengths: Sequence[int], count: int, item: int, is_complex: bool) -> int:
    """Bytes that cuFFT likely takes for `count` signals of these lengths, in complex numbers of `item` bytes.

    `is_complex`: from complex numbers to complex ones; else one side is real. On an H100 that is what 475 of 480 passes
    over one dimension took, to 2 % (lengths of 768 and 1,000 took none from real to complex numbers).
    """
    signal = count * prod(lengths) * item
    if len(lengths) > 1:
        return 2 * signal
    (length,) = lengths
    real = signal // 2
    if _largest_factor(length) > _LARGEST_FACTOR:
        if is_complex:
            return 4 * signal if length > _LONG else 0
        return (5 if length > _LONG else 2) * real * (2 if count == 1 else 1)
    if is_complex:
        return signal if length > _ONE_KERNEL else 0
    if _powers_of_two(lengths):
        return real if length > (_ONE_KERNEL if item <= 8 else _IN_DOUBLE) else 0
    return real if length > _ANY_LENGTH else 0


def _largest_factor(number: int) -> int:
    """The largest prime that divides a number; 1 of 1."""
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


def _batch_first(source: torch.Tensor, dim: Sequence[int]) -> list[int]:
    """The dimensions as they are permuted: those that are not transformed first, by their strides."""
    places = _parted(range(source.ndim), lambda place: place not in dim)
    batch = places[: source.ndim - len(dim)]
    _outermost_first(batch, source)
    return [*batch, *dim]


def _parted(values: Sequence[int], first: Callable[[int], bool]) -> list[int]:
    """`std::partition` of libstdc++ (bits/stl_algo.h): what comes first is exchanged with the last that does not."""
    found, low, high = list(values), 0, len(values)
    while True:
        while low < high and first(found[low]):
            low += 1
        while low < high and not first(found[high - 1]):
            high -= 1
        if low >= high:
            return found
        found[low], found[high - 1] = found[high - 1], found[low]
        low, high = low + 1, high - 1


def _powers_of_two(sizes: Iterable[int]) -> bool:
    return not any(size & (size - 1) for size in sizes)


def _check_half(given: torch.Tensor, signal: Sequence[int]) -> None:
    if given.dtype in _HALVES and not _powers_of_two(signal):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a "
            f"signal size of{signal}"
        )


def _must_be_copied(given: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether a batch of signals cannot be taken as it lies (`CuFFTConfig`, `as_cufft_embed`)."""
    strides = given.stride()
    if given.dtype in (*_HALVES, torch.bfloat16) and strides[-1] != 1:
        return True
    last = strides[-1]
    if last <= 0 or (sizes[0] != 1 and strides[0] == 0):
        return True
    for place in range(len(sizes) - 2, 0, -1):
        if sizes[place] == 1:
            continue
        if strides[place] <= 0 or strides[place] % last:
            return True
        last = strides[place]
    return False


#: By operator, called as those of `graph.fake_cuda.operators.composed`.
FOURIER: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "_fft_c2c": _complex_to_complex,
    "_fft_r2c": _real_to_complex,
    "_fft_c2r": _complex_to_real,
}
