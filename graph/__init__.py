"""Step graphs: one training or inference run of a model as operators, storages and the exact order of events.

A case (`Case`) says which model runs how; `capture` runs it without a GPU and without weights, and answers with a
`StepGraph`. Names are imported when they are first used: a case costs nothing, a capture brings torch and transformers.
This package imports `traces` alone, and never the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.lazy import lazy

if TYPE_CHECKING:
    from graph.case import Case as Case
    from graph.errors import CaptureError as CaptureError
    from graph.errors import UnsupportedTorch as UnsupportedTorch
    from graph.files import load as load
    from graph.files import save as save
    from graph.model import StepGraph as StepGraph
    from graph.recorder.capture import capture as capture

__all__ = lazy(
    __name__,
    {
        "CaptureError": "errors",
        "Case": "case",
        "StepGraph": "model",
        "UnsupportedTorch": "errors",
        "capture": "recorder.capture",
        "load": "files",
        "save": "files",
    },
)
