"""Shapes by PyTorch's rules on `meta` are those by the same rules of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from graph.fake_cuda import shapes  # noqa: E402
from graph.fake_cuda.device import fake_cuda  # noqa: E402
from graph.fake_cuda.torch_private import tree_leaves  # noqa: E402
from graph.hardware.profile import profile  # noqa: E402

_aten = torch.ops.aten
Draw = Callable[[st.SearchStrategy[Any]], Any]
_FLOATING = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
_TYPES = [*_FLOATING, torch.int64, torch.int32, torch.bool]


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[Any]:
    with fake_cuda(profile("A100", "2.13")) as made:
        yield made


def _tensor(draw: Draw, shape: list[int], types: list[Any]) -> Any:
    """A tensor of this shape, contiguous, transposed, with steps, or expanded."""
    dtype, how = draw(st.sampled_from(types)), draw(st.sampled_from(["plain", "permuted", "stepped", "expanded"]))
    if how == "permuted":
        order = draw(st.permutations(range(len(shape))))
        places = [order.index(dim) for dim in range(len(shape))]
        return torch.empty([shape[dim] for dim in order], dtype=dtype, device="cuda").permute(places)
    if how == "stepped" and shape:
        return torch.empty([*shape[:-1], 2 * shape[-1]], dtype=dtype, device="cuda")[..., ::2]
    if how == "expanded" and shape:
        return torch.empty([1, *shape[1:]], dtype=dtype, device="cuda").expand(shape)
    return torch.empty(shape, dtype=dtype, device="cuda")


def _call(name: str, draw: Draw) -> tuple[Any, ...]:
    """Arguments of an operator, most of which it takes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    a, b, c, d = (draw(st.integers(0, 4)) for _ in range(4))
    types = [draw(st.sampled_from(_TYPES))] if draw(st.booleans()) else _TYPES
    if name in ("mm", "addmm", "bmm"):
        batch = [d] if name == "bmm" else []
        operands = [_tensor(draw, [*batch, *shape], types) for shape in ([a, b], [b, c])]
        added = draw(st.sampled_from([[c], [1, c], [a, c], []]))
        return (_tensor(draw, added, types), *operands) if name == "addmm" else tuple(operands)
    if name == "cat":
        dim = draw(st.integers(-len(sizes), len(sizes) - 1))
        ones = [list(sizes) for _ in range(draw(st.integers(1, 3)))]
        for one in ones:
            one[dim] = draw(st.integers(0, 3))
        return [_tensor(draw, one, types) for one in ones], dim
    source = _tensor(draw, sizes, types)
    if name == "index_select":
        return source, draw(st.integers(0, len(sizes) - 1)), torch.empty(a, dtype=torch.int64, device="cuda")
    if name == "native_layer_norm":
        shape = sizes[draw(st.integers(0, len(sizes) - 1)) :]
        weights = [draw(st.sampled_from([None, _tensor(draw, shape, types)])) for _ in range(2)]
        return source, shape, *weights, 1e-5
    if name == "native_layer_norm_backward":
        place = draw(st.integers(0, len(sizes) - 1))
        means = [_tensor(draw, [*sizes[:place], *[1] * (len(sizes) - place)], types) for _ in range(2)]
        weights = [draw(st.sampled_from([None, _tensor(draw, sizes[place:], types)])) for _ in range(2)]
        wanted = [draw(st.booleans()) for _ in range(3)]
        return _tensor(draw, sizes, types), source, sizes[place:], *means, *weights, wanted
    if name in ("_softmax", "_log_softmax"):
        return source, draw(st.integers(-len(sizes), len(sizes) - 1)), draw(st.booleans())
    if name == "_softmax_backward_data":
        dtype = draw(st.sampled_from([source.dtype, *_FLOATING]))
        return source, _tensor(draw, sizes, types), draw(st.integers(0, len(sizes) - 1)), dtype
    if name == "native_dropout":
        return source, draw(st.sampled_from([0.0, 0.1, 1.0])), draw(st.sampled_from([None, True, False]))
    if name == "native_dropout_backward":
        return source, _tensor(draw, sizes, [torch.bool]), 2.0
    if name == "pow":
        return source, draw(st.sampled_from([2, 0.5, -1]))
    if name == "mean":
        dims = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=2, unique=True))
        return source, draw(st.sampled_from([None, dims])), draw(st.booleans())
    if name in ("eq", "ne"):
        return source, draw(st.sampled_from([0, 1.5, True]))
    if name in ("add", "sub", "mul", "div", "gelu_backward"):
        least = draw(st.integers(0, len(sizes) - 1))
        other = [1 if draw(st.booleans()) else size for size in sizes[least:]]
        numbers = [] if "backward" in name else [2, 0.5, True]
        return source, draw(st.sampled_from([_tensor(draw, other, types), *numbers]))
    return (source,)


def _inferred(func: Any, args: tuple[Any, ...]) -> list[tuple[object, ...]] | type[Exception]:
    """Sizes, strides, dtypes and bytes of what an operator makes, or what it raises."""
    try:
        made, _ = shapes.Shapes().infer(func, args, {})
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        return type(error)
    return [
        (tuple(one.shape), one.stride(), one.dtype, one.storage_offset(), one.untyped_storage().nbytes())
        for one in tree_leaves(made)
        if one is not None
    ]


@pytest.mark.parametrize("func", sorted(shapes.ALIKE, key=str), ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_rules_say_the_same_of_meta(func: Any, data: st.DataObject) -> None:
    args = _call(func._schema.name.removeprefix("aten::"), data.draw)
    found = _inferred(func, args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "ALIKE", frozenset())
        assert found == _inferred(func, args)


def test_tensors_of_the_host_are_left_to_the_rules_of_cuda() -> None:
    there = torch.empty(3, device="cuda")
    assert shapes._on_meta_alone(_aten.mul.Tensor, (there, torch.empty(()))) is None
    assert shapes._on_meta_alone(_aten.cat.default, ([there, torch.empty(3)],)) is None
    assert shapes._on_meta_alone(_aten.cat.default, ([there, there],)).shape == (6,)


@pytest.mark.parametrize(("columns", "strides"), [(5000, (5003, 1)), (5003, (5003, 1))])
def test_a_row_that_is_sorted_keeps_its_strides(columns: int, strides: tuple[int, ...]) -> None:
    """As PyTorch 2.13.0+cu130 sorts the last logits of a batch of one, `logits[:, -1]`: without copies."""
    row = torch.empty(1, 5003, device="cuda")[:, :columns]
    assert [one.stride() for one in (*row.sort(), *row.sort(stable=True))] == [strides] * 4
    with pytest.raises(IndexError):
        row.sort(2)
