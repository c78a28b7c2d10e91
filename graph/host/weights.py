"""Files of weights: of those that are read, the headers are; those that are written have their size, and holes.

Where a model of transformers or diffusers has no weights in its folder, or in the cache of the hub, a file with holes
stands for them, with the names and shapes that the model would save.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch

from graph.fake_cuda.device import Runtime
from graph.fake_cuda.torch_private import BINDINGS, FileReader
from graph.host.imports import changed
from graph.host.memory import LARGE, unread
from graph.recorder.checkpoints import may_write

#: MAP_NORESERVE of Linux (asm-generic/mman.h), which Python's mmap lacks.
_NO_RESERVE: Final = 0x4000


@contextlib.contextmanager
def never_read(runtime: Runtime, folder: Path) -> Iterator[None]:
    """Inside, loading and saving weights costs no time; `folder` is for files that stand for others."""
    stand_in = _StandIn(runtime, folder)
    reader = mock.patch.object(BINDINGS, "PyTorchFileReader", _headers_only(FileReader))
    mapped = mock.patch.object(torch.UntypedStorage, "from_file", _mapped(torch.UntypedStorage.from_file))
    libraries = changed(
        {
            "safetensors": _opened_on_host,
            "safetensors.torch": functools.partial(_safetensors, runtime),
            "torch.distributed.checkpoint.filesystem": _checkpoints,
            "transformers.modeling_utils": stand_in.install,
            "diffusers.models.modeling_utils": stand_in.install_in_diffusers,
        }
    )
    with reader, mapped, libraries:
        yield


def _headers_only(plain: Any) -> Any:
    """PyTorch's reader of its own files, which leaves the numbers of large floating-point tensors where they are."""

    class Reader(plain):  # type: ignore[misc]
        def get_storage_from_record(self, name: str, size: int, dtype: object) -> Any:
            number: Any = sys._getframe(1).f_locals.get("dtype")  # of the tensor; the argument is that of bytes
            if size >= LARGE and isinstance(number, torch.dtype) and number.is_floating_point:
                return torch.empty(size, dtype=torch.uint8, device="cpu")
            return super().get_storage_from_record(name, size, dtype)

    return Reader


def _mapped(plain: Callable[..., Any]) -> Callable[..., Any]:
    """UntypedStorage.from_file for files that may be larger than the memory: the system sets nothing aside for them.

    Where a byte is looked at, it does not read what comes after it: safetensors looks at the first of each tensor.
    """

    def from_file(filename: str, shared: bool = False, nbytes: int = 0) -> Any:
        if shared or not nbytes:
            return plain(filename, shared, nbytes)
        with open(filename, "rb") as file:
            pages = mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
        pages.madvise(mmap.MADV_RANDOM)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        unread(pages, whole)
        return whole.untyped_storage()

    return from_file


# ------------------------------------------------------------------------------------------------- safetensors


def _safetensors(runtime: Runtime, module: Any) -> None:
    """What safetensors writes has holes; a file that was there before the program stays as it is."""
    array = module._to_ndarray

    def on_host(tensor: torch.Tensor) -> Any:
        with mock.patch.object(runtime, "host_copies_keep", True):  # nobody asks for values
            return array(tensor)

    def serialize_file(tensors: Mapping[str, Any], filename: object, metadata: Mapping[str, str] | None = None) -> None:
        if may_write(filename):
            _write(Path(str(filename)), tensors, metadata)

    module._to_ndarray = on_host
    module.serialize_file = serialize_file


class _OnDevice:
    """An open file of safetensors, or a slice of one, that gives tensors on a device."""

    def __init__(self, inner: Any, device: str | int | torch.device) -> None:
        self._inner = inner
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> Any:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def _to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._to(self._inner[place])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._to(self._inner.get_tensor(name))

    def get_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: self._to(one) for name, one in self._inner.get_tensors(*args, **kwargs).items()}

    def get_slice(self, name: str) -> Any:
        return _OnDevice(self._inner.get_slice(name), self._device)


