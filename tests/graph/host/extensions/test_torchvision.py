"""torchvision's operators on CUDA: what torchvision 0.28.0 allocated on the CUDA build of PyTorch 2.13.0 on libraries
that do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.simulator.recording.test_record import folder_of, record

#: What torchvision's library registers, which this environment may lack.
EXTENSION = """
import torch

made = torch.library.Library("torchvision", "DEF")
rois = "Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
shape = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
images = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
images += "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
images += "bool use_mask"
for schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, {rois}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, {rois}, {shape}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, {rois}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, {rois.replace('rois,', 'rois, Tensor argmax,')}, {shape}) -> Tensor",
    f"ps_roi_align(Tensor input, {rois}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, {rois.replace('rois,', 'rois, Tensor channel_mapping,')}, "
    f"int sampling_ratio, {shape}) -> Tensor",
    f"ps_roi_pool(Tensor input, {rois}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, {rois.replace('rois,', 'rois, Tensor channel_mapping,')}, {shape}) -> Tensor",
    f"deform_conv2d({images}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {images}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    made.define(schema)
"""

PROGRAM = """
import torch
import torchvision.extension

torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")

def sizes():
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    signs = {"alloc": "", "free_completed": "-"}
    return [signs[e["action"]] + str(e["size"]) for e in events if e["action"] in signs]

def told(name, call):
    before = len(sizes())
    made = call()
    print(name, *sizes()[before:], flush=True)
    return made

ops = torch.ops.torchvision
on = dict(device="cuda")
x, last = torch.randn(4, 32, 50, 60, **on), torch.randn(4, 50, 60, 32, **on).permute(0, 3, 1, 2)
rois, boxes, scores = torch.rand(700, 5, **on), torch.rand(700, 4, **on), torch.rand(700, **on)
whole, part = (4, 32, 50, 60), (700, 2, 4, 4)
told("nms", lambda: ops.nms(boxes, scores, 0.5))
told("nms0", lambda: ops.nms(boxes[:0], scores[:0], 0.5))
y = told("roi_align", lambda: ops.roi_align(x, rois, 0.25, 7, 7, 2, False))
z = told("roi_align_last", lambda: ops.roi_align(last, rois, 0.25, 7, 7, 2, False))
e = told("roi_align_none", lambda: ops.roi_align(x, rois[:0], 0.25, 7, 7, 2, False))
g = told("roi_align_backward", lambda: ops._roi_align_backward(y, rois, 0.25, 7, 7, *whole, 2, False))
y, places = told("roi_pool", lambda: ops.roi_pool(last, rois, 0.25, 7, 7))
g = told("roi_pool_backward", lambda: ops._roi_pool_backward(y, rois, places, 0.25, 7, 7, *whole))
y, places = told("ps_roi_align", lambda: ops.ps_roi_align(x, rois, 0.25, 4, 4, 2))
odd = torch.ones(*reversed(part), **on).permute(3, 2, 1, 0)
g = told("ps_roi_align_backward", lambda: ops._ps_roi_align_backward(odd, rois, places, 0.25, 4, 4, 2, *whole))
y, places = told("ps_roi_pool", lambda: ops.ps_roi_pool(last, rois, 0.25, 4, 4))
g = told("ps_roi_pool_backward", lambda: ops._ps_roi_pool_backward(y, rois, places, 0.25, 4, 4, *whole))
for batch, groups in ((4, 1), (4, 2), (66, 1)):
    image, weight = torch.randn(batch, 16, 12, 10, **on), torch.randn(24, 16 // groups, 3, 3, **on)
    offset, mask, bias = (torch.randn(*shape, **on) for shape in ((batch, 36, 12, 10), (batch, 18, 12, 10), (24,)))
    operands = (image, weight, offset, mask, bias, 1, 1, 1, 1, 1, 1, groups, 2, True)
    y = told("deform", lambda: ops.deform_conv2d(*operands))
    g = told("deform_backward", lambda: ops._deform_conv2d_backward(y, *operands))
"""

#: Sizes of what is allocated, and of what is freed with a minus. Of `nms` what is there before its boxes are chosen:
#: how many are is a matter of values.
RECORDED = """
nms 2800 5600 5600 -5600 -2800 11200 61600 700 4 1 -1
nms0
roi_align 4390400
roi_align_last 4390400 1536000 -1536000
roi_align_none
roi_align_backward 1536000
roi_pool 4390400 4390400 1536000 -1536000
roi_pool_backward 1536000
ps_roi_align 89600 89600
ps_roi_align_backward 1536000 89600 -89600
ps_roi_pool 89600 89600 1536000 -1536000
ps_roi_pool_backward 1536000
deform 46080 46080 276480 8519680 46080 -276480 -46080 -46080
deform_backward 30720 69120 34560 276480 46080 -46080 -276480 13824 46080 276480 -276480 -46080 96 96 96 -96 -96
deform 46080 46080 276480 46080 -276480 -46080 -46080
deform_backward 30720 69120 34560 276480 23040 -23040 23040 -23040 -276480 6912 46080 276480 -276480 -46080 96 96 96 -96 -96
deform 760320 760320 1520640 760320 -1520640 -760320 -760320
deform_backward 506880 1140480 570240 1520640 253440 -253440 253440 -253440 253440 -253440 -1520640 13824 760320 1520640 -1520640 -760320 96 96 96 -96 -96
"""  # noqa: E501


def test_torchvisions_operators_allocate_what_their_kernels_do(tmp_path: Path) -> None:
    files = {"torchvision/__init__.py": "", "torchvision/extension.py": EXTENSION, "train.py": PROGRAM}
    (tmp_path / "torchvision").mkdir()
    done = record(folder_of(tmp_path, files), "--gpu", "A100-80GB", "--steps", "all", "train.py")
    assert done.returncode == 0, done.stderr
    found, expected = done.stdout.splitlines(), RECORDED.strip().splitlines()
    assert found[0].startswith(expected[0])
    assert found[1:] == expected[1:]


def test_a_torchvision_without_its_library_is_left_alone(tmp_path: Path) -> None:
    files = {
        "torchvision/__init__.py": "",
        "torchvision/extension.py": "",
        "train.py": "import torchvision.extension\n",
    }
    (tmp_path / "torchvision").mkdir()
    done = record(folder_of(tmp_path, files), "train.py")
    assert done.returncode == 0, done.stderr
