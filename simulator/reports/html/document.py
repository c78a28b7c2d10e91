"""The frame of every page: one HTML file with its scripts, styles and data inside, and a policy that lets nothing out.

Whatever a trace says is text: it is escaped in the tables, kept in a JSON block that no markup can leave, and the
page's content security policy runs the page's own scripts only (by their hashes) and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

from traces.files import write_atomically

_SCRIPTS: Final = ("uPlot.iife.min.js", "blocks.js", "page.js")
_NO_SCRIPT: Final = (
    '<noscript><p class="alarm">JavaScript is off: the tables are complete, the plot is missing.</p></noscript>'
)
_STYLES: Final = ("uPlot.min.css", "page.css")


def write_page(page: str, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a page to `path` (UTF-8); the file appears whole or not at all.

    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    with write_atomically(path, force=force) as file:
        file.write(page.encode("utf-8", "backslashreplace"))


def assemble(title: str, header: str, before: str, ranks: str, notes: str, data: Mapping[str, Any]) -> str:
    """The page as text: `title` is plain text, the other parts ready HTML (`before` stands above the choice
    of ranks); `data` is for the scripts, which a page without
    any ranks does not have."""
    drawn = bool(data.get("ranks"))
    scripts = f'<script type="application/json" id="data">{_json(data)}</script>' + "".join(
        f"<script>{static(name)}</script>" for name in _SCRIPTS
    )
    parts = {
        "title": escape(title),
        "policy": _policy(),
        "styles": "".join(f"<style>{static(name)}</style>" for name in _STYLES),
        "header": header,
        "before": before,
        "ranks": ranks,
        "notes": notes,
        "noscript": _NO_SCRIPT if drawn else "",
        "scripts": scripts if drawn else "",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], static("page.html"))


def static(name: str) -> str:
    """The text of a file in `static/`."""
    return (files("simulator.reports.html") / "static" / name).read_text("utf-8")


def _policy() -> str:
    """The content security policy: this page's scripts by hash, its styles, and nothing from anywhere."""
    hashes = (hashlib.sha256(static(name).encode()).digest() for name in _SCRIPTS)
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _json(data: Mapping[str, Any]) -> str:
    """JSON for a script element: pure ASCII without `<`, `>` and `&`, so that no markup can end it."""
    document = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
