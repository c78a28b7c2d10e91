"""The collector kept still: thresholds, the start of a program, and files that a program leaves open."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

from tests.places import ROOT

HURRIED = """
import gc
from traces.collecting import hurried

hurried()
assert gc.isenabled() and gc.get_threshold()[0] > 10_000, gc.get_threshold()
"""
AS_IF_ON = """
import gc

gc.disable()
from traces.collecting import as_if_on

as_if_on(1000)
assert gc.isenabled() and gc.get_count()[1:] == (4, 10) and not gc.collect()
assert gc.get_freeze_count() > 1000  # what was there
assert 1000 <= len(gc.get_objects()) < 1100  # what counts
"""
NOT_YET_IMPORTED = """
import colorsys
import gc
import sys
from traces.collecting import not_yet_imported

spec = colorsys.__spec__
not_yet_imported("colorsys", 70_000, 40_000)
lasting = len(gc.get_objects())
assert "colorsys" not in sys.modules
finders, passes = len(sys.meta_path), sum(one["collections"] for one in gc.get_stats())


def first():
    import colorsys

    return colorsys


assert first() is first() is sys.modules["colorsys"] is colorsys
assert colorsys.__spec__ is spec and len(sys.meta_path) == finders - 1
assert sum(one["collections"] for one in gc.get_stats()) - passes in range(95, 105)  # one for each 700
gc.collect()
assert len(gc.get_objects()) - lasting in range(39_000, 41_000)
"""
#: Files in cycles and without, the module's own and not, one of a class with a method that fails.
LEFT_OPEN = """
import gzip
import io
import sys
from traces.collecting import left_at_exit

left_at_exit()


class Log:
    def __init__(self, name):
        self.file = open(f"{sys.argv[1]}/{name}", "wt")
        self.file.write("kept")
        self.me = self


class Failing(io.FileIO):
    def writable(self):
        raise ValueError


lasting, zipped = Log("lasting.txt"), gzip.open(f"{sys.argv[1]}/zipped.gz", "wt")
zipped.write("kept")
Log("gone.txt")
failing = Failing(f"{sys.argv[1]}/failing.txt", "w")
failing.write(b"kept")
closed = open(f"{sys.argv[1]}/closed.txt", "w")
closed.close()
plain = open(f"{sys.argv[1]}/plain.txt", "w")
plain.write("kept")
"""


def run(code: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_passes_are_rare_in_a_process_of_our_own() -> None:
    run(HURRIED)


def test_a_program_begins_as_if_the_collector_had_looked_at_all() -> None:
    run(AS_IF_ON)


def test_a_module_counts_as_not_imported_until_the_program_imports_it() -> None:
    run(NOT_YET_IMPORTED)


def test_what_was_written_is_in_files_that_a_program_left_open(tmp_path: Path) -> None:
    run(LEFT_OPEN, str(tmp_path))
    for name in ("lasting.txt", "gone.txt", "failing.txt", "plain.txt"):
        assert (tmp_path / name).read_text() == "kept", name
    with gzip.open(tmp_path / "zipped.gz", "rt") as file:
        assert file.read() == "kept"
