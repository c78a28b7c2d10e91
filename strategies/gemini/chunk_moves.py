"""Colossal-AI's Gemini as LLMem ran it: one GPU, data parallel with sharded chunks (ADP), and its fp16 protocol.

Parameters live in fp16 chunks that become the storage of their own gradients, beside fp32 chunks of the same layout;
placement is `cuda`: a chunk gathered in forward stays whole until its gradients have been reduced. HybridAdam makes its
two fp32 states for the real elements of a rank's shard at the first step.

Written from Colossal-AI v0.3.0+72 (d4fb7bfd): zero/gemini/gemini_ddp.py, chunk/chunk.py, chunk/manager.py,
gemini_optimizer.py, nn/optimizer/hybrid_adam.py; the order of events is that of recorded runs of it on torch 2.0.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from graph.model import Kind
from strategies.gemini.chunk_layout import HALF, MASTER, Chunk, ChunkLayout
from strategies.gemini.event_builder import EventBuilder
from strategies.gemini.skeleton import FORWARD, LOAD, OPTIMIZER, Skeleton, Walker
from strategies.timing.roofline import Speed
from traces.model import Op

#: The stream of NCCL's collectives, and the group over which chunks are shared.
NCCL: Final = 1
GROUP: Final = "dp"
WORLD: Final = "world"
#: `any()` over a chunk: its answer, and what its reduction takes while it runs.
ANSWER: Final = 1
STAGING: Final = 320
SEMAPHORES: Final = 4
#: Elements from which several blocks of 512 threads share such a reduction (setReduceConfig of Reduce.cuh).
SHARED: Final = 1 << 17
#: The name that a captured graph gives to workspaces that are never freed.
WORKSPACE: Final = "workspace"
#: Attention that moved its table of positions to the device in its first forward, in transformers 4.29
#: (modeling_codegen.py, modeling_gptj.py).
MASKED: Final = frozenset({"CodeGenAttention", "GPTJAttention"})
#: Functions with an argument `inplace`: Colossal-AI gives them a clone of their input (nn/_ops/element_wise.py).
CLONED: Final = frozenset({"aten.native_dropout.default", "aten.relu.default", "aten.silu.default"})
#: Attention whose weights come out of a scripted function, as a plain tensor: their dropout clones nothing.
SCRIPTED: Final = frozenset({"GPTBigCodeAttention"})
#: A copy; one that reads nothing on the device reads the host's memory, and the host waits for it.
COPY: Final = "aten.copy_.default"
#: Bytes of HybridAdam's overflow counter; how often the booster measures; what the loss scaler keeps.
OVERFLOW: Final = 4
BARRIERS: Final = 2
#: Bytes that HybridAdam moves an element: gradient, parameter, two states and fp16 copy, read and written as they are.
ADAM_BYTES: Final = 30
SCALER: Final = (("scale", 4), ("growth_tracker", 4), ("backoff", 4), ("found_inf", 4))


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may do differently.

    `flat`: NCCL's list collectives allocate one flat tensor (torch 2.0). `protocol`: LLMem's script around the model
    (fp32 model to the device, halved there, the batch that probes shapes, scaler, `empty_cache`); without it the fp16
    model is loaded and nothing else is. `small`: the scalars of the overflow check. `paired`: a layer's gradients reach
    the hooks together, the weight's first, as they leave the function that Colossal-AI puts around each operator's
    parameters (tensor/param_op_hook.py); without it each reaches them alone. `workspaces`: how many persistent cuBLAS
    workspaces there are; recorded runs have one, for all threads.
    """

    flat: bool = True
    protocol: bool = True
    small: bool = True
    paired: bool = True
    workspaces: int = 1