def _opened_on_host(module: ModuleType) -> Callable[[], None]:
    """safetensors reads a file into pinned memory where its tensors go to a device: here the pages are mapped."""
    plain = module.safe_open

    @functools.wraps(plain)
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        # transformers before 5 gives None for "cuda", an index that it does not have
        there = framework in ("pt", "torch", "pytorch") and device is not None and torch.device(device).type == "cuda"
        return (
            _OnDevice(plain(filename, framework, **kwargs), device)
            if there
            else plain(filename, framework, device, **kwargs)
        )

    def instead(old: object, new: object) -> None:
        for one in list(sys.modules.values()):  # those that have it by name already, too
            if getattr(one, "__dict__", {}).get("safe_open") is old:
                one.safe_open = new  # type: ignore[attr-defined]

    instead(plain, safe_open)
    return functools.partial(instead, safe_open, plain)


def _checkpoints(module: ModuleType) -> Callable[[], None]:
    """torch.distributed.checkpoint leaves the files of others as they are."""
    system = module.FileSystem
    create, remove, rename = system.create_stream, system.rm_file, system.rename

    def create_stream(self: object, path: object, mode: str) -> Any:
        return create(self, path, mode) if "w" not in mode or may_write(path) else tempfile.TemporaryFile(mode)

    def rm_file(self: object, path: object) -> None:
        if may_write(path):
            remove(self, path)

    def renamed(self: object, path: object, new_path: object) -> None:
        if may_write(new_path):
            rename(self, path, new_path)
        else:
            remove(self, path)

    def undo() -> None:
        system.create_stream, system.rm_file, system.rename = create, remove, rename

    system.create_stream, system.rm_file, system.rename = create_stream, rm_file, renamed
    return undo


