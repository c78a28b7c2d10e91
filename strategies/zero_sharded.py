"""ZeRO stage 3 as DeepSpeed runs it: parameters, gradients and optimizer states are all spread over the ranks.

`strategies.zero_partition` gathers parameters; here gradients are copied into a bucket on a stream of their own,
reduced and scattered, and the optimizer updates this rank's parts, a sub-group at a time. Written after
deepspeed/runtime/zero/stage3.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from graph.loop.inputs import DTYPES
from graph.loop.placement import place
from strategies import zero_norm as norms
from strategies.zero_flat import (
    FP16_SCALE,
    MakeOptimizer,
    flatten,
    new_stream,
    unflatten,
    when_accumulated,
)
from strategies.zero_partition import Coordinator, Hooks, Shard, Throttle, gather_at_once
from strategies.zero_settings import Settings


def scattered(tensors: Sequence[torch.Tensor], world: int, rank: int) -> list[torch.Tensor]:
    """Reduce whole gradients, each rank keeping its part of each (runtime/comm/coalesced_collectives.py)."""
    sizes = [math.ceil(tensor.numel() / world) for tensor in tensors]
    cut = [
        [tensor.view(-1)[one * size : one * size + size] for one in range(world)]
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    if len(tensors) == 1 and tensors[0].numel() % world == 0:
        flat = tensors[0].view(-1)
    else:
        padded = []
        for one in range(world):
            for size, chunks in zip(sizes, cut, strict=True):
                padded.append(chunks[one])
                missing = size - chunks[one].numel()
                if missing > 0:
                    padded.append(torch.empty(missing, dtype=chunks[one].dtype, device=chunks[one].device))
        flat = torch.cat(padded)
        del padded
    flat.div_(world)
    mine = torch.chunk(flat, world)[rank]
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from PyTorch 2.13 on
    scatter(mine, flat)
    offset = 0
    found = []
    for size, chunks in zip(sizes, cut, strict=True):
        found.append(mine.narrow(0, offset, chunks[rank].numel()))
        offset += size
    return found


class Sharded:
    """One rank's optimizer of stage 3, and the model's hooks."""

    def __init__(
        self,
        settings: Settings,
        module: torch.nn.Module,
        shards: list[Shard],
        make: MakeOptimizer,
    ) -> None:
        self.settings = settings
        self.module = module
        self.shards = shards
        self.device = shards[0].parameter.device
        self.dtype = shards[0].parameter.dtype
        self.accumulate = DTYPES[settings.accumulate]
        self.communicate = DTYPES[settings.dtype]
        self.scale = FP16_SCALE if settings.dtype == "fp16" else 1.0
        self.boundary = True
        self.micro = 0
        self.norm: torch.Tensor | None = None
        self.noted: torch.Tensor | None = None  # the engine's own reference to the norm of the last step
        self.throttle = Throttle()
        self._mark_persistent()
        stream = new_stream() if settings.overlap else torch.cuda.default_stream()
        self.coordinator = Coordinator(settings, stream)
        module.register_forward_pre_hook(lambda module, args: self.coordinator.restart())
        for part in _in_order(module):
            Hooks(self.coordinator, part)
        self.overflow = None if settings.offload else torch.zeros(1, dtype=torch.bool, device=self.device)
        self.stream = new_stream() if settings.overlap else torch.cuda.default_stream()
        self.barrier = torch.empty(1, dtype=torch.uint8, device=self.device)  # what NCCL's first barrier leaves
        self.trained = [shard for shard in shards if shard.parameter.requires_grad]
        self.groups = self._sub_groups()
        self.flats = self._defragment()
        self.masters = [self._master(flat) for flat in self.flats]
        self.optimizer = None if settings.offload else make(list(self.masters))
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["params"] = []
            largest = max(sum(shard.size for shard in group) for group in self.groups)
            torch.zeros(largest, dtype=torch.float32, device=self.device)  # for a moment
        self.buffer = torch.empty(settings.reduce_bucket, dtype=self.communicate, device=self.device)
        self.bucket: list[Shard] = []
        self.elements = 0
        self.gradients = self._gradient_parts()
        self.averaged: dict[int, list[torch.Tensor]] = {}
        self.local_norms: dict[int, torch.Tensor] = {}
        for shard in self.trained:
            shard.gather_alone()
            when_accumulated(shard.parameter, self._hook)
            shard.drop()

    # Set up -----------------------------------------------------------------------------------------------------

    def _mark_persistent(self) -> None:
        total = 0
        for shard in self.shards:
            if shard.numel + total <= self.settings.model_persistence and shard.numel <= self.settings.persistence:
                shard.persistent = True
                total += shard.numel

    def _sub_groups(self) -> list[list[Shard]]:
        most = self.settings.sub_group
        if most >= sum(shard.size for shard in self.trained):
            return [self.trained]
        groups: list[list[Shard]] = [[]]
        size = 0
        for shard in self.trained:
            groups[-1].append(shard)
            size += shard.size
            if size >= most and shard is not self.trained[-1]:
                groups.append([])
                size = 0
        return groups

    def _defragment(self) -> list[torch.Tensor]:
        """Move all parts into one tensor, by way of the host; answers its piece of each sub-group."""
        sizes = [shard.size for shard in self.trained]
        for shard in self.trained:
            shard.part = torch.empty(0, dtype=self.dtype, device=self.device)
        gc.collect()
        torch.cuda.empty_cache()
        whole = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        for shard, part in zip(self.trained, torch.split(whole, sizes), strict=True):
            shard.part = part
        return list(torch.split(whole, [sum(shard.size for shard in group) for group in self.groups]))

    def _master(self, flat: torch.Tensor) -> torch.nn.Parameter:
        if self.settings.offload:
            return torch.nn.Parameter(torch.empty(0))
        converted = flat.to(dtype=torch.float32)
        copied: Any = converted.clone().detach().requires_grad_()
        master: torch.nn.Parameter = copied
        return master

    def _gradient_parts(self) -> dict[int, torch.Tensor]:
        """Where this rank's part of each gradient is summed; on the host with an optimizer there."""
        if self.settings.offload:
            return {}
        sizes = [shard.size for shard in self.trained]
        self.sums = torch.zeros(sum(sizes), dtype=self.accumulate, device=self.device)
        return {shard.number: part for shard, part in zip(self.trained, torch.split(self.sums, sizes), strict=True)}

    # Backward ---------------------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """What a forward pass clears before it runs: nothing here."""

    def backward_begins(self) -> None:
        """What happens when the gradient of the loss arrives: nothing here."""

    def _hook(self, parameter: torch.Tensor) -> None:
        shard: Shard = parameter.shard  # type: ignore[attr-defined]
        if self.elements + shard.numel > self.settings.reduce_bucket and self.elements > 0:
            self._reduce()
        self.stream.wait_stream(torch.cuda.current_stream())
        gradient = parameter.grad
        assert gradient is not None
        if self.elements + shard.numel <= self.settings.reduce_bucket:
            with torch.cuda.stream(self.stream):
                place = self.buffer.narrow(0, self.elements, shard.numel).view_as(gradient)
                place.copy_(gradient, non_blocking=True)
                gradient.record_stream(torch.cuda.current_stream())
                gradient.data = place
        self.bucket.append(shard)
        self.elements += shard.numel

    @torch.no_grad()
    def _reduce(self) -> None:
        if not self.bucket:
            return
        self.throttle.before()
        with torch.cuda.stream(self.stream):
            if self.elements <= self.settings.reduce_bucket and not self.settings.reduce_scatter:
                parts = self._all_reduced()
            else:
                self.bucket.sort(key=lambda shard: shard.number)
                parts = self._scattered()
            self._add(parts)
            self.bucket.clear()
            self.elements = 0
            self.throttle.after()

    def _scattered(self) -> list[torch.Tensor]:
        whole = [_grad(shard) for shard in self.bucket]
        parts = scattered(whole, self.settings.world, self.settings.rank)
        if self.communicate != self.accumulate:
            parts = [part.to(self.accumulate) for part in parts]
        return parts

    def _all_reduced(self) -> list[torch.Tensor]:
        reduced = self.buffer.narrow(0, 0, self.elements)
        reduced.div_(self.settings.world)
        dist.all_reduce(reduced)
        if self.settings.world != 1:
            reduced = reduced.mul(1.0)
        if self.communicate != self.accumulate:
            reduced = reduced.to(self.accumulate)
        parts = []
        begin = 0
        for shard in self.bucket:
            first = min(self.settings.rank * shard.size, shard.numel)
            last = min(first + shard.size, shard.numel)
            part = reduced[begin + first : begin + last]
            if part.numel() != shard.size:
                padded = torch.zeros(shard.size, dtype=self.accumulate, device=self.device)
                if part.numel():
                    padded[: part.numel()] = part
                part = padded
            parts.append(part)
            begin += shard.numel
        return parts

    def _add(self, parts: Sequence[torch.Tensor]) -> None:
        """Sum the reduced parts up over micro-batches, and drop the whole gradients."""
        for shard, part in zip(self.bucket, parts, strict=True):
            if shard.size * self.settings.rank >= shard.numel:
                shard.parameter.grad = None
                continue
            if self.settings.offload:
                self._to_host(shard, part)
            else:
                total = self.gradients[shard.number].narrow(0, 0, part.numel())
                if self.micro == 0:
                    total.copy_(part, non_blocking=True)
                else:
                    total.add_(part.to(self.accumulate).view(total.shape))
            gradient = shard.parameter.grad
            if gradient is not None:
                gradient.record_stream(torch.cuda.current_stream())
                del gradient
            shard.parameter.grad = None

    def _to_host(self, shard: Shard, part: torch.Tensor) -> None:
        """A part goes to the host and comes back for its norm and for the sum over micro-batches."""
        back = torch.empty_like(part, dtype=self.accumulate)
        if self.micro:
            back.add_(part.to(self.accumulate).view(back.shape))
        if self.boundary:
            square = None
            for piece in torch.split(back.view(-1), 250_000_000):
                one = piece.data.to(torch.double).norm(2) ** 2.0
                square = one if square is None else square + one
            assert square is not None
            self.local_norms[shard.number] = square**0.5
            back.to(torch.float32)

    def backward_ends(self) -> None:
        """After autograd: reduce what is left in the bucket, wait for it, drop what was left gathered."""
        self._reduce()
        self.stream.synchronize()
        if not self.settings.offload:
            for number, group in enumerate(self.groups):
                self.averaged[number] = [self.gradients[shard.number] for shard in group]
        with torch.no_grad():
            self.coordinator.release_leftovers()

    # Step -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[Any, Any]:
        """The states of the optimizer inside."""
        return {} if self.optimizer is None else dict(self.optimizer.state)

    def zero_grad(self) -> None:
        """What the engine's zero_grad does."""
        for shard in self.shards:
            shard.parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Drop all parameters, check, clip, update each sub-group; gather what is always kept."""
        self.bucket.clear()
        self.elements = 0
        self.coordinator.release_all(self.shards)
        if self.settings.dtype == "fp16":
            self._check_overflow()
        found = self._norms()
        total = norms.combined(found)
        norms.invalid(total)
        self.norm = total / self.scale
        if not self.settings.offload:
            self._clear()
        for number in range(len(self.groups)):
            self._update(number, total)
        self.local_norms = {}
        gather_at_once([shard for shard in self.shards if shard.persistent])
        self.noted = self.norm
        self._clear()

    def _clear(self) -> None:
        for shard in self.trained:
            shard.parameter.grad = None

    def _check_overflow(self) -> None:
        if self.overflow is None:
            flag = torch.zeros(1, dtype=torch.uint8, device=self.device)
        else:
            with torch.cuda.stream(self.stream):
                self.overflow.logical_or_(torch.isinf(self.sums).any())
                self.overflow.logical_or_(torch.isnan(self.sums).any())
                flag = self.overflow.clone().to(torch.uint8)
                self.overflow.zero_()
            torch.cuda.default_stream().wait_stream(self.stream)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        flag[0].item()

    def _norms(self) -> list[torch.Tensor]:
        if self.settings.offload:
            return [self._norm_by_host(group) for group in self.groups]
        return [self._norm(self.averaged[number]) for number in range(len(self.groups))]

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        found = []
        for gradient in gradients:
            found.append(gradient.to(torch.double).norm(2.0))
        square = torch.sum(torch.pow(torch.stack(found), 2.0))
        dist.all_reduce(square)
        total = square**0.5
        infinite = total.isinf()
        nan = total.isnan()
        either = nan.logical_or(infinite)
        mark = torch.tensor(-1.0, device=self.device, dtype=torch.float)
        return torch.where(either, mark, total)

    def _norm_by_host(self, group: Sequence[Shard]) -> torch.Tensor:
        total: Any = 0.0
        for shard in group:
            if shard.number in self.local_norms:
                total += self.local_norms[shard.number] ** 2.0
        flag = torch.tensor([float(total)], dtype=torch.float32, device=self.device)
        dist.all_reduce(flag)
        norm = flag[0] ** 0.5
        norms.mask_invalid(norm)
        return norm.cpu()

    def _update(self, number: int, total: torch.Tensor) -> None:
        if self.optimizer is None:
            return
        master = self.masters[number]
        master.grad = flatten(self.averaged[number]).to(master.dtype)
        self.averaged.pop(number)
        scale: Any = self.scale
        if self.settings.clip > 0.0:
            clip = ((total / self.scale) + 1e-6) / self.settings.clip
            clip = torch.clamp(clip, min=1.0)
            scale = clip * self.scale
        assert master.grad is not None
        master.grad.mul_(1.0 / scale)
        self.optimizer.param_groups[0]["params"] = [master]
        self.optimizer.step()
        self.optimizer.param_groups[0]["params"] = []
        self.flats[number].data.copy_(master.data)
        group = self.groups[number]
        for shard, part in zip(group, unflatten(self.flats[number], [shard.part for shard in group]), strict=True):
            shard.part = part
        master.grad = None


def _grad(shard: Shard) -> torch.Tensor:
    gradient = shard.parameter.grad
    assert gradient is not None
    return gradient


def _in_order(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules, each after those in it, as often as they are registered."""
    return [part for child in module.children() for part in _in_order(child)] + [module]


