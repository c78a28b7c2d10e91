"""What libraries keep of a capture, dropped, so that the next one finds them as in a new process.

`torch.distributed.destroy_process_group` clears the registries of process groups (`graph.fake_cuda.ranks.collectives`),
and a recorder, a runtime and a model last for one capture. The rest is what this module drops, before a capture and
after it:

- answers that a GPU gave once: the next capture may be on another one (`torch.cuda`, bitsandbytes);
- tensors that lie on the fake device, which is gone (bitsandbytes' code books and lists of paged states,
  DataParallel's streams);
- DTensor's plans, which hold the mesh that they were made for. Meshes are equal that have the same ranks and names, but
  the groups behind those are the job's: `pp=2,dp=2,tp=2` and `dp=4,tp=2` both have `tp` on ranks 0 and 1, as their
  fourth group and their third. DTensor keeps plans for each thread, so autograd's thread is asked as well;
- DTensor's generator, which the first job that draws numbers makes, and brings to one state by a broadcast.

Only modules that are imported are looked at.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import torch

#: Functions with a cache of what the GPU answered: module, name.
_ANSWERS: Final = (
    ("torch.cuda", "_check_bf16_tensor_supported"),
    ("bitsandbytes.backends.cuda.ops", "_gpu_dispatch_props"),
    ("bitsandbytes.backends.cuda.ops", "_gemm_4bit_use_custom_fn"),
)
#: Functions with a cache by mesh: module, name.
_PLANS: Final = (
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached"),
)


def drop() -> None:
    """Drop all of it. The fake device must be in use, and nobody be told of what happens there."""
    for module, name in (*_ANSWERS, *_PLANS):
        _clear(module, name)
    if (bitsandbytes := sys.modules.get("bitsandbytes.functional")) is not None:
        bitsandbytes.name2qmap.clear()
        bitsandbytes.GlobalPageManager.get_instance().paged_tensors.clear()
    if (scatter := sys.modules.get("torch.nn.parallel._functions")) is not None:
        scatter._streams = None  # type: ignore[attr-defined]
    if "torch.distributed.tensor._api" in sys.modules:
        _drop_plans()


def _clear(module: str, name: str) -> None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not None:  # not imported, or a release without it
        found.cache_clear()


def _drop_plans() -> None:
    """DTensor's, of this thread and of autograd's for the device, and its generator."""
    logging.getLogger("torch.utils.flop_counter").setLevel(
        logging.ERROR
    )  # imported here, it says that Triton is absent
    from torch.distributed.tensor import DTensor, _random, _redistribute, debug

    shardings = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    clear = getattr(debug, "_clear_sharding_prop_cache", None) or shardings.cache.cache_clear  # up to 2.9

    _random._rng_tracker = None
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # from 2.10 on
        _redistribute.clear_redistribute_planner_cache()
    clear()
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device="cuda", requires_grad=True)
        result = leaf.clone()
        result.register_hook(lambda gradient: clear())  # type: ignore[no-untyped-call]
        torch.autograd.grad(result, leaf, torch.empty(0, device="cuda"))
