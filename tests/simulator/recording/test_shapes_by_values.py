"""Programs whose shapes depend on what is in their batches: recorded, they do what they do for real on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.simulator.recording.test_record import answer, record

#: Writes what each operator made, in bytes of new storages: of a model that reads texts of random lengths.
PROGRAM = """
import json, random, sys
import torch, torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

where, out = sys.argv[1:]
made = []

class Made(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = lambda value: [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        new = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors(result)}
        if "unique" in str(func):  # CUDA finds values in room for all of them
            new = {x.untyped_storage()._cdata: x.nbytes for x in tensors(result)}
        if str(func) not in ("aten._to_copy.default", "aten.detach.default"):
            made.append((str(func), sorted(size for storage, size in new.items() if storage not in given)))
        return result

random.seed(1)
torch.manual_seed(0)
embedding = torch.nn.Embedding(100, 32).to(where)
layer = torch.nn.Linear(32, 32).to(where)
head = torch.nn.Linear(32, 100).to(where)
weights = [*embedding.parameters(), *layer.parameters(), *head.parameters()]

def padded(texts):
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(where)
    mask = ids != 0
    x = layer(embedding(ids))
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, None], float("-inf"))
    x = scores.softmax(-1) @ x
    if not bool(mask.all()):
        x = x * mask[..., None]
    kept = mask[:, 1:]
    return F.cross_entropy(head(x)[:, :-1][kept], ids[:, 1:][kept])

def packed(texts):
    lengths = torch.tensor([len(text) for text in texts]).to(where)
    ids = torch.cat(texts).to(where)
    ends = F.pad(lengths.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(torch.arange(len(texts), device=where), lengths)
    place = torch.arange(len(ids), device=where) - ends[:-1][owner]
    x = layer(embedding(ids) + embedding(place.clamp(max=99)))
    parts = [part @ part.t() @ part for part in x.split((ends[1:] - ends[:-1]).tolist())]
    longest = int(lengths.max())
    first = (place == 0).nonzero().flatten()
    return F.cross_entropy(head(torch.cat(parts)), ids) + head(x[first]).sum() / longest

def distinct(texts):
    ids = torch.cat(texts).to(where)
    found, back, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    often = found[counts > 1]
    x = layer(embedding(found))[back]
    return x.masked_select((ids % 2 == 0)[:, None]).sum() + embedding(often).sum() + head(x[ids > 50]).sum()

texts = [torch.tensor([random.randint(1, 99) for _ in range(random.randint(3, 40))]) for _ in range(12)]
with Made():
    for loss in (padded, packed, distinct, padded):
        batch = random.sample(texts, 5)
        loss(batch).backward()
        with torch.no_grad():
            for weight in weights:
                if weight.grad is not None:
                    weight -= 0.01 * weight.grad
                    weight.grad = None
json.dump(made, open(out, "w"))
"""


def test_what_operators_make_is_what_they_make_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "program.py", "cpu", "cpu.json"], cwd=tmp_path, check=True)
    done = record(tmp_path, "program.py", "cuda", "cuda.json")
    assert done.returncode == 0, done.stderr
    real, ours = (json.loads((tmp_path / f"{where}.json").read_text()) for where in ("cpu", "cuda"))
    assert len(real) > 200
    assert ours == real
    assert answer(tmp_path)["assumptions"] == []


CHECKED = """
import torch
boxes = torch.rand(2, 4, device="cuda")
degenerate = boxes[:, 2:] <= boxes[:, :2]
if degenerate.any():  # as torchvision's detectors ask of their targets
    raise ValueError("All bounding boxes should have positive height and width.")
print((boxes[:, 2:] > 0).any().item())
"""


def test_a_programs_own_checks_of_floating_point_numbers_pass(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHECKED)
    done = record(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert ["False is assumed" in text for text in answer(tmp_path)["assumptions"]] == [True, False]


DRAWN = """
import torch
mask = torch.bernoulli(torch.full((8, 1000), 0.15, device="cuda")).bool()
print(len(torch.zeros(8, 1000, 64, device="cuda")[mask]))
rounds = 0
while (torch.rand(10, device="cuda") < 0.9).any():
    rounds += 1
print(rounds)
"""


def test_random_masks_are_told_and_loops_that_go_on_by_them_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DRAWN)
    done = record(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "1200\n99\n"), done.stderr
    told = [text for text in answer(tmp_path)["assumptions"] if "how random numbers compare" in text]
    assert [text.partition(" ")[0].rpartition("/")[2] for text in told] == ["train.py:3", "train.py:6"]


COMPARED = """
import torch
mask, number = torch.rand(10, device="cuda") > 0.5, torch.rand(1, device="cuda")
if mask.sum() == 0:
    raise ValueError("nothing is left")
assert number > 0
if not (number > 0).all() or mask.sum() < 1:
    raise ValueError("out of range")
if mask.long().sum() * 2 > 0:
    raise ValueError("some are wrong")
print(bool(number > 3), bool(mask.sum() > 3))
"""


def test_comparisons_that_a_program_checks_hold(tmp_path: Path) -> None:
    """Those of single numbers; where both ways go on they compare as 0, and counts as what all true ones are."""
    (tmp_path / "train.py").write_text(COMPARED)
    done = record(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
    assert [text for text in answer(tmp_path)["assumptions"] if "train.py:11 (<module>) asks for how" in text]


def test_a_programs_own_checks_of_numbers_from_the_host_are_made(tmp_path: Path) -> None:
    given = "torch.tensor([[10.0, 20.0, 5.0, 120.0]]).cuda()"
    (tmp_path / "train.py").write_text(CHECKED.replace('torch.rand(2, 4, device="cuda")', given))
    done = record(tmp_path, "train.py")
    assert done.returncode == 1
    assert "All bounding boxes should have positive height and width." in done.stderr
    assert answer(tmp_path)["assumptions"] == []


FACTORIZED = """
import torch
matrix = torch.eye(8, device="cuda").expand(3, 8, 8).contiguous().requires_grad_()
linalg = torch.linalg
for factorized in (linalg.inv, linalg.cholesky, linalg.eigh, linalg.svd, linalg.qr, linalg.lu, linalg.slogdet):
    factorized(matrix)
linalg.solve(matrix, matrix).sum().backward()
print(torch.distributions.MultivariateNormal(matrix[0, 0], matrix[0]).rsample().shape)
"""


def test_matrices_can_be_factorized(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FACTORIZED)
    done = record(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "torch.Size([8])\n"), done.stderr
    assert any("whether a matrix could not be factorized" in text for text in answer(tmp_path)["assumptions"])
