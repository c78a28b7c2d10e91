"""What torch.compile is told of the device."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("torch")

from torch._dynamo import callback

from graph.fake_cuda.device import fake_cuda
from graph.hardware.profile import profile
from graph.host import compiled


def test_triton_that_is_installed_is_told_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own driver asks for libcuda and a GPU. It stands in `triton.runtime` and in the module of its name, and
    Inductor takes either (torch/utils/_triton.py: `triton_backend`)."""
    modules = {
        name: ModuleType(name)
        for name in ("triton", "triton.runtime", "triton.runtime.driver", "triton.backends", "triton.backends.compiler")
    }
    modules["triton.backends.compiler"].__dict__["GPUTarget"] = lambda *target: target
    own = SimpleNamespace(active=None)
    for name in ("triton.runtime", "triton.runtime.driver"):
        modules[name].__dict__["driver"] = own
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "triton.testing", ModuleType("triton.testing"))
    with fake_cuda(profile("A10", "2.13")) as runtime:
        answers = compiled._triton_answers(runtime)
        for module_name, name, answer in answers:
            with mock.patch.object(importlib.import_module(module_name), name, answer, create=True):
                if name == "driver":
                    active = modules[module_name].__dict__["driver"].active
                    assert active.get_current_target() == ("cuda", 86, 32)
                    assert active.utils.get_device_properties(0)["max_shared_mem"] == 101_376
    assert {module for module, name, _ in answers if name == "driver"} == {"triton.runtime", "triton.runtime.driver"}


@pytest.mark.skipif(not compiled.tells_of_backwards(), reason="PyTorch says nothing of it before 2.8")
def test_compiled_backwards_are_told_of_after_a_program_forgets_all() -> None:
    """`torch.compiler.reset` takes all callbacks away, ours too; two are followed at once, one in the other."""
    told: list[str] = []
    handler = callback.callback_handler
    backward = callback.CallbackArgs(callback.CallbackTrigger.LAZY_BACKWARD, "0")
    with compiled.after_backwards(lambda: told.append("outer")):
        with compiled.after_backwards(lambda: told.append("inner")):
            handler.clear()
            handler.run_end_callbacks(backward)
        handler.clear()
        handler.run_end_callbacks(backward)
    assert sorted(told) == ["inner", "outer", "outer"]
    assert not handler.end_callbacks
