"""A PyTorch that lacks a private name that captures need is told in one line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from graph.errors import UnsupportedTorch  # noqa: E402
from graph.fake_cuda import torch_private  # noqa: E402


@pytest.mark.parametrize(
    "name",
    [
        "torch.utils._pytree.tree_map",
        "torch._C._from_dlpack",
        "torch._C.PyTorchFileReader",
        "torch._utils._flatten_dense_tensors",
    ],
)
def test_a_name_that_is_gone_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert torch_private.__file__ is not None
    path = Path(torch_private.__file__)
    runpy.run_path(str(path))  # nothing is missing yet
    monkeypatch.delattr(name)
    with pytest.raises(UnsupportedTorch) as caught:
        runpy.run_path(str(path))
    text = str(caught.value)
    assert f"'{name.rpartition('.')[2]}'" in text
    assert "\n" not in text
    assert str(torch.__version__) in text


def test_a_release_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(UnsupportedTorch, match=r"2\.5\.1\+cu124 is too old: .* PyTorch 2\.6 to 2\."):
        runpy.run_path(str(torch_private.__file__))
