"""An out-of-memory message as figures: what it says, and what follows from that by subtraction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Source = Literal["allocator", "snapshot", "driver", "library", "host"]

#: Bytes by which two figures that are printed with two digits of a GiB may differ and be the same.
ROUNDING: Final = (1 << 30) // 100
#: What a CUDA context takes with the handles of cuBLAS, cuDNN and NCCL, rather too much: the contexts alone that
#: `graph/hardware/gpus.toml` has measured come to about half of it.
CONTEXT: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the card by NVML's account; `bytes` is None where NVML does not tell (0, or all ones)."""

    pid: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Held:
    """Live tensors of one stack at the end of a snapshot: where they were asked for, how many, and their bytes."""

    name: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """One message, in bytes; None where it does not say a figure.

    `source`: PyTorch's allocator, a snapshot of it, the driver (refused to a part of PyTorch that is not the allocator,
    or to NCCL), another library's allocator, or the machine's own memory. `party` names who asked.
    `reserved` is what PyTorch's allocator holds in all, `unallocated` the part of it without tensors, in `allocated`
    is `private`: what private pools keep without tensors in it. `own` is all that this process has. `largest` is the
    largest free piece, `tensors` the largest by stack; only a snapshot has them. `releases` are the releases of PyTorch
    that print such a message, `conf` the allocator string where a snapshot keeps it. `line` counts from 1, `times` how
    often it stands in the text.
    """

    source: Source
    party: str
    said: str = field(compare=False)
    line: int = 0
    times: int = 1
    rank: int | None = None
    gpu: int | None = None
    releases: str = ""
    conf: str = ""
    asked: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    unallocated: int | None = None
    private: int | None = None
    own: int | None = None
    processes: tuple[Process, ...] = ()
    largest: int | None = None
    tensors: tuple[Held, ...] = ()

    @property
    def held(self) -> int | None:
        """What PyTorch's allocator has of the driver."""
        if self.reserved is not None or self.allocated is None or self.unallocated is None:
            return self.reserved
        return self.allocated + self.unallocated

    @property
    def pieces(self) -> int | None:
        """What lies in PyTorch's segments without a tensor, private pools apart."""
        if self.unallocated is not None or self.reserved is None or self.allocated is None:
            return self.unallocated
        return max(self.reserved - self.allocated, 0)

    @property
    def process(self) -> int | None:
        """What this process has in all: as said, or by the listed process that it must be.

        In a container PyTorch does not know its own number, and lists itself as another process.
        """
        if self.own is not None or self.held is None:
            return self.own
        mine = [one.bytes for one in self.processes if one.bytes is not None and one.bytes >= self.held - ROUNDING]
        return min(mine, default=None)

    @property
    def outside(self) -> int | None:
        """What this process has that is not the allocator's: a context, NCCL's buffers, handles of libraries."""
        return None if self.process is None or self.held is None else max(self.process - self.held, 0)

    @property
    def elsewhere(self) -> int | None:
        """What is neither free nor the allocator's: this process's context, and whatever others have."""
        if self.total is None or self.free is None or self.held is None:
            return None
        return max(self.total - self.free - self.held, 0)

    @property
    def others(self) -> int | None:
        """What other processes have; where this process's own part is not told, less `CONTEXT`."""
        if self.elsewhere is None:
            return None
        return max(self.elsewhere - (CONTEXT if self.outside is None else self.outside), 0)

    @property
    def shortage(self) -> int | None:
        """What was lacking of the request."""
        return None if self.asked is None or self.free is None else max(self.asked - self.free, 0)
