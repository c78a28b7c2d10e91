"""What CUDA kernels allocate beyond what dispatch shows: a table of rules by operator, and `plan`, which asks it.

Each module exports `RULES`, operator name to rule; those of kernels that call CUB are in the room `cub`. Rules are pure
functions of a call (`rules.Call`) but for the persistent workspaces they note in `Call.state`. Sources are named rule
by rule; all are checked against recordings of CUDA builds (tests/graph/workspaces/test_workspaces.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

from graph.workspaces.rules import Call, Plan, Rule

__all__ = ["Call", "Plan", "Rule", "merge", "plan", "rules"]

_MODULES: Final = (
    "attention",
    "batch_norm",
    "chunking",
    "convolution",
    "cub.embedding",
    "cub.indexing",
    "cub.segments",
    "cub.sorting",
    "cub.unique",
    "elementwise",
    "foreach",
    "gemm",
    "linalg",
    "loss",
    "norm",
    "reduction",
    "resampling",
    "softmax",
)


def merge(tables: Iterable[Mapping[str, Rule]]) -> dict[str, Rule]:
    """One table of several; raises ValueError for an operator that two of them name."""
    merged: dict[str, Rule] = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        if twice:
            raise ValueError(f"two rules for {', '.join(sorted(twice))}")
        merged.update(table)
    return merged


@cache
def rules() -> Mapping[str, Rule]:
    """Every rule, by operator name ("aten.mm.default")."""
    return merge(importlib.import_module(f"{__name__}.{name}").RULES for name in _MODULES)


def plan(call: Call) -> Plan | None:
    """The allocator's sequence inside a call, or None where it is only the outputs, in order."""
    rule = rules().get(call.name)
    return None if rule is None else rule(call)
