"""The one table of dtypes: how cases call them, how torch prints them, and their sizes. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: A case's word for a dtype (`dtype`, `autocast`, ...) -> its name in torch (and for `from_pretrained`).
NAMES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Bytes an element, by the name of the dtype as torch prints it.
SIZES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
