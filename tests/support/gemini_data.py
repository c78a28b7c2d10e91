"""The recorded Gemini runs of tests/data/gemini: parameter lists and what the real chunk manager made of them."""

from __future__ import annotations

import csv
import gzip
import json
from functools import cache
from typing import Any

from tests.places import DATA

FOLDER = DATA / "gemini"
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def case_of(model: str, batch: int, **keys: Any) -> dict[str, Any]:
    """LLMem's run of a model as a case: 512 tokens on 16 GB V100s; all else is what strategy gemini has by default."""
    path = FOLDER / model
    name = str(path) if path.exists() else model
    return {"model": name, "strategy": "gemini", "batch": batch, "seq": 512, "gpu": "V100-16GB", **keys}


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
    data = (FOLDER / name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8")
    return list(csv.DictReader(text.splitlines()))


def setups() -> dict[str, list[str]]:
    """What loading and set-up of the two-layer OPT allocate and free, by setting."""
    lines = (FOLDER / "setup.txt").read_text("utf-8").splitlines()
    return {key: events for key, *events in (line.split() for line in lines)}
