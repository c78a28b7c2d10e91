"""Workspace rules against allocator sequences recorded with CUDA builds of PyTorch (tests/data/workspaces.json)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from graph.hardware.profile import profile
from graph.workspaces import Call, merge, plan, rules
from graph.workspaces.cub.temporary import merge_sort_pairs, unique_by_key_of_thrust
from graph.workspaces.gemm import ENVIRONMENT, workspace_bytes
from tests.places import DATA as _DATA
from tests.support.plans import as_recorded

DATA = _DATA / "workspaces.json"
WITHOUT_CUDNN = _DATA / "convolutions.json"
WIDTHS = {"bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4}
WIDTHS |= {"float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16}
OPERATORS_BY_SOURCE = {  # variants with `out=` or in place take the rule of the operator that is recorded
    "aten.mm.out",
    "aten.mm.dtype_out",
    "aten.addmm.out",
    "aten.addmm_.default",
    "aten.addmm.dtype_out",
    "aten.baddbmm.dtype",
    "aten.baddbmm.dtype_out",
    "aten._addmm_activation.out",
    "aten.bmm.out",
    "aten.baddbmm.out",
    "aten.baddbmm_.default",
    "aten.addmv_.default",
    "aten._scaled_mm.out",
    "aten._int_mm.out",
    "aten.nll_loss_forward.output",
    "aten.sum.IntList_out",
    "aten.mean.out",
    "aten.linalg_vector_norm.out",
    "aten.any.out",
    "aten.any.all_out",
    "aten.all.out",
    "aten.all.all_out",
    "aten._softmax.out",
    "aten.argmax.out",
    "aten.argmin.out",
    "aten.cumsum.out",
    "aten.cumprod.out",
    "aten._logcumsumexp.out",
    "aten.topk.values",
    "aten.median.dim_values",
    "aten.nanmedian.dim_values",
    "aten.kthvalue.values",
    *("aten.arange.start_step", "aten.arange.start_out", "aten.eye.out", "aten.eye.m_out"),
    *(
        "aten.index_select.default",
        "aten.nll_loss2d_backward.default",
    ),  # recorded as programs:
    *(f"aten.randperm.{name}" for name in ("default", "generator", "out", "generator_out")),  # test_deterministic
    *(f"aten.clamp_{name}.default" for name in ("min", "max")),  # test_served
    *("aten.nonzero.out", "aten.nonzero_static.out", "aten.linalg_lu.default"),  # the same
    *("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"),  # below
    *(f"aten.norm.{name}" for name in ("ScalarOpt_dim", "ScalarOpt_dim_dtype", "out", "dtype_out")),  # the same
}


@dataclass(frozen=True)
class Device:
    """A device by its type."""

    type: str


class Tensor:
    """What rules see of a tensor."""

    def __init__(self, dtype: str, sizes: list[int], strides: list[int] | None = None, device: str = "cuda") -> None:
        self.shape = tuple(sizes)
        self.dtype = f"torch.{dtype}"
        self.device = Device(device)
        steps: list[int] = []
        step = 1
        for extent in reversed(sizes):
            steps.insert(0, step)
            step *= max(extent, 1)
        self._strides = tuple(steps if strides is None else strides)

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._strides

    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def element_size(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.dtype.removeprefix("torch.")]

    def is_conj(self) -> bool:
        """What was recorded was conjugated in memory, if at all."""
        return False

    def untyped_storage(self) -> None:
        """Tensors have one; rules never look into it."""
        raise AssertionError("a rule looked into a storage")


def tensor(value: Any) -> Any:
    """Arguments and outputs of a record with their tensors made."""
    if isinstance(value, dict):
        return Tensor(*value["t"])
    if isinstance(value, list):
        return [tensor(part) for part in value]
    return value


def call(name: str, *args: Any, out: Any = None, gpu: str = "A100", release: str = "2.13", **rest: Any) -> Call:
    """A call on the main thread's default stream."""
    state = rest.pop("state", {})
    thread = rest.pop("thread", 0)
    return Call(name, args, rest.pop("kwargs", {}), out, profile(gpu, release), 0, thread, False, state)


