"""The options of a case (model, precision, batch, optimizer, GPU ...), shared by every command that takes one.

Each key that `graph.case` declares is one option of the same name, with its help, its default and its other names; only
what was given is passed on, and the case checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem
from msgspec import inspect

from graph.case import GROUPS, KEYS, Case
from graph.hardware.gpus import GPUS, gpu
from graph.keys import Key, Only, is_function
from graph.models import catalogue
from graph.models.lookup import configuration
from strategies.parallel.mesh import Mesh
from traces.errors import ConfigError, LLMemError
from traces.text import number, path_text
from traces.units import parse_size

if TYPE_CHECKING:
    from graph.keys import Group

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: What the argument MODEL may be, for the end of the help.
MODEL_HELP: Final = (
    "MODEL is an id of the hub or another name of the catalogue (`llmem models`), an id in the Hub cache, a path of a "
    "Hugging Face config.json (or its folder), or module:function "
    "(also folder/module.py:function), a function of your own that returns (nn.Module, example inputs) or "
    "(nn.Module, example inputs, loss function); "
    "--batch, --seq and --dtype reach it as arguments batch, seq and dtype where it has parameters of these names. "
    "Nothing is downloaded. Sizes: 80GB is 80 x 10^9 bytes, 80GiB is 80 x 2^30."
)
#: The keys of a case that are options.
OPTION_KEYS: Final[tuple[str, ...]] = tuple(key for key in KEYS if key != "model")
#: Values that are longer together stand in the help, not beside the option.
_LONG: Final = 40


class CaseOption(click.Option):
    """An option of a command that stands in a group of keys; `key` is the name of its key in a case."""

    def __init__(self, *names: Any, key: Key, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.key = key

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """What the help says; made when it is asked for, since it may name what other packages register."""
        self.help = _help(self.key)
        return super().get_help_record(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The values that the key may have, and the GPUs that are known."""
        if self.key.name == "gpu":
            return cards_like(ctx, self, incomplete)
        return _begun([*self.key.choices, *("true", "false") * self.key.has(inspect.BoolType)], incomplete)