@dataclass
class ChunkState:
    """A pair of chunks on this rank: numbers of the storages that exist now (None: none)."""

    chunk: Chunk
    index: int
    place: int  # of this rank among those that share the chunk
    whole: int | None = None
    shard: int | None = None
    master: int | None = None
    waiting: set[str] = field(default_factory=set)

    @property
    def gathered(self) -> bool:
        """Whether all of the fp16 chunk is here."""
        return self.whole is not None


class Gemini(Walker):
    """One rank's run of Gemini over a skeleton whose parameters are those of `layout`.

    `rank` is the world rank. Raises KeyError where the layout lacks a trainable parameter.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        layout: ChunkLayout,
        rank: int = 0,
        options: Options | None = None,
        out: EventBuilder | None = None,
    ) -> None:
        super().__init__(skeleton, out)
        self.layout = layout
        self.rank = rank
        self.options = options or Options()
        self.speed: Speed | None = None  # of the optimizer's kernel; none is written without
        self.chunks = [ChunkState(chunk, index, layout.place(chunk, rank)) for index, chunk in enumerate(layout.chunks)]
        self.home = {slot.name: state for state in self.chunks for slot in state.chunk.slots}
        self.local = {slot.name: slot.end - slot.start for chunk in layout.chunks for slot in chunk.slots}
        self._model: dict[int, int] = {}  # parameter -> its own storage, until a chunk has taken it over
        self._emptied = False
        self._workspaces: set[int] = set()  # persistent workspaces that exist
        self._tables = self._position_tables() if self.options.protocol else {}
        self._passing: set[int] = set()  # storages of this iteration's forward that are alive
        self._short: list[int] = []  # what dies when the current operator has run
        self._delayed: dict[str, list[int]] = {}  # tables of positions that a module's first forward makes
        self._biases = _followed_by_weight(skeleton) if self.options.paired else frozenset()
        self._hooks = 0  # gradients that were ready
        self._bias: tuple[int, int] | None = None  # parameter and gradient of a bias that waits for its layer's weight

    # Loading -----------------------------------------------------------------------------------------------------

    def parameter_allocated(self, parameter: int) -> None:
        """The model is loaded whole: in fp32 by the protocol, else in fp16."""
        one = self.skeleton.parameters[parameter]
        size = MASTER if self.options.protocol else HALF
        self._model[parameter] = self.out.alloc(size * self._elements(one.name), "parameter", f"model.{one.name}")

    def _position_tables(self) -> dict[int, str]:
        """Storages of the tables of positions that a first forward moves to the device, and their modules."""
        buffers = (one for one in self.skeleton.graph.tensors if one.kind == "buffer" and len(one.shape) == 2)
        found = ((one.storage, one.name.rpartition(".")[0]) for one in buffers)
        return {storage: path for storage, path in found if self.skeleton.modules.get(path) in MASKED}

    def enter(self, module: str) -> None:
        """A module's first forward makes what it has put off."""
        for storage in self._delayed.pop(module, ()):
            self.place(storage)

    def loaded(self) -> None:
        """Halve the model, build the chunks, make what the booster makes, and give the cache back."""
        if self.options.protocol:
            self._halve()
            self.out.add(Op.EMPTY_CACHE)
            self._probe()
            self.out.alloc(OVERFLOW, "buffer", "overflow")
            self._barriers()
        self._build()
        if self.options.protocol:
            for name, size in SCALER:
                self.out.alloc(size, "buffer", name)
            self.out.add(Op.EMPTY_CACHE)

    def _probe(self) -> None:
        """The batch by which the script learns shapes: ids, labels and a bool mask, kept to the end."""
        case = self.skeleton.graph.case
        tokens = int(case.get("batch", 1)) * int(case.get("seq", 512))
        for name, size in (("input_ids", 8 * tokens), ("labels", 8 * tokens), ("attention_mask", tokens)):
            self.out.alloc(size, "input", f"probe.{name}")

    def _barriers(self) -> None:
        """The booster measures between barriers, each with a tensor of 1 byte; the last but one stays (utils.py)."""
        kept = self.out.alloc(1, "communication", "barrier")
        for _ in range(BARRIERS):
            self.out.free(self.out.alloc(1, "communication", "barrier"))
            after = self.out.alloc(1, "communication", "barrier")
            self.out.free(kept)
            kept = after
        self.out.free(self.out.alloc(1, "communication", "barrier"))

    def _elements(self, name: str) -> int:
        return self.local[name]

    def _halve(self) -> None:
        for parameter, number in self._model.items():
            name = self.skeleton.parameters[parameter].name
            self._model[parameter] = self.out.alloc(HALF * self._elements(name), "parameter", f"model.{name}")
            self.out.free(number)

    def _build(self) -> None:
        """Move every parameter into its pair of chunks, closing each chunk when the next of its group opens."""
        opened: dict[int, ChunkState] = {}
        copy: int | None = None
        for parameter, number in self._model.items():
            name = self.skeleton.parameters[parameter].name
            state = self.home[name]
            before = copy
            copy = self.out.alloc(MASTER * self._elements(name), "temporary", f"float.{name}")
            if before is not None:
                self.out.free(before)
            fresh = state.whole is None
            closing = opened.get(state.chunk.degree) if fresh else None
            if fresh:
                if closing is not None:
                    self._close_half(closing)
                state.whole = self._whole(state)
            self.out.free(number)
            if fresh:
                if closing is not None:
                    self._close_master(closing)
                state.master = self.out.alloc(MASTER * state.chunk.elements, "parameter", f"c32.{state.index}.global")
                opened[state.chunk.degree] = state
        for state in opened.values():
            self._close_half(state)
            self._close_master(state)
        if copy is not None:
            self.out.free(copy)
        self._model.clear()

    def _whole(self, state: ChunkState) -> int:
        return self.out.alloc(HALF * state.chunk.elements, "parameter", f"c16.{state.index}.global")

    def _shard(self, state: ChunkState) -> int:
        return self.out.alloc(HALF * state.chunk.held, "parameter", f"c16.{state.index}.shard")

    def _close_half(self, state: ChunkState) -> None:
        if not state.chunk.gathered and state.whole is not None:
            state.shard = self._shard(state)
            self.out.free(state.whole)
            state.whole = None

    def _close_master(self, state: ChunkState) -> None:
        if not state.chunk.gathered and state.master is not None:
            shard = self.out.alloc(MASTER * state.chunk.held, "parameter", f"c32.{state.index}.shard")
            self.out.free(state.master)
            state.master = shard

    def phase(self, name: str, step: int) -> None:
        """A phase starts; the script gives the cache back once, between the first backward and the first step."""
        if name == OPTIMIZER and self.options.protocol:
            for storage in sorted(self._passing):  # masks: checkpoints of transformers 4.29 let them go in backward
                self.drop(storage)
            self._passing.clear()
        if name == OPTIMIZER and self.options.protocol and not self._emptied:
            self._emptied = True
            self.out.add(Op.EMPTY_CACHE)
        super().phase(name, step)

    def allocate(self, storage: int) -> None:
        """A storage of the run itself; of persistent workspaces no more than there are."""
        storages = self.skeleton.graph.storages
        if self.skeleton.text(int(storages.name[storage])) == WORKSPACE:
            if len(self._workspaces) >= self.options.workspaces:
                return
            self._workspaces.add(storage)
        if storage in self._tables and self.phase_name == LOAD:
            self._delayed.setdefault(self._tables[storage], []).append(storage)
            return
        super().allocate(storage)
        passing = self.skeleton.text(int(storages.category[storage])) in ("activation", "temporary")
        if passing and self.phase_name == FORWARD:
            self._passing.add(storage)

    def release(self, storage: int) -> None:
        """A storage of the run itself dies."""
        self._passing.discard(storage)
        super().release(storage)

    # Forward and backward ----------------------------------------------------------------------------------------

    def before(self, operator: int, uses: tuple[int, ...]) -> None:
        """Gather the chunks of all parameters that the operator reads, in their order in the model.

        In the first iteration Gemini's monitor waits for the device before (memory_tracer/chunk_memstats_collector.py).
        """
        if self.options.protocol and self._waits(operator, uses):
            self.out.add(Op.SYNCHRONIZE)
        if self.options.protocol and self._cloned(operator):
            self._short.append(self.out.alloc(self._written(operator), "temporary", "clone"))
        for parameter in sorted(uses):
            state = self.home.get(self.skeleton.parameters[parameter].name)
            if state is not None and not state.gathered:
                self.gather(state)

    def _cloned(self, operator: int) -> bool:
        """Whether Colossal-AI gives an operator a copy of its input."""
        skeleton, operators = self.skeleton, self.skeleton.graph.operators
        if skeleton.text(int(operators.name[operator])) not in CLONED:
            return False
        parent, _, name = skeleton.text(int(operators.module[operator])).rpartition(".")
        return name != "attn_dropout" or skeleton.modules.get(parent) not in SCRIPTED

    def _written(self, operator: int) -> int:
        """Bytes of the largest storage that an operator writes."""
        graph = self.skeleton.graph
        written = graph.writes.storage[graph.writes.start[operator] : graph.writes.start[operator + 1]]
        return max((int(graph.storages.bytes[storage]) for storage in written.tolist()), default=0)

    def after(self, operator: int, uses: tuple[int, ...]) -> None:
        """What only the operator needed dies."""
        for number in self._short:
            self.out.free(number)
        self._short.clear()

    def _waits(self, operator: int, uses: tuple[int, ...]) -> bool:
        """Whether the host waits: before all of iteration 1, and where a value comes from the host's memory."""
        if uses and self.step_number == 0:
            return True
        graph = self.skeleton.graph
        reads_nothing = graph.reads.start[operator] == graph.reads.start[operator + 1]
        return bool(reads_nothing) and self.skeleton.text(int(graph.operators.name[operator])) == COPY

    def gather(self, state: ChunkState) -> None:
        """All-gather a chunk from its shards: its whole storage, NCCL's flat copy, then the shard goes."""
        state.whole = self._whole(state)
        if state.shard is None:
            return
        self._flat(state, "all_gather", f"nccl.flat.{state.index}")
        self.out.record_stream(state.shard, NCCL)
        self.out.free(state.shard)
        state.shard = None

    def _group(self, state: ChunkState) -> str:
        return GROUP if state.chunk.degree == self.layout.data else WORLD

    def _flat(self, state: ChunkState, kind: str, name: str) -> None:
        size = HALF * state.chunk.elements
        flat = self.out.alloc(size, "communication", name) if self.options.flat else None
        self.out.collective(kind, self._group(state), size, stream=NCCL, name=f"chunk.{state.index}")
        if flat is not None:
            self.out.record_stream(flat, NCCL)
            self.out.free(flat)

    def gradient_ready(self, parameter: int, storage: int) -> None:
        """A layer's gradients pass Gemini's hooks in the order of its arguments: the weight's, then the bias's."""
        self._hooks += 1
        if self._hooks - 1 in self._biases:
            self._bias = parameter, storage
            return
        self._hook(parameter, storage)
        if self._bias is not None:
            (parameter, storage), self._bias = self._bias, None
            self._hook(parameter, storage)

    def gradient_released(self, parameter: int, storage: int) -> None:
        """The captured run drops a gradient; one that waits for its hook is dropped there."""
        if self._bias != (parameter, storage):
            super().gradient_released(parameter, storage)

    def _hook(self, parameter: int, storage: int) -> None:
        """The hook of a gradient: it goes into its chunk; the last one of the chunk reduces it."""
        name = self.skeleton.parameters[parameter].name
        number = self.numbers.get(storage)
        size = HALF * self._elements(name) if number is None else self.out.size(number)
        self.out.free(self.out.alloc(size, "temporary", f"empty_grad.{name}"))
        state = self.home[name]
        if not state.waiting:
            state.waiting = {slot.name for slot in state.chunk.slots}
        state.waiting.discard(name)
        if not state.waiting:
            self.reduce(state)
        self.drop(storage)

    def reduce(self, state: ChunkState) -> None:
        """Reduce a chunk whose gradients are all there, keep this rank's part of it, and look for overflows."""
        chunk = state.chunk
        if chunk.gathered:
            if chunk.degree > 1:
                size = HALF * chunk.elements
                self.out.collective("all_reduce", self._group(state), size, stream=NCCL, name=f"chunk.{state.index}")
            self._check(state, chunk.used)
            return
        state.shard = self._shard(state)
        if chunk.degree > 1:
            self._flat(state, "reduce_scatter", f"nccl.rsin.{state.index}")
        if state.whole is not None:
            if chunk.degree > 1:
                self.out.record_stream(state.whole, NCCL)
            self.out.free(state.whole)
            state.whole = None
        self._check(state, chunk.valid(state.place))

    def _check(self, state: ChunkState, valid: int) -> None:
        """Chunk.has_inf_or_nan: isinf takes |x| and a mask, isnan a mask, each with a reduction; the host waits."""
        if not valid:
            return
        magnitude = self.out.alloc(HALF * valid, "temporary", f"abs.{state.index}")
        mask = self.out.alloc(valid, "temporary", f"isinf.{state.index}")
        self.out.free(magnitude)
        self._any(mask, valid)
        self._any(self.out.alloc(valid, "temporary", f"isnan.{state.index}"), valid)

    def _any(self, mask: int, elements: int) -> None:
        """A mask's `any()`, read by the host: it waits, and with it what NCCL had to do before."""
        if not self.options.small:
            self.out.add(Op.SYNCHRONIZE)
            self.out.free(mask)
            return
        answer = self.out.alloc(ANSWER, "temporary", "any")
        if elements >= SHARED:
            staging = self.out.alloc(STAGING, "temporary", "any.staging")
            self.out.free(self.out.alloc(SEMAPHORES, "temporary", "any.semaphores"))
            self.out.free(staging)
        self.out.add(Op.SYNCHRONIZE)
        self.out.free(mask)
        self.out.free(answer)

    # The optimizer -----------------------------------------------------------------------------------------------

    def optimizer(self, step: int) -> bool:
        """HybridAdam: states at the first step, by the parts of the parameters that this rank keeps; then in place."""
        if step == 0:
            parts = {slot.name: slot for state in self.chunks for slot in state.chunk.pieces(state.place)}
            for parameter in self.skeleton.parameters:
                slot = parts.get(parameter.name)
                if slot is not None:
                    for which in ("m", "v"):
                        size = 4 * (slot.end - slot.start)
                        self.out.alloc(size, "optimizer_state", f"{which}.{parameter.name}")
        if self.speed is not None:
            own = sum(slot.end - slot.start for state in self.chunks for slot in state.chunk.pieces(state.place))
            moved = np.asarray([own * ADAM_BYTES], dtype=np.int64)
            self.out.kernel(int(self.speed.duration_ns(np.zeros_like(moved), moved)[0]), "adam", moved=int(moved[0]))
        return True


def _followed_by_weight(skeleton: Skeleton) -> frozenset[int]:
    """Which of the gradients, counted as they become ready, are a bias's right before that of its layer's matrix."""
    graph = skeleton.graph
    marks = graph.index[graph.kind == Kind.GRADIENT].tolist()
    order = [skeleton.parameters[skeleton.parameter[storage]] for storage in marks]
    return frozenset(
        number
        for number, (one, other) in enumerate(pairwise(order))
        if one.module == other.module and len(one.shape) == 1 and len(other.shape) == 2
    )