def followed(steps: Any, outputs: list[int]) -> list[list[Any]]:
    """The allocator's sequence of a plan: scratch numbered by birth, outputs that it does not name at their place."""
    steps = as_recorded(steps)
    named = {step[1] for step in steps if step[0] == "out"}
    rest = [["out", i, nbytes] for i, nbytes in enumerate(outputs) if i not in named]
    events: list[list[Any]] = [] if ("rest",) in steps else list(rest)
    numbers: dict[str, int] = {}
    born = 0
    for step in steps:
        if step[0] == "alloc":
            assert step[1] not in numbers, f"{step[1]} is born twice"
            numbers[step[1]] = born
            events.append(["alloc", born, step[2]])
            born += 1
        elif step[0] == "free":
            events.append(["free", numbers.pop(step[1])])
        elif step[0] == "out":
            events.append(["out", step[1], outputs[step[1]]])
        elif step[0] == "keep":
            events.append(["keep", step[2]])
        elif step[0] == "rest":
            events += rest
    assert not numbers, f"never freed: {list(numbers)}"
    return events


RECORDS: list[list[Any]] = json.loads(DATA.read_text())["records"]
NAMES = sorted({record[0] for record in RECORDS})
CONVOLUTIONS: list[list[Any]] = json.loads(WITHOUT_CUDNN.read_text())["records"]


