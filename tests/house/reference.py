"""Writes the pages of `docs/reference/` from the code: `scripts/reference`. `test_reference` holds them up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from graph.case import GROUPS, KEYS
from graph.hardware.gpus import GPUS
from graph.keys import Key
from graph.optimizers import OPTIMIZERS
from simulator.cli import COMMANDS, EXIT_CODES, command_of, main
from simulator.options.case import CaseOption
from simulator.reports.schemas import DOCUMENTS
from strategies import registry
from strategies.parallel.meshes import AXES
from tests.places import ROOT

FOLDER: Final = ROOT / "docs" / "reference"
NOTE: Final = "<!-- Written by scripts/reference from the code: change it there. -->"


def pages() -> dict[str, str]:
    """Every page by its file name."""
    found = {
        "command-line.md": command_line(),
        "case-keys.md": case_keys(),
        "trace-format.md": trace_format(),
        "results.md": results(),
        "exit-codes.md": exit_codes(),
        "gpus.md": gpus(),
        "methods.md": methods(),
    }
    return {name: f"{NOTE}\n\n{text.rstrip()}\n" for name, text in found.items()}


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """A table of Markdown."""
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(words: Iterable[object]) -> str:
    """Words as code, with commas between them."""
    return ", ".join(f"`{word}`" for word in words)


# --- command line ----------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its arguments and options, those of a case apart."""
    text = [
        "# Command line\n\n`llmem COMMAND`, or `python -m simulator COMMAND`. Notes and progress go to standard error. "
        "A file that exists is kept unless `--force` is given. [Exit codes](exit-codes.md) are the same for all.",
        table(("command", "what it does"), ((f"[`{name}`](#{name})", line) for name, line in COMMANDS.items())),
    ]
    for name in COMMANDS:
        text += _command(name, command_of(name))
    return "\n\n".join(text)


def _command(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=f"llmem {name}", **main.context_settings)
    yield f"## {name}\n\n`{' '.join((context.command_path, *command.collect_usage_pieces(context)))}`"
    yield re.sub(r"\s+", " ", command.help or "")
    options = [one for one in command.params if isinstance(one, click.Option)]
    if any(isinstance(one, CaseOption) for one in options):
        yield "It takes the keys of a [case](case-keys.md) as options: `dec_seq` is `--dec-seq`."
    own = [one for one in options if not isinstance(one, CaseOption)]
    records = [record for one in own if (record := one.get_help_record(context))]
    yield table(("option", "meaning"), ((f"`{names}`", text) for names, text in records))
    if command.epilog:
        yield command.epilog


def exit_codes() -> str:
    """What the process says when it ends."""
    traced = "With `LLMEM_TRACEBACK=1` in the environment, the traceback of an error stands before its line."
    return f"# Exit codes\n\n{table(('code', 'meaning'), EXIT_CODES.items())}\n\n{traced}"


# --- case keys and methods -------------------------------------------------------------------------------------------


def case_keys() -> str:
    """The keys of a case, group by group."""
    text = [
        "# Keys of a case\n\nA case is a JSON object: a line of `sweep`'s file, or the argument of "
        "`simulator.estimate`. On the command line each key but `model` is an option. An unknown key is an error, and "
        "so is a key that means nothing for the case; the error says where it does. Under "
        "some [methods](methods.md) some keys have other defaults."
    ]
    for group in GROUPS:
        rows = (_key(key) for key in KEYS.values() if key.about.group is group)
        head = ("key", "meaning", "value", "default", "only with", "other names")
        text.append(f"## {group.title}\n\n{table(head, rows)}")
    return "\n\n".join(text)


def _key(key: Key) -> tuple[str, ...]:
    about = key.about
    default = "(needed)" if key.name == "model" else about.unset or f"`{json.dumps(key.default)}`"
    only = "; ".join(str(one).partition(";")[0].replace("'", "") for one in key.only)
    names = [name for name in key.names[1:] if name not in about.switches]
    others = [code(names)] * bool(names) + [f"`{name}` ({value})" for name, value in about.switches.items()]
    return f"`{key.name}`", about.help, key.wanted(), default, only, ", ".join(others)


def methods() -> str:
    """Distributed methods and optimizers."""
    rows = []
    for name, one in registry.known().items():
        usual = ", ".join(f"`{key}` {value}" for key, value in one.usual.items())
        rows.append((f"`{name}`", one.help, code(one.aliases), code(one.takes), usual))
    head = ("strategy", "what runs", "other names", "takes", "other defaults")
    words = (
        "A text that begins with `...` goes on from the one above it. *Takes* names the scopes of keys that mean "
        f"something under it. The axes of a `mesh` are {code(AXES)}; it combines methods."
    )
    optimizers = (
        (f"`{name}`", f"`{one.path}`", ", ".join(f"{key}={value}" for key, value in one.options.items()))
        for name, one in OPTIMIZERS.items()
    )
    return (
        f"# Methods and optimizers\n\nThe names that a case's `strategy` may have. {words} "
        f"`llmem select` tries those that are sensible.\n\n{table(head, rows)}\n\n## Optimizers\n\n"
        f"The names that `optimizer` may have.\n\n{table(('optimizer', 'class', 'arguments'), optimizers)}"
    )