def cards_like(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The GPUs whose names begin so, for a shell."""
    return _begun(GPUS, incomplete)


def models_like(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The models of the catalogue whose names or repositories begin so, for a shell; files where there is none."""
    repositories = (entry["repository"] for entry in catalogue.entries().values() if "/" in incomplete)
    found = _begun([*catalogue.names(), *repositories], incomplete)
    return found or [CompletionItem(incomplete, type="file")]


def _begun(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word and word.casefold().startswith(incomplete.casefold())]


class CaseCommand(click.Command):
    """A command with the options of a case: its help has them in their groups, the common ones first.

    Options may be written with `_` for `-`, as transformers' scripts have them. An option of the command's own stands
    in the place of one of the case with the same name.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        case = [one for one in self.params if isinstance(one, CaseOption) or getattr(one, "hidden", False)]
        own = {name for one in self.params if one not in case for name in one.opts}
        self.params = [one for one in self.params if one not in case or own.isdisjoint(one.opts)]
        self.context_settings["token_normalize_func"] = lambda name: name.replace("_", "-")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: the common ones of a case, those of the command, then one group of keys after another."""
        groups: dict[Group | None, list[tuple[str, str]]] = {GROUPS[0]: [], None: [], **{one: [] for one in GROUPS[1:]}}
        for option in self.get_params(ctx):
            shown = option.get_help_record(ctx)
            if shown is not None and isinstance(option, click.Option):
                groups[option.key.about.group if isinstance(option, CaseOption) else None].append(shown)
        for group, rows in groups.items():
            if rows:
                with formatter.section("Options of this command" if group is None else _title(group)):
                    formatter.write_dl(rows)


def case_options(command: _Command) -> _Command:
    """Decorator: gives a click command an option for each key of a case (but `model`); `case_from` takes their values.

    The option of `dec_seq` is `--dec-seq`; switches have a `--no-` form. Other names of a key are hidden options. An
    option that is not given is None.
    """
    for name in reversed(OPTION_KEYS):
        key = KEYS[name]
        for other in key.about.switches:
            command = click.option(_option(other), other, is_flag=True, default=None, hidden=True)(command)
        for other in key.about.aliases:
            command = click.option(_spelled(key, other), other, default=None, hidden=True)(command)
        alone = {} if key.about.alone is None else {"is_flag": False, "flag_value": key.about.alone}
        command = click.option(
            _spelled(key, name), name, cls=CaseOption, key=key, default=None, metavar=_metavar(key), **alone
        )(command)
    return command


def case_from(model: str, options: Mapping[str, Any], *, any_strategy: bool = False) -> Case:
    """The case that a command line says: `model`, and those of `options` that were given (other names are passed by).

    `any_strategy` is that of `Case.of`. Raises ConfigError for a value that its key cannot have, for a key that means
    nothing for the case, and for an unknown GPU; UsageError where two names of a key are given.
    """
    try:
        case = Case.of({"model": model, **given_keys(options)}, where="options", any_strategy=any_strategy)
    except ConfigError as error:
        raise ConfigError(_in_options(str(error))) from None
    gpu(case.gpu)
    if not is_function(case.model):
        configuration(case.model)  # who names what nobody knows hears it at once, before heavy packages are loaded
    return case


def case_of(model: str, options: Mapping[str, Any]) -> Case:
    """The case of a command line: a model with options, or a file with a case, which options change.

    Raises what `case_from` raises.
    """
    from simulator.comparison.compare import read_document

    document = read_document(model) if Path(model).is_file() else None
    if document is None or "model" not in document:
        return case_from(model, options)
    return Case.of({**document, **given_keys(options)}, path_text(Path(model).name))


def assumed(options: Mapping[str, Any]) -> tuple[str, ...]:
    """What a command line leaves open although it matters for what it says, one line each."""
    if options.get("memory") is None or options.get("gpu") is not None:
        return ()
    return (f"--gpu is not given: an {KEYS['gpu'].default} is assumed, with the memory that --memory says",)


def given_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys whose options were given."""
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name in OPTION_KEYS:
        about = KEYS[name].about
        for other in KEYS[name].names:
            if options.get(other) is None:
                continue
            if name in said:
                raise click.UsageError(f"{_option(said[name])} and {_option(other)} are the same: give one of them")
            said[name] = other
            found[name] = about.switches[other] if other in about.switches else _value(KEYS[name], options[other])
    return found


# --- help ------------------------------------------------------------------------------------------------------------


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spelled(key: Key, name: str) -> str:
    return f"{_option(name)}/--no-{name.replace('_', '-')}" if key.is_switch else _option(name)


def _title(group: Group) -> str:
    return f"{group.title} ({scope})" if (scope := _scope(group.only)) else group.title


def _scope(only: tuple[Only, ...]) -> str:
    """Conditions in words, such as `only with --quant nf4`; nothing of what most cases are anyway."""
    words = " and ".join(str(one) for one in only if one.key != "model")
    return re.sub(r"(--[\w-]+):", r"\1", _in_options(f"only with {words}")).replace("'", "") if words else ""


def _metavar(key: Key) -> str | None:
    if key.is_switch or key.about.metavar:
        return key.about.metavar or None
    if key.choices:
        words = "|".join(("true", "false") * key.has(inspect.BoolType) + tuple(one or "none" for one in key.choices))
        return words if len(words) <= _LONG else "NAME"
    return "X" if key.has(inspect.FloatType) else "N"


def _help(key: Key) -> str:
    """What an option says of its key: meaning, values, other names, scope and default."""
    about = key.about
    words = [about.help]
    if _metavar(key) == "NAME" and key.choices:
        words.append(", ".join(one or "none" for one in key.choices) + ".")
    others = [_option(other) for other in key.names[1:]]
    notes = [f"also {', '.join(others)}"] if others else []
    scope = _scope(tuple(one for one in about.only if one.key != "task"))
    notes += [scope, f"default: {_default(key)}"] if scope else [f"default: {_default(key)}"]
    return f"{' '.join(words)} [{'; '.join(notes)}]"


def _default(key: Key) -> str:
    if key.default in (None, "", (), {}):
        return key.about.unset or "none"
    if isinstance(key.default, bool):
        return "yes" if key.default else "no"
    return f"{key.default:g}" if isinstance(key.default, float) else str(key.default)


def _in_options(text: str) -> str:
    """The text of an error about a case, with its keys as the options that they are here."""
    keys = re.compile(rf"(?:\bkey )?'({'|'.join(OPTION_KEYS)})'(?=:| |$|;|,)")
    return keys.sub(lambda match: _option(match[1]), text.removeprefix("options: "))


# --- values ----------------------------------------------------------------------------------------------------------


def _value(key: Key, given: object) -> Any:
    """What an option's text means as the value of `key` in a case document; what is wrong is left to the case."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    if text.lower() == "none" and ("" in key.choices or key.about.read is not None):
        return ""
    if text.lower() in ("true", "false") and key.has(inspect.BoolType):
        return text.lower() == "true"
    if key.name == "memory":
        return _memory(text)
    if key.name == "mesh":
        return _mesh(text)
    return number(text) if key.has(inspect.IntType, inspect.FloatType) else text


def _memory(text: str) -> int | list[int]:
    try:
        sizes = [parse_size(part) for part in text.split(",")]
    except LLMemError as error:
        raise ConfigError(f"--memory: {error}") from None
    return sizes[0] if len(sizes) == 1 else sizes


def _mesh(text: str) -> dict[str, int]:
    """`fsdp2=4,tp=2`."""
    return dict(Mesh.parse(text).axes)
