"""What programs tell NCCL's backend, and ask of it: `ProcessGroupNCCL.Options`, which a build for the host lacks.

They have no effect on memory. Defaults are those of PyTorch 2.13's CUDA build.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from graph.fake_cuda.torch_private import fake_backend

_CLASS: Final = "ProcessGroupNCCL"
#: NCCL_CONFIG_UNDEF_INT of nccl.h, and the numbers of its ncclConfig_t that PyTorch knows.
_UNDEFINED: Final = -(1 << 31)
_NUMBERS: Final = (
    *("blocking", "cga_cluster_size", "collnet_enable", "cta_policy", "max_ctas", "min_ctas", "nvls_ctas"),
    *("split_share", "traffic_class"),
)


def _config() -> types.SimpleNamespace:
    return types.SimpleNamespace(net_name=None, **dict.fromkeys(_NUMBERS, _UNDEFINED))


@dataclass(eq=False)
class _Options:
    """`ProcessGroupNCCL.Options`."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)
    backend: str = "nccl"
    config: Any = field(default_factory=_config)
    global_ranks_in_group: list[int] = field(default_factory=list)
    group_name: str = ""
    split_color: int = -2
    split_from: object = None
    use_pg_for_symm_mem_rendezvous: bool = False


class ProcessGroupNCCL:
    """The backend, of which nothing is made."""

    Options = _Options
    NCCLConfig = types.SimpleNamespace
    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = range(3)


class Options:
    """Those of the job's group."""

    def __init__(self) -> None:
        self._given: Any = None

    def begin(self, given: object, timeout: object) -> None:
        """The job begins with these, and waits so long, if they are told."""
        self._given = given or vars(dist)[_CLASS].Options()
        if timeout is not None:
            self._given._timeout = timeout

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Inside, every build has them, and backends give them."""
        with contextlib.ExitStack() as stack:
            for module in (dist, c10d):
                if not hasattr(module, _CLASS):
                    stack.enter_context(mock.patch.object(module, _CLASS, ProcessGroupNCCL, create=True))
            stack.enter_context(
                mock.patch.object(fake_backend(), "options", property(lambda backend: self._given), create=True)
            )
            yield
