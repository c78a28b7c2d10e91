"""What cuDNN and cuFFT may take beside what is recorded: workspaces of the algorithms that they choose on a GPU.

PyTorch takes them from its allocator for the time of a call. Where there is no room for one of cuDNN's, the next
algorithm is tried (`try_plans`, aten/src/ATen/native/cudnn/Conv_v8.cpp), so they decide on peaks, not on whether a
program ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from graph.model import Kind
from graph.recorder.recorder import KIND_BITS, Log
from graph.user_code import place
from traces.model import Events, Int64Array, Op
from traces.units import format_bytes

if TYPE_CHECKING:
    from graph.recorder.program import Labels

#: What is worth a word.
_LEAST: Final = 1 << 20
#: By library: why its workspaces are not known here, and what is likely.
_REASONS: Final[Mapping[str, tuple[str, str]]] = {
    "cuDNN": ("chooses its algorithms on the GPU, and workspaces of convolutions", "a copy of each operand is likely"),
    "cuFFT": (
        "plans its transforms on the GPU, and their workspaces",
        "the signal twice is likely, at most eight times",
    ),
}


def of_program(labels: Labels, events: Events) -> str:
    """How much higher the peak of allocated memory would be with likely workspaces, and where; or nothing."""
    if not labels.perhaps:
        return ""
    ids, births = events.ints("id"), np.flatnonzero(events.op == Op.ALLOC)
    signs = (events.op == Op.ALLOC).astype(np.int64) - (events.op == Op.FREE)
    sizes = np.zeros(len(labels.operator), dtype=np.int64)  # 0 of what a private pool has given back
    sizes[ids[births]] = events.ints("bytes")[births]
    event_of = dict(zip(ids[births].tolist(), births.tolist(), strict=True))
    perhaps = {event_of[number]: size for number, (_, size) in labels.perhaps.items() if number in event_of}
    more, event = _more(signs, sizes, ids, perhaps)
    if more < _LEAST:
        return ""
    number = int(ids[event])
    leaf = labels.lines.leaf(labels.stack[number])
    return _told(more, labels.perhaps[number][0], "" if leaf is None else place(*leaf))


def of_log(log: Log) -> str:
    """The same of a capture, on one GPU."""
    if not log.perhaps:
        return ""
    packed = np.array(log.events, dtype=np.int64)
    kind, index = packed & ((1 << KIND_BITS) - 1), packed >> KIND_BITS
    signs = (kind == Kind.ALLOC).astype(np.int64) - (kind == Kind.FREE)
    sizes = np.array([row[0] for row in log.born], dtype=np.int64)
    more, event = _more(signs, sizes, index, {position: size for position, (_, size) in log.perhaps.items()})
    if more < _LEAST:
        return ""
    calls = np.flatnonzero(kind[: event + 1] == Kind.OPERATOR)
    module = log.operators[int(index[calls[-1]])][1]
    return _told(more, log.perhaps[event][0], list(log.names)[module] if module >= 0 else "")


def _more(signs: Int64Array, sizes: Int64Array, of: Int64Array, perhaps: Mapping[int, int]) -> tuple[int, int]:
    """How many bytes the peak is higher where `perhaps` bytes are added after some events, and at which of those.

    `signs`: 1 for births, -1 for deaths of what `of` says, of as many bytes as `sizes` says.
    """
    if not perhaps:
        return 0, 0
    allocated = np.cumsum(signs * sizes[np.where(signs != 0, of, 0)])
    after = np.fromiter(perhaps, np.int64)
    most = allocated[after] + np.fromiter(perhaps.values(), np.int64)
    first = int(most.argmax())
    return int(most[first] - allocated.max()), int(after[first])


def _told(more: int, library: str, where: str) -> str:
    at = f", first of all at {where}" if where else ""
    reason, likely = _REASONS[library]
    return f"the peak may be {format_bytes(more)} higher: {library} {reason} are not in these figures ({likely}{at})"
