"""ZeRO stages 1 and 2 as DeepSpeed runs them: one flat copy of the parameters, each rank updating its share of it.

Gradients go through a bucket (the "ipg buffer") that is reduced when it is full; what a rank owns of them is copied
out. Stage 2 does so in the hook of each gradient, stage 1 after the backward pass (or, with overlap_comm, in the hooks
of the last micro-batch). Written after deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed 0.19.8: the same tensors
are made, kept and dropped in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch._utils
import torch.distributed as dist

from graph.loop.inputs import DTYPES
from strategies import zero_norm as norms
from strategies.zero_settings import Settings

#: Loss scale of fp16: DeepSpeed's initial_scale_power is 16.
FP16_SCALE: Final = 2.0**16

#: torch's own: several tensors as one flat tensor (the same memory where there is one), and views of it as they were.
flatten: Any = torch._utils._flatten_dense_tensors
unflatten: Any = torch._utils._unflatten_dense_tensors

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def new_stream() -> Any:
    """A CUDA stream."""
    make: Any = torch.cuda.Stream
    return make()


def when_accumulated(parameter: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` each time the parameter's gradient is complete."""
    parameter.register_post_accumulate_grad_hook(hook)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in one rank's share."""

    rank: int
    start: int
    """Its first element in the parameter."""
    size: int
    place: int
    """Where it begins in the rank's share."""


@dataclass
class Bucket:
    """Gradients that wait to be reduced together."""

    buffers: list[torch.Tensor] = field(default_factory=list)
    index: int = 0
    elements: int = 0
    members: list[int] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    large: torch.nn.Parameter | None = None
    writers: set[Any] = field(default_factory=set)

    def clear(self) -> None:
        """Empty, but for the buffers."""
        self.members.clear()
        self.gradients.clear()
        self.elements = 0
        self.writers.clear()


def aligned(tensors: Sequence[torch.Tensor], alignment: int) -> torch.Tensor:
    """One flat tensor of all, padded to a multiple of `alignment` elements."""
    rest = sum(tensor.numel() for tensor in tensors) % alignment
    padded = list(tensors)
    if rest:
        padded.append(torch.zeros(alignment - rest, device=tensors[0].device, dtype=tensors[0].dtype))
    flat: torch.Tensor = flatten(padded)
    return flat


