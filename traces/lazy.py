"""Packages whose names are imported when they are first used, so that importing the package itself costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> list[str]:
    """Have `package` take each name of `homes` from its module of that value when it is first asked for; `__all__`.

    Importing a module that is called as a function in it (`graph.capture`) does not hide the function.
    """

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in homes:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
            setattr(self, name, value)
            return value

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *homes})

        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, ModuleType) and homes.get(name) == name:
                value = getattr(value, name)
            super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
    return sorted(homes)
