"""What one key of a case is, from its declaration in `graph.case`: type, default, help, group, scope and other names.

Checks, texts of errors and the options of the command line derive from a `Key`. Types are msgspec's: `Literal`,
`Annotated[int, Meta(ge=1)]` and the like, which `msgspec.convert` checks. No torch here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec
from msgspec import inspect

from graph import methods
from graph.models import catalogue
from traces.errors import ConfigError
from traces.text import number

#: Whole numbers stay below it: every JSON reader keeps them.
LARGEST: Final = 2**53
_UNIONS: Final = (typing.Union, types.UnionType)


@dataclass(frozen=True)
class Only:
    """A condition under which a key means something: another key has one of `values` (none given: is set at all)."""

    key: str
    values: tuple[str, ...] = ()

    def holds(self, case: Any) -> bool:
        """Whether it holds for a `graph.case.Case`."""
        value = getattr(case, self.key)
        if self.values:
            return value in self.values
        return bool(value != next(one.default for one in dataclasses.fields(case) if one.name == self.key))

    def __str__(self) -> str:
        return f"'{self.key}'" + (": " + either(map(repr, self.values)) if self.values else "")


@dataclass(frozen=True)
class Taken(Only):
    """The case's method takes the keys of `scope`; a case with a mesh has the methods that its axes name."""

    key: str = "strategy"
    scope: str = ""
    alone: bool = False
    """Whether one GPU has them, too."""

    def holds(self, case: Any) -> bool:
        """Whether it holds for a `graph.case.Case`."""
        if case.mesh and not methods.has_own_mesh(case.strategy):
            return not set(methods.axes_taking(self.scope)).isdisjoint(case.mesh)
        return case.strategy in self._takers()

    def _takers(self) -> tuple[str, ...]:
        return (*([methods.ONE_GPU] if self.alone else []), *methods.taking(self.scope))

    def __str__(self) -> str:
        axes = methods.axes_taking(self.scope)
        words = f"'{self.key}': {either(map(repr, self._takers()))}"
        return words + (f", or a 'mesh' with {either(axes)}" if axes else "")


@dataclass(frozen=True)
class Configuration(Only):
    """The model is a configuration, not a function of the user's own, which returns its model as it is to be."""

    key: str = "model"

    def holds(self, case: Any) -> bool:
        """Whether the case's model is a configuration."""
        return not is_function(case.model)

    def __str__(self) -> str:
        return "a model that is a configuration; let the function itself return the model so"


@dataclass(frozen=True)
class Group:
    """Keys that belong together in help and reference, with the scope that all of them share."""

    title: str
    only: tuple[Only, ...] = ()


@dataclass(frozen=True)
class About:
    """What a declaration says of a key besides type and default.

    `means`: what a value should be, where the type alone does not say it well. `read`: the value that one text stands
    for. `aliases`: other names of the key that are taken; `hints`: those that only help the error of an unknown key.
    `values`: other names of values. `known`: for a text that may be any name of an open table, all spellings of
    each name, asked for when a value other than the default is checked. `switches`: names that stand for the key
    with a value, as `bf16` for autocast; `alone`: the value of an option that is given without one. `unset`: what
    the default is in words, where it is null or empty.
    """

    group: Group
    help: str
    metavar: str = ""
    only: tuple[Only, ...] = ()
    means: str = ""
    unset: str = ""
    read: Callable[[str], Any] | None = None
    aliases: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    known: Callable[[], Mapping[str, str]] | None = None
    switches: Mapping[str, str] = field(default_factory=dict)
    alone: str | None = None