def pieces(sizes: Sequence[int], share: int) -> list[list[Piece]]:
    """For each of the parameters laid end to end, the shares of `share` elements in which it lies."""
    found = []
    begin = 0
    for size in sizes:
        end = begin + size
        found.append(
            [
                Piece(
                    rank,
                    max(begin, rank * share) - begin,
                    min(end, (rank + 1) * share) - max(begin, rank * share),
                    max(begin, rank * share) - rank * share,
                )
                for rank in range(begin // share, -(-end // share))
            ]
        )
        begin = end
    return found


class Flat:
    """One rank's optimizer of stage 1 or 2. `parameters` are on the device; `make` makes the optimizer inside."""

    def __init__(self, settings: Settings, parameters: list[torch.nn.Parameter], make: MakeOptimizer) -> None:
        self.settings = settings
        self.dtype = parameters[0].dtype
        self.accumulate = DTYPES[settings.accumulate]
        self.communicate = DTYPES[settings.dtype]
        self.device = parameters[0].device
        self.scale = FP16_SCALE if settings.dtype == "fp16" else 1.0
        self.boundary = True
        self.stream = new_stream()
        world, rank = settings.world, settings.rank
        self.parameters = self._ordered(parameters, world) if settings.round_robin else parameters
        self.hooked = parameters
        self.position = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.staged: dict[int, torch.Tensor] = {}  # stage 1: gradients in another dtype than the parameters'
        self.flat = self._flatten(2 * world)
        self.share = self.flat.numel() // world
        shares = list(torch.split(self.flat, self.share))
        self.mine = shares[rank]
        self.pieces = pieces([parameter.numel() for parameter in self.parameters], self.share)
        self.owned = [number for number, found in enumerate(self.pieces) if any(one.rank == rank for one in found)]
        self.master = self._master()
        self.optimizer: torch.optim.Optimizer | None = None if settings.offload else make([self.master])
        self.bucket = Bucket()
        self.ready = False
        self.kept: torch.Tensor | None = None  # where gradients of this rank's share are copied to
        self.kept_elements = 0
        self.sums: list[torch.Tensor] | None = None
        self.averaged: list[torch.Tensor] | None = None
        self.compact: torch.Tensor | None = None
        self.scratch: torch.Tensor | None = None
        self.local_norms: dict[int, torch.Tensor] = {}
        self.norm: torch.Tensor | None = None
        self.noted: torch.Tensor | None = None  # the engine's own reference to the norm of the last step
        if settings.offload:
            largest = max(parameter.numel() for parameter in parameters)
            self.scratch = torch.zeros(largest, device=self.device, dtype=self.dtype)
        for parameter in parameters:
            when_accumulated(parameter, self._hook)
        if not settings.offload:
            torch.zeros(self.share, dtype=torch.float32, device=self.device)  # a gradient for a moment

    # Set up -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _ordered(parameters: list[torch.nn.Parameter], world: int) -> list[torch.nn.Parameter]:
        return [parameter for first in range(world) for parameter in parameters[first::world]]

    def _flatten(self, alignment: int) -> torch.Tensor:
        torch.cuda.empty_cache()
        flat = aligned(self.parameters, alignment).detach()
        self._point(flat)
        return flat

    def _point(self, flat: torch.Tensor) -> None:
        """Parameters become views of the flat tensor."""
        begin = 0
        for parameter in self.parameters:
            parameter.data = flat.narrow(0, begin, parameter.numel()).view(parameter.shape).data
            begin += parameter.numel()

    def _master(self) -> torch.nn.Parameter:
        """This rank's share in fp32; on the host it takes nothing here."""
        if self.settings.offload:
            self.mine.detach().clone()
            return torch.nn.Parameter(torch.empty(0))
        master: Any = self.mine.detach().clone().to(dtype=torch.float32).requires_grad_()
        found: torch.nn.Parameter = master
        return found

    @property
    def _staging(self) -> bool:
        """Whether gradients are kept beside the parameters in their own dtype (stage 1)."""
        return self.accumulate != self.dtype and self.settings.stage == 1

    @property
    def _compacting(self) -> bool:
        """Whether this rank's gradients are summed in one fp32 tensor."""
        return self.accumulate == torch.float32 and self.dtype != torch.float32

    # Backward ---------------------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """What a forward pass clears before it runs."""
        self.staged.clear()

    def backward_begins(self) -> None:
        """What happens when the gradient of the loss arrives."""

    def _hook(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        self._make_buffers()
        if self._staging:
            self._stage(parameter)
        if (self.settings.stage == 2 or self.settings.overlap) and (self.settings.stage == 2 or self.boundary):
            self._collect(parameter)

    def _make_buffers(self) -> None:
        if self.ready:
            return
        dtype = self.accumulate if self._staging else self.dtype
        self.bucket.buffers.clear()
        for _ in range(2 if self.settings.overlap else 1):
            self.bucket.buffers.append(torch.empty(self.settings.reduce_bucket, dtype=dtype, device=self.device))
        self.bucket.index = 0
        self.ready = True

    def _stage(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            return
        held = self.staged.get(id(parameter))
        if held is None:
            self.staged[id(parameter)] = parameter.grad.to(self.accumulate)
        else:
            held.add_(parameter.grad.to(self.accumulate).view(held.shape))
        parameter.grad = None

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return self.staged.get(id(parameter)) if self._staging else parameter.grad

    def _drop(self, parameter: torch.nn.Parameter) -> None:
        if self._staging:
            self.staged.pop(id(parameter), None)
        else:
            parameter.grad = None

    def _collect(self, parameter: torch.nn.Parameter) -> None:
        """Copy a gradient into the bucket, which is reduced first if there is no room."""
        gradient = self._gradient(parameter)
        assert gradient is not None
        bucket = self.bucket
        size = parameter.numel()
        if bucket.elements + size > self.settings.reduce_bucket:
            self._reduce_bucket()
            if self.settings.overlap:
                bucket.index = 1 - bucket.index
        if size > self.settings.reduce_bucket:
            if self.settings.offload:
                gradient.data = gradient.detach().clone(memory_format=torch.contiguous_format)
            bucket.large = parameter
        else:
            place = bucket.buffers[bucket.index].narrow(0, bucket.elements, size)
            place.copy_(gradient.view(-1))
            gradient.data = place.data.view_as(gradient)
            if self.settings.overlap:
                bucket.writers.add(torch.cuda.current_stream())
        bucket.elements += size
        bucket.gradients.append(gradient)
        bucket.members.append(self.position[id(parameter)])

    def _reducing(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.settings.overlap else contextlib.nullcontext()

    def _reduce_bucket(self) -> None:
        bucket = self.bucket
        if bucket.large is not None:
            gradient = self._gradient(bucket.large)
            assert gradient is not None
            line = gradient.view(-1)
            gradient.data = line.data.view_as(gradient)
            self._average(line)
            bucket.large = None
        else:
            self._average(bucket.buffers[bucket.index].narrow(0, 0, bucket.elements))
        with self._reducing():
            for number in bucket.members:
                parameter = self.parameters[number]
                if number in self._owned_set:
                    self._keep(parameter, number)
                elif self.settings.stage == 2:
                    self._drop(parameter)
            bucket.clear()

    @property
    def _owned_set(self) -> frozenset[int]:
        return frozenset(self.owned)

    def _average(self, tensor: torch.Tensor) -> None:
        """Reduce the gradients in `tensor`, each slice for the rank that owns it."""
        bucket = self.bucket
        if self.settings.overlap:
            for writer in bucket.writers or {torch.cuda.current_stream()}:
                self.stream.wait_stream(writer)
            torch.cuda.current_stream().wait_stream(self.stream)
        with self._reducing():
            if not self.settings.reduce_scatter:
                self._average_whole(tensor)
                return
            slices = self._slices(tensor)
            tensor.div_(self.settings.world)
            if self.settings.all_ranks_at_once:
                self._reduce_lists(slices, None)
                return
            for rank in dict.fromkeys(one[0] for one in slices):
                self._reduce_lists([one for one in slices if one[0] == rank], rank)

    def _average_whole(self, tensor: torch.Tensor) -> None:
        reduced = tensor if tensor.dtype == self.communicate else tensor.to(self.communicate)
        dist.all_reduce(reduced)
        reduced.mul_(1.0 / self.settings.world)
        if reduced is not tensor:
            tensor.copy_(reduced)
        if not self._compacting:
            return
        begin = 0
        for number in self.bucket.members:
            for piece in self.pieces[number]:
                if piece.rank == self.settings.rank:
                    self._compact_part(piece).add_(reduced.narrow(0, begin + piece.start, piece.size).to(torch.float32))
            begin += self.parameters[number].numel()

    def _compact_part(self, piece: Piece) -> torch.Tensor:
        if self.compact is None:
            self.compact = torch.zeros(self.share, dtype=self.accumulate, device=self.device)
        return self.compact.narrow(0, piece.place, piece.size)

    def _slices(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """(rank, slice, where its sum goes) of all gradients in the bucket; neighbours of one rank are one slice."""
        found: list[tuple[int, int, int, torch.Tensor | None]] = []
        begin = 0
        for number in self.bucket.members:
            for piece in self.pieces[number]:
                output = None
                if self._compacting and piece.rank == self.settings.rank:
                    output = self._compact_part(piece)
                if output is None and found and found[-1][0] == piece.rank:
                    last = found[-1]
                    found[-1] = (last[0], last[1], last[2] + piece.size, None)
                else:
                    found.append((piece.rank, begin, piece.size, output))
                begin += piece.size
        return [(rank, tensor.narrow(0, start, size), output) for rank, start, size, output in found]

    def _reduce_lists(self, slices: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]], owner: int | None) -> None:
        waiting: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        elements = 0
        for one in slices:
            waiting.append(one)
            elements += one[1].numel()
            if elements > self.settings.reduce_bucket:
                self._reduce_list(waiting, owner)
                waiting = []
                elements = 0
        if waiting:
            self._reduce_list(waiting, owner)

    def _reduce_list(self, slices: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]], owner: int | None) -> None:
        """One collective over the slices, in a flat copy of them; what is ours goes back to where it was."""
        tensors = [one[1] for one in slices]
        if owner is not None and self.settings.overlap:
            torch.cuda.synchronize()
        flat = flatten(tensors)
        sent = flat if flat.dtype == self.communicate else flat.to(self.communicate)
        if owner is None:
            dist.all_reduce(sent)
        else:
            dist.reduce(sent, owner)
        if sent is not flat and owner in (None, self.settings.rank):
            flat.copy_(sent)
        del flat
        if self.settings.overlap:
            sent.record_stream(self.stream)
        for (rank, tensor, output), synced in zip(slices, unflatten(sent, tensors), strict=True):
            if rank == self.settings.rank:
                if output is not None:
                    output.add_(synced.to(output.dtype))
                tensor.copy_(synced)
                if self.settings.overlap:
                    tensor.record_stream(self.stream)

    def _keep(self, parameter: torch.nn.Parameter, number: int) -> None:
        """Copy a gradient that this rank needs out of the bucket."""
        if self.settings.offload:
            self._to_host(parameter, number)
            return
        if self._compacting:
            if self._staging:
                self._drop(parameter)
            return
        if self.kept is None:
            self.kept_elements = 0
            total = sum(self.parameters[one].numel() for one in self.owned)
            self.kept = torch.empty(total, dtype=self.dtype, device=self.device)
        gradient = self._gradient(parameter)
        assert gradient is not None
        place = self.kept.view(-1).narrow(0, self.kept_elements, parameter.numel())
        place.copy_(gradient.view(-1))
        gradient.data = place.data.view_as(gradient)
        self.kept_elements += parameter.numel()

    def _to_host(self, parameter: torch.nn.Parameter, number: int) -> None:
        """A gradient of ours goes to the host, where the optimizer is; its norm is taken here."""
        piece = next(one for one in self.pieces[number] if one.rank == self.settings.rank)
        if self._compacting:
            if self.boundary:
                part = self._compact_part(piece)
                self.local_norms[number] = part.data.to(torch.double).norm(2)
                self._look_for_overflow(part)
                self._drop(parameter)
            return
        gradient = self._gradient(parameter)
        assert gradient is not None
        if self.settings.accum > 1:
            assert self.scratch is not None
            if self.micro > 0:
                gradient.data.view(-1).add_(self.scratch.view(-1).narrow(0, 0, parameter.numel()))
        if not self.boundary:
            return
        self.local_norms[number] = gradient.view(-1).narrow(0, piece.start, piece.size).data.to(torch.double).norm(2)
        self._look_for_overflow(gradient)
        source = gradient.view(-1).narrow(0, piece.start, piece.size)
        if source.dtype != torch.float32:
            source = source.to(torch.float32)
        gradient.record_stream(torch.cuda.current_stream())
        self._drop(parameter)

    @staticmethod
    def _look_for_overflow(tensor: torch.Tensor) -> None:
        bool(norms.not_finite(tensor.data))

    #: The micro-batch of the step.
    micro = 0

    def backward_ends(self) -> None:
        """After autograd: stage 2 reduces what is left, stage 1 does all of it after the last micro-batch."""
        if self.settings.stage == 1:
            if not self.boundary:
                return
            if not self.settings.overlap:
                for parameter in self.hooked:
                    if self._gradient(parameter) is not None:
                        self._collect(parameter)
        self._reduce_bucket()
        if self.settings.overlap:
            torch.cuda.synchronize()
        if not self.settings.offload:
            self._account()
        self.bucket.buffers.clear()
        self.kept = None
        self.ready = False
        for parameter in self.hooked:
            parameter.grad = None

    def _account(self) -> None:
        """Gradients of this rank's share, summed over micro-batches; at the end of a step also cut to the share."""
        if self._compacting:
            if self.boundary and self.averaged is None:
                if self.compact is None:
                    self.compact = torch.zeros(self.share, dtype=self.accumulate, device=self.device)
                self.averaged = self._compact_parts(self.compact)
            return
        gradients = []
        for number in self.owned:
            gradient = self._gradient(self.parameters[number])
            if gradient is None:
                gradient = torch.zeros_like(self.parameters[number], dtype=self.accumulate)
            gradients.append(gradient)
        if self.sums is None:
            self.sums = gradients
        else:
            for total, new in zip(self.sums, gradients, strict=True):
                total.add_(new)
        if self.boundary:
            self.averaged = self._cut(self.sums)
            self.sums = None

    def _compact_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.narrow(0, piece.place, piece.size)
            for number in self.owned
            for piece in self.pieces[number]
            if piece.rank == self.settings.rank
        ]

    def _cut(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of whole gradients that lie in this rank's share, with zeros after the last parameter."""
        found = []
        filled = 0
        for number, gradient in zip(self.owned, gradients, strict=True):
            piece = next(one for one in self.pieces[number] if one.rank == self.settings.rank)
            whole = piece.size == gradient.numel()
            found.append(gradient if whole else gradient.contiguous().view(-1).narrow(0, piece.start, piece.size))
            filled += piece.size
        if filled < self.share:
            found.append(torch.zeros(self.share - filled, dtype=self.accumulate, device=self.device))
        return found

    # Step -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[Any, Any]:
        """The states of the optimizer inside."""
        return {} if self.optimizer is None else dict(self.optimizer.state)

    def step(self) -> None:
        """Check, clip, update this rank's share, gather all shares; then drop gradients."""
        settings = self.settings
        if settings.dtype != "fp32":
            self._check_overflow()
        total = self._norm()
        norms.invalid(total)
        self.norm = total / self.scale
        if settings.offload:
            self._step_on_host()
        else:
            self._step_here(total)
        if settings.offload:
            self.local_norms = {}
        if settings.world > 1:
            norms.gather_shares(self.flat, self.mine)
        self._point(self.flat)
        self.clear()
        self.noted = self.norm

    def clear(self) -> None:
        """No gradients."""
        for parameter in self.hooked:
            parameter.grad = None
        self.staged.clear()

    def zero_grad(self) -> None:
        """What the engine's zero_grad does."""
        for parameter in self.hooked:
            parameter.grad = None

    def _check_overflow(self) -> None:
        if self.settings.offload:
            flag = torch.tensor([0], dtype=torch.uint8, device=self.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            flag[0].item()
        else:
            assert self.averaged is not None
            norms.overflowing(self.averaged, self.device)

    def _norm(self) -> torch.Tensor:
        if self.settings.offload:
            groups = [self._norm_by_host()]
        else:
            assert self.averaged is not None
            groups = [norms.norm_over_ranks(self.averaged[: len(self.owned)], self.device)]
        return norms.combined(groups)

    def _norm_by_host(self) -> torch.Tensor:
        for one in self.local_norms.values():
            one.item()
        total = torch.tensor([0.0], dtype=torch.float32, device=self.device)
        dist.all_reduce(total)
        return torch.tensor(total[0].item(), dtype=torch.float32)

    def _step_here(self, total: torch.Tensor) -> None:
        assert self.averaged is not None
        assert self.optimizer is not None
        for number, parameter in enumerate(self.parameters):
            if number not in self._owned_set:
                self._clear_one(parameter)
        flat = self.compact
        if flat is None:
            last = self.settings.rank == self.settings.world - 1
            flat = aligned(self.averaged, self.share) if last else flatten(self.averaged)
        gradient = flat.to(self.master.dtype)
        del flat
        self.master.grad = gradient
        for number in self.owned:
            self._clear_one(self.parameters[number])
        self.averaged = None
        self.compact = None
        self.sums = None
        norms.unscale_and_clip(gradient, total, self.scale, self.settings.clip)
        self.optimizer.step()
        self.master.grad = None
        del gradient
        self.mine.data.copy_(self.master.data)

    def _clear_one(self, parameter: torch.nn.Parameter) -> None:
        parameter.grad = None
        self.staged.pop(id(parameter), None)

    def _step_on_host(self) -> None:
        """The host's optimizer takes nothing here; the new share is copied over the old one."""
        self.averaged = None
        self.compact = None
