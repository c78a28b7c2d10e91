"""Calls that PyTorch refuses for shapes, dimensions and dtypes, and its words."""
import torch
from torch.nn import functional


def f(*sizes, dtype=torch.float32):
    return torch.zeros(*sizes, device="cuda", dtype=dtype)


def i(*sizes):
    return f(*sizes, dtype=torch.int64)


for call in (
    lambda: f(32, 50) @ f(3, 3), lambda: torch.addmm(f(5), f(2, 3), f(4, 5)), lambda: torch.bmm(f(2, 3, 4), f(2, 5, 6)),
    lambda: functional.linear(f(2, 3), f(4, 5)), lambda: f(2, 3) @ f(4), lambda: torch.dot(f(3), f(4)),
    lambda: torch.baddbmm(f(2, 3, 3), f(2, 3, 4), f(2, 5, 3)), lambda: torch.einsum("ij,jk->ik", f(2, 3), f(4, 5)),
    lambda: f(2, 3) + f(2, 4), lambda: torch.cat([f(2, 3), f(2, 4)]), lambda: torch.stack([f(2), f(3)]),
    lambda: f(2, 3).view(7), lambda: f(2).add_(f(2, 2)), lambda: f(2).copy_(f(3)), lambda: f(3, 4).expand(2, 4),
    lambda: functional.layer_norm(f(2, 3), (4,)), lambda: functional.group_norm(f(2, 5), 2),
    lambda: functional.conv2d(f(1, 3, 8, 8), f(4, 2, 3, 3)), lambda: functional.conv2d(f(1, 3, 2, 2), f(4, 3, 3, 3)),
    lambda: functional.cross_entropy(f(2, 3), i(3)), lambda: functional.binary_cross_entropy(f(2), f(3)),
    lambda: functional.softmax(f(3), 2), lambda: functional.log_softmax(f(3, 3), -3), lambda: f(4, 4).topk(5),
    lambda: f(3, 3).gather(0, i(4, 4)), lambda: f(2, 3).scatter_add_(0, i(3, 3), f(2, 2)), lambda: torch.take(f(2), f(2)),
    lambda: f(2).index_add_(0, i(2), f(3)), lambda: f(2).index_copy_(0, i(2), f(3)), lambda: f(3).index_select(0, i(2, 2)),
    lambda: f(2, 2).index_fill_(0, f(2), 1.0), lambda: functional.pad(f(2, 3, 3), (5, 5), mode="reflect"),
    lambda: functional.adaptive_avg_pool2d(f(3, 3), 2), lambda: functional.grid_sample(f(1, 1, 4, 4), f(2, 3, 3, 2)),
    lambda: functional.fold(f(1, 5, 4), (4, 4), (2, 2)), lambda: torch.linalg.inv(f(2, 3)), lambda: i(3).float().long().mean(),
    lambda: torch._foreach_add([f(2)], [f(3)]), lambda: torch.lerp(f(2), f(2).half(), 0.5), lambda: functional.gelu(i(3)),
    lambda: f(2) & 1, lambda: torch.clamp(f(2)), lambda: functional.embedding(f(3), f(4, 4)),
    lambda: f(2).lerp_(f(2).half(), 0.5), lambda: f(2).lerp_(f(2), f(2).double()), lambda: f(2).lerp_(f(2), f(1).double()[0]),
    lambda: functional.grouped_mm(f(8, 36).half(), f(2, 36, 64).half(), offs=i(2).int()),
    lambda: functional.grouped_mm(f(8, 64), f(2, 64, 34), offs=i(2).int()),
    lambda: functional.grouped_mm(f(64).expand(8, 64), f(2, 64, 32), offs=i(2).int()),
    *(lambda call=call: call(f(4, 4).bfloat16()) for call in (
        torch.nn.init.orthogonal_, torch.linalg.qr, torch.linalg.lu_factor, torch.linalg.svdvals, torch.linalg.cholesky,
        torch.linalg.eigvalsh, torch.linalg.eigvals, torch.linalg.det, torch.geqrf, torch.special.erfcx, torch.angle,
        lambda x: torch.cdist(x, x), lambda x: torch.linalg.solve(x, x), lambda x: torch.linalg.householder_product(x, x[0]),
        lambda x: torch.linalg.solve_triangular(x, x, upper=True), lambda x: torch.cholesky_solve(x, x),
        lambda x: torch.igamma(x, x), lambda x: torch.linalg.qr(x.half().expand(3, 4, 4)), torch.bitwise_not,
        lambda x: torch.linalg.lu_factor(x.expand(3, 4, 4)), lambda x: torch.linalg.svdvals(x.repeat(20, 20)),
        lambda x: functional.ctc_loss(x[:, None], i(1, 2), i(1) + 4, i(1) + 2))),
    *(lambda call=call: call(i(1, 4, 6)) for call in (
        functional.silu, functional.mish, functional.glu, functional.hardshrink, torch.frac, lambda x: functional.avg_pool1d(x, 2),
        lambda x: functional.max_pool2d(x, 2), lambda x: functional.interpolate(x, scale_factor=2), lambda x: x.clone().normal_(),
        lambda x: functional.mse_loss(x, x, reduction="none"), lambda x: functional.smooth_l1_loss(x, x, reduction="none"),
        lambda x: functional.dropout(x, 0.5), lambda x: torch.lerp(x, x, 0.5), lambda x: x[0, 0] @ x[0, 0],
        lambda x: x[0] @ x[0, 0], lambda x: x.clone().uniform_(), lambda x: functional.unfold(x[None].mT, 2),
        lambda x: torch.hypot(x, x.float()).dtype, lambda x: functional.mse_loss(x, x.float(), reduction="none").dtype,
        lambda x: functional.interpolate(x[None].byte(), scale_factor=2).shape, lambda x: torch.round(x > 0))),
    lambda: torch._foreach_lerp_([f(2)], [f(2).bfloat16()], 0.5), lambda: torch._foreach_lerp_([f(2)], [f(2)], [f(2).long()]),
    *(lambda call=call: call(torch.Generator()) for call in (
        lambda g: torch.randn(3, device="cuda", generator=g), lambda g: torch.randperm(3, device="cuda", generator=g),
        lambda g: f(3).uniform_(generator=g), lambda g: torch.poisson(f(3), g), lambda g: torch.normal(f(3), 1.0, generator=g),
        lambda g: torch.multinomial(f(3), 2, generator=g), lambda g: torch.bernoulli(f(3), generator=g),
        lambda g: torch.rand(3, device="cuda", generator=torch.Generator("cuda")).shape)),
    *(lambda call=call: call(f(1, 4).expand(4, 4), f(4, 4)).shape for call in (
        lambda x, y: x.add_(1), lambda x, y: x.mul_(y), lambda x, y: x.copy_(y), lambda x, y: x.relu_(), lambda x, y: x.normal_(),
        lambda x, y: x.clamp_(0), lambda x, y: x.index_add_(0, i(1), y[:1]), lambda x, y: x.scatter_(0, i(4, 4), 1.0),
        lambda x, y: x.cumsum_(0), lambda x, y: x.masked_scatter_(y > 0, y), lambda x, y: x.fill_(y[0, 0]),
        lambda x, y: x.index_put_((i(1),), y[:1], accumulate=True), lambda x, y: torch._foreach_add_([x, x], 1.0)[0],
        lambda x, y: x.fill_(1), lambda x, y: x.zero_(), lambda x, y: x.masked_fill_(y > 0, 1), lambda x, y: x.triu_(),
        lambda x, y: x.index_put_((i(1),), y[:1]), lambda x, y: x.index_fill_(0, i(1), 1.0), lambda x, y: torch.add(y, 1, out=x),
        lambda x, y: y[1:].copy_(y[:-1]), lambda x, y: y[:2].add_(y[1:3]), lambda x, y: y.mul_(y.t()), lambda x, y: y.add_(y),
        lambda x, y: y[:2].add_(y[2:]), lambda x, y: y[:, :2].add_(y[:, 1:3]), lambda x, y: torch.clamp(y[1:], 0, out=y[:-1]),
        lambda x, y: torch.add(y, 1, out=y))),
):
    try:
        print(call())
    except Exception as error:
        print(type(error).__name__, str(error).partition("\n")[0])
