"""The phases that are found in a program (`graph.recorder.phases`), for those who know no torch."""

from __future__ import annotations

from typing import Final

PHASES: Final = ("load", "forward", "backward", "optimizer", "evaluation", "saving", "generation")
LOAD, FORWARD, BACKWARD, OPTIMIZER, EVALUATION, SAVING, GENERATION = range(len(PHASES))
