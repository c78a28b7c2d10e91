"""Operators whose CUDA kernels are written in other operators: each is run as those, in the same order.

What they allocate is what those allocate, by the rules that those have. Each function is called as the kernel is, with
the runtime before its arguments; the file that it follows is named (below aten/src/ATen/native).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.memory import Layout, contiguous
from graph.fake_cuda.operators.fast_path import FAST_PATH
from graph.fake_cuda.operators.fft import FOURIER
from graph.fake_cuda.operators.least_squares import LEAST_SQUARES
from graph.fake_cuda.operators.quantized import QUANTIZED
from graph.fake_cuda.operators.rnn import RECURRENT
from graph.fake_cuda.torch_private import BY_CPU_KERNEL
from graph.fake_cuda.values import FEW, has_room

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.fake_cuda.torch_private import Operator

_aten: Final = torch.ops.aten
_broadcast: Final[Callable[..., torch.Size]] = torch.broadcast_shapes


def install(runtime: Runtime) -> None:
    """Have composite operators that check values find what lets them go on, and quantized tensors read as integers."""
    runtime.override("aten::int_repr", torch.clone)
    runtime.override("aten::istft", functools.partial(_istft, runtime), ("AutogradCUDA", "CUDA"))


def _istft(runtime: Runtime, *args: object, **kwargs: object) -> Any:
    """SpectralOps.cpp: its windows overlap, or it is an error."""
    with runtime.values.comparing(False):
        return _aten.istft.default.redispatch(BY_CPU_KERNEL, *args, **kwargs)


@functools.cache
def _place_of_info(func: Operator) -> int | None:
    """Which result of an operator says how a factorization went, if it writes no argument."""
    places = [place for place, result in enumerate(func._schema.returns) if result.name == "info"]
    return places[0] if places and not func._schema.is_mutable else None


def succeeding(runtime: Runtime, func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator, whose result `info` says of each matrix that it could be factorized, or inverted."""
    place = _place_of_info(func)
    if place is None:
        return kernel

    @functools.wraps(kernel)
    def called(*args: object, **kwargs: object) -> Any:
        made = kernel(*args, **kwargs)
        info = made[place]
        _factorized(runtime)
        runtime.values.put(info, torch.zeros(info.shape, dtype=info.dtype))
        return made

    return called


