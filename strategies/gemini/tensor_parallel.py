"""LLMem's 1D tensor parallelism on Gemini's chunks: every linear layer split on its input, embeddings on their width.

Written over the skeleton of the whole model. A linear layer copies its slice of the input, makes a full output, has it
reduced in place and adds the bias out of place; in backward its input's gradient is a slice that is gathered: one piece
for each rank, NCCL's flat copy, and their concatenation. Embeddings gather their outputs in the same way, twice (the
first result is dropped). Activations between layers are whole; what a linear layer saves is its slice.

Written from Colossal-AI v0.3.0+72 with LLMem's changes: nn/_ops/linear.py, nn/_ops/embedding.py,
tensor/dist_spec_mgr.py, zero/gemini/colo_init_context.py; the order of events is that of recorded runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from graph.model import Kind, Role
from strategies.gemini.chunk_layout import HALF, MASTER, ChunkLayout
from strategies.gemini.chunk_moves import NCCL, WORKSPACE, Gemini, Options
from strategies.gemini.event_builder import EventBuilder
from strategies.gemini.skeleton import BACKWARD, EMBEDDINGS, Skeleton
from traces.model import Op

GROUP: Final = "tp"
PRODUCTS: Final = ("aten.mm.default", "aten.addmm.default")
SUM: Final = "aten.sum."
ADD: Final = "aten.add.Tensor"
#: The name that a captured graph gives to what a product with a bias takes while it runs; products here have none.
LT_WORKSPACE: Final = "cublaslt"
EMBEDDING_BACKWARD: Final = "aten.embedding_dense_backward.default"


@dataclass
class Plan:
    """What tensor parallelism does to operators: numbers of operators, with the parameter that each belongs to.

    `linears`: forward products, with their inputs' storage too; `inputs`, `weights`: the products of backward that give
    the gradients of a linear layer's input and weight, `sums` those of its bias; `saved`: forward products whose
    input a backward will read; `last`: operators that are the last of a forward to read what only linear layers save;
    `kept`: the inputs of heads, which the outputs of the model below hold until the backward.
    """

    linears: dict[int, tuple[int, int]] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    embeddings: dict[int, int] = field(default_factory=dict)
    embedding_gradients: dict[int, int] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    last: dict[int, list[int]] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, skeleton: Skeleton) -> Plan:
        """Find the linear layers and embeddings of a skeleton."""
        plan = cls()
        graph = skeleton.graph
        names = [skeleton.text(code) for code in graph.operators.name.tolist()]
        roles = graph.operators.role.tolist()
        start, flat = graph.reads.start.tolist(), graph.reads.storage.tolist()
        reads = [flat[start[index] : start[index + 1]] for index in range(len(names))]
        for index, name in enumerate(names):
            matrices = [use for use in skeleton.uses(index) if len(skeleton.parameters[use].shape) == 2]
            if name in PRODUCTS and matrices:
                if roles[index] == Role.BACKWARD:
                    plan.inputs[index] = matrices[0]
                else:
                    own = {skeleton.parameters[use].storage for use in skeleton.uses(index)}
                    plan.linears[index] = (matrices[0], next(one for one in reads[index] if one not in own))
            elif name in EMBEDDINGS and matrices:
                plan.embeddings[index] = matrices[0]
        plan._weights(skeleton, names, reads)
        plan._lasts(skeleton, roles, reads)
        return plan

    def _weights(self, skeleton: Skeleton, names: list[str], reads: list[list[int]]) -> None:
        """The products beside an input's gradient that give the weight's; and the gradients of embeddings."""
        graph = skeleton.graph
        start, flat = graph.writes.start.tolist(), graph.writes.storage.tolist()
        sizes = graph.storages.bytes
        layers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, pair in self.linears.items():
            layers[pair].append(index)

        def output(index: int) -> int:
            return int(sizes[flat[start[index]]]) if start[index] < start[index + 1] else -1

        for index, parameter in self.inputs.items():
            size = skeleton.parameters[parameter].bytes
            for beside in (index - 1, index + 1):
                free = 0 <= beside < len(names) and beside not in self.weights and not skeleton.uses(beside)
                if free and names[beside] in PRODUCTS and output(beside) == size:
                    self.weights[beside] = parameter
                    for after in (index + 1, index + 2):
                        if after < len(names) and names[after].startswith(SUM):
                            self.sums[after] = parameter
                    for one in reads[beside]:
                        runs = layers.get((parameter, one), [])
                        if at := bisect_left(runs, beside):
                            self.saved.add(runs[at - 1])
                    break
        tables = sorted(set(self.embeddings.values()))
        for index, name in enumerate(names):
            if name == EMBEDDING_BACKWARD:
                fitting = [one for one in tables if skeleton.parameters[one].bytes == output(index)]
                if fitting:
                    self.embedding_gradients[index] = fitting[0]

    def _lasts(self, skeleton: Skeleton, roles: list[int], reads: list[list[int]]) -> None:
        """Where an input dies that the captured layers keep for backward, but slices replace."""
        inputs = {self.linears[index][1] for index in self.saved}
        readers: dict[int, list[int]] = defaultdict(list)
        for index, storages in enumerate(reads):
            for storage in inputs.intersection(storages):
                readers[storage].append(index)
        deaths = _deaths(skeleton, roles)
        steps = skeleton.graph.operators.step.tolist()
        heads = {steps[index]: index for index in sorted(self.linears) if roles[index] == Role.FORWARD}
        for storage, found in readers.items():
            backward = [index for index in found if roles[index] == Role.BACKWARD]
            forward = [index for index in found if roles[index] != Role.BACKWARD]
            if forward and all(index in self.weights for index in backward):
                if max(forward) in heads.values():
                    self.kept.append(storage)
                else:
                    self.last.setdefault(max(*forward, deaths.get(storage, 0)), []).append(storage)


def _deaths(skeleton: Skeleton, roles: list[int]) -> dict[int, int]:
    """When the variables of a checkpoint's second forward let go of each storage, saved or not: operator by storage.

    Its first forward, which saves nothing, shows it: the same operators in the same modules.
    """
    graph = skeleton.graph
    begins, flat = graph.writes.start.tolist(), graph.writes.storage.tolist()
    keys = list(zip(graph.operators.step.tolist(), graph.operators.module.tolist(), graph.operators.name.tolist(),
                    strict=True))  # fmt: skip
    first: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    for index, role in enumerate(roles):
        if role == Role.FORWARD:
            first[keys[index]].append(index)
    again = {first[keys[index]].popleft(): index for index, role in enumerate(roles)
             if role == Role.RECOMPUTE and first[keys[index]]}  # fmt: skip
    frees = graph.kind == Kind.FREE
    current = np.maximum.accumulate(np.where(graph.kind == Kind.OPERATOR, graph.index, -1))
    died = dict(zip(graph.index[frees].tolist(), current[frees].tolist(), strict=True))
    return {
        flat[begins[index] + place]: again[died[storage]]
        for twin, index in again.items()
        for place, storage in enumerate(flat[begins[twin] : begins[twin + 1]])
        if died.get(storage) in again and begins[index] + place < begins[index + 1]
    }


class GeminiTensorParallel(Gemini):
    """One rank's run of LLMem's tensor parallelism, alone or with data parallelism, over the whole model's skeleton."""

    def __init__(
        self,
        skeleton: Skeleton,
        layout: ChunkLayout,
        rank: int = 0,
        options: Options | None = None,
        out: EventBuilder | None = None,
    ) -> None:
        super().__init__(skeleton, layout, rank, options, out)
        self.plan = Plan.of(skeleton)
        self.tensor = layout.tensor
        self._slices: dict[tuple[int, int], int] = {}  # (parameter, input): the slice that waits for backward
        self._partial: int | None = None  # storage of an input's gradient that is a slice still
        self._owner: int | None = None  # the parameter of its layer
        self._local: int | None = None  # that slice
        self._weight: int | None = None  # storage of the gradient of its weight, made right before that slice
        self._done: tuple[int, int] | None = None  # (parameter, input) whose backward is running
        self._output: int | None = None  # of a linear layer with a bias: made once its product is there
        self._gathered: set[int] = set()  # gradients of inputs that have been gathered
        self._sums: set[int] = set()  # what the sum of a bias's gradient takes while it runs

    # Loading -----------------------------------------------------------------------------------------------------

    def parameter_allocated(self, parameter: int) -> None:
        """ColoInitContext builds the model on the device in fp32, whole."""
        one = self.skeleton.parameters[parameter]
        size = MASTER if self.options.protocol else HALF
        self._model[parameter] = self.out.alloc(size * one.elements, "parameter", f"model.{one.name}")

    def _halve(self) -> None:
        """Halve the model, give the cache back, cut every matrix; a tied head is built too, and dropped when tied."""
        tied = self._tied()
        if tied is not None:
            size = MASTER * self.skeleton.parameters[tied].elements
            self.out.free(self.out.alloc(size, "parameter", "model.head"))
        for parameter, number in self._model.items():
            one = self.skeleton.parameters[parameter]
            self._model[parameter] = self.out.alloc(HALF * one.elements, "parameter", f"model.{one.name}")
            self.out.free(number)
        self.out.add(Op.EMPTY_CACHE)
        for parameter, number in self._model.items():
            one = self.skeleton.parameters[parameter]
            if len(one.shape) == 2:
                self._model[parameter] = self.out.alloc(HALF * self.local[one.name], "parameter", f"model.{one.name}")
                self.out.free(number)

    def _tied(self) -> int | None:
        """The embedding that is a head as well."""
        used = {parameter for parameter, _ in self.plan.linears.values()}
        return next((parameter for parameter in self.plan.embeddings.values() if parameter in used), None)

    # Forward and backward ----------------------------------------------------------------------------------------

    def phase(self, name: str, step: int) -> None:
        """A phase starts; what only variables of the forward still hold dies before the backward."""
        if name == BACKWARD:
            for storage in self.plan.kept:
                self.drop(storage)
        super().phase(name, step)

    def before(self, operator: int, uses: tuple[int, ...]) -> None:
        """A linear layer copies its slice of the input, and an embedding's backward that of the gradient."""
        if self._owner not in (self.plan.weights.get(operator), self.plan.sums.get(operator)):
            self._whole_gradient()
        super().before(operator, uses)
        if operator in self.plan.linears:
            parameter, source = self.plan.linears[operator]
            number = self.out.alloc(self._sliced(source), "activation", "slice")
            if operator in self.plan.saved:
                self._slices[parameter, source] = number
            else:
                self._short.append(number)
        elif operator in self.plan.embedding_gradients:
            reads = self.skeleton.graph.reads
            storages = reads.storage[reads.start[operator] : reads.start[operator + 1]].tolist()
            size = max(int(self.skeleton.graph.storages.bytes[one]) for one in storages)
            self._short.append(self.out.alloc(size // self.tensor, "temporary", "slice"))

    def _sliced(self, storage: int) -> int:
        return int(self.skeleton.graph.storages.bytes[storage]) // self.tensor

    def allocate(self, storage: int) -> None:
        """Outputs of linear layers and embeddings, and gradients in slices, are made as split layers make them."""
        plan, operator = self.plan, self.current
        storages = self.skeleton.graph.storages
        if operator in plan.sums:
            self._sums.add(storage)
        if self.skeleton.text(int(storages.category[storage])) == WORKSPACE:
            if operator not in plan.linears or self.skeleton.text(int(storages.name[storage])) != LT_WORKSPACE:
                super().allocate(storage)
        elif operator in plan.linears:
            self._linear(storage, operator)
        elif (first := self._summand(operator)) is not None:
            self.numbers[storage] = self.numbers.pop(first)
        elif operator in plan.embeddings:
            self._embedding(storage)
        elif operator in plan.inputs and self._partial is None:
            self._partial, self._owner = storage, plan.inputs[operator]
        elif operator in plan.weights or operator in plan.embedding_gradients:
            self.place(storage, self._sliced(storage))
        else:
            super().allocate(storage)

    def _summand(self, operator: int) -> int | None:
        """The gathered gradient to which autograd adds another one in place: nobody else has it."""
        if self.role != Role.BACKWARD or self.skeleton.text(int(self.skeleton.graph.operators.name[operator])) != ADD:
            return None
        reads = self.skeleton.graph.reads
        first = int(reads.storage[reads.start[operator]])
        return first if first in self._gathered and first in self.numbers else None

    def _linear(self, storage: int, operator: int) -> None:
        size = int(self.skeleton.graph.storages.bytes[storage])
        biased = len(self.skeleton.uses(operator)) > 1
        if biased:
            self._short.append(self.out.alloc(size, "temporary", "linear"))
            self._output = storage
        else:
            self._reduced(self.place(storage), size)

    def _reduced(self, number: int, size: int) -> None:
        self.out.collective("all_reduce", GROUP, size, stream=NCCL, name="linear")
        self.out.record_stream(number, NCCL)

    def _biased(self) -> None:
        """Reduce the product that waits, if one does, and add the bias."""
        if self._output is not None:
            storage, self._output = self._output, None
            self._reduced(self._short[-1], int(self.skeleton.graph.storages.bytes[storage]))
            self.place(storage)

    def _embedding(self, storage: int) -> None:
        local = self.out.alloc(self._sliced(storage), "temporary", "embedding.local")
        self.out.free(self._gather(storage, None))
        self._gather(storage, local)

    def _gather(self, storage: int, local: int | None) -> int:
        """Gather slices into a storage: pieces, flat copy, concatenation; then the pieces and `local` go."""
        size = int(self.skeleton.graph.storages.bytes[storage])
        pieces = [self.out.alloc(size // self.tensor, "communication", "piece") for _ in range(self.tensor)]
        if self.options.flat:
            flat = self.out.alloc(size, "communication", "nccl.flat")
            self.out.collective("all_gather", GROUP, size, stream=NCCL, name="slices")
            self.out.record_stream(flat, NCCL)
            self.out.free(flat)
        result = self.place(storage)
        for number in [*reversed(pieces), *([] if local is None else [local])]:
            self.out.record_stream(number, NCCL)
            self.out.free(number)
        return result

    def release(self, storage: int) -> None:
        """A storage dies; the slice of an input's gradient is made before, and gathered if it is the one that dies."""
        if storage in self.numbers:
            self._biased()
        if self._partial == storage:
            self._whole_gradient()
        elif self._partial is not None and self._local is None and storage not in self._sums:
            self._slice_gradient()
        self._sums.discard(storage)
        super().release(storage)

    def after(self, operator: int, uses: tuple[int, ...]) -> None:
        """Slices that no backward reads die, and so do inputs of which only slices are saved."""
        self._biased()
        super().after(operator, uses)
        for storage in self.plan.last.get(operator, ()):
            self.drop(storage)
        if operator in self.plan.weights:
            parameter = self.plan.weights[operator]
            self._done = next((key for key in self._slices if key[0] == parameter), None)

    def _slice_gradient(self) -> None:
        """The gradient of a linear layer's input comes after those of its bias and then its weight, as a slice."""
        if self._weight is not None:
            weight, self._weight = self._weight, None
            self.place(weight, self._sliced(weight))
        if self._partial is not None:
            self._local = self.out.alloc(self._sliced(self._partial), "temporary", "grad.slice")

    def _whole_gradient(self) -> None:
        """Gather the slice that waits, if one does; the saved slice of the input has died before."""
        if self._partial is None:
            return
        if self._local is None:
            self._slice_gradient()
        if self._done in self._slices:
            self.out.free(self._slices.pop(self._done))
        storage, local = self._partial, self._local
        self._partial = self._owner = self._local = self._done = None
        self._gather(storage, local)
        self._gathered.add(storage)

    def gradient_allocated(self, parameter: int, storage: int) -> None:
        """The gradient of a split matrix is a slice, too; that of a linear layer comes after its bias's."""
        if self._partial is not None and self._local is None and self.current in self.plan.weights:
            self._weight = storage
            return
        self.place(storage, HALF * self.local[self.skeleton.parameters[parameter].name])

    def gradient_ready(self, parameter: int, storage: int) -> None:
        """The input's gradient is gathered before the hooks of the weight's run."""
        self._whole_gradient()
        super().gradient_ready(parameter, storage)
