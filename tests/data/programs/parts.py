"""Small parts of programs that few write: after each, the peak of allocated bytes in it and allocations so far."""
import gc
import time

import torch
from torch.ao.quantization import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
from torch.func import functional_call, grad, hessian, jacfwd, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn


def made(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def lazy_module():
    layer = torch.nn.LazyLinear(64).cuda()
    layer(made(32, 48)).mean().backward()


def cell_of_gru():
    for biases in (True, False):
        torch.nn.GRUCell(32, 64, bias=biases).cuda()(made(8, 32)).mean().backward()


def transform_of_functions():
    layer = torch.nn.Linear(64, 64).cuda()
    grad(lambda given: functional_call(layer, given, (torch.randn(32, 64, device="cuda"),)).sum())(
        dict(layer.named_parameters()))


def packed_attention():
    for heads, key_heads, size in (4, 4, 64), (8, 4, 80), (4, 4, 128), (4, 2, 192), (4, 4, 256):
        query, key, value = (made(300, one, size, dtype=torch.bfloat16) for one in (heads, key_heads, key_heads))
        starts = torch.tensor([0, 100, 180, 300], dtype=torch.int32, device="cuda")
        varlen_attn(query, key, value, starts, starts, 120, 120, **{"enable_gqa": True} if heads != key_heads else {}
                    ).float().mean().backward()


def tangents():
    """Forward differentiation, where what has no tangent has zeros that take no memory."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)).cuda()
    jvp(layers, (torch.randn(512, 64, device="cuda"),), (torch.randn(512, 64, device="cuda"),))
    jacfwd(layers)(torch.randn(64, device="cuda"))
    hessian(lambda one: layers(one).pow(2).sum())(torch.randn(64, device="cuda"))
    time.sleep(0.5)  # the thread of autograd lets go of what it computed with
    gc.collect()
    zeros = torch._efficientzerotensor((500, 500), device="cuda")
    kept = [zeros + 1, zeros * made(500, 500), zeros @ made(500, 500), zeros.t().clone(), zeros.to(torch.float16)]
    del kept


def bags_of_embeddings():
    for mode, options in (("sum", {}), ("mean", {"scale_grad_by_freq": True}), ("max", {})):
        bag = torch.nn.EmbeddingBag(5000, 32, mode=mode, **options).cuda()
        bag(torch.randint(0, 5000, (6400,)).cuda(), torch.arange(0, 6400, 10).cuda()).mean().backward()


def products_of_columns_and_rows():
    (made(16, 300, 1) @ made(16, 1, 200)).mean().backward()


def quantization_while_training():
    weights = FusedMovingAvgObsFakeQuantize(
        MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric).cuda()
    inputs = FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255).cuda()
    image, kernel = made(16, 3, 64, 64), made(512, 3, 3, 3)
    for _ in range(2):
        (inputs(image).sum() + inputs(image.to(memory_format=torch.channels_last)).sum() + weights(kernel).sum()
         ).backward()
    torch.fake_quantize_per_channel_affine(kernel, weights.scale, weights.zero_point, 0, -128, 127).sum().backward()


def cells_of_lstm():
    for biases in (True, False):
        cell, state = torch.nn.LSTMCell(32, 64, bias=biases).cuda(), None
        for _ in range(3):
            state = cell(made(8, 32), state)
        state[0].mean().backward()


def bags_of_two_kinds_of_integers():
    for indices, offsets in (torch.int32, torch.int64), (torch.int64, torch.int32):
        weights = made(6400)
        bag = torch.nn.EmbeddingBag(5000, 32, mode="sum").cuda()
        bag(torch.randint(0, 5000, (6400,)).to("cuda", indices), torch.arange(0, 6400, 10).to("cuda", offsets),
            per_sample_weights=weights).mean().backward()


def values_that_differ():
    """Nothing keeps what they were sought in."""
    torch.unique(made(100_000), return_inverse=True)
    torch.unique_consecutive(made(300_000).detach(), return_counts=True)


def losses_of_long_sequences():
    """From a length on, CTC's derivative is made of other operators."""
    for steps, batch, labels in (100, 5, 31), (500, 17, 203):
        scores = made(steps, batch, labels).log_softmax(2)
        targets, lengths = torch.randint(1, labels, (batch, 20)).cuda(), torch.full((batch,), steps)
        torch.nn.functional.ctc_loss(
            scores, targets, lengths, torch.full((batch,), 20), zero_infinity=steps > 100).backward()


def attention_to_the_lower_right():
    for size in 40, 64:
        query, key, value = (made(2, 3, rows, size, dtype=torch.bfloat16) for rows in (37, 41, 41))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=causal_lower_right(37, 41)).float().sum().backward()


def nothing():
    torch.empty(1, device="cuda")


gc.disable()  # what transforms leave in cycles goes between the parts, not when the collector happens to come
torch.nn.Linear(8, 8).cuda()(made(8, 8)).sum().backward()  # cuBLAS has its workspace
for part in lazy_module, cell_of_gru, transform_of_functions, packed_attention, tangents, bags_of_embeddings, \
        products_of_columns_and_rows, quantization_while_training, cells_of_lstm, bags_of_two_kinds_of_integers, \
        values_that_differ, losses_of_long_sequences, attention_to_the_lower_right, nothing:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    part()
    stats = torch.cuda.memory_stats()
    print(part.__name__, stats["allocated_bytes.all.peak"], stats["allocation.all.allocated"], flush=True)
