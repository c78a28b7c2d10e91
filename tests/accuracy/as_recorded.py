"""Runs a program whose booleans and whole numbers read as on the machine that made the recordings, where nothing has
values: `python as_recorded.py BOOLEAN PROGRAM ARGUMENTS`. Numbers are 0, booleans BOOLEAN (0 or 1), and none is set.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from graph.fake_cuda import device
from graph.fake_cuda.operators import sparse


def without_values(truth: bool) -> None:
    """The device in use forgets what it is told."""
    (runtime,) = device._active
    runtime.boolean = lambda: truth  # type: ignore[method-assign]
    runtime.truth = truth
    runtime.nonzero = lambda tensor: 0
    sparse._different = lambda runtime, indices: 0
    runtime.values.finite = False
    runtime.values.of = lambda tensor: tensor if tensor.device.type == "cpu" else None  # type: ignore[method-assign]
    runtime.values.integer = lambda tensor: 0  # type: ignore[method-assign]
    runtime.values.put = lambda tensor, host, *, mask=False: None  # type: ignore[method-assign]


if __name__ == "__main__":
    without_values(sys.argv[1] == "1")
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