def partitioned(settings: Settings, module: torch.nn.Module) -> list[Shard]:
    """Cut up the parameters of a placed model, one after another."""
    return [Shard(parameter, number, settings) for number, parameter in enumerate(module.parameters())]


def partitioned_while_built(settings: Settings, recorder: Any, module: torch.nn.Module) -> list[Shard]:
    """Place a model as `deepspeed.zero.Init` does: the parameters of each module are cut up as soon as it is made.

    A tied parameter is made for each of its modules; all but the first are dropped again.
    """
    made: dict[int, Shard] = {}
    number = 0
    for part in _in_order(module):
        whole: list[tuple[str, int, torch.nn.Parameter]] = []
        for name, meta in part._parameters.items():
            if meta is not None:
                tensor = torch.empty_like(meta, device=recorder.device)
                whole.append((name, id(meta), torch.nn.Parameter(tensor, requires_grad=meta.requires_grad)))
                del tensor
        while whole:
            name, key, parameter = whole.pop(0)
            shard = Shard(parameter, number, settings)
            number += 1
            if key in made:
                del parameter.shard  # type: ignore[attr-defined]
            else:
                made[key] = shard
            part._parameters[name] = made[key].parameter
            del parameter, shard
    place(recorder, module, keep=lambda tensor: not tensor.is_meta)
    return [parameter.shard for parameter in module.parameters()]  # type: ignore[attr-defined]
