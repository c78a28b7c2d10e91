"""Programs that call torch.compile: what they compile runs as it stands, and the place is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda.device import Runtime, fake_cuda
from graph.hardware.profile import profile
from graph.host.uncompiled import uncompiled


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with fake_cuda(profile("A100-80GB", "2.13")) as found:
        yield found


def test_every_way_to_compile(runtime: Runtime) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    net = torch.nn.Linear(2, 2)
    before = torch.compile
    with uncompiled(runtime):
        assert torch.compile(doubled, mode="max-autotune") is doubled
        assert torch.compile(fullgraph=True)(doubled) is doubled
        net.compile(dynamic=True)
        assert torch.compile(net) is net
    assert torch.compile is before
    assert net._compiled_call_impl is None
    places = {told.split()[0].split(":")[0] for told in runtime.assumptions}
    assert len(runtime.assumptions) == 4  # a line each
    assert all("test_uncompiled.py" in place for place in places)
    assert all("recorded as it runs uncompiled" in told for told in runtime.assumptions)
