"""PyTorch's pipeline stages and schedules on one captured rank: what the neighbours would send is known beforehand.

A real rank learns the shapes at its boundaries from its neighbours; here there are none, so they come from the case.
Before PyTorch 2.12 a stage finds its own shapes by one forward without gradients and sends them on; from then on
stages vote on whether to infer, and infer those of gradients by a backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.pipelining import stage as stages_of_torch

from graph.case import Case
from graph.hardware.profile import profile
from graph.loop.inputs import DTYPES
from graph.model import Role

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from graph.fake_cuda.ranks.collectives import Collectives
    from graph.recorder.recorder import Recorder

_library: Any = stages_of_torch


@dataclass(frozen=True)
class Boundary:
    """What goes into a stage and comes out of it: `tokens` are (batch, length) of one micro-batch."""

    stage: int
    stages: int
    tokens: tuple[int, int]
    hidden: int
    vocabulary: int
    dtype: str

    @property
    def states(self) -> torch.Tensor:
        """Hidden states of one micro-batch, as a meta tensor."""
        return self._meta(self.hidden)

    @property
    def inputs(self) -> torch.Tensor:
        """What the stage takes."""
        return torch.empty(self.tokens, dtype=torch.int64, device="meta") if self.stage == 0 else self.states

    @property
    def outputs(self) -> torch.Tensor:
        """What the stage gives."""
        if self.stage + 1 < self.stages:
            return self.states
        return self._meta(self.vocabulary)

    def _meta(self, width: int) -> torch.Tensor:
        return torch.empty((*self.tokens, width), dtype=DTYPES[self.dtype], device="meta", requires_grad=True)


class Stage(PipelineStage):
    """A stage that tells the recorder whether it computes forward or backward, and knows its neighbours' shapes."""

    def __init__(
        self, module: torch.nn.Module, boundary: Boundary, recorder: Recorder, given: bool, group: ProcessGroup | None
    ) -> None:
        shapes: dict[str, Any] = {}
        if given:
            shapes = {"input_args": (boundary.inputs,), "output_args": (boundary.outputs,)}
        super().__init__(module, boundary.stage, boundary.stages, recorder.device, group=group, **shapes)
        self.boundary = boundary
        self.recorder = recorder

    @contextlib.contextmanager
    def _as(self, role: Role) -> Iterator[None]:
        before = self.recorder.role
        self.recorder.role = int(role)
        try:
            yield
        finally:
            self.recorder.role = before

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch."""
        with self._as(Role.FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Backward of one micro-batch."""
        with self._as(Role.BACKWARD):
            return super().backward_one_chunk(*args, **kwargs)

    def _compute_input_grads(self, *args: Any, **kwargs: Any) -> Any:
        with self._as(Role.BACKWARD):
            return super()._compute_input_grads(*args, **kwargs)

    def _recv_meta(self, src_stage: int) -> Any:
        states = self.boundary.states
        if src_stage < self.stage_index:
            return _library._StageForwardMeta(forward_metas=_library.extract_tensor_metas((states,)))
        return _library._StageBackwardMeta(backward_metas=_library.extract_tensor_metas((states.detach(),)))


def schedule(
    case: Case,
    module: torch.nn.Module,
    boundary: Boundary,
    recorder: Recorder,
    traffic: Collectives,
    group: ProcessGroup | None,
) -> Any:
    """The schedule of a case over `module` as one stage; `traffic` are the rank's collectives, `group` the pipeline's.

    What is sent to find shapes is not told as a collective, since not all of it has a counterpart here.
    """
    given = case.shapes == "given"
    votes = profile(case.gpu, case.release, case.cudnn_sdp).release >= (2, 12)
    stage = Stage(module, boundary, recorder, given and votes, group)

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float().view(-1, boundary.vocabulary), target.view(-1))

    made: Any = (Schedule1F1B if case.schedule == "1F1B" else ScheduleGPipe)(stage, case.microbatches, loss_fn=loss)
    usual = made._initialize_stage

    def initialize(*args: object, **kwargs: object) -> None:
        if made._stage_forward_initialized:
            return
        with traffic.unrecorded():
            if votes:
                usual(*args, **kwargs)
            else:
                _initialize_2_11(made, stage, boundary, given, args)

    if votes:
        warm = made._warmup_p2p

        def decided(parts: object, *args: object, **kwargs: object) -> None:
            warm(parts, *args, **kwargs)
            modes = _library.InferenceMode
            stage._inference_mode = modes.STATIC if given else modes.DYNAMIC

        made._warmup_p2p = decided
    made._initialize_stage = initialize
    return made


def _initialize_2_11(made: Any, stage: Stage, boundary: Boundary, given: bool, args: Sequence[Any]) -> None:
    """As PyTorch 2.11 readies a stage (torch/distributed/pipelining/stage.py: `_shape_inference`)."""
    any_stage: Any = stage
    greetings = any_stage._get_init_p2p_neighbors_ops()
    schedules._wait_batch_p2p(schedules._batch_p2p(greetings))
    if not given:
        with torch.no_grad(), stage._as(Role.FORWARD):
            taken = torch.zeros_like(boundary.inputs, device=stage.device)
            found = stage.submod(taken)
        outputs = torch.empty_like(found, device="meta", requires_grad=False)
        if not stage.is_last:
            group = stage.group or dist.group.WORLD
            peer = stage.stage_index_to_group_rank[stage.stage_index + 1]
            dist.send_object_list([(outputs,)], group_dst=peer, group=group, device=stage.device, use_batch=True)
        del taken, found
    metas = _library.extract_tensor_metas
    stage._user_meta = _library._StageMeta(inputs=metas((boundary.inputs,)), outputs=metas((boundary.outputs,)))
    stage._inference_mode = _library.InferenceMode.STATIC
    stage._prepare_forward_infra(made._n_microbatches, args[0], args[1], has_backward=True)
    made._stage_forward_initialized = True
    stage._prepare_backward_infra(made._n_microbatches)
    made._stage_backward_initialized = True
