"""Lets autograd have its thread for CUDA: it starts threads once a process, with the first backward of all.

A test that runs a backward of its own calls this first, so that captures in the same process can be made after it.
"""

from __future__ import annotations

from functools import cache


@cache
def start_device_threads() -> None:
    """Run a first backward where there is a (fake) CUDA device."""
    from graph.fake_cuda.device import fake_cuda
    from graph.hardware.profile import profile

    with fake_cuda(profile("A100-80GB", "2.13")):
        pass