def gpus() -> str:
    """The table of GPUs."""
    rows = (
        (
            f"`{one.name}`",
            one.product,
            f"{one.arch[0]}.{one.arch[1]}",
            f"{one.total_bytes / 2**30:.2f}",
            f"{one.half / 1e12:g}",
            f"{one.memory / 1e9:g}",
            code(one.aliases),
            one.total_source,
        )
        for one in GPUS.values()
    )
    head = ("name", "product", "capability", "GiB", "TFLOP/s fp16", "GB/s", "other names", "source of the total")
    return (
        "# GPUs\n\nGiB are what `cudaMemGetInfo` shows as the total. Rows and sources are in "
        f"`graph/hardware/gpus.toml`; `llmem gpus` prints them too.\n\n{table(head, rows)}"
    )


# --- documents -------------------------------------------------------------------------------------------------------


def trace_format() -> str:
    """The trace format, from its schema."""
    schema = json.loads((ROOT / "traces" / "schema.json").read_text("utf-8"))
    parts = schema["$defs"]
    needed = _needed(parts["event"]["allOf"])
    ops = (
        (f"`{one['const']}`", one["description"], code(needed.get(one["const"], ()))) for one in parts["op"]["oneOf"]
    )
    text = [
        f"# Trace format\n\n{schema['description']}\n\nThe schema is `traces/schema.json`. A file is JSON, gzipped or "
        "not, or the same as columns in `.npz`. Everything but `format`, `version` and `ranks` has a default.",
        f"## Document\n\n{_fields(schema)}",
        f"## Operations\n\n{table(('op', 'meaning', 'needs'), ops)}",
        f"## Fields of an event\n\n{_fields({'properties': parts['fields']})}",
    ]
    for name in ("device", "rank", "initial", "segment", "block", "columns"):
        body = _fields(parts[name]) if name != "columns" and "properties" in parts[name] else ""
        text.append(f"## {name.capitalize()}\n\n{parts[name]['description']}\n\n{body}".rstrip())
    return "\n\n".join(text)


def _needed(rules: list[Any]) -> dict[str, list[str]]:
    return {op: one["then"]["required"] for one in rules for op in one["if"]["properties"]["op"]["enum"]}


def results() -> str:
    """The document of `--json`, from its schema."""
    schema = json.loads((ROOT / "simulator" / "reports" / "result_schema.json").read_text("utf-8"))
    text = [
        f"# Results\n\n{schema['description']}\n\nThe schema is `simulator/reports/result_schema.json`, "
        "and that of every other document comes from Python: `simulator.schema(name)` for the names "
        f"{code(DOCUMENTS)}. `sweep-line` is a line of `RESULTS.jsonl`. `run` has:"
    ]
    text.append(f"## Document\n\n{_fields(schema)}")
    for name, part in schema["$defs"].items():
        if "properties" in part:
            words = f"{part['description']}\n\n" if "description" in part else ""
            text.append(f"## {name.capitalize()}\n\n{words}{_fields(part)}")
    return "\n\n".join(text)


def _fields(schema: Mapping[str, Any]) -> str:
    return table(("field", "value", "meaning"), _rows(schema, ""))


def _rows(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    """The fields of an object and of the objects in it."""
    for name, one in schema["properties"].items():
        here = f"{path}{name}"
        yield f"`{here}`", _value(one), one.get("description", "")
        inner = one.get("items") or one.get("additionalProperties")
        for part, step in ((one, "."), (inner, "[]." if "items" in one else ".*.")):
            if isinstance(part, Mapping) and "properties" in part:
                yield from _rows(part, f"{here}{step}")


def _value(one: Mapping[str, Any]) -> str:
    """What kind of value a field has, in words."""
    if "$ref" in one:
        return str(one["$ref"]).rpartition("/")[2]
    if "const" in one:
        return f"`{json.dumps(one['const'])}`"
    if "enum" in one:
        return code(one["enum"])
    if "anyOf" in one or "oneOf" in one:
        return " or ".join(dict.fromkeys(_value(part) for part in one.get("anyOf") or one["oneOf"]))
    kinds = [one["type"]] if isinstance(one.get("type"), str) else one.get("type", [])
    words = " or ".join(kinds)
    if isinstance(one.get("items"), Mapping) and "properties" not in one["items"]:
        words += f" of {_value(one['items'])}"
    default = f", default `{json.dumps(one['default'])}`" if "default" in one else ""
    return words + default


def write(folder: Path = FOLDER) -> None:
    """Write every page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    write()