def sought(func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of `isin`, which sorts what it seeks among what it looks at where that is much (TensorCompare.cpp)."""
    if func._opname != "isin" or not func._overloadname.startswith("Tensor_Tensor"):
        return kernel

    @functools.wraps(kernel)
    def called(elements: torch.Tensor, test: torch.Tensor, **options: object) -> Any:
        made = kernel(elements, test, **options)
        if elements.numel() and test.numel() >= int(10 * elements.numel() ** 0.145):
            _sorted_together(elements, test, bool(options.get("assume_unique")), bool(options.get("invert")))
        return made

    return called


#: Where operators of bags have their indices and offsets.
_BAGS: Final[Mapping[str, int]] = {
    "_embedding_bag": 1,
    "_embedding_bag_forward_only": 1,
    "_embedding_bag_backward": 1,
    "_embedding_bag_per_sample_weights_backward": 2,
}


def widened(func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator of bags, which converts the narrower of its indices and offsets (EmbeddingBag.cpp,
    `promoteIndicesAndOffsets`)."""
    place = _BAGS.get(func._opname)
    if place is None or func._overloadname != "default":
        return kernel

    @functools.wraps(kernel)
    def called(*args: object, **kwargs: object) -> Any:
        given: Any = args[place : place + 2]
        if given[0].dtype != given[1].dtype:
            args = (*args[:place], *[one.long() for one in given], *args[place + 2 :])
        return kernel(*args, **kwargs)

    return called


def parted(func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of the backward of attention by token, whose gradients may be parts of one tensor of (batch, rows, 3,
    heads, head) (attention_backward.cu, `shared_storage_dqdkdv`)."""
    if func is not _aten._efficient_attention_backward.default:
        return kernel

    @functools.wraps(kernel)
    def called(*args: object, **kwargs: object) -> Any:
        whole, *others = made = kernel(*args, **kwargs)
        return (*whole.unbind(2), others[-1]) if kwargs.get("shared_storage_dqdkdv") else made

    return called


def _sorted_together(elements: torch.Tensor, test: torch.Tensor, unique: bool, invert: bool) -> None:
    """TensorCompare.cpp, `isin_sorting`."""
    flat, others, order = elements.reshape(-1), test.reshape(-1), None
    if not unique:
        flat, order = torch.unique(elements, sorted=False, return_inverse=True)
        others = torch.unique(test, sorted=False)
    every = torch.cat([flat, others])
    del flat, others
    values, places = every.sort(stable=True)
    twice = torch.empty_like(values, dtype=torch.bool)
    first, second = values[1:], values[:-1]
    twice[:-1].copy_(first.ne(second) if invert else first.eq(second))
    twice[-1:].fill_(invert)
    mask = torch.empty_like(twice).index_copy_(0, places, twice)
    if order is not None:
        mask[order]


def _factorized(runtime: Runtime) -> None:
    runtime.assume("whether a matrix could not be factorized", False)


#: Operators whose last result, or only one, are places along a dimension: which argument that is, and what it is where
#: it is not given.
_PLACES: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(("argmax", "argmin", "max.dim", "min.dim"), (1, None)),
    **{"mode": (1, -1), "topk": (2, -1), "sort.stable": (3, -1)},
}
#: Those that may give all places, in an order.
_ORDERING: Final = frozenset({"sort.stable", "topk"})
#: Those that choose some: among few, that is a router's choice of experts, or one of classes.
_CHOOSING: Final = frozenset({"argmax", "argmin", "max.dim", "min.dim", "topk"})


def bounded(runtime: Runtime, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator, of whose places is remembered how many there are."""
    if name not in _PLACES:
        return kernel
    place, usual = _PLACES[name]

    @functools.wraps(kernel)
    def called(source: torch.Tensor, *rest: object, **kwargs: object) -> Any:
        args = (source, *rest)
        made = kernel(*args, **kwargs)
        dim: Any = kwargs.get("dim", args[place] if len(args) > place else usual)
        extent = source.numel() if dim is None else source.shape[dim] if source.ndim else 1
        places = made if isinstance(made, torch.Tensor) else made[-1]
        runtime.values.bound(places, extent)
        whole = name in _ORDERING and places.ndim == 1 and len(places) == extent
        if whole and has_room(places.dtype, places.nbytes) and runtime.values.of(places) is None:
            runtime.values.put(places, torch.arange(extent))  # any order is as good as the GPU's
        elif name in _CHOOSING and dim is not None and 1 < extent <= FEW:
            _choose(runtime, places, dim if places.ndim == source.ndim else None, extent)
        return made

    return called


def _choose(runtime: Runtime, places: torch.Tensor, dim: int | None, extent: int) -> None:
    """Let unknown places be chosen in turn: each as often, none twice along the dimension (None: one of each is left).

    Only where as many are chosen as there are, as for tokens: fewer may be a text's end.
    """
    given = runtime.nonzero is not torch.Tensor.numel  # shares of experts
    if given or places.numel() < extent or runtime.values.of(places) is not None:
        return
    rows = list(places.shape)
    each = 1 if dim is None else rows.pop(dim)
    turn = torch.arange(math.prod(rows)).unsqueeze(1) + torch.arange(each)
    turn = turn.reshape(rows) if dim is None else turn.reshape(*rows, each).movedim(-1, dim)
    runtime.values.suppose(places, turn % extent)
    runtime.assume("which of a few places are chosen", "each as often")


def _zeros(runtime: Runtime, size: Sequence[int], *, dtype: torch.dtype | None = None, **others: object) -> Any:
    """cuda/TensorFactories.cu, `_efficientzerotensor_cuda`: what a tangent is where there is none."""
    return runtime.memory.zeros(Layout(tuple(size), contiguous(size), dtype or torch.get_default_dtype()))


def _masked_select(runtime: Runtime, source: torch.Tensor, mask: torch.Tensor, **out: torch.Tensor) -> Any:
    """cuda/IndexKernel.cpp, `masked_select_out_cuda_impl`: indexing by the mask."""
    mask, source = (tensor if tensor.ndim else tensor.unsqueeze(0) for tensor in (mask, source))
    shape = _broadcast(mask.shape, source.shape)
    index = _aten.index.Tensor_out if out else _aten.index.Tensor
    return index(source.expand(shape), [mask.expand(shape)], **out)


@functools.cache
def _scales_at_once() -> bool:
    """Whether this PyTorch has a kernel for `ldexp`, which does not make the power that a half has no room for."""
    return bool(torch.ldexp(torch.tensor(2.0, dtype=torch.half), torch.tensor(-25)))


def _ldexp(runtime: Runtime, source: torch.Tensor, exponent: torch.Tensor, **out: torch.Tensor) -> Any:
    """BinaryOps.cpp, `ldexp`: one kernel for integral exponents of floating-point numbers, else powers and products."""
    own = source.is_floating_point() and not exponent.is_floating_point() and not exponent.is_complex()
    if own and _scales_at_once():
        factor = exponent
    elif source.is_floating_point() and source.dtype is not torch.float32:
        factor = _aten.pow.Tensor_Tensor(source.new_full((), 2.0), exponent)
    else:
        factor = _aten.pow.Scalar(2.0, exponent)
    return (_aten.mul.out if out else _aten.mul.Tensor)(source, factor, **out)


def _count_nonzero(runtime: Runtime, source: torch.Tensor, dim: Sequence[int]) -> Any:
    """TensorAdvancedIndexing.cpp, `count_nonzero_cuda`."""
    return _aten.sum.dim_IntList(source if source.dtype is torch.bool else _aten.ne.Scalar(source, 0), list(dim))


def _trace(runtime: Runtime, source: torch.Tensor) -> Any:
    """cuda/TriangularOps.cu, `trace_cuda`."""
    return _aten.sum.default(_aten.diagonal.default(source))


def _matrix_exp(runtime: Runtime, source: torch.Tensor) -> torch.Tensor:
    """LinearAlgebra.cpp, `mexp`: Taylor polynomials by the matrices' norms, of which all take the one of degree 18
    (`compute_T18_scale_square`), with as few squares as there may be."""
    if source.numel() == 0 or source.shape[-1] == 1:
        return torch.exp(source)
    runtime.assume("the norm of a matrix whose exponential is taken", "one that needs all terms and no squares")
    matrices = source.reshape(-1, *source.shape[-2:])
    norms = matrices.abs().sum(-2).amax(-1)
    result = torch.empty_like(matrices)
    high = torch.empty_like(norms, dtype=torch.bool)
    runtime.values.put(high, torch.ones(len(norms), dtype=torch.bool))
    places = _aten.nonzero.default(high)[:, 0]
    chosen, large = matrices.index_select(0, places), norms.index_select(0, places)
    made = torch.empty_like(chosen)
    powers = torch.pow(2, torch.ceil(torch.log2(large / 1.09)).clamp(min=0))
    made.copy_(_degree_18(chosen / powers[:, None, None]))
    result.index_put_((places,), made)
    return result.view(source.shape)


def _degree_18(scaled: torch.Tensor) -> torch.Tensor:
    """`compute_T18`: powers, their linear combinations, and two products of those."""
    powers = scaled.new_empty((5, *scaled.shape))
    for power in powers[2:]:
        torch.matmul(scaled, scaled, out=power)
    sums: torch.Tensor = _aten._compute_linear_combination.default(powers, scaled.new_empty(5, 5))
    for number in (3, 2):
        torch.matmul(sums[0], sums[4], out=powers[0])
        sums[number].add_(powers[0])
    return sums[1].add(powers[0])


def _bincount(runtime: Runtime, source: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """cuda/SummaryOps.cu, `_bincount_cuda_template`: as many bins as the largest value says, where that is known."""
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        weights = weights.double()
    dtype = torch.int64 if weights is None else weights.dtype
    if not source.numel():
        return torch.zeros(minlength, dtype=dtype, device=source.device)
    known = runtime.values.of(source)
    if known is None:
        runtime.assume("the largest of numbers that are counted", "the least that the result has room for")
        runtime.assume("how often numbers are among others", "that all are as often")
    limits = _aten.aminmax.default(source)
    most = 0 if known is None else int(known.max()) + 1
    runtime.synchronized()
    bins = torch.zeros(max(most, minlength, 1), dtype=dtype, device=source.device)
    del limits
    if weights is None:
        counts = evenly(source.numel(), len(bins)) if known is None else torch.bincount(known, minlength=minlength)
        runtime.values.put(bins, counts)
    return bins


def evenly(count: int, places: int) -> torch.Tensor:
    """So many things over places, as evenly as can be."""
    each = torch.full((places,), count // places)
    each[: count % places] += 1
    return each


def _result(shape: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """A new result, or the given one (`out=`) with this shape."""
    return torch.empty(shape, dtype=dtype, device="cuda") if out is None else out.resize_(shape)


def _multinomial(
    runtime: Runtime,
    source: torch.Tensor,
    samples: int,
    replacement: bool = False,
    *,
    generator: object = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Distributions.cpp, `multinomial_out`; with replacement cuda/MultinomialKernel.cu."""
    out = _result((*source.shape[:-1], samples), torch.int64, out)
    if not source.numel():
        return out
    if replacement and samples > 1:
        given = None if runtime.profile.release >= (2, 15) else source.new_empty(source.shape)
        normed, sums = (source.new_empty(source.shape) for _ in range(2))
        _aten.cumsum.out(normed, -1, out=sums)
        del sums, normed, given
        return out
    least, most = _aten.aminmax.default(source)
    valid = _aten.bitwise_and.Tensor(_aten.ge.Scalar(least, 0), _aten.lt.Scalar(most, float("inf")))
    zero = _aten.eq.Scalar(_aten.sum.default(source), 0) if source.ndim == 1 else _no_row(source)
    zero = _aten.bitwise_not.default(zero)
    runtime.synchronized()
    drawn = torch.empty_like(source)
    if samples == 1:
        _aten.argmax.out(drawn, -1, True, out=out)
    else:
        best = torch.empty(out.shape, dtype=source.dtype, device=source.device)
        _aten.topk.values(drawn, samples, values=best, indices=out)
        del best
    del drawn, zero, valid, most, least
    return out


def _no_row(source: torch.Tensor) -> Any:
    """Whether a row of probabilities adds up to 0."""
    sums = _aten.sum.dim_IntList(source, [1])
    return _aten.any.default(_aten.eq.Scalar(sums, 0))


def _median(runtime: Runtime, source: torch.Tensor) -> Any:
    """cuda/Sorting.cpp, `median_impl`: the middle of the sorted values, or the last where that is no number."""
    if not source.numel():
        return torch.full((), float("nan"), dtype=source.dtype, device=source.device)
    ordered = _ordered(source)
    last = ordered[-1]
    return _aten.where.self(_aten.isnan.default(last), last, ordered[(source.numel() - 1) // 2])


def _nanmedian(runtime: Runtime, source: torch.Tensor) -> Any:
    """As `_median`: the middle of those that are numbers, whose place is reckoned on the device."""
    if not source.numel():
        return _median(runtime, source)
    ordered = _ordered(source)
    lacking = _aten.isnan.default(ordered)
    number = _aten.sum.default(lacking)
    others = source.numel() - 1 - number
    half = _aten.div.Tensor(others, 2)
    place = half.long()
    del half, others, number, lacking
    found = _aten.index.Tensor(ordered, [place])
    del place, ordered
    return found


def _ordered(source: torch.Tensor) -> torch.Tensor:
    """All values, sorted."""
    flat = source.flatten()
    values, places = _aten.sort.default(flat, 0, False)
    del places, flat
    found: torch.Tensor = values
    return found


def _normal(
    runtime: Runtime, mean: Any, std: Any = 1.0, *, generator: object = None, out: torch.Tensor | None = None
) -> Any:
    """DistributionTemplates.h, `normal_impl` and `normal_out_impl`, which check deviations both."""
    if not isinstance(std, torch.Tensor):
        result = _result(mean.shape, mean.dtype, out)
        torch.empty_like(result)
        return result
    if out is None:
        _check_positive(runtime, std)
    if isinstance(mean, torch.Tensor):
        result = _result(_broadcast(mean.shape, std.shape), mean.dtype, out)
        _check_positive(runtime, std)
        return result
    result = _result(std.shape, std.dtype, out)
    _check_positive(runtime, std)
    torch.full((), mean, dtype=result.dtype, device=result.device)
    return result


def _check_positive(runtime: Runtime, std: torch.Tensor) -> None:
    if std.numel():
        least = _aten.min.default(std)
        _aten.ge.Scalar(least, 0)
        runtime.synchronized()


#: Operators that look for rows which differ.
_OF_ROWS: Final = frozenset({"unique_dim", "unique_dim_consecutive", "unique_consecutive"})


def differing(
    runtime: Runtime, func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...] | None:
    """Rows that differ, the place of each among them and how often each is there, where no values are known: as if all
    did. The rows, which have no values, are on "meta"; None for other operators."""
    if func._opname not in _OF_ROWS:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    source, dim = args[0], given.get("dim")
    if dim is None or not source.numel():
        return None
    runtime.assume("values that differ", "that all do")
    rows, count = source.movedim(dim, 0), source.shape[dim]
    made = torch.empty(rows.shape, dtype=source.dtype, device="meta").movedim(0, dim)
    places = torch.arange(count if given.get("return_inverse") else 0)
    return made, places, torch.ones(count if given.get("return_counts") else 0, dtype=torch.int64)


def _repeat_interleave(runtime: Runtime, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    """cuda/Repeat.cu and native/Repeat.h: as many as the repeats add up to."""
    if not repeats.numel():
        return torch.empty_like(repeats)
    known = runtime.values.of(repeats)
    sums = _aten.cumsum.default(repeats, 0)
    if output_size is None:
        enough = _aten.ge.Scalar(repeats, 0)
        _aten.all.default(enough)
        del enough
        runtime.synchronized()
        if known is None:
            runtime.assume("how often values are repeated", "once each")
        output_size = repeats.numel() if known is None else int(known.sum())
    out = torch.empty(output_size, dtype=repeats.dtype, device=repeats.device)
    if known is not None and int(known.sum()) == output_size:
        runtime.values.put(out, torch.repeat_interleave(known).to(repeats.dtype))
    del sums
    return out


def _ctc_loss(
    runtime: Runtime, scores: torch.Tensor, targets: torch.Tensor, inputs: object, lengths: object, *rest: object
) -> Any:
    """cuda/LossCTC.cu, `ctc_loss_gpu_template`: the loss of each of a batch, and the likelihoods of all alignments."""
    time, batch = scores.shape[:2]
    offsets = [torch.empty(batch, dtype=torch.int64, device=scores.device) for _ in range(3)]
    paths = torch.empty((batch, time, 2 * _longest(runtime, lengths) + 1), dtype=scores.dtype, device=scores.device)
    losses = torch.empty(batch, dtype=scores.dtype, device=scores.device)
    del offsets
    return losses, paths


def _longest(runtime: Runtime, lengths: Any) -> int:
    if not isinstance(lengths, torch.Tensor):
        return int(max(lengths))
    known = runtime.values.of(lengths)
    if known is None:
        runtime.assume("the lengths of targets", "0")
    runtime.synchronized()
    return 0 if known is None else int(known.max())


def _ctc_loss_backward(
    runtime: Runtime, gradient: torch.Tensor, scores: torch.Tensor, targets: object, *rest: Any
) -> torch.Tensor:
    """cuda/LossCTC.cu, `ctc_loss_backward_gpu_template`: the likelihoods from behind, and the gradient. Where there is
    much, the sums of every other likelihood, those of blanks, and the zeros for losses that are infinite are operators
    of their own."""
    steps, batch, labels = scores.shape
    offsets = [torch.empty(batch, dtype=torch.int64, device=scores.device) for _ in range(3)]
    loss, before, finite = rest[2], rest[3], len(rest) > 5 and rest[5]
    behind = torch.empty_like(before)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if 2 * steps + 24 * batch // 10 + 2 * labels // 10 > 450:
        blanks = before[..., ::2] + behind[..., ::2]
        _aten.logsumexp.default(blanks, [2], True)
        del blanks
        if finite:
            out = torch.where(loss.view(1, batch, 1) == math.inf, out.new_zeros(()), out)
    del behind, offsets
    return out


def jitted(function: Any, *tensors: torch.Tensor, **kwargs: object) -> Any:
    """A function of `torch.cuda.jiterator`: results of the shape and type that its operands have together."""
    shape = _broadcast(*(tensor.shape for tensor in tensors))
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    made = tuple(torch.empty(shape, dtype=dtype, device=tensors[0].device) for _ in range(function.num_outputs))
    return made if len(made) > 1 else made[0]


def _histc(runtime: Runtime, source: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """cuda/SummaryOps.cu, `_histc_cuda_template`: without limits, those of the numbers are read by the host."""
    counts = torch.zeros(bins, dtype=source.dtype, device=source.device)
    if low == high and source.numel():
        limits = _aten.aminmax.default(source)
        runtime.synchronized()
        del limits
    known = runtime.values.of(source)
    if known is None:
        runtime.assume("how often numbers are among others", "that all are as often")
        runtime.values.suppose(counts, evenly(source.numel(), bins).to(counts.dtype))
    else:
        runtime.values.put(counts, torch.histc(known.float(), bins, low, high).to(counts.dtype))
    return counts


def _histc_out(
    runtime: Runtime, source: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0, *, out: torch.Tensor
) -> Any:
    """The same file, `_histc_out_cuda`: a copy."""
    counts = _histc(runtime, source, bins, low, high)
    return out.resize_(counts.shape).copy_(counts)


def _no_errors(runtime: Runtime, info: torch.Tensor, name: str, *, is_matrix: bool) -> None:
    """BatchLinearAlgebra.cpp, `_linalg_check_errors`: the host reads whether a matrix could not be factorized."""
    _aten.any.default(info)
    _factorized(runtime)
    runtime.synchronized()


def no_errors_on_host(runtime: Runtime, info: torch.Tensor, name: str, *, is_matrix: bool) -> None:
    """The same on the host: a matrix that cannot be factorized is one of weights, which are zeros here."""
    if info.any():
        _factorized(runtime)


def _gru_cell(
    runtime: Runtime, inputs: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *biases: object
) -> Any:
    """cuda/RNN.cu, `_thnn_fused_gru_cell_cuda`: five values of each unit are kept for the derivative."""
    kept = torch.empty((hidden.shape[0], 5 * hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), kept


def _gru_cell_backward(runtime: Runtime, gradient: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> Any:
    """cuda/RNN.cu, `_thnn_fused_gru_cell_backward_cuda`."""
    gates = [torch.empty((kept.shape[0], kept.shape[1] // 5 * 3), dtype=kept.dtype, device=kept.device) for _ in "ih"]
    hidden = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    biases = [_aten.sum.dim_IntList(gate, [0]) for gate in gates] if has_bias else [None, None]
    return *gates, hidden, *biases


def _embedding_bag_backward(
    runtime: Runtime,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bags: torch.Tensor,
    sizes: torch.Tensor,
    largest: torch.Tensor,
    rows: int,
    scale: bool,
    mode: int,
    sparse: bool,
    weights: torch.Tensor | None,
    padding: int = -1,
) -> Any:
    """EmbeddingBag.cpp: sparse or dense."""
    rest = (rows, scale, mode, weights, padding)
    if sparse:
        return _aten._embedding_bag_sparse_backward.default(gradient, indices, offsets, bags, sizes, *rest)
    return _aten._embedding_bag_dense_backward.default(gradient, indices, bags, sizes, largest, *rest)


def _grid_sampler(runtime: Runtime, source: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """cudnn/GridSampler.cpp, `cudnn_grid_sampler_forward`."""
    copies = _no_zero_strides(source), grid.contiguous()
    out = torch.empty((*source.shape[:2], *grid.shape[1:3]), dtype=source.dtype, device=source.device)
    del copies
    return out


def _grid_sampler_backward(
    runtime: Runtime, source: torch.Tensor, grid: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cudnn/GridSampler.cpp, `cudnn_grid_sampler_backward`."""
    copies = _no_zero_strides(source), grid.contiguous(), _no_zero_strides(gradient)
    made = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (source, grid)]
    del copies
    return made[0], made[1]


def _no_zero_strides(tensor: torch.Tensor) -> torch.Tensor:
    """`contiguousIfZeroInStrides`."""
    return tensor.contiguous() if 0 in tensor.stride() else tensor


#: By operator.
COMPOSED: Final[Mapping[str, Callable[..., Any]]] = {
    "_efficientzerotensor": _zeros,
    "_embedding_bag_backward": _embedding_bag_backward,
    "cudnn_grid_sampler": _grid_sampler,
    "cudnn_grid_sampler_backward": _grid_sampler_backward,
    "histc": _histc,
    "histc.out": _histc_out,
    "linalg_matrix_exp": _matrix_exp,
    "_linalg_check_errors": _no_errors,
    **dict.fromkeys(("ldexp.Tensor", "ldexp.out"), _ldexp),
    **dict.fromkeys(("masked_select", "masked_select.out"), _masked_select),
    "count_nonzero.dim_IntList": _count_nonzero,
    "trace": _trace,
    "bincount": _bincount,
    **dict.fromkeys(("multinomial", "multinomial.out"), _multinomial),
    "median": _median,
    "nanmedian": _nanmedian,
    **dict.fromkeys((f"normal.{kind}" for kind in ("Tensor_Tensor", "Tensor_float", "float_Tensor")), _normal),
    **dict.fromkeys((f"normal.{kind}_out" for kind in ("Tensor_Tensor", "Tensor_float", "float_Tensor")), _normal),
    "repeat_interleave.Tensor": _repeat_interleave,
    **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor"), _ctc_loss),
    **dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), _ctc_loss_backward),
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    **LEAST_SQUARES,
    **QUANTIZED,
    **RECURRENT,
    **FAST_PATH,
    **FOURIER,
}
