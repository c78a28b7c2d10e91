"""What libraries take on a GPU against what an H100 allocated (tests/data/gpu/libraries.json.gz)."""

from __future__ import annotations

import gzip
import json
from functools import cache
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


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_convolutions_take_a_copy_of_each_operand(dtype: str) -> None:
    """Most of those without channels last; where they do not, they are the likely size still."""
    near = total = 0
    for kind, desc, forward, _ in seen()["parts"]:
        if kind != "conv" or desc[1:] != [dtype, False, False, False]:
            continue
        into, out, size, stride, pad, groups, batch, height, width = desc[0]
        name = dtype.removeprefix("torch.")
        rows, columns = ((one + 2 * pad - size) // stride + 1 for one in (height, width))
        source, weight = Tensor(name, [batch, into, height, width]), Tensor(name, [out, into // groups, size, size])
        made = Tensor(name, [batch, out, rows, columns])
        given = call(
            "aten.cudnn_convolution.default",
            source,
            weight,
            [pad] * 2,
            [stride] * 2,
            [1, 1],
            groups,
            False,
            False,
            True,
            out=made,
        )
        ours = sum(there(plan(given), "algorithm"))
        theirs = sum(forward[1:])
        if not ours:
            assert theirs < (16 << 20) or size == 1, desc
            continue
        total += 1
        near += abs(ours - theirs) < 1024
    assert total >= 20
    assert near >= total // 2
