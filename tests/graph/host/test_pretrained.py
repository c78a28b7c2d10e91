"""Models whose weights would be downloaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graph.host.pretrained import kept_as_made  # noqa: E402

ADDRESS = "https://download.pytorch.org/models/resnet18-f37072fd.pth"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Something with assumptions; nothing is in torch's cache, and nothing can be downloaded."""

    def download(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network is asked")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    return SimpleNamespace(assumptions={})


@pytest.fixture
def runtime(made: Any) -> Iterator[Any]:
    with kept_as_made(made):
        yield made


def test_a_model_keeps_the_weights_that_it_was_made_with(runtime: Any) -> None:
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    found = model.load_state_dict(torch.hub.load_state_dict_from_url(ADDRESS, progress=True))
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(model.weight, before)
    assert list(runtime.assumptions) == [
        "the weights of resnet18-f37072fd.pth are not on this machine: the model keeps those that it was made with"
    ]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_weights_that_are_there_are_loaded(runtime: Any, tmp_path: Path) -> None:
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "hub" / "checkpoints" / "small.pth")
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(torch.hub.load_state_dict_from_url("https://example.org/small.pth"))
    assert model.weight.sum().item() == 6
    assert not runtime.assumptions


@pytest.mark.parametrize("source", ["url", "hub"])
def test_timm_looks_into_weights_before_it_loads_them(source: str, made: Any) -> None:
    def load_pretrained(model: Any, pretrained_cfg: dict[str, str]) -> None:
        if "hf_hub_id" in pretrained_cfg:
            from huggingface_hub import hf_hub_download

            hf_hub_download(pretrained_cfg["hf_hub_id"], "model.safetensors")
        torch.hub.load_state_dict_from_url(ADDRESS)
        builder.load_state_dict_from_url(ADDRESS).pop("head.weight")

    builder: Any = ModuleType("timm.models._builder")
    builder.load_pretrained, builder.load_state_dict_from_url = load_pretrained, torch.hub.load_state_dict_from_url
    about = {"url": ADDRESS} if source == "url" else {"hf_hub_id": "timm/vit_small"}
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, builder.__name__)
        sys.modules[builder.__name__] = builder
        stack.enter_context(kept_as_made(made))
        builder.load_pretrained(torch.nn.Identity(), pretrained_cfg=about)
    (told,) = made.assumptions
    assert told.startswith(f"the weights of {next(iter(about.values()))} are not on this machine")
    assert builder.load_pretrained is load_pretrained
