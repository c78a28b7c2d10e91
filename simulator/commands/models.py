"""`models [PATTERN]`: the models of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator

import click

from graph.models import catalogue
from simulator.options.case import models_like
from traces.errors import ConfigError


@click.command("models")
@click.argument("pattern", required=False, default="", shell_complete=models_like)
def command(pattern: str) -> int:
    """List the models that are known, or those that PATTERN names or whose name, family or repository has it.

    A model goes by its name or its id on the hub. Tuned variants (-Instruct, -it, -Chat), quantised copies and copies
    by other owners go by the model that they are of; so do the names of Ollama (qwen2.5:7b).
    """
    for line in _list(pattern):
        click.echo(line)
    return 0


def _list(pattern: str) -> Iterator[str]:
    shown = [name for name in catalogue.names() if _has(name, pattern.casefold())] or [catalogue.find(pattern) or ""]
    if not shown[0]:
        near = ", ".join(repr(one) for one in catalogue.nearest(pattern))
        raise ConfigError(f"no model of the catalogue has {pattern[:80]!r}{f'; near it: {near}' if near else ''}")
    yield f"{'name':30} {'family':14} {'parameters':>17}  repository"
    for name in shown:
        entry = catalogue.entries()[name]
        where = ", ".join(filter(None, (entry["repository"], entry.get("note", ""))))
        yield f"{name:30} {_family(name):14} {entry['parameters']:17,}  {where}"


def _has(name: str, pattern: str) -> bool:
    entry = catalogue.entries()[name]
    return any(pattern in text.casefold() for text in (name, entry["repository"], _family(name)))


def _family(name: str) -> str:
    return str(catalogue.entries()[name]["config"].get("model_type", "diffusers"))
