"""The cells of a notebook, run one after another in this process by IPython, as a kernel of Jupyter runs them."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Final

import nbformat
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from traces.errors import ConfigError

#: What runs the code of a cell: the outermost frame that is not the notebook's.
BASE: Final[CodeType] = InteractiveShell.run_code.__code__
#: Tags of cells that are left out, and of those whose errors do not end the run (nbclient/client.py).
_SKIPPED: Final = "skip-execution"
_MAY_RAISE: Final = "raises-exception"


def cells(path: str) -> list[Any]:
    """The cells of code of a notebook, as nbformat's nodes. ConfigError for a file that is none."""
    try:
        found = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, AttributeError, nbformat.ValidationError) as error:
        raise ConfigError(f"{path}: is not a notebook: {str(error).splitlines()[0]}") from error
    return [cell for cell in found.cells if cell.cell_type == "code" and _SKIPPED not in cell.metadata.get("tags", ())]


def run(path: str) -> None:
    """Run a notebook's cells in its folder, as the module `__main__`, up to the first that raises; that is raised.

    Line 2 of the third cell is `train.ipynb[3]`, line 2."""
    code = cells(path)
    os.chdir(Path(path).resolve().parent)
    sys.excepthook = traceback.print_exception  # Python's own knows no lines but those of files
    _Compiler.path = path
    shell = _Shell.instance(config=Config(HistoryManager={"enabled": False}))
    for cell in code:
        found = shell.run_cell(cell.source, store_history=True)  # type: ignore[no-untyped-call]
        error = found.error_before_exec or found.error_in_exec
        ends = not isinstance(error, Exception) or _MAY_RAISE not in cell.metadata.get("tags", ())
        if error is not None and ends:
            raise error.with_traceback(_from_cell(error.__traceback__, path))


class _Compiler(CachingCompiler):
    """Names the code of cells by their notebook."""

    path = ""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return f"{self.path}[{number}]"


class _Shell(InteractiveShell):
    """Says nothing of what cells raise: whoever runs them does."""

    compiler_class = _Compiler

    def init_virtualenv(self) -> None:
        """Packages are those of the Python that runs this, whichever environment a terminal is in."""

    def enable_gui(self, gui: str | None = None) -> None:
        """None is there for what `%matplotlib` asks."""

    def _showtraceback(self, etype: object, evalue: object, stb: object) -> None:
        pass


def _from_cell(frames: TracebackType | None, path: str) -> TracebackType | None:
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith(f"{path}["):
        frames = frames.tb_next
    return frames
