"""The arguments of transformers' Trainer: those that a program has read from its command line can be changed there, of
others the line is told that has them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from graph.host.imports import changed
from graph.user_code import caller

#: Those that matter for memory.
NAMES: Final = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "optim",
    "bf16",
    "fp16",
    "torch_empty_cache_steps",
    "use_liger_kernel",
)


@dataclass
class Arguments:
    """Values of `NAMES` that are `given` on the command line, and the line of the program where they are `written`."""

    given: dict[str, Any] = field(default_factory=dict)
    written: str = ""


@contextlib.contextmanager
def followed(found: Arguments) -> Iterator[None]:
    """Inside, the values of `NAMES` are noted in `found` where HfArgumentParser, or TRL's parser, which is one, makes
    TrainingArguments of the command line, and else the line that makes them."""

    def change(module: ModuleType) -> Callable[[], None]:
        parser = module.HfArgumentParser
        plain = parser.parse_args_into_dataclasses

        @functools.wraps(plain)
        def parsed(self: object, args: Sequence[str] | None = None, *rest: object, **named: object) -> Any:
            made = plain(self, args, *rest, **named)
            if args is None or {*args} <= {*sys.argv[1:]}:
                for one in filter(_trains, made):
                    found.given.update({name: _plain(getattr(one, name)) for name in NAMES if hasattr(one, name)})
            return made

        parser.parse_args_into_dataclasses = parsed
        return lambda: setattr(parser, plain.__name__, plain)

    def noting(module: ModuleType) -> Callable[[], None]:
        kind = module.TrainingArguments
        plain = kind.__post_init__

        @functools.wraps(plain)
        def made(self: object, *rest: object) -> None:
            found.written = found.written or caller()
            plain(self, *rest)

        kind.__post_init__ = made
        return lambda: setattr(kind, plain.__name__, plain)

    with changed({"transformers.hf_argparser": change, "transformers.training_args": noting}):
        yield


def _trains(made: object) -> bool:
    return any(kind.__name__ == "TrainingArguments" for kind in type(made).__mro__)


def _plain(value: object) -> object:
    """A value as the command line has it: that of an enumeration's member."""
    return getattr(value, "value", value)
