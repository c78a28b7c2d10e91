"""What the commands share: notes are told whole."""

from __future__ import annotations

import pytest

from simulator.options.common import announce


def test_a_note_is_told_whole_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    note = "what NCCL's watchdog has not dropped by then counts twice, " * 6  # some 350 characters
    announce((note, "short", note), quiet=False)
    assert capsys.readouterr().err == f"note: {note.strip()}\nnote: short\n"


def test_a_note_of_another_library_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    announce(("\n".join(["line"] * 5000),), quiet=False)
    told = capsys.readouterr().err
    assert told.startswith("note: line line ")
    assert told.count("\n") == 1
    assert len(told) < 1100
