"""The smallest device on which a trace runs through, by bisection over replays of the same events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.allocator.layout import ALLOCATED_BYTES, RESERVED_BYTES
from traces.errors import ReplayError
from traces.model import Trace

if TYPE_CHECKING:
    from simulator.engine.replay import Prepared

#: Sizes that are tried are multiples of this: the driver hands out memory in pages of 2 MiB.
STEP: Final = 2 << 20


def smallest_memory(
    trace: Trace | Prepared, *, conf: str | None = None, release: str | None = None, step: int = STEP
) -> int:
    """The least total memory in bytes, a multiple of `step`, on which every rank of a trace has no out-of-memory.

    Below its peak of reserved memory the allocator gives back free segments and tries again, so that a run may fit a
    device smaller than what it reserves on a large one; it never fits below its peak of allocated memory. Between the
    two the size is bisected. Whether a run fits is nearly, not wholly, monotonous in the size: a few MiB above the
    answer a size may exist that does not serve. No CUDA context is counted.

    Raises ReplayError where the trace does not fit any device, and what `simulator.replay` raises.
    """
    from simulator.engine.replay import ENDLESS, Prepared, prepare, serve

    made = trace if isinstance(trace, Prepared) else prepare(trace)

    def tried(memory: int | None) -> tuple[bool, int, int]:
        found = serve(made, conf=conf, release=release, memory=memory, context=0)
        peaks = [[one.machine.stat(stat)["all"][1] for one in found] for stat in (ALLOCATED_BYTES, RESERVED_BYTES)]
        return all(one.oom is None for one in found), max(peaks[0]), max(peaks[1])

    fits, allocated, reserved = tried(None)
    if not fits:
        fits, allocated, reserved = tried(ENDLESS)
        if not fits:
            raise ReplayError("the trace runs out of memory on any device: an allocation fails whatever its size")
    bad, good = allocated // step - 1, -(-reserved // step)
    while good - bad > 1:
        middle = (good + bad) // 2
        if middle > 0 and tried(middle * step)[0]:
            good = middle
        else:
            bad = middle
    return good * step
