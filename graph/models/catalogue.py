"""Published model configurations, shipped as data: `catalogue.json` beside this module; no torch here.

An entry is {"repository", "parameters", "config"} and perhaps "note", "aliases", "like", "published", "source" and
"apart". "repository": the one on huggingface.co whose config.json it follows ("" where it is a shape of nobody's);
"parameters": those of the class that `architectures` names (`_class_name` for a denoiser of diffusers), without
buffers; "config": the configuration itself, or what differs from that of the entry which "like" names. "published" is
the number that was published for the model, as "source" says, and "apart" how many of them belong to parts that the
class does not have as parameters. Keys that have no effect on memory are left out; `dtype` stands in those of models
that were published in 16 bits, from LLaMA on, but not of diffusers, which loads them in fp32.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from traces.errors import ConfigError

#: Words that tell how a model was tuned or is stored, not its shape.
_IDLE: Final = frozenset(["instruct", "it", "chat", "hf", "pt", "thinking", "latest", "bf16", "fp16", "f16", "meta"])
#: What ends the names of quantised copies.
_QUANTISED: Final = re.compile(
    r"[-_.:](?:unsloth|bnb|[2-8]bit|gguf|ggml|awq|gptq|hqq|exl[23]|mlx|qat|(?:nv)?fp[48]|int[48]|mxfp4|w\d+a\d+"
    r"|i?q[2-8](?:[-_](?:[01]|k|xxs|xs|s|m|l))*|quantized|dynamic|block|g\d+)$"
)
_SIZE: Final = re.compile(r"[\d.]+[bmk]")


class Found(NamedTuple):
    """An entry's name, and what to tell whoever wrote another one (empty for its name and its repository)."""

    name: str
    note: str


@functools.cache
def entries() -> Mapping[str, Mapping[str, Any]]:
    """Every entry by its name, in order of families and sizes; those that are "like" another have a whole "config"."""
    text = Path(__file__).with_name("catalogue.json").read_text("utf-8")
    written: dict[str, Mapping[str, Any]] = json.loads(text)
    return {name: {**entry, "config": _whole(written, name)} for name, entry in written.items()}


def _whole(written: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    entry = written[name]
    shared = _whole(written, entry["like"]) if "like" in entry else {}
    return {**shared, **entry.get("config", {})}


def names() -> tuple[str, ...]:
    """The names of all entries, in order."""
    return tuple(entries())


@functools.cache
def _spellings() -> Mapping[str, str]:
    """Names, and repositories with or without their owner, in lower case, to names."""
    found = {name.casefold(): name for name in entries()}
    for name, entry in entries().items():
        if entry["repository"]:
            found.setdefault(entry["repository"].casefold(), name)
            found.setdefault(_tail(entry["repository"]), name)
    return found


@functools.cache
def _keys() -> Mapping[str, str]:
    """Names, repositories and aliases, as `_key` has them, to names; the first of a kind wins."""
    found: dict[str, str] = {}
    for name, entry in entries().items():
        for spelled in (name, entry["repository"], *entry.get("aliases", ())):
            found.setdefault(_key(_tail(spelled)), name)
    return {key: name for key, name in found.items() if key}


def _tail(name: str) -> str:
    return name.casefold().rpartition("/")[2]


def _key(name: str) -> str:
    """A name as it is looked up: `qwen2.5:7b`, `Qwen2.5-7B-Instruct` and `qwen-2.5-7b` are one."""
    words = re.findall(r"b?fp?16|\d+(?:\.\d+)?(?:[bmk](?![a-z])|x\d+b)?|[a-z]+", name)
    sized = any(_SIZE.fullmatch(word) for word in words)
    return "-".join(word for word in words if word not in _IDLE and not (word == "base" and sized))


def resolve(name: str) -> Found | None:
    """The entry meant by `name`; None if there is none.

    That is its name or repository in any case of letters, spelled as Ollama spells it, a tuned variant (`-Instruct`,
    `-it`, `-Chat`), and a copy by another owner, quantised or not.
    """
    exact = _spellings().get(name.casefold())
    if exact is not None:
        return Found(exact, "")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return None
    for shorter in _shorter(_tail(name[:200])):
        known = _keys().get(_key(shorter))
        if known is not None:
            return Found(known, _note(name, known, quantised=shorter != _tail(name)))
    return None


def _shorter(name: str) -> Iterator[str]:
    """A name, and then without one ending of quantised copies after another."""
    yield name
    while (shorter := _QUANTISED.sub("", name)) != name:
        yield shorter
        name = shorter


def _note(name: str, known: str, quantised: bool) -> str:
    about = entries()[known].get("note", "")
    text = f"{name} is taken for {known} of the catalogue{f' ({about})' if about else ''}"
    return f"{text}; the copy's own quantisation is not honoured (--quant says one)" if quantised else text


def find(name: str) -> str | None:
    """The name of the entry meant by `name`, as `resolve` has it; None if there is none."""
    found = resolve(name)
    return None if found is None else found.name


def nearest(name: str, count: int = 3) -> list[str]:
    """The names that begin as `name` does, else those that are close to it, for error messages; often none."""
    key = _key(_tail(name[:80]))
    begin = [known for spelled, known in _keys().items() if key and spelled.startswith(f"{key}-")]
    near = [_keys()[one] for one in difflib.get_close_matches(key, _keys(), n=count * 2, cutoff=0.8)]
    return list(dict.fromkeys(begin or near))[:count]


def configuration(name: str) -> dict[str, Any]:
    """A copy of the configuration of the entry meant by `name`, as a config.json would hold it; ConfigError if none."""
    known = find(name)
    if known is None:
        near = ", ".join(repr(one) for one in nearest(name))
        hint = f"; near it are {near}" if near else ""
        raise ConfigError(f"the catalogue has no model {name[:80]!r}{hint}")
    copy: dict[str, Any] = json.loads(json.dumps(entries()[known]["config"]))
    return copy
