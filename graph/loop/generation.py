"""The inference run that is captured: prefill and decode, by `model.generate` itself or by a plain loop.

Phases: load; prefill (the first forward, what prepares it included); first (the first token is picked); decode (the
other forwards). Greedy decoding of `Case.new` tokens after a prompt of `Case.prompt` ids and a mask of ones; no token
ends a sequence early. The cache grows by concatenation (dynamic) or is allocated whole (static).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from graph.case import Case
from graph.errors import CaptureError
from graph.loop.inputs import check_positions
from graph.loop.training import Clock
from graph.model import Kind, Role
from graph.recorder.attribution import Roles
from traces.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from graph.models.sources import Built

LOAD, PREFILL, FIRST, DECODE, END = range(5)
PHASES: Final = ("load", "prefill", "first", "decode", "end")


def check(case: Case, built: Built) -> None:
    """ConfigError where a case asks for what cannot be generated."""
    if built.config is None:
        raise ConfigError(f"key 'task': inference is for configurations, and {built.where} is a function of your own")
    if built.head != "causal-lm":
        kind = built.head or built.facts.name
        raise ConfigError(f"key 'task': inference is for decoders (head causal-lm), and {built.where} is {kind}")
    check_positions(built.config, case.prompt + case.new - 1, "prompt", built.where)


def generate(clock: Clock, built: Built, case: Case, roles: Roles) -> None:
    """Run the inference of a case on a model that is on the device; marks phases on `clock`."""
    model = built.module
    clock.mark(PREFILL, -1, Role.FORWARD)
    handles = [model.register_forward_pre_hook(_Before(clock)), model.register_forward_hook(_After(clock))]
    try:
        with torch.no_grad():
            run = _by_generate if case.mode == "generate" else _by_hand
            ids = torch.zeros(case.batch, case.prompt, dtype=torch.int64).to(clock.recorder.device)
            roles.input.add(clock.recorder.number(ids))
            kept = run(model, ids, case)
            clock.mark(END, -1, Role.OTHER)
            del kept
    finally:
        for handle in handles:
            handle.remove()


class _Before:
    """Starts the phase `decode` where the second forward starts."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        self.calls += 1
        if self.calls == 2:
            self.clock.mark(DECODE, -1, Role.FORWARD)
        if self.calls >= 2:
            self.clock.recorder.log.event(Kind.MICRO_STEP, self.calls - 2, self.calls - 2)


class _After:
    """Starts the phase `first` where the first forward has ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def __call__(self, module: torch.nn.Module, args: object, output: object) -> None:
        self.calls += 1
        if self.calls == 1:
            self.clock.mark(FIRST, -1, Role.FORWARD)


def _by_generate(model: Any, ids: torch.Tensor, case: Case) -> Any:
    """`model.generate`, which goes on to the last token whatever it reads (values are made up here)."""
    picked = 0

    def unfinished(finished: object, synced: bool, device: torch.device) -> bool:
        nonlocal picked
        bool(finished)  # as the real one: the host waits for the flag
        picked += 1
        return picked <= case.new

    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(owner, "_has_unfinished_sequences"):
        raise CaptureError("this release of transformers has no GenerationMixin._has_unfinished_sequences to go by")
    owner._has_unfinished_sequences = unfinished
    options: dict[str, Any] = {"max_new_tokens": case.new, "do_sample": False, "pad_token_id": 0}
    if case.cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        del owner._has_unfinished_sequences


def _by_hand(model: PreTrainedModel, ids: torch.Tensor, case: Case) -> Any:
    """A plain loop: logits of all positions of the prompt, which go with the first token, then token after token."""
    past = _cache(model, case)
    token = ids
    for turn in range(case.new):
        out = model(input_ids=token, past_key_values=past, use_cache=True)
        past = out.past_key_values
        token = out.logits[:, -1:].argmax(-1)
        if turn == 0:
            out = None
    return past, out, token


def _cache(model: PreTrainedModel, case: Case) -> Any:
    from transformers import DynamicCache, StaticCache

    if case.cache == "static":
        return StaticCache(config=model.config, max_cache_len=case.prompt + case.new)
    return DynamicCache(config=model.config)
