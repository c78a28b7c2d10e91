"""Where the configuration of a model is found: a file, the Hub cache of this machine, or the catalogue; no torch here.

Nothing is downloaded. An id that is in the Hub cache has the configuration that stands there; the catalogue comes after
it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from graph.models import catalogue
from traces.errors import ConfigError

#: Where a repository has the configuration: of a model of transformers, of the denoiser of a pipeline of diffusers.
_PLACES: Final = ("config.json", "transformer/config.json", "unet/config.json")


class Configuration(NamedTuple):
    """A configuration as its config.json has it, where it stands ("catalogue: gpt2", or the path of the file), and
    what to tell whoever named it (empty where it is what was named)."""

    document: dict[str, Any]
    place: str
    note: str = ""


def configuration(model: str) -> Configuration:
    """The configuration that `model` names.

    `model` is the path of a JSON file or of a folder with a config.json (in `transformer` or `unet`, for a pipeline of
    diffusers), an id of the hub, or a name of the catalogue, spelled freely. Raises ConfigError.
    """
    known = catalogue.resolve(model)
    path = _path(model)
    if path is None:
        raise ConfigError(_unknown(model))
    if path.is_file() or (path.is_dir() and (known is None or known.note)):
        path = _inside(path) if path.is_dir() else path
        return Configuration(_read(path), str(path))
    cached = _cached(model)
    if cached is not None:
        instead = f", not the {known.name} of the catalogue" if known else ""
        return Configuration(_read(cached), str(cached), f"{model} is what the Hub cache has as {cached}{instead}")
    if known is not None:
        return Configuration(catalogue.configuration(known.name), f"catalogue: {known.name}", known.note)
    if path.suffix == ".json" or model.startswith((".", "/", "~")):
        return Configuration(_read(path), str(path))
    raise ConfigError(_unknown(model))


def _inside(folder: Path) -> Path:
    return next((folder / one for one in _PLACES if (folder / one).is_file()), folder / _PLACES[0])


def _path(model: str) -> Path | None:
    """`model` as a path; None where no path is spelled so."""
    try:
        path = Path(model).expanduser()
        path.is_file()
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _unknown(model: str) -> str:
    near = ", ".join(repr(one) for one in catalogue.nearest(model))
    name = model[:80]
    target = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else "OWNER/NAME"
    return (
        f"model {name!r} is neither in the catalogue{f' (near it: {near})' if near else ''} nor in the Hub cache nor a "
        "path of a config.json nor module:function; nothing is downloaded. `llmem models` lists the catalogue; for "
        f"another, `hf download {target} config.json`, then {'the same again' if target == name else 'OWNER/NAME here'}"
    )


def _cached(model: str) -> Path | None:
    """The config.json of an id in the Hub cache: that of `main`, else the newest; None if there is none."""
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?", model):
        return None
    folder = _hub() / f"models--{model.replace('/', '--')}"
    held: list[Path] = []
    main = ""
    try:
        found = (sorted(folder.glob(f"snapshots/*/{one}"), key=lambda one: one.stat().st_mtime) for one in _PLACES)
        held = next(filter(None, found), [])
        main = (folder / "refs" / "main").read_text("utf-8").strip() if held else ""
    except (OSError, UnicodeDecodeError):
        pass
    return next((one for one in held if one.is_relative_to(folder / "snapshots" / main)), held[-1] if held else None)


def _hub() -> Path:
    """The folder of the Hub cache, as huggingface_hub chooses it."""
    place = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if place:
        return Path(place).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; the configuration of a model is needed there") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; a config.json is text") from None
    try:
        document = json.loads(text, object_hook=_float_or_object)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a model's configuration") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a configuration is a JSON object, not {type(document).__name__}")
    return document


def _float_or_object(found: dict[str, Any]) -> Any:
    """`{"__float__": "Infinity"}`, as transformers writes the floats that JSON has no word for, is that float."""
    text = found.get("__float__")
    return float(text) if len(found) == 1 and text in ("Infinity", "-Infinity", "NaN") else found
