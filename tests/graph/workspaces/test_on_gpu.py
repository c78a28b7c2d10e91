"""What libraries take on a GPU against what an H100 allocated (tests/data/gpu/libraries.json.gz)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import pytest

from graph.workspaces import plan
from graph.workspaces.rules import Plan
from tests.graph.workspaces.test_workspaces import Tensor, call
from tests.places import DATA


@cache
def seen() -> dict[str, Any]:
    """The recordings."""
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / "gpu" / "libraries.json.gz").read_bytes()))
    return found


def there(made: Plan | None, name: str) -> list[int]:
    """The bytes that scratch of a name has on a GPU."""
    return [step[-1] for step in made or () if step[0] == "alloc" and step[1] == name]


def test_attention_by_cudnn() -> None:
    """Every recorded call: heads alone and grouped, masks, dropout, odd lengths, heads of 32 to 256."""
    count = 0
    for desc, _, forward, backward in seen()["attention"]:
        batch, heads, keys, rows, columns, head, values, dtype = desc[:8]
        backend, _, trains = desc[-3:]
        if backend is None or not trains:
            continue
        kind = dtype.removeprefix("torch.")
        query, key = Tensor(kind, [batch, heads, rows, head]), Tensor(kind, [batch, keys, columns, head])
        value, out = Tensor(kind, [batch, keys, columns, values]), Tensor(kind, [batch, heads, rows, values])
        made = call("aten._scaled_dot_product_cudnn_attention.default", query, key, value, None, True, out=(out,) * 4)
        assert there(plan(made), "workspace") == (forward[-1:] if rows > 1 else [])
        back = call(
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            out,
            query,
            key,
            value,
            out,
            out=(query, key, value),
        )
        assert there(plan(back), "workspace") == backward[-1:], desc
        count += 1
    assert count > 250


@pytest.mark.parametrize(
    ("dtype", "last", "off"),
    [
        ("float32", False, (0.16, 0.07, 0.21)),
        ("float16", False, (0.05, 0.03, 0.12)),
        ("bfloat16", False, (0.03, 0.03, 0.1)),
        (
            "bfloat16",
            True,
            (0.16, 0.32, 0.52),
        ),  # a tenth of the bytes: what is left are sums, and copies of few channels
    ],
)
def test_copies_of_convolutions(dtype: str, last: bool, off: tuple[float, ...]) -> None:
    """Of all recorded bytes no more than this share is missed by output, gradient of the input, and of the weight."""
    missed, taken = [0, 0, 0], [0, 0, 0]
    for kind, desc, forward, backward in seen()["parts"]:
        if kind != "conv" or desc[1:] != [f"torch.{dtype}", last, False, False]:
            continue
        theirs = _scratch(desc, forward, backward)
        for way, (ours, real) in enumerate(zip(_likely(desc, dtype, last), theirs, strict=True)):
            missed[way] += abs(ours - real)
            taken[way] += real
    assert min(taken) > 40 << 20
    assert all(few <= share * all_ for few, share, all_ in zip(missed, off, taken, strict=True)), (missed, taken)


@pytest.mark.parametrize(("pictures", "operands"), [(1, 0.75), (8, 6.0), (16, 0.0)])
def test_what_has_too_many_elements_is_not_copied(pictures: int, operands: float) -> None:
    """By peaks of FLUX's autoencoder on an H100, whose largest convolution this is: 47.509 GiB for eight pictures are
    with the copies, 61.548 for sixteen without (tests/data/published/pipelines.csv)."""
    out, *_ = _likely([[256, 128, 3, 1, 1, 1, pictures, 1024, 1024]], "bfloat16", False)
    assert out == (operands * (1 << 30) + 2 * 256 * 128 * 9 if operands else 0)


def _scratch(desc: Any, forward: list[int], backward: list[int]) -> list[int]:
    """What a recorded convolution took for its output and both gradients; nothing for those by PyTorch's kernels."""
    into, out, size, _, _, groups, batch, height, width = desc[0]
    item = 4 if "32" in desc[1] else 2
    results = [batch * into * height * width * item, out * into // groups * size * size * item, out * item]
    if groups == into or backward[0] != results[0]:
        return [sum(forward[1:]), 0, 0]
    found = [sum(forward[1:])]
    places = iter(backward)
    at = next(places)
    for result, following in pairwise(results):
        assert at == result
        took = 0
        while (at := next(places)) != following:
            took += at
        found.append(took)
    return found


def _likely(desc: Any, dtype: str, last: bool) -> list[int]:
    """The same by the rules."""
    into, out, size, stride, pad, groups, batch, height, width = desc[0]
    rows, columns = ((one + 2 * pad - size) // stride + 1 for one in (height, width))

    def tensor(*sizes: int) -> Tensor:
        steps = [prod(sizes[1:]), 1, sizes[3] * sizes[1], sizes[1]]
        return Tensor(dtype, [*sizes], steps if last else None)

    source, weight = tensor(batch, into, height, width), tensor(out, into // groups, size, size)
    made, how = tensor(batch, out, rows, columns), ([pad] * 2, [stride] * 2, [1, 1])
    given = call("aten.cudnn_convolution.default", source, weight, *how, groups, False, False, True, out=made)
    outs = source, weight, Tensor(dtype, [out])
    padding, strides, dilation = how
    back = call(
        "aten.convolution_backward.default",
        made,
        source,
        weight,
        [out],
        strides,
        padding,
        dilation,
        False,
        [0, 0],
        groups,
        [True] * 3,
        out=outs,
    )
    gradients = by_way(plan(back))
    known = groups < into and into > 1
    return [sum(there(plan(given), "algorithm")), *(gradients if known else [0, 0])]


def by_way(made: Plan | None) -> list[int]:
    """What the gradients of input and weight take on a GPU: before the second result is born, and after that."""
    found, way = [0, 0], 0
    for step in made or ():
        if step[0] == "out" and step[1] == 1:
            way = 1
        elif step[0] == "alloc" and step[1] == "algorithm":
            found[way] += step[-1]
    return found


def test_transforms_by_cufft() -> None:
    """All but five of 480 passes over one dimension, to 6 %."""
    pytest.importorskip("torch")
    from graph.fake_cuda.operators.fft import workspace

    count, off = 0, set()
    for kind, desc, forward, _ in seen()["parts"]:
        if kind == "fft":
            way, length, batch, dtype = desc
            theirs = sum(forward[2 if way == "irfft" else 1 :])
            ours = workspace([length], batch, 16 if "64" in dtype else 8, way == "fft")
            count += 1
            if abs(ours - theirs) > 0.06 * theirs:
                off.add((way, length))
    assert count == 480
    assert off <= {("rfft", 768), ("irfft", 768), ("rfft", 1000), ("irfft", 1000), ("fft", 3000)}


def test_recurrent_networks_by_cudnn() -> None:
    """The reserve space of every recorded call; the workspace within a factor of two."""
    pytest.importorskip("torch")
    from graph.fake_cuda.operators.rnn import reserved, workspace

    modes = {"RNN": 1, "LSTM": 2, "GRU": 3}
    for kind, desc, forward, _ in seen()["parts"]:
        if kind == "rnn":
            name, _, size, layers, both, dropout, batch, steps, dtype, trains = desc
            units, item, ways = batch * steps * size, 4 if "32" in dtype else 2, 1 + both
            if trains:
                assert reserved(modes[name], units, item, layers, ways, dropout) == forward[-1], desc
            theirs = forward[-2 if trains else -1]
            assert theirs / 2 < workspace(modes[name], units, item, layers * ways) < 2 * theirs, desc
