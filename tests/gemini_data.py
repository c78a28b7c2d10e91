"""The recorded Gemini runs of tests/data/gemini: parameter lists and what the real chunk manager made of them."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "data" / "gemini"
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@cache
def parameters() -> dict[str, Shapes]:
    """Names and shapes of every model's parameters, in the order of `model.parameters()`."""
    found: dict[str, Shapes] = {}
    for model, part in json.loads((FOLDER / "parameters.json").read_text("utf-8")).items():
        layers = [
            (f"{part['prefix']}{layer}.{name}", shape)
            for layer in range(part["layers"])
            for name, shape in part["layer"]
        ]
        found[model] = tuple((name, tuple(shape)) for name, shape in [*part["head"], *layers, *part["tail"]])
    return found


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a table, text as it stands."""
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
