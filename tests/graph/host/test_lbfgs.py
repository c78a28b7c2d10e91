"""LBFGS makes all of its iterations, and fills its history."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda.device import fake_cuda
from graph.hardware.profile import profile
from graph.host.lbfgs import never_converged


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_each_step_fills_the_history(search: str | None) -> None:
    with fake_cuda(profile("A100-80GB", "2.13")) as runtime:
        runtime.values.finite = True
        before = torch.optim.LBFGS.step
        with never_converged(runtime):
            model = torch.nn.Linear(64, 64, device="cuda")
            optimizer: Any = torch.optim.LBFGS(
                model.parameters(), history_size=5, max_iter=12, max_eval=400, line_search_fn=search
            )

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(8, 64, device="cuda")).square().mean()
                torch.autograd.backward(loss)
                return loss

            optimizer.step(closure)
        (state,) = optimizer.state.values()
        assert state["n_iter"] == 12
        assert [len(state[name]) for name in ("old_dirs", "old_stps", "ro")] == [5] * 3
        assert optimizer.param_groups[0]["tolerance_grad"] == 1e-7
        assert [text for text in runtime.assumptions if "lbfgs.py" in text] == []
        assert any("LBFGS is taken not to converge" in text for text in runtime.assumptions)
        runtime.values.finite = False
    assert torch.optim.LBFGS.step is before
