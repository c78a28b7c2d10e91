"""The arguments of transformers' Trainer that a program has read from its command line: they can be changed there."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Final

from graph.host.imports import changed

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


@contextlib.contextmanager
def followed(found: dict[str, Any]) -> Iterator[None]:
    """Inside, the values of `NAMES` are noted in `found` where HfArgumentParser, or TRL's parser, which is one, makes
    TrainingArguments of the command line."""

    def change(module: ModuleType) -> Callable[[], None]:
        parser = module.HfArgumentParser
        plain = parser.parse_args_into_dataclasses

        @functools.wraps(plain)
        def parsed(self: object, args: Sequence[str] | None = None, *rest: object, **named: object) -> Any:
            made = plain(self, args, *rest, **named)
            if args is None or {*args} <= {*sys.argv[1:]}:
                for one in filter(_trains, made):
                    found.update({name: _plain(getattr(one, name)) for name in NAMES if hasattr(one, name)})
            return made

        parser.parse_args_into_dataclasses = parsed
        return lambda: setattr(parser, plain.__name__, plain)

    with changed({"transformers.hf_argparser": change}):
        yield


def _trains(made: object) -> bool:
    return any(kind.__name__ == "TrainingArguments" for kind in type(made).__mro__)


def _plain(value: object) -> object:
    """A value as the command line has it: that of an enumeration's member."""
    return getattr(value, "value", value)
