"""What one capture leaves behind does not change the next: cases after each other, beside the same in new processes."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy import random_order

pytest.importorskip("transformers")

#: A case, and one that it would have changed or that is as unlike it as can be.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mesh": {"pp": 2, "dp": 2, "tp": 2}}, {"mesh": {"dp": 4, "tp": 2}}),
    ({"strategy": "deepspeed-3", "world": 2}, {"strategy": "fsdp2", "world": 2, "gpu": "T4-16GB"}),
    ({"quant": "nf4", "lora": 4}, {"checkpointing": "nonreentrant", "optimizer": "adamw-8bit"}),
    ({"task": "inference", "cache": "static"}, {"autocast": "fp16"}),
]


def test_cases_after_others_are_those_of_new_processes(tmp_path: Path) -> None:
    random_order.write_models(tmp_path)
    usual = {"model": str(tmp_path / "llama-2")}
    cases = [usual | random_order.sizes(case) | case for pair in PAIRS for case in pair]
    cases += itertools.islice(random_order.draw(7, tmp_path), 4)
    again = cases[1::2]
    alone = random_order.in_fresh_processes(again, 2)
    assert not any(one.error for one in alone[: len(PAIRS)])
    assert random_order.in_one_process(cases)[1::2] == alone


@pytest.mark.parametrize("case", [{"mesh": {"hsdp": 4, "tp": 2}}, {"strategy": "tp-sp", "world": 2}])
def test_no_mesh_outlives_its_capture(tmp_path: Path, case: dict[str, Any]) -> None:
    """Nor does one that is stopped, or that autograd's thread has planned for."""
    from torch.distributed.device_mesh import DeviceMesh

    random_order.write_models(tmp_path)
    case = case | {"model": str(tmp_path / "llama-2"), "seq": 32}
    for run in (random_order.outcome, random_order.stop_midway):
        run(case)
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is DeviceMesh]
