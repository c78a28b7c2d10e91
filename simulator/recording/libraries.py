"""What cuDNN may take for itself beside what is recorded: its workspaces, by the algorithms that it chooses on a GPU.

PyTorch takes them from its allocator for the time of a call. Where there is no room for one, the next algorithm is
tried (`try_plans`, aten/src/ATen/native/cudnn/Conv_v8.cpp), so they decide on peaks, not on whether a program ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from graph.user_code import place
from traces.model import Events, Op
from traces.units import format_bytes

if TYPE_CHECKING:
    from graph.recorder.program import Labels

#: What is worth a word.
_LEAST: Final = 1 << 20


def notice(labels: Labels, events: Events) -> str:
    """How much higher the peak of allocated memory would be with likely workspaces, and where; or nothing."""
    if not labels.perhaps:
        return ""
    size = events.ints("bytes")
    born = np.flatnonzero(events.op == Op.ALLOC)
    signs = (events.op == Op.ALLOC).astype(np.int64) - (events.op == Op.FREE)
    sizes = size[born][np.where(signs != 0, events.ints("id"), 0)]
    allocated = np.cumsum(signs * sizes)
    calls = np.fromiter(labels.perhaps, np.int64)
    most = allocated[born[calls]] + np.fromiter(labels.perhaps.values(), np.int64)
    where = int(most.argmax())
    if (more := int(most[where] - allocated.max())) < _LEAST:
        return ""
    leaf = labels.lines.leaf(labels.stack[int(calls[where])])
    at = "" if leaf is None else f", first of all at {place(*leaf)}"
    return (
        f"the peak may be {format_bytes(more)} higher: cuDNN chooses its algorithms on the GPU, and workspaces of "
        f"convolutions are not in these figures (a copy of each operand is likely{at})"
    )
