"""torch.optim.LBFGS as if it did not converge: it asks numbers that have no values whether it has.

A step of it makes `max_iter` iterations at most, each of which adds two tensors of the size of all parameters to its
history, up to `history_size`. Gradients read as 0 would end it at once (torch/optim/lbfgs.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: What numbers are meanwhile: above the least curvature that it keeps in its history, 1e-10.
_NUMBER: Final = 1e-9
#: How what it asks itself is told, beside what the closure does.
_ITS_OWN: Final = "torch/optim/lbfgs.py:"
#: No number is as small as these tolerances.
_UNREACHED: Final = {"tolerance_grad": -1.0, "tolerance_change": -1.0}


@contextlib.contextmanager
def never_converged(runtime: Runtime) -> Iterator[None]:
    """Inside, each step makes all of its iterations, and the answer says so."""
    plain: Callable[..., Any] = torch.optim.LBFGS.step

    def step(optimizer: torch.optim.LBFGS, closure: Callable[[], Any]) -> Any:
        runtime.note("LBFGS is taken not to converge: each step makes all of its iterations")
        (group,) = optimizer.param_groups
        given = {name: group[name] for name in _UNREACHED}
        group.update(_UNREACHED)
        try:
            with mock.patch.object(runtime.values, "number", _NUMBER):
                return plain(optimizer, closure)
        finally:
            group.update(given)
            for asked in [text for text in runtime.assumptions if text.startswith(_ITS_OWN)]:
                del runtime.assumptions[asked]

    with mock.patch.object(torch.optim.LBFGS, "step", step):
        yield
