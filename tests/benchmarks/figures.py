"""What a benchmark found: figures beside their goals, as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

#: CPU of a malloc and its free in the real allocator, in ns: measured with the recordings (C++ loop, torch 2.11.0).
REAL_RANGE: Final = (681, 867)
REAL_NS: Final = 700
GOAL_NS: Final = REAL_NS / 5


@dataclass(frozen=True)
class Figure:
    """One figure; the goal is an upper bound. `details` are further numbers by the unit that follows them."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met, if there is one."""
        return None if self.goal is None else self.value < self.goal


@dataclass(frozen=True)
class Section:
    """Figures of one part of the benchmark. `calibration_ns` is the pace of the machine just before it."""

    name: str
    title: str
    calibration_ns: float
    figures: Sequence[Figure]


def number(value: float) -> str:
    """Three or four digits: 0.12, 12.3, 1,234; whole numbers without decimals."""
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def as_text(section: Section) -> str:
    """A section as lines of text."""
    wide = max((len(figure.name) for figure in section.figures), default=0)
    lines = [f"{section.title} [calibration {number(section.calibration_ns)} ns]"]
    lines += [f"  {figure.name:{wide}}  {_beside(figure)}" for figure in section.figures]
    return "\n".join(lines)


def _beside(figure: Figure) -> str:
    """The value, the goal, and the details."""
    text = f"{number(figure.value):>8} {figure.unit}"
    if figure.goal is not None:
        verdict = "met" if figure.met else "MISSED"
        text += f"  (goal: under {number(figure.goal)} {figure.unit.split()[0]}, {verdict})"
    return text + "".join(f"  {number(value)} {unit}" for unit, value in figure.details.items())


def as_document(sections: Sequence[Section], about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as one JSON document."""
    found = []
    for section in sections:
        figures = [{**asdict(figure), "met": figure.met} for figure in section.figures]
        found.append({**asdict(section), "figures": figures})
    return {"about": dict(about), "sections": found}
