"""The pages of `docs/reference/` are what the code says."""

from __future__ import annotations

import pytest

from graph.case import KEYS
from simulator.cli import COMMANDS
from tests.house import reference

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    kept = (reference.FOLDER / name).read_text("utf-8")
    assert kept == PAGES[name], "write it anew: scripts/reference"


def test_no_page_is_left_over() -> None:
    assert {path.name for path in reference.FOLDER.iterdir()} == set(PAGES)


def test_every_key_command_and_op_is_there() -> None:
    assert PAGES["case-keys.md"].count("\n| `") == len(KEYS)
    assert PAGES["command-line.md"].count("\n## ") == len(COMMANDS)
    for op in ("alloc", "wait_stream", "pool_release"):
        assert f"\n| `{op}` |" in PAGES["trace-format.md"]
