"""The training run that is captured: the loop that people write, with marks where its phases end.

Loading, then for each step: inputs to the device, forward, loss, backward, [unscale, clip], optimizer, mark, zero_grad.
A phase is what happens between two marks, so `zero_grad` and the death of the loss belong to the next forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.errors import CaptureError
from graph.loop.inputs import DTYPES
from graph.model import Kind, Role
from graph.optimizers import OPTIMIZERS
from graph.recorder.attribution import Roles, note_states
from graph.recorder.recorder import Recorder

if TYPE_CHECKING:
    from graph.case import Case
    from graph.loop.method import Method
    from graph.models.sources import Built

LOAD, FORWARD, BACKWARD, OPTIMIZER, END = range(5)
PHASES: Final = ("load", "forward", "backward", "optimizer", "end")


class Clock:
    """Says where a run is: phases, iterations and the host's waits go into the recorder's log."""

    def __init__(
        self,
        recorder: Recorder,
        sync: bool,
        settle: Callable[[], None] | None = None,
        phases: tuple[str, ...] = PHASES,
    ) -> None:
        self.recorder = recorder
        self.phases = phases
        self.settle = settle
        self.sync = sync
        self.boundaries: list[tuple[int, int, int]] = []  # events, operators, storages where each iteration starts

    def begin(self, phase: int, step: int, role: Role) -> None:
        """A phase starts here (the mark that ends the one before)."""
        recorder = self.recorder
        recorder.log.event(Kind.PHASE, phase, step)
        recorder.phase = phase
        recorder.step = step
        recorder.role = int(role)
        recorder.notify(self.phases[phase])

    def mark(self, phase: int, step: int, role: Role, *, iteration: int = -1) -> None:
        """The host waits for the device, as a measuring loop does, and the next phase starts.

        `iteration`: an iteration ends here as well; what is still to be freed of it belongs to the next.
        """
        if self.sync:
            self.recorder.log.event(Kind.SYNCHRONIZE, 0)
        if self.settle is not None:
            self.settle()
        if iteration >= 0:
            self.iteration(iteration)
        self.begin(phase, step, role)

    def iteration(self, step: int) -> None:
        """Iteration `step` starts here."""
        log = self.recorder.log
        self.boundaries.append((len(log.events), len(log.operators), len(log.born)))
        log.event(Kind.STEP, step, step)


def train(
    clock: Clock,
    built: Built,
    case: Case,
    roles: Roles,
    steps: int,
    method: Method,
) -> None:
    """Run `steps` steps of `built` (a `graph.models.sources.Built` that is on the device), as `method` has it.

    Notes inputs and optimizer states in `roles`. The observer is gone when this returns: what dies then is not of the
    run. Raises CaptureError where nothing is to be trained.
    """
    recorder = clock.recorder
    device = recorder.device
    model = built.module
    clock.mark(FORWARD, 0, Role.FORWARD, iteration=0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise CaptureError("the model has no parameter to train (requires_grad is False for all)")
    optimizer: Any = (
        StepInBackward(case, method, trainable) if case.step_in_backward else method.optimizer(case, trainable)
    )
    scaler = torch.amp.GradScaler(device.type) if case.autocast == "fp16" else None
    inputs: dict[str, Any] = {}
    for step in range(steps):
        for micro in range(case.accum):
            recorder.log.event(Kind.MICRO_STEP, micro, micro)
            batch = built.host(step * case.accum + micro)
            if built.head == "causal-lm":  # one after another, each in place of the last one's
                for name, host in batch:
                    inputs[name] = host.to(device)
            else:  # a batch is made whole before it takes the place of the last
                inputs = {name: host.to(device) for name, host in batch}
            roles.input.update(recorder.number(tensor) for tensor in inputs.values())
            last = micro + 1 == case.accum
            with method.micro_step(model, micro, last):
                context: Any = contextlib.nullcontext()
                if case.autocast:
                    context = torch.autocast(device.type, dtype=DTYPES[case.autocast])
                with context:
                    loss = built.forward(model, inputs)
                clock.mark(BACKWARD, step, Role.BACKWARD)
                method.backward(scaler.scale(loss) if scaler else loss, method.share(loss, case.accum))
            clock.mark(OPTIMIZER if last else FORWARD, step, Role.OPTIMIZER if last else Role.FORWARD)
        if case.clip:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        note_states(recorder, optimizer, roles)
        final = step + 1 == steps
        phase, role = (END, Role.OTHER) if final else (FORWARD, Role.FORWARD)
        clock.mark(phase, -1 if final else step + 1, role, iteration=step + 1)
        optimizer.zero_grad()
        if case.outputs == "step":
            built.held.clear()
        del loss
    recorder.runtime.observer = None  # what dies when this function returns is not of the run


class StepInBackward:
    """An optimizer for each parameter, which steps in backward and drops the gradient (a recipe of PyTorch's)."""

    def __init__(self, case: Case, method: Method, parameters: list[torch.nn.Parameter]) -> None:
        self.optimizers = {parameter: method.optimizer(case, [parameter]) for parameter in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def _step(self, parameter: torch.Tensor) -> None:
        optimizer = self.optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all parameters."""
        return {key: value for one in self.optimizers.values() for key, value in one.state.items()}

    def step(self) -> None:
        """Nothing is left to do after backward."""

    def zero_grad(self) -> None:
        """No gradient is left."""


def make_optimizer(case: Case, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a case over `parameters`, with torch's defaults but for the learning rate."""
    kind, options = optimizer_class(case)
    made: torch.optim.Optimizer = kind(parameters, **options)
    return made


def optimizer_class(case: Case) -> tuple[Any, dict[str, Any]]:
    """The class of a case's optimizer, and its arguments besides the parameters."""
    found = OPTIMIZERS[case.optimizer]
    return found.made(), {"lr": 1e-5, **found.arguments(case)}