def _write(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> None:
    """A file of safetensors, header and holes, of tensors given as its `TensorSpec`.

    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.data_len
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


# ------------------------------------------------------------------------------------------------ transformers


class _StandIn:
    """Files for weights that are not there."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self.folder = folder
        self._made = 0

    def install(self, module: Any) -> None:
        """Look for weights on this machine alone, and go on without."""
        if hasattr(module, "_get_resolved_checkpoint_files"):
            self._where_files_are_found(module)
        else:
            self._around_all(module)

    def _where_files_are_found(self, module: Any) -> None:
        plain = inspect.unwrap(module._get_resolved_checkpoint_files)
        together = "download_kwargs" in inspect.signature(plain).parameters  # from 5 on

        @functools.wraps(plain)
        def resolve(*args: Any, **kwargs: Any) -> Any:
            alone: dict[str, object] = {"local_files_only": True}
            kwargs |= {"download_kwargs": (kwargs.get("download_kwargs") or {}) | alone} if together else alone
            try:
                found = plain(*args, **kwargs)
            except OSError:
                found = [""], None
            files = found[0]
            if files is None or all(os.path.exists(file) for file in files):
                return found
            caller = sys._getframe(1).f_locals  # from_pretrained: the class, and the configuration that it has read
            given = caller.get("model_args") or (), caller.get("model_kwargs") or {}
            return [str(self._file(module, caller["cls"], caller["config"], *given))], None

        module._get_resolved_checkpoint_files = resolve

    def _around_all(self, module: ModuleType) -> None:
        """Releases before 4.50 find the files amid from_pretrained: where there are none it is called again, for a
        folder that has one."""
        plain = module.PreTrainedModel.from_pretrained.__func__

        def from_pretrained(cls: Any, /, name: object, *args: object, config: Any = None, **kwargs: object) -> Any:
            kwargs["local_files_only"] = True
            try:
                return plain(cls, name, *args, config=config, **kwargs)
            except OSError:
                if not isinstance(config, module.PretrainedConfig):
                    config = cls.config_class.from_pretrained(config or name, local_files_only=True)
            file = self._file(module, cls, config, args, kwargs)
            folder = file.with_suffix("")
            folder.mkdir()
            file.rename(folder / module.SAFE_WEIGHTS_NAME)
            model = plain(cls, folder, *args, config=config, **kwargs)
            model.name_or_path = model.config.name_or_path = str(name)
            return model

        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def _file(
        self, module: ModuleType, kind: Any, config: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Path:
        """What a model of this class and configuration would have saved, in the configuration's dtype; it is made with
        `args` and those of `kwargs` that it has parameters for."""
        config = copy.deepcopy(config)
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        path = self.folder / f"{self._made}.safetensors"
        taken = inspect.signature(kind.__init__).parameters.keys() & kwargs.keys()
        made = functools.partial(kind, config, *args, **{name: kwargs[name] for name in taken})
        self._holes(path, _saved(module, made, dtype), config.name_or_path, kind, dtype)
        return path

    def install_in_diffusers(self, module: ModuleType) -> None:
        """The same for models of diffusers, alone or in pipelines: where there are none, `from_pretrained` is called
        again, for a folder that has them."""
        plain = module.ModelMixin.from_pretrained.__func__

        def from_pretrained(cls: Any, /, name: object, **kwargs: object) -> Any:
            kwargs["local_files_only"] = True
            try:
                return plain(cls, name, **kwargs)
            except OSError:
                where = {key: kwargs[key] for key in ("cache_dir", "revision", "subfolder") if key in kwargs}
                config = cls.load_config(name, local_files_only=True, **where)
            elsewhere = ("cache_dir", "revision", "subfolder", "variant", "use_safetensors")
            rest = {key: value for key, value in kwargs.items() if key not in elsewhere}
            asked = (kwargs.get("dtype"), kwargs.get("torch_dtype"))
            dtype = next((one for one in asked if isinstance(one, torch.dtype)), torch.float32)
            with torch.device("meta"):
                state = cls.from_config(config).state_dict()
            folder = self.folder / str(self._made)
            folder.mkdir()
            (folder / module.CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
            self._holes(folder / module.SAFETENSORS_WEIGHTS_NAME, _cast(state, dtype), str(name), cls, dtype)
            return plain(cls, folder, **rest)

        module.ModelMixin.from_pretrained = classmethod(from_pretrained)

    def _holes(
        self, path: Path, tensors: Mapping[str, torch.Tensor], name: str, kind: type, dtype: torch.dtype
    ) -> None:
        """Write the file that stands for the weights of a model, and say so."""
        self._made += 1
        _write(path, {key: _spec(tensor) for key, tensor in tensors.items()}, {"format": "pt"})
        name, saver = name or kind.__name__, kind.__name__
        what = f"the weights of {name} are not on this machine: they count as those that {saver} saves, in {dtype}"
        self.runtime.assumptions[what] = 1


def _cast(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def _saved(module: ModuleType, made: Callable[[], Any], dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """The tensors that `save_pretrained` would write of a model; `module` is transformers.modeling_utils.

    It is made on the meta device, or where it reads a number meanwhile (xIELU), on the host."""
    try:
        return _saved_on("meta", module, made, dtype)
    except NotImplementedError:  # "Cannot copy out of meta tensor"
        return _saved_on("cpu", module, made, dtype)


def _saved_on(
    device: str, module: ModuleType, made: Callable[[], Any], dtype: torch.dtype
) -> Mapping[str, torch.Tensor]:
    if not hasattr(module, "init"):  # before 5
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), module.no_init_weights():
                model = made()
            model.tie_weights()
            state = model.state_dict(keep_vars=True)
        finally:
            torch.set_default_dtype(before)
        tied = {id(tensor): name for name, tensor in reversed(state.items())}  # the first name of each
        return {name: tensor for name, tensor in state.items() if tied[id(tensor)] == name}
    safely = getattr(module.init, "meta_device_safe_creation_ops", contextlib.nullcontext)  # from 5.6 on
    empty = (torch.device(device), safely(), module.init.no_init_weights())
    with module.ContextManagers([module.local_torch_dtype(dtype), *empty]):
        model = made()
    model.tie_weights()
    model.get_parameter = model.state_dict(keep_vars=True).__getitem__  # asked up to 5.13 for buffers too, on meta
    state = module.remove_tied_weights_from_state_dict(model.state_dict(), model)
    converted: Mapping[str, torch.Tensor] = module.revert_weight_conversion(model, state)
    return converted


def _spec(tensor: torch.Tensor) -> Any:
    from safetensors import TensorSpec

    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=1, data_len=tensor.nbytes)
