"""A PyTorch release as traces, cases and commands write it: `2.13`, `2.13.0`, `2.13.0+cu130`, `2.13.0a0+git1234`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from traces.errors import ConfigError
from traces.text import quoted


class Version(NamedTuple):
    """Major and minor number: patch releases and builds behave alike. Compares with plain pairs, `>= (2, 13)`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


_FORM: Final = re.compile(
    r"v?([0-9]{1,3})\.([0-9]{1,3})(\.[0-9]{1,3})?([-.+]?[a-z0-9][a-z0-9._+-]{0,60})?", re.ASCII | re.IGNORECASE
)


def version_of(text: str) -> Version:
    """The version that a text names. Raises ConfigError where it names none."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"release {quoted(text)} is no version of PyTorch; write it like 2.13")
    return Version(int(match[1]), int(match[2]))
