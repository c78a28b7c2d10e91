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
from traces.model import BY_CHOICE, Events, Int64Array, Op
from traces.units import format_bytes

if TYPE_CHECKING:
    from graph.recorder.program import Labels

#: What is worth a word.
_LEAST: Final = 1 << 20
#: By the name of scratch that is there on a GPU alone: the library, why its workspaces are not known, what is likely.
_REASONS: Final[Mapping[str, tuple[str, str, str]]] = {
    BY_CHOICE: (
        "cuDNN",
        "chooses its algorithms there, and workspaces of convolutions",
        "copies of operands are likely",
    ),
    "cuFFT": (
        "cuFFT",
        "plans its transforms there, and their workspaces",
        "from none to ten times the signal were seen",
    ),
}


def of_program(labels: Labels, events: Events) -> str:
    """How much higher the peak of allocated memory would be with likely workspaces, and where; or nothing."""
    guessed = {code: name for name, code in labels.names.items() if name in _REASONS}
    sized = {number: size for number, size in labels.gpu_bytes.items() if labels.operator[number] in guessed}
    if not sized:
        return ""
    ids, births = events.ints("id"), np.flatnonzero(events.op == Op.ALLOC)
    signs = (events.op == Op.ALLOC).astype(np.int64) - (events.op == Op.FREE)
    sizes = np.zeros(len(labels.operator), dtype=np.int64)  # 0 of what a private pool has given back
    sizes[ids[births]] = events.ints("bytes")[births]
    event_of = dict(zip(ids[births].tolist(), births.tolist(), strict=True))
    more, event = _more(signs, sizes, ids, {event_of[one]: size for one, size in sized.items() if one in event_of})
    if more < _LEAST:
        return ""
    number = int(ids[event])
    leaf = labels.lines.leaf(labels.stack[number])
    return _told(more, guessed[labels.operator[number]], "" if leaf is None else place(*leaf))


def of_log(log: Log) -> str:
    """The same of a capture, on one GPU."""
    sized = {number: size for number, size in log.gpu_bytes.items() if log.born[number][2] in _REASONS}
    if not sized:
        return ""
    packed = np.array(log.events, dtype=np.int64)
    kind, index = packed & ((1 << KIND_BITS) - 1), packed >> KIND_BITS
    signs = (kind == Kind.ALLOC).astype(np.int64) - (kind == Kind.FREE)
    sizes = np.array([row[0] for row in log.born], dtype=np.int64)
    births = ((event, int(index[event])) for event in np.flatnonzero(kind == Kind.ALLOC).tolist())
    more, event = _more(signs, sizes, index, {event: sized[number] for event, number in births if number in sized})
    if more < _LEAST:
        return ""
    _, operator, name, _ = log.born[int(index[event])]
    module = log.operators[operator][1]
    return _told(more, str(name), list(log.names)[module] if module >= 0 else "")


def _more(signs: Int64Array, sizes: Int64Array, of: Int64Array, added: Mapping[int, int]) -> tuple[int, int]:
    """How many bytes the peak is higher where bytes are added after some events, and at which of those.

    `signs`: 1 for births, -1 for deaths of what `of` says, of as many bytes as `sizes` says.
    """
    if not added:
        return 0, 0
    allocated = np.cumsum(signs * sizes[np.where(signs != 0, of, 0)])
    after = np.fromiter(added, np.int64)
    most = allocated[after] + np.fromiter(added.values(), np.int64)
    first = int(most.argmax())
    return int(most[first] - allocated.max()), int(after[first])


def _told(more: int, name: str, where: str) -> str:
    at = f", first of all at {where}" if where else ""
    library, reason, likely = _REASONS[name]
    return f"on a GPU the peak may be {format_bytes(more)} higher: {library} {reason} are a guess ({likely}{at})"
