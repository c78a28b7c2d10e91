"""Modules that a caller of Python has in hand: registered under a name for as long as cases with that name run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from traces.errors import ConfigError

#: Module and example inputs (None: by its configuration) by the name that stands in a case's `model`.
MODULES: Final[dict[str, tuple[torch.nn.Module, Any]]] = {}
_numbers: Final = itertools.count(1)
_DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@contextmanager
def named(module: object, inputs: object = None) -> Iterator[dict[str, str]]:
    """The keys of a case of a module: `model`, a name that no other has, and `dtype`, that of its weights.

    `inputs` are example inputs of its forward, as those of a user's function (`graph.models.sources`); a model of
    transformers needs none. Raises ConfigError for what is no module, and where inputs are missing.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"a model is a name, a path, module:function or an nn.Module, not {type(module).__name__}")
    kind = type(module).__name__
    if inputs is None and not hasattr(module, "config"):
        raise ConfigError(
            f"{kind} has no configuration of transformers: give example inputs as inputs={{name: tensor}}"
        )
    name = f"{kind} #{next(_numbers)}"
    MODULES[name] = module, inputs
    try:
        yield {"model": name, "dtype": _dtype(module)}
    finally:
        del MODULES[name]


def without_weights(module: torch.nn.Module) -> torch.nn.Module:
    """A copy on the meta device: shapes, dtypes and ties of parameters and buffers as they are, without bytes."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        bare = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        memo[id(parameter)] = bare
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def _dtype(module: torch.nn.Module) -> str:
    found = {one.dtype for one in module.parameters() if one.is_floating_point()}
    return _DTYPES.get(next(iter(found)), "fp32") if len(found) == 1 else "fp32"