def check(records: list[list[Any]]) -> None:
    """Each plan is what was recorded."""
    for name, gpu, release, thread, existing, args, kwargs, out, outputs, sequence in records:
        state = {(kind, 0, 0): 1 for kind in existing}
        given = {key: tensor(value) for key, value in kwargs.items()}
        made = Call(name, tuple(tensor(args)), given, tensor(out), profile(gpu, release), 0, thread, False, state)
        assert followed(plan(made), outputs) == sequence, (gpu, release, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_the_sequence_is_the_recorded_one(name: str) -> None:
    check([record for record in RECORDS if record[0] == name])


@pytest.mark.parametrize("name", sorted({record[0] for record in CONVOLUTIONS}))
def test_without_cudnn_the_sequence_is_the_recorded_one(name: str) -> None:
    torch = pytest.importorskip("torch")
    with torch.backends.cudnn.flags(enabled=False):
        check([record for record in CONVOLUTIONS if record[0] == name])


def test_every_rule_has_recordings() -> None:
    attention = {name for name in rules() if "scaled_dot_product" in name or "_attention_" in name}
    assert set(rules()) - attention - OPERATORS_BY_SOURCE <= {*NAMES, *(record[0] for record in CONVOLUTIONS)}
    assert {record[2] for record in RECORDS} == {f"2.{minor}" for minor in range(6, 16)}
    assert len({record[1] for record in RECORDS}) >= 7


@pytest.mark.parametrize("exponent", [0.0, -0.0, 1.0, 2.0, -1.0])
def test_integers_to_a_power_that_is_none_are_cast_first(exponent: float) -> None:
    """As PyTorch 2.13.0+cu130 allocated for `torch.arange(1000) ** exponent`, whatever the exponent is."""
    made = call("aten.pow.Tensor_Scalar", Tensor("int64", [1000]), exponent, out=Tensor("float32", [1000]))
    assert [event[-1] for event in followed(plan(made), [4000]) if event[0] == "alloc"] == [4000]


@pytest.mark.parametrize(
    ("count", "window", "step", "nbytes"),
    [(4000, 256, 64, [31744]), (4000, 256, 100, [31648]), (100, 10, 9, [800]), (100, 10, 10, [])],
)
def test_windows_that_overlap_have_the_places_that_are_in_them(
    count: int, window: int, step: int, nbytes: list[int]
) -> None:
    """As PyTorch 2.13.0+cu130 allocated in the backward of `x.unfold(1, window, step)`, beside the gradient."""
    gradient = Tensor("float32", [2, (count - window) // step + 1, window])
    made = plan(
        call("aten.unfold_backward.default", gradient, [2, count], 1, window, step, out=Tensor("float32", [2, count]))
    )
    assert [event[-1] for event in followed(made, [8 * count]) if event[0] == "alloc"] == nbytes


@pytest.mark.parametrize(("sizes", "dim", "nbytes"), [([32724, 8], 0, [8192, 4]), ([8, 32724], 1, [])])
def test_both_extremes_of_a_dimension_are_staged_together(sizes: list[int], dim: int, nbytes: list[int]) -> None:
    """As PyTorch 2.13.0+cu130 allocated for `torch.aminmax(x, dim=dim)` of bf16, beside the results."""
    outs = [Tensor("bfloat16", [8]) for _ in range(2)]
    made = call("aten.aminmax.default", Tensor("bfloat16", sizes), out=outs, kwargs={"dim": dim})
    assert [event[-1] for event in followed(plan(made), [16, 16]) if event[0] == "alloc"] == nbytes


def test_the_sizes_of_bags_are_born_first() -> None:
    """As PyTorch 2.13.0+cu130 allocated for the largest of 41 indices in 3 bags, of 40 fp32 values."""
    indices, sizes = Tensor("int64", [41]), Tensor("int64", [3])
    outs = (Tensor("float32", [3, 40]), indices, sizes, Tensor("int64", [3, 40]))
    made = plan(call("aten._embedding_bag.default", Tensor("float32", [56, 40]), indices, sizes, False, 2, out=outs))
    assert [event[-1] for event in followed(made, [480, 328, 24, 960])] == [24, 328, 480, 960]


@pytest.mark.parametrize(
    ("name", "rows", "columns", "dtype", "births"),
    [
        ("_foreach_norm.Scalar", 900, (900, 901), "float32", [4, 396, 4, 4, 396, 4]),
        ("_foreach_norm.Scalar", 900, (900, 901), "float16", [2, 396, 4, 2, 396, 4]),
        ("_foreach_norm.Scalar", 7, (7, 8), "float32", [4, 4]),
        ("_foreach_max.default", 7, (9, 10), "float32", [4, 252, 4, 280]),
    ],
)
def test_lists_of_tensors_with_gaps_are_reduced_one_by_one(
    name: str, rows: int, columns: tuple[int, int], dtype: str, births: list[int]
) -> None:
    """As PyTorch 2.13.0+cu130 allocated for columns of wider matrices."""
    sources = [Tensor(dtype, [rows, count], [count + 3, 1]) for count in columns]
    outs = [Tensor(dtype, []) for _ in columns]
    made = plan(call(f"aten.{name}", sources, out=outs))
    events = followed(made, [WIDTHS[dtype]] * 2)
    assert [event[-1] for event in events if event[0] in ("alloc", "out")] == births


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float16", {2: 1279, 100_000: 1279, 286_249: 1535, 400_000: 2303, 3_000_000: 7423}),
        ("bfloat16", {2: 1279, 286_249: 1535, 400_000: 2303, 3_000_000: 7423}),
        ("complex64", {2: 1791, 100_000: 3839, 1_000_003: 23551}),
        ("complex128", {2: 2303, 100_000: 11519, 3_000_000: 283_391}),
        ("int16", {2: 767, 286_249: 1023, 400_000: 1279, 3_000_000: 3839}),
        ("int8", {2: 767, 286_249: 1023, 400_000: 1279, 3_000_000: 3839}),
    ],
)
def test_numbers_that_cub_does_not_know_are_scanned_with_three_arrays(dtype: str, sizes: dict[int, int]) -> None:
    """As PyTorch 2.13.0+cu130 allocated for `torch.cumsum(x, 0)` of one row, by its length."""
    made = {
        count: plan(call("aten.cumsum.default", Tensor(dtype, [count]), 0, out=Tensor(dtype, [count])))
        for count in sizes
    }
    assert {count: [step[2] for step in steps or () if step[0] == "alloc"] for count, steps in made.items()} == {
        count: [nbytes] for count, nbytes in sizes.items()
    }


@pytest.mark.parametrize(
    ("dtype", "count", "sort", "sums"),
    [
        ("float16", 2049, 21503, [5, 2, 8, 1535, 767, 69391]),
        ("bfloat16", 230_000, 2_300_671, [17667, 2, 8, 3071, 767, 69391]),
        ("float32", 2049, 24833, [5, 4, 8, 1535, 767, 69391]),
        ("float32", 230_000, 2_845_567, [17667, 4, 8, 3071, 767, 69391]),
        ("float32", 1_000_003, 12_342_783, [17667, 4, 8, 8447, 767, 69391]),
        ("uint8", 5000, 2_302_335, [17667, 1, 8, 1535, 767, 69391]),
        ("int16", 230_000, 6_769_023, [17667, 2, 8, 3071, 767, 69391]),
        ("int64", 5000, 99071, [17667, 8, 8, 1535, 767, 69391]),
    ],
)
def test_the_mode_of_a_long_row_sorts_it(dtype: str, count: int, sort: int, sums: list[int]) -> None:
    """As PyTorch 2.13.0+cu130 allocated for `torch.mode(x)` on an A100, up to where it uses what a GPU would have
    found."""
    outs = (Tensor(dtype, []), Tensor("int64", []))
    made = plan(call("aten.mode.default", Tensor(dtype, [count]), out=outs))
    births = [step[2] for step in made or () if step[0] == "alloc"]
    assert births == [WIDTHS[dtype] * count, 8 * count, sort, *sums]


def test_the_mode_of_rows_is_that_of_each() -> None:
    """As PyTorch 2.13.0+cu130 allocated for `torch.mode(x, 0)`: booleans are counted, single values are the mode."""
    for rows, dtype, births in ((5000, "bool", [10_000, *[34823, 69391] * 2]), (1, "float32", [])):
        outs = (Tensor(dtype, [2]), Tensor("int64", [2]))
        made = plan(call("aten.mode.default", Tensor(dtype, [rows, 2], [1, rows]), 0, out=outs))
        assert [step[2] for step in made or () if step[0] == "alloc"] == births


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "dim", "out", "births"),
    [
        ("sum.dim_IntList", "complex128", [262_144], 0, ["complex128"], [1024, 4]),
        ("prod.dim_int", "complex64", [262_144], 0, ["complex64"], [256, 4]),
        ("var.correction", "complex64", [262_144], 0, ["float32"], [4, 512, 4, 4, 512, 4]),
        ("var_mean.correction", "complex128", [262_144], 0, ["float64", "complex128"], [8, 8, 1024, 4, 8, 8, 1024, 4]),
    ],
)
def test_complex_numbers_are_reduced(
    name: str, dtype: str, sizes: list[int], dim: int, out: list[str], births: list[int]
) -> None:
    """As PyTorch 2.13.0+cu130 allocated on an A100, beside the results: with 256 threads for `complex128`, and of both
    parts in turn for variances."""
    outs = [Tensor(kind, []) for kind in out]
    made = plan(call(f"aten.{name}", Tensor(dtype, sizes), [dim], out=outs if len(outs) > 1 else outs[0]))
    assert [step[2] for step in made or () if step[0] == "alloc"] == births