@dataclass(frozen=True)
class Key:
    """One key: its name, type as msgspec takes it, default (`MISSING` for the model), and what is said of it."""

    name: str
    kind: Any
    default: Any
    about: About

    @property
    def only(self) -> tuple[Only, ...]:
        """Where it means something: the scope of its group, then its own."""
        return (*self.about.group.only, *self.about.only)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that is taken for it, its own first."""
        return (self.name, *self.about.aliases, *self.about.switches)

    @cached_property
    def parts(self) -> tuple[inspect.Type, ...]:
        """The kinds of value that it may have."""
        found = inspect.type_info(self.kind)
        return tuple(found.types) if isinstance(found, inspect.UnionType) else (found,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be, in the order of the declaration."""
        if self.about.known is not None:
            return tuple(dict.fromkeys(self.about.known().values()))
        kinds = typing.get_args(self.kind) if typing.get_origin(self.kind) in _UNIONS else (self.kind,)
        return tuple(
            word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)
        )

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false and nothing else."""
        return len(self.parts) == 1 and self.has(inspect.BoolType)

    def has(self, *kinds: type[inspect.Type]) -> bool:
        """Whether a value may be of one of msgspec's kinds."""
        return any(isinstance(part, kinds) for part in self.parts)

    def wanted(self) -> str:
        """What a value should be, in words."""
        if self.about.means:
            return self.about.means
        plain = [word for part in self.parts for word in _words(part)]
        return either([*plain, *map(repr, self.choices)]) if plain else f"one of {', '.join(map(repr, self.choices))}"

    def checked(self, value: object) -> Any:
        """The value as a case holds it. Raises ConfigError, which names the key and the nearest value."""
        given = value
        if isinstance(value, str):
            value = self.about.values.get(value.casefold(), value)
            if self.about.known is not None and value != self.default:
                value = self.about.known().get(value.casefold(), value)
            if self.about.read is not None:
                value = self.about.read(value)
        with contextlib.suppress(msgspec.ValidationError):
            found = msgspec.convert(value, self.kind)
            if self.about.known is None or found == self.default or found in self.choices:
                return found
        near = nearest(value, self.choices) if isinstance(value, str) and value else ""
        hint = f"; the nearest is {near!r}" if near else ""
        raise ConfigError(f"key '{self.name}': {shown(given)} should be {self.wanted()}{hint}")

    def unmet(self, case: object) -> Only | None:
        """The first condition that a case does not meet, so that the key means nothing for it."""
        return next((one for one in self.only if not one.holds(case)), None)


def declared(default: Any, group: Group, text: str, **about: Any) -> Any:
    """The field of a dataclass that is a key: its default, then what `About` has."""
    notes = {"about": About(group, text, **about)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=notes)
    return field(default=default, metadata=notes)


def keys_of(holder: type) -> dict[str, Key]:
    """The keys that a dataclass declares, in order."""
    kinds = typing.get_type_hints(holder, include_extras=True)
    found = {}
    for one in dataclasses.fields(holder):
        if "about" not in one.metadata:
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        found[one.name] = Key(one.name, kinds[one.name], default, one.metadata["about"])
    return found


def function_of(model: str) -> tuple[str, str] | None:
    """Module and function that `module:function` names, or `folder/module.py:function`; None where it is neither."""
    module, colon, function = model.rpartition(":")
    if module.endswith(".py"):
        module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    words = [*module.split("."), function]
    found = bool(colon) and all(word.isidentifier() for word in words) and catalogue.find(model) is None
    return (module, function) if found else None


def is_function(model: str) -> bool:
    """Whether a model is `module:function`, a function of the user's own."""
    return function_of(model) is not None


# --- texts -----------------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A value for an error, not too long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known` that is spelled most like `word`; empty where there is none."""
    near = difflib.get_close_matches(word[:60], [one for one in known if one], n=1, cutoff=0.0)
    return near[0] if near else ""


def either(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _words(part: inspect.Type) -> list[str]:
    if isinstance(part, inspect.IntType):
        return [f"a whole number of at least {part.ge}"]
    if isinstance(part, inspect.FloatType):
        return [f"a number of at least {part.ge:g}"]
    return {inspect.BoolType: ["true", "false"], inspect.NoneType: ["null"]}.get(type(part), [])


# --- values that are written as one text -----------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Words with `+` or `,` between them."""
    return [word for word in re.split(r"[+,]", text) if word]


def edges(text: str) -> str:
    """`448x336`, also for `448X336`; `448` is `448x448`."""
    return f"{text}x{text}" if text.isdecimal() else text.casefold()


def numbers(text: str) -> list[Any]:
    """Numbers with `,` between them; what is none is left as it is."""
    return [number(part) for part in text.split(",")]


def pairs(text: str) -> Any:
    """`key=value,key=value`; the text itself where it is of another form."""
    found = dict(_pairs(text))
    return found if all(found) else text


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        truth = value.lower() == "true" if value.lower() in ("true", "false") else number(value)
        yield name if equals and value else "", truth
