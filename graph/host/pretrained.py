"""Weights that a program would download: where they are not on this machine, a model keeps those that it was made with.

That is all the same to memory: timm and torchvision make a model first, and then copy weights into it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from graph.host.imports import changed

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime


class _Elsewhere(dict[str, torch.Tensor]):
    """What stands for weights at an address: no module has to load them."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address


class _NotHereError(OSError):
    """A file would have to be downloaded."""


@contextlib.contextmanager
def kept_as_made(runtime: Runtime) -> Iterator[None]:
    """Inside, weights that `torch.hub` (so torchvision) or timm would download are not, and the answer says so."""
    load_url: Callable[..., Any] = torch.hub.load_state_dict_from_url
    load: Callable[..., Any] = torch.nn.Module.load_state_dict

    def note(name: str) -> None:
        what = f"the weights of {name} are not on this machine: the model keeps those that it was made with"
        runtime.assumptions[what] = 1

    def load_state_dict_from_url(url: str, *args: object, **kwargs: object) -> Any:
        with mock.patch.object(torch.hub, "download_url_to_file", _refuse):
            try:
                return load_url(url, *args, **kwargs)
            except _NotHereError:
                return _Elsewhere(url)

    def load_state_dict(module: torch.nn.Module, state_dict: object, *args: object, **kwargs: object) -> Any:
        if not isinstance(state_dict, _Elsewhere):
            return load(module, state_dict, *args, **kwargs)
        note(os.path.basename(state_dict.address))
        return type(load(torch.nn.Identity(), {}))([], [])

    with (
        mock.patch.object(torch.hub, "load_state_dict_from_url", load_state_dict_from_url),
        mock.patch.object(torch.nn.Module, "load_state_dict", load_state_dict),
        changed({"timm.models._builder": lambda module: _timm(module, load_url, note)}),
    ):
        yield


def _refuse(url: str, *args: object, **kwargs: object) -> None:
    raise _NotHereError(f"{url} is not on this machine")


def _timm(module: ModuleType, load_url: Callable[..., Any], note: Callable[[str], None]) -> None:
    """timm looks into a state before it loads it, so there it must be absent."""
    plain = module.load_pretrained

    def load_pretrained(
        model: torch.nn.Module, pretrained_cfg: Mapping[str, object] | None = None, *args: object, **kwargs: object
    ) -> None:
        from huggingface_hub import constants  # timm needs it

        offline = mock.patch.object(constants, "HF_HUB_OFFLINE", True)
        with offline, mock.patch.object(torch.hub, "download_url_to_file", _refuse):
            try:
                plain(model, pretrained_cfg, *args, **kwargs)
            except OSError:
                about: Mapping[str, object] = pretrained_cfg or getattr(model, "pretrained_cfg", None) or {}
                note(str(about.get("hf_hub_id") or about.get("url") or type(model).__name__))

    module.__dict__.update(load_pretrained=load_pretrained, load_state_dict_from_url=load_url)
