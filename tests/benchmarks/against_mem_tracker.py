"""One case, by `estimate` or by torch's own MemTracker, in a process of its own: seconds beyond imports, peak bytes.

    python -m tests.benchmarks.against_mem_tracker estimate|mem-tracker CASE

CASE is a JSON object. MemTracker follows a real program, so that it needs a GPU or, as here, a fake one; it counts what
is alive, each storage rounded up to 512 bytes, and knows no allocator.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any


def estimate(document: dict[str, Any]) -> dict[str, float]:
    """The whole of `estimate`: capture, lowering, replay with its analyses."""
    import simulator.engine.replay  # noqa: F401 (imports are not timed)
    from simulator.estimator.estimate import answer

    _imported()
    start = time.perf_counter()
    found = answer(document)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak": found["peak_allocated"]}


def mem_tracker(document: dict[str, Any]) -> dict[str, float]:
    """Two training steps, which is where the peak is, under MemTracker."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from graph.case import Case
    from graph.fake_cuda import sdpa as attention
    from graph.fake_cuda.device import fake_cuda
    from graph.hardware.profile import profile
    from graph.loop.training import make_optimizer
    from graph.models.sources import build

    case = Case.of({**document, "steps": 2})
    _imported()
    start = time.perf_counter()
    built = build(case)
    with fake_cuda(profile(case.gpu, case.release)) as runtime:
        attention.install(runtime)
        model = built.load(lambda module, _: _placed(module)) or built.module
        optimizer = make_optimizer(case, list(model.parameters()))
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(case.steps):
                inputs = {name: host.to(torch.device("cuda", 0)) for name, host in built.host()}
                built.forward(model, inputs).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        peak = sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
    return {"seconds": time.perf_counter() - start, "peak": peak}


def _imported() -> None:
    """Import what both need of torch, of transformers and of the project."""
    from importlib import import_module

    for name in (
        "transformers.models.opt.modeling_opt",
        "graph.fake_cuda.sdpa",
        "graph.recorder.capture",
        "graph.fake_cuda.device",
    ):
        import_module(name)


def _placed(module: Any) -> Any:
    """A model of the meta device on the GPU, tied parameters once."""
    import torch

    moved: dict[int, tuple[Any, Any]] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty_like(tensor, device="cuda")
                    parameter = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = (
                        torch.nn.Parameter(empty, tensor.requires_grad) if parameter else empty,
                        tensor,
                    )
                table[name] = moved[id(tensor)][0]
    return module


if __name__ == "__main__":
    which, text = sys.argv[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps((estimate if which == "estimate" else mem_tracker)(json.loads(text))))
