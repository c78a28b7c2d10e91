"""Objects on the device that this PyTorch's C++ cannot make: generators, storages, tensors by names of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from graph.errors import CaptureError
from graph.fake_cuda.torch_private import StorageBase, generator_address, without_modes
from traces.release import installed_release, version_of

_CUDA: Final = torch.device("cuda")
#: Bytes of the state of a generator on CUDA: a seed and an offset.
_SEED: Final = 8
_STATE: Final = 16
#: Storages that go to the device have values if they have no more bytes: most larger ones are weights.
_READ: Final = 1 << 20
_plain: Final[Any] = torch.Generator


class _Named(type(_plain)):  # type: ignore[misc]
    """Every generator is one of `torch.Generator`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _plain)


#: Those of the device that live, by what C++ has of them, which operators get in another object.
_of_device: Final[WeakValueDictionary[int, Generator]] = WeakValueDictionary()


def of_device(generator: torch.Generator) -> bool:
    """Whether operators on the device take it."""
    return generator_address(generator) in _of_device


class Generator(torch.Generator, metaclass=_Named):
    """`torch.Generator`: those of the host are PyTorch's own; one of the device draws nothing."""

    _place: torch.device
    _state: torch.Tensor

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator of the host is not of this class."""
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if place.type != "cuda":
            return _plain(device)
        made = super().__new__(cls)
        made._place = place
        made._state = torch.zeros(_STATE, dtype=torch.uint8, device="cpu")
        _of_device[generator_address(made)] = made
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU that it was made for, else the current one."""
        return torch.device("cuda", torch.cuda.current_device()) if self._place.index is None else self._place

    def get_state(self) -> torch.Tensor:
        """A copy of the state, on the host as PyTorch has it, which no mode sees being made."""
        with without_modes():
            return self._state.clone()

    def set_state(self, new_state: torch.Tensor) -> Any:
        """The state is what `get_state` gave."""
        self._state = new_state.clone()
        return self

    def manual_seed(self, seed: int) -> Any:
        """Begin anew."""
        self.set_offset(0)
        return super().manual_seed(seed)

    def get_offset(self) -> int:
        """Where in its sequence it was told to be, which stands behind the seed in the state; nothing is drawn."""
        with without_modes():
            return int(self._state[_SEED:].view(torch.int64))

    def set_offset(self, offset: int) -> Any:
        """RuntimeError, as PyTorch's, where it is no multiple of 4."""
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        with without_modes():
            self._state[_SEED:].view(torch.int64).fill_(offset)
        return self

    def clone_state(self) -> Any:
        """Itself, as nothing is drawn."""
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: torch.Generator) -> Any:
        """Nothing changes."""
        return self


class _Typed(type):
    """A type of tensors as `torch.cuda.FloatTensor`: called it makes one, and it has those of its dtype."""

    on_host: Any

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        return cls.on_host(*args, **kwargs).to(_CUDA)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.on_host.dtype


def _typed() -> list[tuple[Any, str, Any]]:
    dtypes = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
    names = [f"{name}Tensor" for name in dtypes]
    kinds = [_Typed(f"torch.cuda.{name}", (), {"on_host": getattr(torch, name)}) for name in names]
    return [(torch.cuda, name, kind) for name, kind in zip(names, kinds, strict=True)]


def _default_type(plain: Any) -> Any:
    """`torch.set_default_tensor_type`, where the type is one of the device, and back."""

    def default_type(t: Any) -> None:
        name = t if isinstance(t, str) else t.__name__
        if name.startswith("torch.cuda."):
            torch.set_default_dtype(getattr(torch, name.rpartition(".")[2]).dtype)
            torch.set_default_device(_CUDA)
            torch.Tensor.__new__ = _by_default  # type: ignore[assignment, method-assign]
            return
        plain(t)
        if vars(torch.Tensor).get("__new__") is _by_default:
            del torch.Tensor.__new__
            torch.set_default_device(None)

    return default_type


def _by_default(cls: type[torch.Tensor], *args: object, **kwargs: object) -> Any:
    """`torch.Tensor(...)`, which makes one of the default type: no default device counts for it."""
    made = super(torch.Tensor, cls).__new__(cls, *args, **kwargs)
    return made if made.is_cuda else made.to(_CUDA)


def _storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """`torch.UntypedStorage(bytes, device=...)`: `copy.deepcopy` makes them so."""
    if device is None or torch.device(device).type != "cuda":
        return StorageBase.__new__(cls, *args, **({} if device is None else {"device": device}), **kwargs)
    return _bytes(torch.device(device), *args).untyped_storage()


def _bytes(device: torch.device, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _moved(plain: Callable[..., Any]) -> Callable[..., Any]:
    """How storages go to a device (`torch.load` moves them): this PyTorch makes none on CUDA."""

    def moved(self: torch.UntypedStorage, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type != "cuda" or self.device.type == "cuda":
            return plain(self, device, non_blocking)
        there = _bytes(device, self.nbytes())
        if len(there) <= _READ:
            there.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(self))
        return there.untyped_storage()

    return moved


def _shared(self: torch.UntypedStorage) -> Any:
    """`_share_cuda_`: how a tensor goes to another process."""
    raise CaptureError(
        "a tensor on the GPU goes to another process, where its memory is not recorded: make it there, or send it "
        "from the CPU (`tensor.cpu()`, `model.cpu().share_memory()`)"
    )


def _read(plain: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`Tensor.item`: up to PyTorch 2.8 no kernel in Python can give a number beyond int64, as torchtitan has seeds."""

    def item(self: torch.Tensor) -> Any:
        return plain(self.cpu() if self.dtype is torch.uint64 and self.is_cuda else self)

    return item


def changes() -> list[tuple[Any, str, Any]]:
    """Owner, name and replacement of each."""
    unsigned = [(torch.Tensor, "item", _read(torch.Tensor.item))] if version_of(installed_release()) < (2, 9) else []
    return [
        *unsigned,
        (torch, "Generator", Generator),
        (torch.UntypedStorage, "__new__", _storage),
        (torch.UntypedStorage, "_share_cuda_", _shared),
        (torch.storage, "_to", _moved(vars(torch.storage)["_to"])),
        (torch, "set_default_tensor_type", _default_type(torch.set_default_tensor_type)),
        *_typed(),
    ]
