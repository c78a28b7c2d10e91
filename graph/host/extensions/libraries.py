"""Libraries of operators that a compiled extension would register."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime


def define(runtime: Runtime, library: str, schemas: Sequence[str]) -> None:
    """The operators of these schemas are there while the runtime lasts; what they do is told by `Runtime.override`."""
    defined: Any = torch.library.Library
    defined = defined(library, "FRAGMENT")
    runtime.libraries.append(defined)
    for schema in schemas:
        defined.define(schema)
