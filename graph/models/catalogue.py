"""Published model configurations, shipped as data: `catalogue.json` beside this module; no torch here.

An entry is {"repository", "parameters", "config"} and perhaps "note": the repository on huggingface.co whose
config.json it follows ("" where it is a shape of nobody's), the parameters of the model with the head that
`architectures` names, and the configuration itself. Keys that have no effect on memory are left out; `dtype` stands
in those of models that were published in 16 bits, from LLaMA on.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from traces.errors import ConfigError


@functools.cache
def entries() -> Mapping[str, Mapping[str, Any]]:
    """Every entry by its name, in order of families and sizes."""
    text = (importlib.resources.files("graph.models") / "catalogue.json").read_text("utf-8")
    found: dict[str, Mapping[str, Any]] = json.loads(text)
    return found


def names() -> tuple[str, ...]:
    """The names of all entries, in order."""
    return tuple(entries())


@functools.cache
def _spellings() -> Mapping[str, str]:
    """Every accepted spelling, in lower case, to its name: names, and repositories with or without their owner."""
    found: dict[str, str] = {}
    for name in entries():
        found.setdefault(name.casefold(), name)
    for name, entry in entries().items():
        if entry["repository"]:
            found.setdefault(entry["repository"].casefold(), name)
            found.setdefault(entry["repository"].rpartition("/")[2].casefold(), name)
    return found


def find(name: str) -> str | None:
    """The name of the entry meant by `name` (a name or a repository, in any case of letters); None if there is none."""
    return _spellings().get(name.casefold())


def nearest(name: str, count: int = 3) -> list[str]:
    """The names closest to `name`, for error messages."""
    word = name.casefold()[:80]
    near = difflib.get_close_matches(word, list(_spellings()), n=count * 2, cutoff=0.3)
    return list(dict.fromkeys(_spellings()[one] for one in near))[:count]


def configuration(name: str) -> dict[str, Any]:
    """A copy of the configuration of the entry meant by `name`, as a config.json would hold it; ConfigError if none."""
    known = find(name)
    if known is None:
        near = ", ".join(repr(one) for one in nearest(name))
        hint = f"; near it are {near}" if near else ""
        raise ConfigError(f"the catalogue has no model {name[:80]!r}{hint}")
    copy: dict[str, Any] = json.loads(json.dumps(entries()[known]["config"]))
    return copy
