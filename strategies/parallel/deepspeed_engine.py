"""A process that is one rank of DeepSpeed's job: everything of DeepSpeed that is not its public face stands here.

That is what it reads from the environment, what it keeps in its modules from one job to the next, its log, and the
checks in which ranks compare themselves with rank 0. All is undone at the end of a job.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from unittest import mock

from graph.errors import CaptureError
from traces.errors import ConfigError
from traces.release import Version, version_of

#: The group of all ranks that DeepSpeed makes for itself is told as the job's own, of the same ranks.
_GROUP: Final = "default_pg"
#: What DeepSpeed imports as it makes an engine: done before there is a fake GPU, and nothing in it compiled.
_LATE: Final = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
)


def ready(zero: Mapping[str, Any] | None = None) -> Any:
    """The library, imported with nothing else changed.

    Raises ConfigError where it is not installed, and for what it does not take in a configuration's
    `zero_optimization`.
    """
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cuda"), _silent():
        try:
            library = importlib.import_module("deepspeed")
        except ModuleNotFoundError as error:
            if error.name != "deepspeed":
                raise
            raise ConfigError(
                "deepspeed is not installed, whose own code runs its strategies; install it with: "
                "pip install 'vramsim[deepspeed]'"
            ) from None
        import torch

        with mock.patch.object(torch, "compile", return_value=lambda function: function):
            for name in _LATE:
                importlib.import_module(name)
        _check(zero or {})
    return library


def _check(zero: Mapping[str, Any]) -> None:
    """DeepSpeed's own check of `zero_optimization`: the first thing that is wrong."""
    try:
        importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(**zero)
    except ValueError as error:
        listed: Any = getattr(error, "errors", list)()
        first = listed[0] if listed else {"loc": (), "msg": str(error).partition("\n")[0]}
        raise ConfigError(f"key 'zero_extra': {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@contextlib.contextmanager
def job(rank: int, world: int, release: str) -> Iterator[None]:
    """This process as a rank of a job of DeepSpeed's on the fake device, in torch's process group, under its `release`.

    Raises CaptureError for a DeepSpeed that has not what is replaced here.
    """
    library = ready()
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}))
        stack.enter_context(_silent())
        stack.enter_context(_as_they_were())
        try:
            for owner, name, instead in _replaced(version_of(release)):
                stack.enter_context(mock.patch.object(owner, name, instead))
        except (AttributeError, ImportError) as error:
            raise CaptureError(f"DeepSpeed {library.__version__} is not laid out as expected: {error}") from error
        yield


def _replaced(release: Version) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name, and what is there instead during a job."""
    import torch

    accelerators = importlib.import_module("deepspeed.accelerator.real_accelerator")
    checks = importlib.import_module("deepspeed.runtime.zero.utils")
    cuda = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
    device = cuda.CUDA_Accelerator()
    yield accelerators, "ds_accelerator", device
    builders = importlib.import_module("deepspeed.ops.op_builder")
    for name in (name for name in vars(builders) if name.endswith("Builder") and name != "OpBuilder"):
        yield builders, name, device.get_op_builder(name)  # chosen when it was imported, perhaps without this device
    yield importlib.import_module("deepspeed.utils.nvtx"), "enable_nvtx", False
    yield importlib.import_module("deepspeed.runtime.engine"), "is_deepcompile_supported", lambda: False
    for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"):
        yield checks, name, functools.partial(_as_rank_0, getattr(checks, name))
    yield importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder, "jit_load", _compiled
    distributed: Any = torch.distributed
    yield distributed, "new_group", functools.partial(distributed.new_group, group_desc=_GROUP)
    yield distributed, "barrier", _Barrier(distributed.barrier, stays=release < (2, 12))
    event: Any = torch.cuda.Event
    yield event, "query", lambda self: False  # the host does not know: it waits, as it may have to
    yield torch.Tensor, "__repr__", object.__repr__  # it logs tensors, which hold nothing


def _compiled(builder: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the compiler: what CUDA kernels of DeepSpeed's own allocate is not known."""
    raise CaptureError(f"DeepSpeed would compile its operator {builder.name!r}, which cannot run without a GPU")


class _Barrier:
    """torch.distributed.barrier on the device. Up to 2.11 the byte of the first `stays` as long as the job lasts."""

    def __init__(self, plain: Callable[..., object], stays: bool) -> None:
        self.plain = plain
        self.stays = stays
        self.left: Any = None

    def __call__(self, *args: object, **kwargs: object) -> None:
        import torch

        if not self.stays:
            self.plain(*args, **{**kwargs, "device_ids": [0]})
        elif self.left is None:
            self.left = torch.empty(1, dtype=torch.uint8, device="cuda")


def _as_rank_0(check: Callable[[list[int]], Any], mine: list[int]) -> list[int]:
    """A check of `mine` against rank 0, which has the same: the device's memory cannot tell."""
    with contextlib.suppress(RuntimeError):
        check(mine)
    return mine


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """DeepSpeed logs nothing."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _as_they_were() -> Iterator[None]:
    """What a job leaves in DeepSpeed's modules, in `zero.Init` and in torch's functions is put back."""
    import torch

    modules: list[Any] = [module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"]
    initial = importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init
    kept: list[Any] = [*modules, *initial.__mro__[:-1], torch.nn.functional]
    before = [(owner, {name: value for name, value in vars(owner).items() if name[:2] != "__"}) for owner in kept]
    try:
        yield
    finally:
        for owner, values in before:
            now = {name: value for name, value in vars(owner).items() if name[:2] != "__"}
            for name in now.keys() - values.keys():
                delattr(owner, name)
            for name, value in values.items():
                if now.get(name, owner) is not value:
                    setattr(owner, name, value)
