"""What a workspace rule sees and answers: one operator call, and the allocator's exact sequence inside it.

CUDA kernels allocate more than their outputs: sort buffers, partial sums, cuBLAS workspaces. Dispatch does not show
them; rules say them, one function an operator family, from the source of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from graph.hardware.profile import Profile

#: ("alloc", key, bytes): scratch `key` is born; ("free", key): it dies; ("out", i): the i-th new output storage of the
#: call (flattened outputs, new storages only) is born; ("keep", key, bytes): a workspace that stays, noted in `state`
#: under this key, which ends with its stream; ("rest",): outputs not named yet are born here. Outputs that no step
#: names are born before the first step. A fourth entry of "alloc" and "keep" are its bytes on a GPU, where a library
#: takes more than the recordings have, in which libraries do nothing.
Step = tuple[Any, ...]
Plan = tuple[Step, ...]
#: `Call.deterministic` where what is not deterministic is an error.
ENFORCED: Final = 2
#: Threads that have libraries' handles of their own: the main one, autograd's, and one of the program's own.
THREADS: Final = (0, 1, 2)
#: The outputs that no step has named are born.
REST: Final = ("rest",)
#: What the allocator has cached is given back, as torch.cuda.empty_cache does.
EMPTY: Final = ("empty",)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call on CUDA tensors: shapes, strides and dtypes are right, values are not there.

    `name` is the overload's full name ("aten.mm.default"). `thread` is one of THREADS, since cuBLAS handles are per
    thread; those that a thread leaves, the next one takes. `state` lives as long as the capture: rules note in it which
    persistent workspaces exist. `deterministic`: torch.get_deterministic_debug_mode; `filling`: whether memory is then
    filled before it is written (torch.utils.deterministic.fill_uninitialized_memory).
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    profile: Profile
    stream: int
    thread: int
    grad: bool
    state: dict[Any, Any]
    deterministic: int = 0
    filling: bool = False


Rule = Callable[[Call], Plan | None]


def gpu_bytes(step: Step) -> int:
    """The bytes of an "alloc" or "keep" on a GPU; -1 where they are the same."""
    return int(step[3]) if len(step) > len(("alloc", "key", "bytes")) else -1


def within(scratch: Iterable[tuple[str, int] | tuple[str, int, int]], *inside: Step) -> Plan:
    """Scratch (key, bytes, perhaps bytes on a GPU) that is born in this order, what comes meanwhile, and its deaths in
    the reverse order."""
    made = list(scratch)
    births, deaths = [("alloc", *one) for one in made], [("free", one[0]) for one in reversed(made)]
    return (*births, *inside, *deaths)


def after(scratch: Iterable[tuple[str, int]]) -> Plan | None:
    """The same once the outputs are there; None where there is no scratch."""
    made = within(scratch)
    return (REST, *made) if made else None