@pytest.mark.parametrize(
    ("dtype", "sizes", "order", "out", "births"),
    [
        ("complex64", [3, 1], 2, "float32", [24]),
        ("complex64", [3, 1], 0, "float32", []),
        ("complex64", [3, 1], 2, "float64", [48, 48]),
        ("complex64", [2, 3], 2, "float64", [96]),
        ("complex128", [1, 1], float("inf"), "float64", [16]),
        ("float16", [1, 1], 2, "float32", [4]),
        ("float32", [3, 1], 2, "float32", []),
    ],
)
def test_norms_of_single_numbers_are_absolute_values(
    dtype: str, sizes: list[int], order: float, out: str, births: list[int]
) -> None:
    """As PyTorch 2.13.0+cu130 allocated for `torch.linalg.vector_norm(x, order, 1, dtype=...)`, beside the result."""
    made = call("aten.linalg_vector_norm.default", Tensor(dtype, sizes), order, [1], out=Tensor(out, sizes[:1]))
    assert [step[2] for step in plan(made) or () if step[0] == "alloc"] == births


def test_an_operator_without_a_rule_has_no_plan() -> None:
    source = Tensor("float32", [4, 4])
    assert plan(call("aten.add.Tensor", source, source, out=Tensor("float32", [4, 4]))) is None


