"""Step graphs: one training or inference run of a model as operators, storages and the exact order of events.

A case (`Case`) says which model runs how; `capture` runs it without a GPU and without weights, and answers with a
`StepGraph`. Names are imported when they are first used: a case costs nothing, a capture brings torch and transformers.
This package imports `traces` alone, and never the simulator.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph.capture import capture as capture
    from graph.case import Case as Case
    from graph.errors import CaptureError as CaptureError
    from graph.errors import UnsupportedTorch as UnsupportedTorch
    from graph.files import load as load
    from graph.files import save as save
    from graph.model import StepGraph as StepGraph

_HOMES = {
    "CaptureError": "errors",
    "Case": "case",
    "StepGraph": "model",
    "UnsupportedTorch": "errors",
    "capture": "capture",
    "load": "files",
    "save": "files",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(ModuleType):
    """This package: importing its module `capture` must not hide the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
