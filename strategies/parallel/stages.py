"""Cuts a decoder into the stages of a pipeline: each keeps its share of the layers, and the ends what belongs there.

The layers are split evenly, the first stages one more; embedding and what else runs before the layers is on the first
stage, what runs after them and an untied head on the last. What has no parameters but buffers (rotary embeddings) is
on every stage. A stage calls its layers one after another, as pipeline code does, each with the arguments that the
model's own forward would give it (masks, positions): that forward runs as far as the layers, which only note them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from graph.errors import CaptureError
from traces.errors import ConfigError

#: Positional arguments after the hidden states, and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def shares(layers: int, stages: int, key: str = "key 'world'") -> tuple[range, ...]:
    """Which layers each stage has. Raises ConfigError, which names `key`, for more stages than layers."""
    if stages > layers:
        raise ConfigError(f"{key}: {stages} stages for {layers} layers; a stage needs at least one layer")
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def decoder(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The part of a model that has its layers, and the name of their list in it. Raises CaptureError without any."""
    for part in module.modules():
        for name, child in part.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) > 1:
                return part, name
    raise CaptureError("the model has no list of layers (torch.nn.ModuleList) that stages could share")


def cut(module: torch.nn.Module, stage: int, stages: int) -> torch.nn.Module:
    """`module` (a decoder with a head, on meta) with what stage `stage` of `stages` has, called with one tensor.

    The first stage takes token ids, others hidden states; the last answers logits, others hidden states. Changes
    `module`. Raises ConfigError for more stages than layers, CaptureError for a model that cannot be cut so.
    """
    model: Any = module
    base, name = decoder(module)
    layers: Any = getattr(base, name)
    share = shares(len(layers), stages)[stage]
    head = model.get_output_embeddings()
    if head is None:
        raise CaptureError("the model has no head (get_output_embeddings) that the last stage could have")
    before, after, positions = _order(base, name)
    mine = torch.nn.ModuleList()
    for number in share:
        mine.add_module(str(number), layers[number])
    setattr(base, name, mine)
    base.config = _of_layers(base, share, len(layers))
    first, last = stage == 0, stage + 1 == stages
    for child, part in list(base.named_children()):
        kept = child == name or (first and child in before) or (last and child not in before)
        if not kept and _belongs(part):
            setattr(base, child, _stand_in(base, part))
    if last:
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=head.weight.requires_grad)
    else:
        paths = {id(part): path for path, part in module.named_modules()}
        module.set_submodule(paths[id(head)], torch.nn.Identity())
    calls = _Calls(base, name, positions if first or positions else None)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        started, given = calls(hidden, first)
        hidden = started if first else hidden
        del started
        for layer, (args, kwargs) in zip(getattr(base, name), given, strict=True):
            out = layer(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
            del out
        if last:
            for part in after:
                hidden = getattr(base, part)(hidden)
            hidden = head(hidden)
        return hidden

    model.forward = forward
    return module


class _ReachedError(Exception):
    """The last layer is reached."""


class _Calls:
    """With what the forward of `base` calls its layers: (arguments after the hidden states, keyword arguments) each.

    `positions`: whether positions are given to it on the device; None: where it wants any, they are not on the device,
    since nothing on this stage reads them.
    """

    def __init__(self, base: torch.nn.Module, name: str, positions: bool | None) -> None:
        self.base = base
        self.name = name
        self.positions = positions
        self.wanted = "position_ids" in inspect.signature(type(base).forward).parameters

    def __call__(self, hidden: torch.Tensor, ids: bool) -> tuple[Any, list[Call]]:
        """The hidden states that the first layer gets, and the calls."""
        given: dict[str, Any] = {"input_ids" if ids else "inputs_embeds": hidden}
        if self.wanted:
            device = hidden.device if self.positions is not None else "meta"
            given["position_ids"] = torch.arange(hidden.shape[1], device=device).unsqueeze(0)
        calls: list[Call] = []
        own: Any = self.base.get_submodule(self.name)
        count = len(own)
        layers = torch.nn.ModuleList(_Noting(calls, count) for _ in range(count))
        with _unpacked(), _replaced(self.base, self.name, layers), contextlib.suppress(_ReachedError):
            self.base(**given, use_cache=False)
        if not calls:
            raise CaptureError(f"the forward of {type(self.base).__name__} calls none of its layers")
        start = calls[0][0][0] if calls[0][0] else calls[0][1].get("hidden_states")
        rest = [
            (args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states" and not _absent(value)})
            for args, kwargs in calls
        ]
        return start, rest


def _absent(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class _Noting(torch.nn.Module):
    """Stands for a layer: notes how it is called and passes on hidden states; the last one may end the forward."""

    def __init__(self, calls: list[Call], end: int) -> None:
        super().__init__()
        self.calls = calls
        self.end = end

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Hidden states as they came."""
        self.calls.append((args, kwargs))
        if len(self.calls) == self.end:
            raise _ReachedError
        return args[0] if args else kwargs["hidden_states"]


@contextlib.contextmanager
def _replaced(base: torch.nn.Module, name: str, layers: torch.nn.ModuleList) -> Iterator[None]:
    own = base._modules[name]
    base._modules[name] = layers
    try:
        yield
    finally:
        base._modules[name] = own


@contextlib.contextmanager
def _unpacked() -> Iterator[None]:
    """The model does not look whether its sequences are packed: a stage that calls layers itself does not either."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    if not hasattr(masking_utils, name):
        yield
        return
    with mock.patch.object(masking_utils, name, new=_no_packing):  # a mock would keep what it is called with
        yield


def _no_packing(*args: object, **kwargs: object) -> None:
    """Sequences are not packed."""


def _order(base: torch.nn.Module, name: str) -> tuple[frozenset[str], tuple[str, ...], bool]:
    """What of `base` runs before its layers, what after them (in order), and whether layers are given any tensor.

    Seen in its own forward on meta, with a stand-in for the layers.
    """
    calls: list[Call] = []
    layers = torch.nn.ModuleList([_Noting(calls, -1)])
    before: list[str] = []
    after: list[str] = []

    def note(child: str) -> Callable[[Any, Any], None]:
        return lambda part, args: (after if calls else before).append(child)

    parts = [(child, part) for child, part in base.named_children() if child != name]
    handles = [part.register_forward_pre_hook(note(child)) for child, part in parts]
    try:
        ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
        with torch.no_grad(), torch.device("meta"), _unpacked(), _replaced(base, name, layers):
            base(input_ids=ids, use_cache=False)
    except Exception:
        if not calls:
            raise
    finally:
        for handle in handles:
            handle.remove()
    held = {child for child, part in parts if any(True for _ in part.parameters())}
    return frozenset(before), tuple(child for child in after if child in held), _positioned(base, name, *calls[0])


class _Watched(torch.Tensor):
    """A tensor that says whether anybody asked anything of it."""

    asked = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        cls.asked = True
        plain: Any = super()
        return plain.__torch_function__(func, types, args, kwargs or {})


def _positioned(base: torch.nn.Module, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the layers, called so on meta, need positions: more tensors than their numbers, or those read."""
    given = [one for value in kwargs.values() for one in (value if isinstance(value, tuple) else (value,))]
    tensors = sum(isinstance(one, torch.Tensor) for one in given)
    numbers = kwargs.get("position_ids")
    if not isinstance(numbers, torch.Tensor) or tensors > 1:
        return tensors > 0
    watched: Any = numbers.as_subclass(type("Watched", (_Watched,), {}))
    try:
        with torch.no_grad(), torch.device("meta"):
            next(base.get_submodule(name).children())(*args, **{**kwargs, "position_ids": watched})
    except Exception:
        return True
    return bool(type(watched).asked)


def _belongs(part: torch.nn.Module) -> bool:
    """Whether a part is of one end of the model: all but those that hold nothing but buffers."""
    return any(True for _ in part.parameters()) or not any(True for _ in part.buffers())


def _stand_in(base: Any, part: torch.nn.Module) -> torch.nn.Module:
    """What stands for a part that is on another stage: nothing is added by a table, and others pass on their input."""
    if isinstance(part, torch.nn.Embedding) and part is not base.get_input_embeddings():
        return _Neutral()
    return torch.nn.Identity()


class _Nothing:
    """The neutral operand: any operator of torch with it answers its other tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return next(one for one in args if isinstance(one, torch.Tensor))

    def to(self, *args: object, **kwargs: object) -> _Nothing:
        """Itself, on any device."""
        return self

    view = to


class _Neutral(torch.nn.Module):
    """A table of positions that is on another stage."""

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Nothing to add."""
        return _Nothing()


def _of_layers(base: Any, share: range, layers: int) -> Any:
    """The configuration with its lists of one entry a layer cut to those of this stage."""
    config = copy.copy(base.config)
    for key in ("layer_types", "attention_layers"):
        entries = getattr(config, key, None)
        if isinstance(entries, list) and len(entries) == layers:
            setattr(config, key, [entries[number] for number in share])
    return config
