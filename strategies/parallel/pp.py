"""Pipeline parallel by torch.distributed.pipelining: `pp`, one stage a rank, by 1F1B or GPipe.

Each rank is captured with PyTorch's own PipelineStage and schedule (torch/distributed/pipelining). A step is one
`schedule.step` over all micro-batches (phase `pipe`), then the optimizer (phase `step`), then zero_grad. Every rank
brings all token ids to its device; the last has the losses, and the merged logits where outputs are returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from graph.case import Case
from strategies.parallel.native import Native
from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.loop.training import Clock
    from graph.models.sources import Built
    from graph.recorder.attribution import Roles
    from graph.recorder.recorder import Recorder

LOAD, PIPE, STEP, END = range(4)


class Pipeline(Native):
    """One stage of a pipeline: the loop around its schedule."""

    phases: tuple[str, ...] = ("load", "pipe", "step", "end")
    #: Which of how many stages this rank has, and the group of ranks that make its pipeline.
    stage: int
    stages: int
    group: Any

    def train(self, clock: Clock, built: Built, case: Case, roles: Roles, steps: int) -> None:
        """Steps of the schedule, each followed by the optimizer's."""
        import torch

        from graph.model import Role
        from graph.recorder.attribution import note_states

        recorder = clock.recorder
        clock.mark(PIPE, 0, Role.FORWARD, iteration=0)
        schedule = self._schedule(recorder, built, case)
        parameters = [one for one in built.module.parameters() if one.requires_grad]
        optimizer = self.optimizer(case, parameters) if parameters else None
        ids = torch.zeros((case.batch * case.microbatches, case.seq), dtype=torch.int64, device="cpu")
        first, last = self.stage == 0, self.stage + 1 == self.stages
        for step in range(steps):
            tokens = ids.to(recorder.device)
            roles.input.add(recorder.number(tokens))
            losses: list[Any] = []
            with self._around(case):
                options: dict[str, Any] = {} if case.return_outputs else {"return_outputs": False}
                if last:
                    options |= {"target": tokens, "losses": losses}
                merged = schedule.step(*((tokens,) if first else ()), **options)
            clock.mark(STEP, step, Role.OPTIMIZER)
            if optimizer is not None:
                if case.clip:
                    torch.nn.utils.clip_grad_norm_(built.module.parameters(), case.clip)
                optimizer.step()
                note_states(recorder, optimizer, roles)
            final = step + 1 == steps
            following = (END, -1, Role.OTHER) if final else (PIPE, step + 1, Role.FORWARD)
            clock.mark(*following, iteration=step + 1)
            if optimizer is not None:
                optimizer.zero_grad()
            del merged, losses, options
        recorder.runtime.observer = None

    def _around(self, case: Case) -> contextlib.AbstractContextManager[Any]:
        """What stands around a step of the schedule."""
        import torch

        from graph.loop.inputs import DTYPES

        around = contextlib.ExitStack()
        if case.autocast:
            around.enter_context(torch.autocast("cuda", dtype=DTYPES[case.autocast]))
        if case.offload.startswith("activations"):
            pinned = case.offload == "activations-pin"
            around.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
        return around

    def _schedule(self, recorder: Recorder, built: Built, case: Case) -> Any:
        from strategies.parallel.pipelining import Boundary, schedule

        boundary = Boundary(
            stage=self.stage,
            stages=self.stages,
            tokens=(case.batch, case.seq),
            hidden=int(built.config.get_text_config().hidden_size),
            vocabulary=int(built.config.get_text_config().vocab_size),
            dtype=case.dtype,
        )
        assert self._collectives is not None  # `running` has made them
        return schedule(case, built.module, boundary, recorder, self._collectives, self.group)


def refused(case: Case) -> Iterator[tuple[str, str]]:
    """(key, reason) of what no pipeline can run."""
    offload = bool(case.offload) and not case.offload.startswith("activations")
    reasons = {
        "accum": (case.accum > 1, "a pipeline accumulates over its 'microbatches'"),
        "quant": (bool(case.quant), "a pipeline trains unquantized weights"),
        "loss": (bool(case.loss), "the last stage of a pipeline has cross-entropy over whole logits"),
        "lengths": (bool(case.lengths), "the stages of a pipeline are made for one length"),
        "attention_mask": (bool(case.attention_mask), "the stages of a pipeline hand on hidden states alone"),
        "autocast": (case.autocast == "fp16", "a schedule scales no loss; use 'bf16'"),
        "task": (case.task != "train", "a pipeline trains"),
        "offload": (offload, "a pipeline offloads 'activations' or 'activations-pin'"),
    }
    return ((key, reason) for key, (bad, reason) in reasons.items() if bad)


def check_schedule(case: Case, stages: int) -> None:
    """ConfigError for a schedule that has too few micro-batches for `stages`."""
    if case.schedule == "1F1B" and case.microbatches < stages:
        raise ConfigError(
            f"key 'microbatches': 1F1B needs at least as many micro-batches as stages ({stages}), not "
            f"{case.microbatches}"
        )
