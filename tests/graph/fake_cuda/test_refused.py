"""Arguments that CUDA's kernels refuse, with the words of PyTorch 2.13.0 (CUDA 13.0) on stub CUDA libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda import sdpa
from graph.hardware.profile import profile

F16, BF16, LEAST = torch.float16, torch.bfloat16, torch.finfo(torch.float32).min


def f(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*sizes, device="cuda", dtype=dtype)


def b(*sizes: int) -> torch.Tensor:
    return f(*sizes, dtype=BF16)


def i(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*sizes, device="cuda", dtype=dtype)


def t(*sizes: int) -> torch.Tensor:
    return i(*sizes, dtype=torch.bool)


def e(*sizes: int) -> torch.Tensor:
    return f(*sizes).to(torch.float8_e4m3fn)


def attended(mask: torch.Tensor) -> torch.Tensor:
    query, key, value = (b(1, 2, 8, 16) for _ in range(3))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _adamw() -> object:
    fused: Any = torch._fused_adamw_
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    states: list[list[torch.Tensor]] = [[f(4)], [b(4)], [f(4)], [f(4)], [], [f(1)[0]]]
    return fused(*states, amsgrad=False, maximize=False, **numbers)


NONE = "{}(): Expected reduction dim to be specified for input.numel() == 0."
NONE_ALONG = "{}(): Expected reduction dim {} to have non-zero size."
MM = "expected mat1 and mat2 to have the same dtype, but got: "
OVER = "value cannot be converted to type {} without overflow"
TWO = "Expected all tensors to be on the same device, but "
MIXED = TWO + "found at least two devices, cuda:0 and cpu!"
H1, HI = torch.tensor(1.0), torch.tensor(1)
#: Calls, which of their operands is on the host, and where PyTorch checks it.
APART: list[tuple[Callable[[], object], str, str]] = [
    (lambda: f(4).clamp(max=H1), "max", "clamp_Tensor"),
    (lambda: f(4).clamp_(max=H1), "max", "clamp__Tensor"),
    (lambda: f(4).clamp_min(H1), "min", "clamp_min_Tensor"),
    (lambda: torch.gcd(i(4), HI), "other", "gcd"),
    (lambda: torch.logaddexp(f(4), H1), "other", "logaddexp"),
    (lambda: functional.huber_loss(f(1)[0], H1), "target", "_huber_loss"),
    (lambda: torch.isin(i(4), HI), "test_elements", "isin_Tensor_Tensor"),
    (lambda: torch.equal(f(4), torch.ones(4)), "other", "_equal"),
    (lambda: functional.embedding(HI, f(4, 4)), "index", "_index_select"),
    (lambda: f(4).gather(0, torch.zeros(4, dtype=torch.int64)), "index", "gather"),
    (lambda: f(4).scatter_add(0, i(4), torch.ones(4)), "src", "scatter_add"),
    (lambda: f(4).index_add(0, i(4), torch.ones(4)), "source", "index_add"),
    (lambda: f(4, 4) @ torch.ones(4, 4), "mat2", "mm"),
    (lambda: functional.layer_norm(f(4, 4), (4,), torch.ones(4)), "weight", "_native_layer_norm"),
    (lambda: functional.cross_entropy(f(4, 4), torch.zeros(4, dtype=torch.int64)), "target", "nll_loss_forward"),
    (lambda: torch.cat([f(4), torch.ones(4)]), "tensors", "cat"),
    (lambda: torch.searchsorted(f(4), H1), "self", "Tensor_searchsorted"),
    (lambda: torch.normal(f(4), torch.ones(4)), "std", "Tensor_Tensor_normal"),
    (lambda: torch.bincount(i(4), torch.ones(4)), "weights", "_bincount"),
    (lambda: f(4).masked_select(torch.ones(4) > 0), "mask", "_masked_select"),
    (lambda: f(4).masked_scatter(f(4) > 0, torch.ones(4)), "source", "_masked_scatter_"),
]
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: f(0).max(), NONE.format("max") + " Specify the reduction dim with the 'dim' argument."),
    (lambda: i(0).min(), NONE.format("min") + " Specify the reduction dim with the 'dim' argument."),
    (lambda: f(0, 4).amax(), NONE.format("amax") + " Specify the reduction dim with the 'dim' argument."),
    (lambda: f(0).argmax(), NONE.format("argmax")),
    (lambda: f(0, 4).max(-2), NONE_ALONG.format("max", 0)),
    (lambda: f(0, 4).amin(-2), NONE_ALONG.format("amin", -2)),
    (lambda: f(0, 4).amax((1, 0)), NONE_ALONG.format("amax", 0)),
    (lambda: f(0, 4).argmin(0), NONE_ALONG.format("argmin", 0)),
    (lambda: f(0, 4).median(0), NONE_ALONG.format("median", 0)),
    (lambda: f(4, 0).mode(), NONE_ALONG.format("mode", 1)),
    (lambda: i(4).std(), "std and var only support floating point and complex dtypes"),
    (lambda: i(4).bool().var(), "std and var only support floating point and complex dtypes"),
    (lambda: torch.std_mean(i(4)), "std_mean only support floating point and complex dtypes"),
    (lambda: torch.var_mean(i(4), 0), "var_mean only support floating point and complex dtypes"),
    (lambda: torch.mm(f(4, 4), b(4, 4)), MM + "float != c10::BFloat16"),
    (lambda: torch.mm(f(4, 4).double(), f(4, 4)), MM + "double != float"),
    (lambda: torch.mm(f(4, 4), b(4, 4), out=f(4, 4)), MM + "float != c10::BFloat16"),  # as compiled code calls it
    (
        lambda: torch.addmm(b(4, 4), f(4, 4), f(4, 4), out=f(4, 4)),
        "self and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    (lambda: torch.mm(f(4, 4).half(), f(4, 4)), MM + "c10::Half != float"),
    (lambda: torch.mm(i(4, 4), i(4, 4)), "\"addmm_cuda\" not implemented for 'Long'"),
    (lambda: functional.linear(f(4, 4), i(4, 4, dtype=torch.int8)), MM + "float != signed char"),
    (
        lambda: functional.linear(f(4, 4), f(4, 4), b(4)),
        "self and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    (
        lambda: functional.linear(f(2, 4, 4), b(4, 4), b(4)),
        "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
    ),
    (lambda: f(2, 3, 4, 4) @ b(4, 4), MM + "float != c10::BFloat16"),
    (lambda: torch.bmm(f(2, 4, 4), b(2, 4, 4)), "expected scalar type Float but found BFloat16"),
    (lambda: torch.bmm(i(2, 4, 4), i(2, 4, 4)), "\"baddbmm_cuda\" not implemented for 'Long'"),
    (
        lambda: torch.baddbmm(b(2, 4, 4), f(2, 4, 4), f(2, 4, 4)),
        "Input dtypes must be the same, got: input c10::BFloat16, batch1: float, batch2: float",
    ),
    (
        lambda: torch.mv(f(4, 4), b(4)),
        "addmv input tensors must have the same dtype, but got BFloat16, Float, and BFloat16",
    ),
    (lambda: functional.layer_norm(b(4, 4), (4,), f(4), f(4)), "expected scalar type BFloat16 but found Float"),
    (lambda: functional.layer_norm(b(4, 4), (4,), b(4), f(4)), "expected scalar type BFloat16 but found Float"),
    (lambda: functional.layer_norm(f(4, 4), (4,), b(4), b(4)), "expected scalar type Float but found BFloat16"),
    (lambda: functional.group_norm(b(2, 4, 4), 2, f(4), f(4)), "expected scalar type BFloat16 but found Float"),
    (
        lambda: functional.group_norm(f(2, 4, 4), 2, b(4), b(4)),
        "mixed dtype (CPU): expect parameter to have scalar type of Float",
    ),
    (
        lambda: functional.batch_norm(f(2, 4, 4, 4), f(4), f(4), b(4), b(4), True),
        "Expected weight to have type Float but got BFloat16",
    ),
    (
        lambda: functional.scaled_dot_product_attention(f(1, 2, 8, 16), b(1, 2, 8, 16), b(1, 2, 8, 16)),
        "Expected query, key, and value to have the same dtype, but got query.dtype: float key.dtype: c10::BFloat16 "
        "and value.dtype: c10::BFloat16 instead.",
    ),
    (
        lambda: attended(f(8, 8)),
        "invalid dtype for bias - should match query's dtype",
    ),
    (lambda: torch.where(f(4) > 0, b(4), LEAST), OVER.format("c10::BFloat16")),
    (lambda: b(4).masked_fill(f(4) > 0, LEAST), OVER.format("c10::BFloat16")),
    (lambda: torch.full((4,), 1e9, device="cuda", dtype=F16), OVER.format("c10::Half")),
    (lambda: f(4).half().masked_fill(f(4) > 0, -1e9), OVER.format("c10::Half")),
    (lambda: functional.pad(f(4).half(), (1, 1), value=1e9), OVER.format("c10::Half")),
    (lambda: f(4).half().scatter(0, i(2), 1e9), OVER.format("c10::Half")),
    (lambda: f(4).half().index_fill(0, i(2), 1e9), OVER.format("c10::Half")),
    (lambda: i(4, dtype=torch.int8).fill_(300), OVER.format("int8_t")),
    (lambda: i(4, dtype=torch.int32).masked_fill(f(4) > 0, 1 << 40), OVER.format("int")),
    (lambda: i(4, dtype=torch.int16).fill_(1 << 20), OVER.format("int16_t")),
    (lambda: i(4).fill_(1e30), OVER.format("int64_t")),
    (lambda: f(4).fill_(1e300), OVER.format("float")),
    (lambda: f(4).to(torch.float8_e4m3fn).fill_(1e6), OVER.format("c10::Float8_e4m3fn")),
    (
        lambda: torch._scaled_mm(e(16, 16), e(16, 16).t(), f(1)[0], f(1)[0], out_dtype=BF16),
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+",
    ),
    (lambda: i(4).add_(f(4)), "result type Float can't be cast to the desired output type Long"),
    (lambda: i(4).mul_(1.5), "result type Float can't be cast to the desired output type Long"),
    (lambda: i(4, dtype=torch.int32).div_(2), "result type Float can't be cast to the desired output type Int"),
    (
        lambda: b(4).masked_scatter(f(4) > 0, f(4)),
        "masked_scatter_: expected self and source to have same dtypes but got BFloat16 and Float",
    ),
    (
        lambda: b(4).index_put((i(2),), f(2)),
        "Index put requires the source and destination dtypes match, got BFloat16 for the destination and Float for "
        "the source.",
    ),
    (
        lambda: b(4).index_add(0, i(2), f(2)),
        "index_add_(): self (BFloat16) and source (Float) must have the same scalar type",
    ),
    (
        lambda: functional.nll_loss(f(4, 4), i(4, dtype=torch.int32)),
        "expected target dtype to be Long or Byte, but got Int",
    ),
    (lambda: functional.binary_cross_entropy(f(4), b(4)), "Found dtype BFloat16 but expected Float"),
    (lambda: torch.softmax(i(4), 0), "\"host_softmax\" not implemented for 'Long'"),
    (lambda: i(4).logcumsumexp(0), "\"logcumsumexp_cuda\" not implemented for 'Long'"),
    (
        lambda: functional.nll_loss(i(4, 3), i(4)),
        "\"nll_loss_forward_reduce_cuda_kernel_2d\" not implemented for 'Long'",
    ),
    (
        lambda: functional.nll_loss(i(4, 3), i(4), reduction="none"),
        "\"nll_loss_forward_no_reduce_cuda_kernel\" not implemented for 'Long'",
    ),
    (
        lambda: functional.nll_loss(i(3), i(1)[0], reduction="none"),
        "\"nll_loss_forward_reduce_cuda_kernel_1d\" not implemented for 'Long'",
    ),
    (lambda: t(4).kthvalue(2), "\"kthvalue_cuda\" not implemented for 'Bool'"),
    (lambda: t(4, 4).median(1), "\"median_out_impl\" not implemented for 'Bool'"),
    (lambda: torch.bucketize(t(4), t(4)), "\"searchsorted_out_cuda\" not implemented for 'Bool'"),
    (lambda: t(4).topk(2), "topk does not support bool dtypes on CPU"),
    (lambda: t(4, 4).argmax(1), "argmax(): does not support bool input"),
    (lambda: t(0).argmin(), "argmin(): does not support bool input"),
    (lambda: t(0).relu(), "Boolean inputs not supported for relu"),
    (lambda: i(4).multinomial(2), "multinomial only supports floating-point dtypes for input, got: Long"),
    (lambda: i(4).bernoulli(), "expected probabilities tensor to have floating type, got Long"),
    (
        lambda: i(4).exponential_(),
        "Exponential distribution is a continuous probability distribution. dtype must be a floating point but you "
        "specified Long",
    ),
    (
        lambda: i(4, dtype=torch.int16).cauchy_(),
        "Cauchy distribution is a continuous probability distribution. dtype must be a floating point but you "
        "specified short int",
    ),
    (
        lambda: torch.matrix_exp(i(4, 4)),
        "linalg.matrix_exp: Expected a floating point or complex tensor as input. Got Long",
    ),
    (
        lambda: functional.conv2d(i(1, 3, 8, 8), i(4, 3, 3, 3)),
        "getCudnnDataTypeFromScalarType() not supported for Long",
    ),
    (
        lambda: functional.conv_transpose2d(t(1, 3, 8, 8), t(3, 4, 3, 3)),
        "getCudnnDataTypeFromScalarType() not supported for Bool",
    ),
    (
        lambda: functional.conv2d(i(1, 3, 8, 8), i(3, 1, 3, 3), groups=3),
        "\"conv_depthwise2d_forward_cuda\" not implemented for 'Long'",
    ),
    (
        lambda: functional.embedding(i(4), i(10, 4), max_norm=1.0),
        "\"embedding_renorm_cuda_\" not implemented for 'Long'",
    ),
    (
        lambda: torch.ops.aten.native_dropout_backward(i(4), t(4), 2.0),
        "\"masked_scale\" not implemented for 'Long'",
    ),
    (lambda: f(4)[f(2)], "tensors used as indices must be long, int, byte or bool tensors"),
    (lambda: torch.ones(4)[i(2)], "indices should be either on cpu or on the same device as the indexed tensor (cpu)"),
    *(
        (
            call,
            f"{TWO}got {name} is on cpu, different from other tensors on cuda:0 (when checking argument in method "
            f"wrapper_CUDA_{by})",
        )
        for call, name, by in APART
    ),
    (
        lambda: torch.clamp(H1, max=f(4)),
        f"{TWO}got max is on cuda:0, different from other tensors on cpu (when checking argument in method "
        "wrapper_CUDA_clamp_Tensor)",
    ),
    (
        lambda: functional.conv2d(torch.ones(1, 1, 4, 4), f(1, 1, 3, 3)),
        f"{TWO}got weight is on cuda:0, different from other tensors on cpu (when checking argument in method "
        "wrapper_CUDA___slow_conv2d_forward)",
    ),
    (
        lambda: torch.mm(f(4, 4), f(4, 4), out=torch.empty(4, 4)),
        f"{TWO}got self is on cuda:0, different from other tensors on cpu (when checking argument in method "
        "wrapper_CUDA_mm_out_out)",
    ),
    (lambda: functional.binary_cross_entropy_with_logits(f(4), torch.ones(4)), MIXED),
    (lambda: torch.ones(4).add_(f(4)), MIXED),
    (lambda: f(4).add_(torch.ones(4)), MIXED),
    (lambda: torch.add(f(4), f(4), out=torch.empty(4)), MIXED),
    (lambda: torch._foreach_add_([f(4)], [torch.ones(4)]), MIXED),
    (lambda: f(4).index_put((i(4),), torch.ones(4)), MIXED),
    (
        lambda: f(4).masked_fill(torch.ones(4) > 0, 0.0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    (_adamw, "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout"),
]
TAKEN: list[Callable[[], Any]] = [
    lambda: functional.batch_norm(b(2, 4, 4, 4), f(4), f(4), f(4), f(4), True),
    lambda: functional.batch_norm(b(2, 4), b(4), b(4), f(4), f(4), True),
    lambda: i(4, dtype=torch.uint8).fill_(-5),
    lambda: i(4, dtype=torch.int32).fill_(3.5),
    lambda: i(4, dtype=torch.bool).fill_(5),
    lambda: f(4).half().fill_(float("inf")),
    lambda: f(4).half() + 1e9,
    lambda: f(4).half().clamp(-1e9, 1e9),
    lambda: b(4).add_(f(4)),
    lambda: torch.where(f(4) > 0, i(4), 1.5),
    lambda: torch.lerp(f(4), f(4), 0.5),
    lambda: b(4).copy_(f(4)),
    lambda: torch.cat([b(4), f(4)]),
    lambda: torch.addcmul(f(4), b(4), b(4)),
    lambda: f(0, 4).max(1)[0],
    lambda: f(0, 4).argmax(-1),
    lambda: functional.mse_loss(f(4), b(4)),
    lambda: attended(b(8, 8)),
    lambda: f(4) * H1,
    lambda: H1 + f(4),
    lambda: f(4).add_(H1),
    lambda: f(4).masked_fill(f(4) > 0, H1),
    lambda: torch.where(f(4) > 0, f(4), H1),
    lambda: f(4).index_put((i(4),), H1),
    lambda: f(4).copy_(torch.ones(4)),
    lambda: torch.maximum(f(4), H1),
    lambda: f(4).index_fill(0, i(4), H1),
    lambda: functional.conv2d(i(1, 3, 8, 8, dtype=torch.uint8), i(4, 3, 3, 3, dtype=torch.uint8)),
    lambda: i(4).addcdiv(i(4), f(4)),
    lambda: i(0).exponential_(),
    lambda: f(0, 4).multinomial(1),
    lambda: torch.searchsorted(i(4), i(4)),
    lambda: i(4).kthvalue(2)[0],
]


@pytest.fixture(autouse=True)
def runtime() -> Iterator[None]:
    with fake_cuda.fake_cuda(profile("A100", "2.13")) as found:
        sdpa.install(found)
        found.observer = mock.Mock()
        yield


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_what_kernels_refuse_ends_as_on_a_gpu(place: int) -> None:
    call, words = REFUSED[place]
    with pytest.raises((RuntimeError, NotImplementedError, IndexError)) as error:
        call()
    assert str(error.value).splitlines()[0] == words


@pytest.mark.parametrize("place", range(len(TAKEN)))
def test_what_kernels_take_goes_on(place: int) -> None:
    assert TAKEN[place]().is_cuda
