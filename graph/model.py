"""The step graph in memory: operators, storages and the exact order of events, as columns of numpy arrays.

A step graph is what one captured run looks like: every operator that ran, every storage that was born on the GPU, and
one sequence of events that says when. The networkx view of it is made by `graph.dag`; files by `graph.files`.

Storages, not tensors, are counted: views share one. An operator writes a new *version* of a storage that it changes in
place, so that the graph of (storage, version) is acyclic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]

FORMAT: Final = "step-graph"
VERSION: Final = 1


class Kind(IntEnum):
    """What an event of the sequence says; `index` is of the table named here, `value` as said."""

    OPERATOR = 0  # operator `index` starts; what follows up to the next operator happens in it or after it
    ALLOC = 1  # storage `index` is born
    FREE = 2  # storage `index` dies
    PHASE = 3  # a phase starts: `index` into `phases`, `value` is the step (-1: none)
    ENTER = 4  # module `index` (a code into `names`) starts its forward (recomputation in backward included)
    EXIT = 5  # module `index` has ended its forward
    GRADIENT = 6  # the gradient of parameter storage `index` is complete for this backward; `value`: .grad's storage
    SYNCHRONIZE = 7  # the host waits for the device (`index` 0), or for stream `index`
    STEP = 8  # iteration `value` starts
    MICRO_STEP = 9  # micro-batch `value` of an iteration starts (gradient accumulation)
    RECORD_STREAM = 10  # storage `index` is in use on stream `value`
    COLLECTIVE = 11  # collective `index` (a code into `names`: "KIND GROUP [STREAM [STREAM IN TIME]]") of `value` bytes
    WAIT_STREAM = 12  # stream `index` waits for what stream `value` has to do
    EMPTY_CACHE = 13  # torch.cuda.empty_cache()


class Role(IntEnum):
    """When an operator ran."""

    LOAD = 0
    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3  # forward again, inside backward, for a checkpoint
    OPTIMIZER = 4
    OTHER = 5


@dataclass(frozen=True)
class Storages:
    """Every storage that lived on the GPU; one entry a storage, in order of birth.

    `bytes` as requested from the allocator. `dtype`, `category` and `name` are codes into `StepGraph.names` (-1: none):
    dtype as torch prints it without `torch.` ("bfloat16"), category one of `traces.model.CATEGORIES`, name a
    parameter's qualified name, an optimizer state (parameter and key), an operator or a workspace. `module` is a code
    into `StepGraph.names` as well (-1: none). `source` is the storage of the parameter that a gradient, an optimizer
    state or a cast belongs to (-1: none). `gpu_bytes` are the bytes on a GPU, where a library takes more than what is
    known without one (-1: the same; None: of all).
    """

    bytes: Int64Array
    dtype: Int32Array
    category: Int32Array
    name: Int32Array
    module: Int32Array
    stream: Int32Array
    source: Int32Array
    gpu_bytes: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True)
class Operators:
    """Every operator call, in order; `name`, `module` are codes into `StepGraph.names`, `role` a `Role`.

    `flops` counts multiply and add as two; `moved` is bytes read and written on the GPU. `origin` is the forward
    operator whose derivative this one computes (-1: none known). `thread`: 0 main, 1 autograd's device thread.
    """

    name: Int32Array
    module: Int32Array
    role: UInt8Array
    phase: Int32Array
    step: Int32Array
    stream: Int32Array
    thread: UInt8Array
    flops: Int64Array
    moved: Int64Array
    origin: Int32Array

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True)
class Accesses:
    """What operators read or write: entries `start[i]:start[i+1]` belong to operator `i`."""

    start: Int64Array  # one more than operators
    storage: Int32Array
    version: Int32Array


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A parameter or buffer of the model, in the order of `module.parameters()`, then of `module.buffers()`.

    A tied tensor stands once, under its first name. `storage` is -1 where it has no bytes on the GPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    kind: str  # "parameter" or "buffer"
    storage: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What model was captured: its class, its parameters in all (without adapters) and those that are trained
    (adapters are), and the dtype of most. `named`: the class that its configuration names, where that is another."""

    name: str
    parameters: int
    trained: int
    dtype: str
    named: str = ""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        found = {"class": self.name, "parameters": self.parameters, "trained": self.trained, "dtype": self.dtype}
        return found | ({"named": self.named} if self.named else {})


@dataclass(frozen=True)
class StepGraph:
    """One captured run: tables, and the order of events.

    `case` is the case document it was captured for; `environment` names GPU, architecture, release, the versions of the
    libraries and, under `model`, the facts of the model (`ModelFacts`); `assumptions` lists what was assumed about
    values, one line each. `parameters` maps the qualified name of each parameter or buffer on the GPU to its storage
    (tied ones to the same). `modules` has the path and class name of each module in the order of
    `module.named_modules()`; events ENTER and EXIT name modules by path (code into `names`, the root is the empty
    text).
    """

    case: Mapping[str, Any]
    environment: Mapping[str, Any]
    names: tuple[str, ...]
    phases: tuple[str, ...]
    storages: Storages
    operators: Operators
    reads: Accesses
    writes: Accesses
    kind: UInt8Array  # the events: `Kind`
    index: Int32Array
    value: Int64Array
    parameters: Mapping[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def name(self, code: int) -> str | None:
        """The text of a code into `names`, or None for -1."""
        return None if code < 0 else self.names[code]