def test_one_operator_in_two_tables_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"two rules for aten\.mm\.default"):
        merge([{"aten.mm.default": plan}, {"aten.mm.default": plan}])


@pytest.mark.parametrize(
    ("gpu", "release", "nbytes"),
    [
        ("V100", "2.9", (2 * 4096 + 8 * 16) * 1024),
        ("A100", "2.13", (2 * 4096 + 8 * 16) * 1024),
        ("H100", "2.9", 32 << 20),
        ("B200", "2.11", (2 * 4096 + 8 * 16) * 1024),
        ("B200", "2.13", 32 << 20),
    ],
)
def test_the_cublas_workspace_is_born_once(gpu: str, release: str, nbytes: int) -> None:
    one, other, out = (Tensor("bfloat16", [16, 16]) for _ in range(3))
    state: dict[Any, Any] = {}
    again: dict[str, Any] = {"gpu": gpu, "release": release, "state": state}
    assert plan(call("aten.mm.default", one, other, out=out, **again)) == (("keep", ("cublas", 0, 0), nbytes),)
    assert plan(call("aten.mm.default", one, other, out=out, **again)) is None


@pytest.mark.parametrize("first", [0, 1])
def test_a_gpu_has_a_handle_and_a_workspace_for_each_thread(first: int) -> None:
    """Recordings have that of the thread that comes first."""
    one, other, out = (Tensor("bfloat16", [16, 16]) for _ in range(3))
    state: dict[Any, Any] = {}
    threads = (first, 1 - first)
    made = [plan(call("aten.mm.default", one, other, out=out, thread=thread, state=state)) for thread in threads]
    nbytes = workspace_bytes(profile("A100", "2.13"))
    assert made == [(("keep", ("cublas", first, 0), nbytes),), (("keep", ("cublas", 1 - first, 0), 0, nbytes),)]
    assert plan(call("aten.mm.default", one, other, out=out, thread=1, state=state)) is None


def test_the_workspace_of_a_product_is_freed_with_it_from_2_15() -> None:
    one, other, out = (Tensor("float32", [16, 16]) for _ in range(3))
    made = plan(call("aten.mm.default", one, other, out=out, release="2.15"))
    assert made == (("alloc", "cublas", 8_519_680), ("free", "cublas"))


def test_a_matrix_that_is_written_to_is_not_added_by_cublaslt() -> None:
    """As PyTorch 2.15.0 allocated in `torch.addmm(..., out=...)`: 1 MiB for cuBLASLt, else cuBLAS's 8.1 MiB."""
    one, other, added, out = (Tensor("bfloat16", [16, 16]) for _ in range(4))
    elsewhere = call("aten.addmm.out", added, one, other, kwargs={"out": out}, out=out, release="2.15")
    in_place = call("aten.addmm.out", added, one, other, kwargs={"out": added}, out=added, release="2.15")
    made = [plan(each) for each in (elsewhere, in_place)]
    assert [steps and steps[0][2] for steps in made] == [1 << 20, 8_519_680]


