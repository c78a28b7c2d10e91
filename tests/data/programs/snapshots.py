"""Snapshots that a program makes of its own memory: entries of the history, blocks, and what an observer is told."""

import collections
import pickle
import tempfile

import torch
from torch import nn

memory = torch.cuda.memory


def say(what, snapshot):
    """Kinds of entries with how many of each, bytes of allocations, the innermost line of each, and the blocks."""
    entries = snapshot["device_traces"][0]
    kinds = collections.Counter(entry["action"] for entry in entries)
    born = [entry for entry in entries if entry["action"] == "alloc"]
    lines = [line_of(entry.get("frames", [])) for entry in born]
    blocks = [
        (block["size"], block["state"], bool(block.get("frames")))
        for segment in snapshot["segments"]
        for block in segment["blocks"]
    ]
    print(what, sorted(kinds.items()), sum(entry["size"] for entry in born), sum("frames" in entry for entry in entries))
    print(" ", [entry["size"] for entry in entries if entry["action"] == "snapshot"], lines)
    print(" ", blocks)


def line_of(frames):
    """The innermost of this file; 0 where it is autograd's."""
    if any("[backward]" in frame["name"] for frame in frames):
        return 0
    return next((frame["line"] for frame in frames if frame["filename"] == __file__), 0)


def observed(device, asked, most, free):
    kinds = collections.Counter(entry["action"] for entry in memory._snapshot()["device_traces"][0])
    print("observed", device, asked, most, free, sorted(kinds.items()))


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


before = torch.ones(1 << 20, device="cuda")
say("no history", memory._snapshot())
memory._record_memory_history(max_entries=100_000)
model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, 3)
say("history", memory._snapshot())
with tempfile.NamedTemporaryFile() as file:
    memory._dump_snapshot(file.name)
    say("file", pickle.load(file))
train(model, optimizer, 1)
memory._record_memory_history(max_entries=20, clear_history=True)
train(model, optimizer, 1)
say("last 20", memory._snapshot())
memory._record_memory_history(enabled=None)
say("ended", memory._snapshot())
memory._record_memory_history("state")
train(model, optimizer, 1)
say("state", memory._snapshot())
memory._record_memory_history(True, trace_alloc_max_entries=1000, trace_alloc_record_context=True)
more = torch.ones(3000, device="cuda")
say("legacy", memory._snapshot())
memory._record_memory_history(max_entries=1000, clear_history=True)
torch._C._cuda_attach_out_of_memory_observer(observed)
for fraction in (1.0, 0.25):
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        torch.empty(1 << 40, device="cuda")
    except torch.OutOfMemoryError as error:
        print(type(error).__name__)
say("out of memory", memory._snapshot())
