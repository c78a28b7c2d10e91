"""What a report says, whatever it is written as: a verdict, and sections of tables, figures, charts and lines.

One module a result builds a `Document` of it; `terminal`, `markdown` and `html` write documents. Everything here is
plain text and numbers: each of them escapes what it must, and writes sizes and shares in its own way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from traces.units import format_bytes

if TYPE_CHECKING:
    from simulator.engine.result import RankResult, Result


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes."""

    bytes: int

    def __str__(self) -> str:
        return format_bytes(self.bytes)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole, in percent; a page draws a bar, in the colour of `category` where it is one."""

    part: int
    whole: int
    category: str = ""

    def __str__(self) -> str:
        return f"{100 * self.part / self.whole:.1f}%" if self.whole else "-"


class Name(str):
    """A name that a trace gives: a terminal leaves out its middle where it is long: names differ at their ends."""

    __slots__ = ()


Cell = str | int | float | Size | Share | None
#: How a row or a line stands out.
Style = Literal["", "good", "bad"]


def cut(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters, cut in the middle: names differ at their ends."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    if len(line) <= limit:
        return line
    half = (limit - 3) // 2
    return f"{line[:half]}...{line[len(line) - (limit - 3 - half) :]}"


@dataclass(frozen=True)
class Table:
    """Rows under a head. The columns numbered in `right` hold numbers; None: those without any text.

    `more` stands below the table: what is left out. `styles`: rows that stand out.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: Collection[int] | None = None
    more: str = ""
    styles: Mapping[int, Style] = field(default_factory=dict)

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers."""
        if self.right is not None:
            return column in self.right
        return not any(isinstance(row[column], str) for row in self.rows)


@dataclass(frozen=True)
class Figure:
    """A main figure: its name, the value with more digits where there are some, and what is to be said of it."""

    name: str
    value: str | Size
    remark: str = ""
    exact: str = ""
    key: str = ""
    """Its name in JSON."""


@dataclass(frozen=True)
class Figures:
    """The main figures, one below the other."""

    rows: tuple[Figure, ...]


@dataclass(frozen=True)
class Lines:
    """Sentences under a title, or without one."""

    lines: tuple[str, ...]
    title: str = ""
    style: Style = ""


@dataclass(frozen=True)
class Bar:
    """A row of a chart: parts (what, size) from left to right, a line at `mark` (a limit), words at the end.

    `alarm` are words at the very end that say what is wrong.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    mark: float | None = None
    remark: str = ""
    alarm: str = ""


@dataclass(frozen=True)
class Chart:
    """Horizontal bars on one scale; parts of one name have one colour. `mark` says what the marks of the bars are.

    A terminal draws it where it has a `plain` title, the first part of each bar as `#`, the others as `-`.
    """

    title: str
    bars: tuple[Bar, ...]
    unit: Literal["bytes", "number"] = "bytes"
    caption: str = ""
    mark: str = "limit"
    plain: str = ""


@dataclass(frozen=True)
class Dots:
    """Rows of dots on one scale of bytes, on a page alone: a label, words at the end, and what, bytes and wrongness."""

    title: str
    rows: tuple[tuple[str, str, tuple[tuple[str, int, bool], ...]], ...]


@dataclass(frozen=True)
class Differences:
    """Bars to both sides of a middle, on a page alone: what, and its bytes before and after; growth is on the right."""

    title: str
    rows: tuple[tuple[str, int, int], ...]


Block = Table | Figures | Lines | Chart | Dots | Differences


@dataclass(frozen=True)
class Section:
    """Blocks under a title. A page draws `rank`, called `label`, over time beside them."""

    title: str
    blocks: tuple[Block, ...]
    rank: RankResult | None = None
    label: str = ""


@dataclass(frozen=True)
class Document:
    """A report. `subject` is what it is about, `lead` the answer in a sentence, behind the words `says` that stand out.

    `badge` colours the answer: a verdict, "regression", "comparison" or nothing. `head` stands before the sections. The
    rest is for pages alone: a `title` where it is not the subject, `notes`, `properties`, and `results` that are drawn
    together and one by one, with categories and blocks where they were replayed with their picture.
    """

    subject: str
    lead: str
    says: str = ""
    named: bool = False
    """Whether `lead` begins with a name, which is never written otherwise."""
    badge: str = ""
    facts: tuple[str, ...] = ()
    head: tuple[Block, ...] = ()
    sections: tuple[Section, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    results: tuple[tuple[str, Result], ...] = ()
