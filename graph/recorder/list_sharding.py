"""Optimizers over lists of sharded tensors, quickly: equal entries of a list are worked out once.

For an operator over lists (`_foreach_*`, `_fused_*`) DTensor's propagation of shardings takes time that grows with the
square of the lists' length, 10 s of 13 for the 723 parameters of a 70 B model. Entry i of the result depends on entry i
of the lists only (torch/distributed/tensor/_ops/single_dim_strategy.py, expanded_foreach_strategy), and most layers
are alike, so that a list with one entry of each kind says it all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeGuard
from unittest import mock

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import ShardedCall

#: Operators whose lists are worked through entry by entry.
_PREFIXES: Final = ("aten::_foreach_", "aten::_fused_")


@contextlib.contextmanager
def equal_entries_once() -> Iterator[None]:
    """Shardings of such operators are propagated for distinct entries, while inside."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    plain = propagator.propagate_op_sharding_non_cached  # dispatch looks into its caches before it asks this
    with mock.patch.object(
        propagator, "propagate_op_sharding_non_cached", new=lambda schema: propagated(schema, plain)
    ):
        yield


def propagated(schema: ShardedCall, plain: Callable[[Any], Any]) -> Any:
    """What `plain` (DTensor's own propagation) says of an operator's schema, from a shorter one where that will do."""
    kinds = _kinds(schema)
    if kinds is None:
        return plain(schema)
    first, numbers = kinds
    found = plain(_picked(schema, first, len(numbers)))
    if found.needs_redistribute:
        return plain(schema)
    specs = found.output_spec
    if isinstance(specs, tuple) and len(specs) == len(first):
        specs = tuple(specs[number].shallow_copy_with_tensor_meta(specs[number].tensor_meta) for number in numbers)
    return type(found)(specs)


def _kinds(schema: ShardedCall) -> tuple[list[int], list[int]] | None:
    """The first entry of each kind, and the kind of every entry; None where that is not another, shorter list."""
    operator: Any = schema.op  # its `name` has no types
    if not operator.name().startswith(_PREFIXES) or not _is_list(schema.args_schema[0]):
        return None  # `_fused_rms_norm` has but one tensor, and a list of two flags
    lists = [part for part in schema.args_schema if _is_list(part)]
    count = max(map(len, lists), default=0)
    if count < 2:
        return None
    try:
        numbers, first = _numbered(list(zip(*(part for part in lists if len(part) == count), strict=True)))
    except TypeError:  # of sizes that Dynamo leaves open nobody knows whether they are equal
        return None
    return (first, numbers) if len(first) < count else None


def _numbered(entries: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The kind of every entry, and the first entry of each kind. TypeError where one has no hash."""
    numbers: list[int] = []
    kinds: dict[Any, int] = {}
    first: list[int] = []
    for place, entry in enumerate(entries):
        number = kinds.setdefault(entry, len(kinds))
        if number == len(first):
            first.append(place)
        numbers.append(number)
    return numbers, first


def _picked(schema: ShardedCall, first: Sequence[int], count: int) -> Any:
    """The schema with these entries of its lists only."""

    def picked(part: object) -> Any:
        if not _is_list(part) or len(part) != count:
            return part
        make: Callable[[Any], Any] = type(part)
        return make(part[place] for place in first)

    return replace(schema, args_schema=tuple(map(picked, schema.args_schema)), _comparison_key=None)


def _is_list(part: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(part, list | tuple)
