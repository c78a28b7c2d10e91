"""Data sets that notebooks load from Hugging Face's hub, made up: their columns, and texts of so many words.

Imported first, as a program that follows would import `datasets`. NOTEBOOK_WORDS: how long the long texts are.
"""

from __future__ import annotations

import os
from typing import Any

import datasets  # type: ignore[import-untyped, unused-ignore]

ROWS = 160
WORDS = int(os.environ.get("NOTEBOOK_WORDS", "6000"))


def words(many: int, first: int = 0) -> str:
    """So many words of the tokenizer that stands for theirs."""
    return " ".join(f"w{(first + number) % 900}" for number in range(many))


def load_dataset(name: str, *_: object, **__: object) -> datasets.Dataset:
    """As `datasets.load_dataset`."""
    rows = range(ROWS)
    columns: dict[str, list[Any]]
    if name.startswith("unsloth/OpenMathReasoning"):
        columns = {"problem": [words(50, row) for row in rows], "generated_solution": [words(WORDS, row) for row in rows]}
    elif name == "mlabonne/FineTome-100k":
        talks = [(("human", words(40, row)), ("gpt", words(100 + row, row))) for row in rows]
        columns = {"conversations": [[{"from": who, "value": what} for who, what in talk] for talk in talks]}
    else:
        raise LookupError(f"no data like {name}")
    return datasets.Dataset.from_dict(columns)


datasets.load_dataset = load_dataset
