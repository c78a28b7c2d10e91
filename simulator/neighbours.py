"""Imports the project's other packages from beside this one, before anything else asks for them by name.

In a folder with a `graph.py` or `traces.py` of the user, `python -m simulator` would find those first: the current
folder leads `sys.path`. Once imported, a package is not looked for again, and its modules are in its own folder.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, _HERE)
try:
    for _name in ("traces", "graph", "strategies"):
        importlib.import_module(_name)
finally:
    sys.path.remove(_HERE)
