"""Copies between host and device, and other operators that make a temporary for each element.

Source: aten/src/ATen/native/cuda/Copy.cu (`copy_requires_temporaries`, `copy_kernel_cuda`), TensorCompare.cpp
(`where_self_out`, `clamp`), cuda/TensorTransformations.cu (`roll_cuda`), Pow.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.dtypes import SIZES
from graph.workspaces.metadata import (
    argument,
    dimension,
    dtype,
    elements,
    is_contiguous,
    is_dense,
    on_device,
    shape,
    size,
    strides,
    tensors,
    width,
)
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, after, within


def copy_(call: Call) -> Plan | None:
    """`copy_` between host and device: another dtype or other strides go through a contiguous tensor on the device.

    The dtype changes on the device if the host does not wait, else on the host.
    """
    target, source = call.args[0], call.args[1]
    if on_device(target) == on_device(source) or elements(target) == 0:
        return None
    same = dtype(target) == dtype(source)
    alike = shape(target) == shape(source) and strides(target) == strides(source) and is_dense(target)
    flat = elements(target) == elements(source) and is_contiguous(target) and is_contiguous(source)
    if same and (alike or flat):
        return None
    if on_device(target):
        waits = not argument(call, 2, "non_blocking")
        sent = width(target if waits else source)
        nbytes = 0 if is_contiguous(target) and (same or waits) else elements(target) * sent
    else:
        expanded = shape(source) != shape(target)
        nbytes = elements(target) * width(source) if expanded or not is_contiguous(source) else 0
    return within([("contiguous", nbytes)]) if nbytes else None


def where(call: Call) -> Plan | None:
    """`where`: values on the device are cast to the type of the output, then scalars on the host go there."""
    condition, *values = call.args[:3]
    out = next(tensors(call.out))
    named = list(zip(("self", "other"), values, strict=True))
    made = [(name, value) for name, value in named if on_device(value) and dtype(value) != dtype(out)]
    made += [(name, value) for name, value in named if not on_device(value)]
    steps: list[Step] = [("alloc", name, elements(value) * width(out)) for name, value in made]
    if not on_device(condition) or dtype(condition) == "uint8":
        steps.append(("alloc", "condition", elements(condition)))
    if not steps:
        return None
    names = [step[1] for step in steps]
    return (*steps, ("rest",), *(("free", name) for name in ("condition", "other", "self") if name in names))


def roll(call: Call) -> Plan | None:
    """`roll`: one dimension after the other, each from a contiguous input into a new tensor."""
    source = call.args[0]
    steps = list(within([(f"dimension {number}", size(source)) for number in range(len(call.args[1]) - 1)], REST))
    if not is_contiguous(source):
        steps.insert(0, ("alloc", "input", size(source)))
        steps.insert(2, ("free", "input"))
    return tuple(steps)


def power(call: Call) -> Plan | None:
    """`pow` of a number: the base goes to the device, as 8 bytes, but for 1."""
    return None if call.args[0] == 1 else after([("base", 8)])


def power_of(call: Call) -> Plan | None:
    """`pow` with a number: integers are cast first where the exponent is none (Pow.cpp, the meta function)."""
    return _cast(call, "base")


def clamped(call: Call) -> Plan | None:
    """`clamp` by numbers of another type: the input is cast first (TensorCompare.cpp, `self.to(result_type)`)."""
    return _cast(call, "self")


def _cast(call: Call, name: str) -> Plan | None:
    """The input is cast to the type of the output, if it has another."""
    source, out = call.args[0], next(tensors(call.out))
    return None if dtype(source) == dtype(out) else within([(name, size(out))], REST)


def modulus(call: Call) -> Plan | None:
    """`abs`, `angle` of complex numbers into real ones: computed as complex numbers first (UnaryOps.cpp)."""
    source, out = call.args[0], next(tensors(call.out))
    if "complex" not in dtype(source) or "complex" in dtype(out) or not elements(source):
        return None
    return within([("complex", size(source))], *(() if "out" in call.kwargs else (REST,)))


def pdist_backward(call: Call) -> Plan | None:
    """`_pdist_backward`: a part of the gradient for each other row (cuda/DistanceKernel.cu)."""
    source = call.args[1]
    parts = (shape(source)[0] - 1) * size(source)
    return after([("parts", parts)]) if parts > 0 and argument(call, 2, "p") else None


def bernoulli(call: Call) -> Plan | None:
    """`bernoulli`, `bernoulli_(Tensor)`: probabilities are cast, for fp64 samples to fp64, else to fp32
    (cuda/DistributionTemplates.h)."""
    chances = call.args[1 if "_." in call.name else 0]
    wanted = "float64" if dtype(next(tensors(call.out))) == "float64" else "float32"
    count = elements(chances)
    return after([("chances", count * SIZES[wanted])]) if count and dtype(chances) != wanted else None


def rrelu(call: Call) -> Plan | None:
    """`rrelu_with_noise` in training: a strided input is copied (cuda/RreluWithNoise.cu)."""
    source, trains = call.args[0], argument(call, 4, "training", False)
    return after([("input", size(source))]) if trains and not is_contiguous(source) else None


def unfold_backward(call: Call) -> Plan | None:
    """`unfold_backward` where windows overlap: the places along the dimension that are in one (UnfoldBackward.h)."""
    sizes, place, window, step = call.args[1:5]
    if step >= window or not elements(call.args[0]):
        return None
    windows = shape(call.args[0])[dimension(int(place), len(sizes))]
    return after([("places", 8 * ((windows - 1) * step + window))])


def jagged(call: Call) -> Plan | None:
    """`_padded_dense_to_jagged_forward`: room for values that nobody writes, as large as the result; of fp16 in vectors
    of eight also the row and the column of each (nested/cuda/NestedTensorTransformerFunctions.cu, from FBGEMM)."""
    dense, offsets = call.args[:2]
    out = next(tensors(call.out))
    if not elements(out):
        return None
    by_eight = dtype(out) == "float16" and shape(out)[-1] % 8 == 0 and strides(dense)[-1] == 1 and len(offsets) == 1
    places = 4 * shape(out)[0]
    places_of_each = within([("rows", places), ("columns", places)]) if by_eight else ()
    return within([("values", size(out))], REST, *places_of_each)


RULES: Mapping[str, Rule] = {
    "aten.copy_.default": copy_,
    "aten.where.self": where,
    "aten.roll.default": roll,
    "aten.pow.Scalar": power,
    "aten.pow.Tensor_Scalar": power_of,
    **dict.fromkeys(("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"), clamped),
    "aten.abs.out": modulus,
    "aten.angle.out": modulus,
    "aten.angle.default": modulus,
    "aten._pdist_backward.default": pdist_backward,
    "aten.rrelu_with_noise.default": rrelu,
    **dict.fromkeys(("aten.bernoulli.default", "aten.bernoulli.out", "aten.bernoulli_.Tensor"), bernoulli),
    "aten.unfold_backward.default": unfold_backward,
    "aten._padded_dense_to_jagged_forward.default": jagged,
}
