"""A PyTorch release as traces, cases and commands write it: `2.13`, `2.13.0`, `2.13.0+cu130`, `2.13.0a0+git1234`."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Final, NamedTuple

from traces.errors import ConfigError
from traces.text import quoted

#: The release that captures are checked with; taken where nothing else says one.
DEFAULT_RELEASE: Final = "2.13"


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


@functools.cache
def installed_release() -> str:
    """The release of the PyTorch that is installed, which is not imported for it; `DEFAULT_RELEASE` where none is."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return DEFAULT_RELEASE
    try:
        said = re.search(r"__version__ = '(.+)'", Path(spec.origin).with_name("version.py").read_text("utf-8"))
        return DEFAULT_RELEASE if said is None else str(version_of(said[1]))
    except (OSError, ConfigError):
        return DEFAULT_RELEASE
