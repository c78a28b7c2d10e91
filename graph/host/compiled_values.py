"""What compiled code makes of integers and booleans has values, as where the same operators run one by one.

Inductor's kernels do nothing here. So the part of Dynamo's graph that makes integers and booleans of such alone runs
beside them on the host, with what is known of its inputs: a mask that a compiled function has made of lengths can be
looked at, and decides what it would on a GPU. What comes of floating-point numbers or of chance has no values.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch import fx

from graph.fake_cuda.torch_private import TorchDispatchMode, tree_leaves
from graph.fake_cuda.values import COUNTED

if TYPE_CHECKING:
    from graph.fake_cuda.values import Values

Compiled = Callable[..., Any]

_ARITHMETIC: Final = ("add", "sub", "mul", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
#: Functions that write what they are given first.
_WRITING: Final = frozenset({operator.setitem, *(getattr(operator, f"i{name}") for name in _ARITHMETIC)})


class _UnknownError(Exception):
    """What follows is not known."""


#: What an operator raises on the host that has too little to go on, or that is for the device alone.
_FAILING: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    _UnknownError,
)


@contextlib.contextmanager
def following(values: Values, backend: object) -> Iterator[None]:
    """Inside, what `backend.compile_fx` gives leaves values behind. It calls itself with the settings of a mode."""
    plain: Callable[..., Compiled] = vars(backend)["compile_fx"]
    inside = False

    def compile_fx(model: object, inputs: Sequence[object], *args: object, **kwargs: object) -> Compiled:
        nonlocal inside
        if inside:
            return plain(model, inputs, *args, **kwargs)
        part = countable(model) if isinstance(model, fx.GraphModule) else None  # before it is changed
        inside = True
        try:
            made = plain(model, inputs, *args, **kwargs)
        finally:
            inside = False
        return made if part is None else _with_values(values, part, made)

    with mock.patch.object(backend, "compile_fx", compile_fx):
        yield


def countable(model: fx.GraphModule) -> fx.GraphModule | None:
    """The part of a graph of Dynamo's that makes its integers and booleans, and writes its inputs', of such alone.

    It takes what the graph takes, and gives as many outputs, None for others. None where there is no such part.
    """
    counted: set[fx.Node] = set()
    inputs = {node for node in model.graph.nodes if node.op == "placeholder"}
    for node in model.graph.nodes:
        example = _example(model, node)
        writes = _writes(node)
        known = counted if writes or _has_tensors(example) else counted | inputs  # sizes are known of all
        if node.op != "output" and _counts(example) and known.issuperset(node.all_input_nodes):
            counted.add(node)
        elif writes and counted.intersection(_written(node)):
            return None  # by what is not known
    given = model.graph.output_node().args[0]
    outputs = list(given) if isinstance(given, tuple | list) else [given]
    wanted = [one for one in outputs if isinstance(one, fx.Node) and one in counted and one.op != "placeholder"]
    needed = _behind([*wanted, *filter(_writes, counted)])
    if not needed:
        return None
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in model.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[one] if isinstance(one, fx.Node) and one in needed else None for one in outputs))
    return fx.GraphModule(model, part)


def _example(model: fx.GraphModule, node: fx.Node) -> object:
    if node.op == "get_attr":
        return getattr(model, str(node.target), None)
    return node.meta.get("example_value", None if _writes(node) else 0.0)  # as of `setitem`


def _counts(value: object) -> bool:
    """Whether this is made of integers and booleans, as far as it is made of numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype in COUNTED
    if isinstance(value, tuple | list):
        return all(map(_counts, value))
    return value is None or isinstance(value, int | torch.SymInt | torch.SymBool | torch.dtype | torch.device)


def _has_tensors(value: object) -> bool:
    return any(isinstance(one, torch.Tensor) for one in tree_leaves(value))


def _writes(node: fx.Node) -> bool:
    """Whether it writes what it is given: by the name of a method or function, by `out`, by its schema."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    if getattr(node.target, "__module__", "") == operator.add.__module__:  # `and_` writes nothing
        return node.target in _WRITING
    name, schema = getattr(node.target, "__name__", ""), getattr(node.target, "_schema", None)
    return (schema is not None and schema.is_mutable) or "out" in node.kwargs or name.endswith(("_", "_mutation"))


def _written(node: fx.Node) -> list[fx.Node]:
    """What a node that writes may write: its first argument; of custom and higher-order operators, anything."""
    own = getattr(node.target, "_schema", None) is None and not hasattr(node.target, "dispatch")
    first = [one for one in node.args[:1] if isinstance(one, fx.Node)]
    return first if own and first and "out" not in node.kwargs else list(node.all_input_nodes)


def _behind(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are made of."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return found


def _with_values(values: Values, part: fx.GraphModule, made: Compiled) -> Compiled:
    """What was compiled, which leaves values behind in what it returns and in what it has written."""

    taken = [bool(node.users) for node in part.graph.nodes if node.op == "placeholder"]

    def called(*args: object) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            hosts = [_host(values, arg) if takes else None for arg, takes in zip(args, taken, strict=True)]
            found = _Beside(values, part).found(hosts)
        results = made(*args)
        written = [(arg, host) for arg, host in zip(args, hosts, strict=True) if getattr(host, "_version", 0)]
        there = [
            (one, host)
            for one, host in [*zip(results, found, strict=False), *(written if found else ())]
            if isinstance(one, torch.Tensor) and one.device.type != "cpu" and not _is_unknown(host)
        ]
        values.received(there)
        values.follows([one for one, _ in there], args)
        return results

    return called


def _host(values: Values, arg: object) -> object:
    """What a tensor is on the host; without values it has its sizes alone."""
    if not isinstance(arg, torch.Tensor):
        return arg
    known = values.of(arg) if arg.dtype in COUNTED else None
    if known is not None:
        return known.clone()
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


def _is_unknown(value: object) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and value.is_meta)


class _Beside(fx.Interpreter):
    """Runs a graph on the host as far as its numbers are known."""

    def __init__(self, values: Values, part: fx.GraphModule) -> None:
        super().__init__(part)
        self._values = values

    def found(self, hosts: Sequence[object]) -> tuple[object, ...]:
        """The outputs, None for those that are not known; none at all where something unknown was written."""
        try:
            with OnHost(chance=False):
                return tuple(self.run(*hosts))
        except _UnknownError:
            return ()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; of what is not known, sizes are."""
        if n.op == "get_attr":
            return _host(self._values, super().run_node(n))
        try:
            if n.op.startswith("call") and (_has_tensors(n.meta.get("example_value")) or _writes(n)):
                self._ask(n)
            return super().run_node(n)
        except _FAILING as error:
            if _writes(n):
                raise _UnknownError from error
            return None

    def _ask(self, node: fx.Node) -> None:
        if any(_is_unknown(self.env[one]) for one in node.all_input_nodes):
            raise _UnknownError


class OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that are made on the device are made on the host. `chance`: random ones too."""

    def __init__(self, *, chance: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chance = chance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._chance and torch.Tag.nondeterministic_seeded in func.tags:
            raise _UnknownError
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)