@pytest.mark.parametrize(
    ("gpu", "release", "count", "sort", "unique"),
    [
        ("A100", "2.13", 2, 1023, 1535),
        ("A100", "2.13", 5000, 80895, 1535),
        ("A100", "2.13", 100_000, 1_600_511, 2047),
        ("A100", "2.13", 300_000, 4_801_023, 3071),
        ("H100", "2.13", 200, 4095, 1535),
        ("H100", "2.13", 300_000, 4_801_023, 1791),
        ("A100", "2.9", 200, 4095, 1279),
        ("A100", "2.9", 300_000, 4_801_535, 2815),
    ],
)
def test_indices_of_sparse_tensors_are_sorted_as_recorded(
    gpu: str, release: str, count: int, sort: int, unique: int
) -> None:
    """As CUDA builds allocated in `coalesce` of `count` elements, of 2.13.0 (CUDA 13.0) and 2.9.1 (CUDA 12.8)."""
    card = profile(gpu, release)
    assert (merge_sort_pairs(card, count, 8, 8), unique_by_key_of_thrust(card, count)) == (sort, unique)


def test_bias_gradient_is_staged_by_blocks() -> None:
    """1024 rows of 768 bf16: each of 6 x 16 blocks leaves an fp32 sum for each of its 32 x 4 outputs."""
    source = Tensor("bfloat16", [1024, 768])
    made = plan(call("aten.sum.dim_IntList", source, [0], True, out=Tensor("bfloat16", [1, 768]), release="2.11"))
    staged = {step[1]: step[2] for step in made or () if step[0] == "alloc"}
    # 768 / 4 outputs a thread = 192 columns, 32 a block: 6 blocks; 1024 rows / 4 threads = 256 each, 16 a block: 16
    assert staged == {"staging": 4 * 768 * 16 * 32 * 4, "semaphores": 4 * 6}


def test_indices_above_3072_are_sorted_in_embedding_backward() -> None:
    def temporaries(count: int) -> int:
        gradient, indices = Tensor("bfloat16", [count, 64]), Tensor("int64", [count])
        made = plan(
            call(
                "aten.embedding_dense_backward.default",
                *(gradient, indices, 50_000, -1, False),
                out=Tensor("bfloat16", [50_000, 64]),
            )
        )
        return sum(step[2] for step in made or () if step[0] == "alloc" and step[1] == "partial sums")

    assert temporaries(3072) == 0
    assert temporaries(3073) == (3073 // 10 + 3073) * 64 * 4


#: Variables of the environment, bytes of cuBLAS's workspace on an A100 and on an H100, and of cuBLASLt's (None: one
#: serves both), as PyTorch 2.13.0 (CUDA 13.0) took them on stub CUDA libraries.
_ENVIRONMENTS: list[tuple[dict[str, str], int, int, int | None]] = [
    ({}, 8_519_680, 33_554_432, None),
    ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 33_554_432, 33_554_432, None),
    ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 131_072, 131_072, None),
    ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, 8_519_680, 8_519_680, None),
    ({"CUBLAS_WORKSPACE_CONFIG": "none"}, 8_519_680, 33_554_432, None),
    ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, 0, 0, None),
    ({"CUBLASLT_WORKSPACE_SIZE": "2048"}, 8_519_680, 33_554_432, None),
    ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, 8_519_680, 33_554_432, 1_048_576),
    ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, 8_519_680, 33_554_432, None),
    ({"CUBLASLT_WORKSPACE_SIZE": "2048", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, 8_519_680, 33_554_432, 2_097_152),
]


@pytest.mark.parametrize(("environment", "ampere", "hopper", "lt"), _ENVIRONMENTS)
def test_workspaces_are_what_the_environment_says(
    environment: dict[str, str], ampere: int, hopper: int, lt: int | None
) -> None:
    one, other, bias, out = (Tensor("bfloat16", size) for size in ([64, 256], [256, 256], [256], [64, 256]))
    for gpu, nbytes in (("A100", ampere), ("H100", hopper)):
        state: dict[Any, Any] = {ENVIRONMENT: environment}
        again: dict[str, Any] = {"gpu": gpu, "release": "2.13", "state": state}
        first = plan(call("aten.mm.default", one, other, out=out, **again))
        assert first == ((("keep", ("cublas", 0, 0), nbytes),) if nbytes else None)
        second = plan(call("aten.addmm.default", bias, one, other, out=out, **again))
        assert second == (None if lt is None else (("keep", ("cublaslt", 0, 0), lt),))
