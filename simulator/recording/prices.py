"""What operators and collectives of a recorded program take, by the clock of an estimate (`strategies.timing`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graph.recorder.flops import cost
from graph.recorder.recorder import OVERWRITING, tensors
from strategies.timing.clock import SAME, Clock
from strategies.timing.host import COPY

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator


class Prices:
    """The durations of one GPU in nanoseconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._speed = clock.speed()

    def kernel(self, func: Operator | str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> int:
        """Of an operator, or a kernel of compiled code by name, by the roofline; 0: it computes and moves nothing."""
        name = str(func)
        flops, moved = cost(name, args, kwargs, out)
        over = name == COPY and args[0].is_cuda != args[1].is_cuda
        return self._speed.kernel_ns(flops, moved, _dtype(func, args, kwargs, out), over=over)

    def collective(self, kind: str, size: int, ranks: tuple[int, ...]) -> int:
        """Of a collective of so many bytes among these ranks."""
        return self._clock.collective(SAME.get(kind, kind), size, ranks)


def _dtype(func: Operator | str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> str:
    """The type of the first operand on the device that is read; of what is written, where none is."""
    first = 0 if isinstance(func, str) else int(func._opname in OVERWRITING)
    for tensor in tensors((args[first:], kwargs, out, args[:first])):
        if tensor.is_cuda:
            return str(tensor.dtype).removeprefix("torch.")
    return ""
