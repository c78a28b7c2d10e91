"""What PyTorch 2.13.0 (CUDA 13.0, stub CUDA libraries, an A100) took of its allocator for operators that sort, or
resize, without and with `torch.use_deterministic_algorithms(True)`: allocations, bytes asked for, and bytes asked for
at the peak."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("torch")

from tests.simulator.recording.test_record import folder_of, record
from traces.release import DEFAULT_RELEASE, installed_release

PROGRAM: Final = """
import sys
import torch
torch.use_deterministic_algorithms("plain" not in sys.argv)
torch.utils.deterministic.fill_uninitialized_memory = "unfilled" not in sys.argv
def f(*size): return torch.randn(*size, device="cuda")
rows, at, given = f(1000, 64), torch.randint(0, 1000, (5000,), device="cuda"), f(5000, 64)
column, wide, several = rows[:, 0].clone(), at[:, None].expand(5000, 64), f(64, 500)
label = torch.randint(0, 500, (64, 1), device="cuda")
query = torch.randn(1, 4, 500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
key, value = (torch.randn_like(query[:, :2], requires_grad=True) for _ in range(2))
attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
gradient = torch.ones_like(attended)
calls = {
    "accumulate": lambda: rows.index_put_((at,), given, accumulate=True),
    "put": lambda: rows.index_put_((at,), given),
    "index_add_": lambda: rows.index_add_(0, at, given),
    "index_copy_": lambda: rows.index_copy_(0, at[:1000], given[:1000]),
    "transposed": lambda: rows.t().index_add_(1, at, given.t()),
    "scatter_add_": lambda: rows.scatter_add_(0, wide, given),
    "scatter_": lambda: rows.scatter_(0, wide[:1000], given[:1000]),
    "of one dimension": lambda: column.scatter_add_(0, at, given[:, 0]),
    "gather's derivative": lambda: torch.zeros_like(several).scatter_add_(1, label, several[:, :1]),
    "of two dimensions": lambda: several.t().scatter_(0, label.t(), several[:, 1:2].t()),
    "a new one": lambda: several.scatter(1, label, several[:, 1:2]),
    "of three": lambda: f(4, 16, 500).scatter_add_(2, label.view(4, 16, 1), several[:, :1].reshape(4, 16, 1)),
    "embedding": lambda: torch.ops.aten.embedding_dense_backward(given, at, 1000, -1, False),
    "embedding itself": lambda: torch.nn.functional.embedding(at, rows),
    "index_select": lambda: rows.index_select(0, at),
    "arange": lambda: torch.arange(10, device="cuda"),
    "eye": lambda: torch.eye(4, device="cuda", dtype=torch.int64),
    "sort": lambda: column[:4].sort(),
    "cumsum": lambda: column[:4].cumsum(0),
    "scatter_add_ of integers": lambda: at.scatter_add_(0, at[:9] % 9, at[9:18].clone()),
    "scatter_reduce of sums": lambda: column.scatter_reduce(0, at, given[:, 0], "sum"),
    "scatter_reduce of means": lambda: column.scatter_reduce(0, at, given[:, 0], "mean"),
    "others than the own": lambda: column.scatter_reduce(0, at, given[:, 0], "mean", include_self=False),
    "scatter_reduce of integers": lambda: at.scatter_reduce(0, at[:9] % 9, at[9:18].clone(), "sum"),
    "scatter_reduce of maxima": lambda: column.scatter_reduce(0, at, given[:, 0], "amax"),
    "put one": lambda: column.index_put_((at,), given[0, :1]),
    "cumsum of many": lambda: given.view(-1).cumsum(0),
    "cumsum of rows": lambda: several.cumsum(1),
    "cumprod": lambda: column[:4].cumprod(0),
    "range": lambda: torch.range(1, 9, device="cuda"),
    "resize_": lambda: torch.empty(0, device="cuda").resize_(30),
    "out=": lambda: torch.add(column, 1, out=torch.empty(0, device="cuda")),
    "two of out=": lambda: torch.max(several, 1, out=(torch.empty(0, device="cuda"), label.new_empty(0))),
    "out= with room": lambda: torch.add(column, 1, out=torch.empty(1000, device="cuda")),
    "var_mean": lambda: torch.var_mean(several, 1),
    "where": lambda: torch.where(column > 0, column, column),
    "bucketize": lambda: torch.bucketize(column, column),
    "unfold": lambda: torch.nn.functional.unfold(several[None, None], 3),
    "randperm": lambda: torch.randperm(9, device="cuda"),
    "randperm of many": lambda: torch.randperm(100_000, device="cuda"),
    "distances": lambda: torch.ops.aten._cdist_backward(f(10, 20), f(10, 3), f(20, 3), 2.0, f(10, 20)),
    "attention": lambda: torch.autograd.grad(attended, (query, key, value), gradient),
}
for name, call in calls.items():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    call()
    after = torch.cuda.memory_stats()
    keys = "allocation.all.allocated", "requested_bytes.all.allocated", "requested_bytes.all.peak"
    first = before["requested_bytes.all.current"]
    print((name, after[keys[0]] - before[keys[0]], after[keys[1]] - before[keys[1]], after[keys[2]] - first))
"""

MODES: Final = ("plain", "deterministic", "unfilled")
#: Without determinism; with it; and with it where memory is not filled before it is written.
RECORDED: Final = {
    "accumulate": ((10, 287057, 247039), (11, 287065, 247039), (10, 287057, 247039)),
    "put": ((0, 0, 0), (11, 287065, 247039), (10, 287057, 247039)),
    "index_add_": ((0, 0, 0), (12, 1567065, 1527039), (11, 1567057, 1527039)),
    "index_copy_": ((0, 0, 0), (11, 40027, 32008), (10, 40019, 32001)),
    "transposed": ((0, 0, 0), (14, 3103065, 3063039), (13, 3103057, 3063039)),
    "scatter_add_": ((0, 0, 0), (11, 287065, 247039), (10, 287057, 247039)),
    "scatter_": ((0, 0, 0), (11, 40027, 32008), (10, 40019, 32001)),
    "of one dimension": ((0, 0, 0), (12, 307065, 267039), (11, 307057, 267039)),
    "gather's derivative": ((1, 128000, 128000), (21, 132405, 130824), (19, 132389, 130817)),
    "of two dimensions": ((0, 0, 0), (21, 132405, 130824), (19, 132389, 130817)),
    "a new one": ((1, 128000, 128000), (21, 132405, 130824), (19, 132389, 130817)),
    "of three": ((1, 128000, 128000), (31, 134127, 130472), (28, 134103, 130465)),
    "embedding": ((15, 957613, 788016), (16, 957621, 788016), (15, 957613, 788016)),
    "embedding itself": ((1, 1280000, 1280000), (2, 1280004, 1280004), (1, 1280000, 1280000)),
    "index_select": ((1, 1280000, 1280000), (2, 1280004, 1280004), (1, 1280000, 1280000)),
    "arange": ((1, 80, 80), (2, 88, 88), (1, 80, 80)),
    "eye": ((1, 128, 128), (2, 136, 136), (1, 128, 128)),
    "sort": ((3, 80, 80), (4, 88, 88), (3, 80, 80)),
    "cumsum": ((2, 1039, 1039), (2, 20, 20), (2, 20, 20)),
    "scatter_add_ of integers": ((2, 144, 144), (2, 144, 144), (2, 144, 144)),
    "scatter_reduce of sums": ((1, 4000, 4000), (13, 311065, 271039), (12, 311057, 271039)),
    "scatter_reduce of means": ((4, 29000, 29000), (27, 623130, 275039), (25, 623114, 275039)),
    "others than the own": ((4, 29000, 29000), (27, 623130, 275039), (25, 623114, 275039)),
    "scatter_reduce of integers": ((3, 40144, 40144), (3, 40144, 40144), (3, 40144, 40144)),
    "scatter_reduce of maxima": ((1, 4000, 4000), (1, 4000, 4000), (1, 4000, 4000)),
    "put one": ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
    "cumsum of many": ((2, 1282303, 1282303), (2, 1280160, 1280160), (2, 1280160, 1280160)),
    "cumsum of rows": ((1, 128000, 128000), (1, 128000, 128000), (1, 128000, 128000)),
    "cumprod": ((2, 1039, 1039), (2, 1039, 1039), (2, 1039, 1039)),
    "range": ((1, 36, 36), (2, 40, 40), (1, 36, 36)),
    "resize_": ((1, 120, 120), (2, 124, 124), (1, 120, 120)),
    "out=": ((1, 4000, 4000), (2, 4004, 4004), (1, 4000, 4000)),
    "two of out=": ((2, 768, 768), (4, 780, 776), (2, 768, 768)),
    "out= with room": ((1, 4000, 4000), (1, 4000, 4000), (1, 4000, 4000)),
    "var_mean": ((2, 512, 512), (4, 520, 516), (2, 512, 512)),
    "where": ((2, 5000, 5000), (3, 5004, 5004), (2, 5000, 5000)),
    "bucketize": ((1, 8000, 8000), (2, 8008, 8008), (1, 8000, 8000)),
    "unfold": ((2, 1239536, 1239536), (3, 1239540, 1239536), (2, 1239536, 1239536)),
    "randperm": ((6, 225, 217), (7, 233, 217), (6, 225, 217)),
    "randperm of many": ((6, 4838407, 4838399), (7, 4838415, 4838399), (6, 4838407, 4838399)),
    "distances": ((6, 4480, 4480), (6, 4480, 4480), (6, 4480, 4480)),
    "attention": ((9, 2068480, 2068480), (9, 15699968, 15699968), (9, 15699968, 15699968)),
}


@pytest.mark.skipif(installed_release() != DEFAULT_RELEASE, reason="recorded of another release")
@pytest.mark.parametrize("mode", MODES)
def test_operators_take_what_was_recorded(mode: str, tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": PROGRAM}), "train.py", mode)
    assert done.returncode == 0, done.stderr
    found = {name: tuple(figures) for name, *figures in map(ast.literal_eval, done.stdout.splitlines())}
    assert found == {name: figures[MODES.index(mode)] for name, figures in RECORDED.items()}
