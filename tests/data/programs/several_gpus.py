"""One process on two GPUs: after each part, of each GPU, allocated bytes, their peak since the last, reserved bytes and
allocations so far. With CUBLAS_WORKSPACE_CONFIG=:0:0, for in the recording both GPUs have one cuBLAS handle."""
import copy
import io

import torch
from torch import nn
from torch.nn.parallel import comm


def said(what):
    for gpu in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(gpu)
        names = "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current"
        print(what, gpu, *(stats[name] for name in names), stats["allocation.all.allocated"])
        torch.cuda.reset_peak_memory_stats(gpu)


def copies():
    there = torch.randn(1000, 1000, device="cuda:1")
    return there.t().to("cuda:0"), there[:, ::2].to("cuda:0"), there.half().to("cuda:0", torch.float32), there.to(
        "cuda:0", torch.float16, non_blocking=True), there.cpu().to("cuda:0"), there.cuda()


def current():
    """What is made without a number is on the GPU that is current."""
    with torch.cuda.device(1):
        kept = [torch.zeros(77777, device="cuda"), torch.empty(3).cuda()]
    torch.cuda.set_device(1)
    kept.append(torch.ones(555, 555, device="cuda"))
    torch.cuda.set_device(0)
    with torch.cuda.device_of(kept[0]):
        kept.append(torch.empty(2000, device="cuda"))
    print([one.device.index for one in kept], torch.cuda.current_device(), torch.arange(3, device="cuda").device)


def streams():
    other = torch.cuda.Stream(device=1)
    with torch.cuda.stream(other):
        used, small = torch.empty(3_000_000, device="cuda:1"), torch.empty(1000, device="cuda")
        print(small.device, torch.cuda.current_stream().device, torch.cuda.current_stream(0).device)
    print(torch.cuda.current_device(), torch.cuda.current_stream(1) == torch.cuda.default_stream(1))
    used.record_stream(torch.cuda.default_stream(1))
    event = torch.cuda.Event()
    event.record(other)
    torch.cuda.current_stream(0).wait_event(event)


def refused():
    here, there = torch.randn(9, 9, device="cuda:0"), torch.randn(9, 9, device="cuda:1")
    for call in (
        lambda: here + there, lambda: torch.mm(there, here), lambda: torch.cat([here, there]),
        lambda: torch.where(here > 0, there, here), lambda: there[torch.zeros(2, dtype=torch.int64, device="cuda:0")],
        lambda: nn.functional.embedding(torch.zeros(2, dtype=torch.int64, device="cuda:0"), there),
        lambda: nn.functional.linear(here, there), lambda: here.add_(there), lambda: torch.empty(1, device="cuda:2"),
        lambda: torch.add(here, here, out=there), lambda: torch._foreach_add_([here, there], [there, here]),
        lambda: comm.gather([here, there[:, 1:]], 0, 0), lambda: comm.gather([here, there[0]]),
        lambda: comm.gather([here.cpu()]), lambda: comm.broadcast_coalesced([here, there], [0, 1]),
        lambda: torch.cuda.get_device_name(2), lambda: torch.cuda.can_device_access_peer(0, 2),
        lambda: torch.cuda.mem_get_info(2), lambda: torch.cuda.current_stream(2), lambda: torch.cuda.Stream(2),
        lambda: torch.cuda.get_device_properties(0) == torch.cuda.get_device_properties(1),
        lambda: torch.where(here > 0, there[0, 0], here).device, lambda: torch.cuda.can_device_access_peer(1, 1),
    ):
        try:
            print(call())
        except (RuntimeError, AssertionError) as error:
            print(str(error).partition("\n")[0])


def lists():
    """Of tensors on both: optimizers and norms sort them."""
    weights = [nn.Parameter(torch.randn(100, 100, device=f"cuda:{place % 2}")) for place in range(6)]
    sum((weight.to("cuda:0") ** 2).sum() for weight in weights).backward()
    print([weight.grad.device.index for weight in weights], nn.utils.clip_grad_norm_(weights, 1.0).device)
    for kind in torch.optim.AdamW, torch.optim.SGD:
        kind(weights, lr=0.1).step()
    torch.optim.Adam(weights, fused=True).step()
    torch._foreach_mul_(weights := [weight.detach() for weight in weights], 2.0)
    print([one.device.index for one in torch._foreach_add(weights, weights)])
    print([one.device.index for one in torch._foreach_norm(weights)])


def between():
    print([one.device.index for one in comm.broadcast(torch.randn(999, device="cuda:1"), [1, 0])])
    sizes = 10, 3_000_000, 5, 7, 2_000_000
    found = comm.broadcast_coalesced([torch.randn(size, device="cuda:0") for size in sizes], [0, 1])
    print([[one.device.index for one in some] for some in found])
    images = [torch.randn(place + 2, 3, 8, 8, device=f"cuda:{place}") for place in range(2)]
    images = comm.gather([one.to(memory_format=torch.channels_last) for one in images], 0, 1)
    print(images.device, tuple(images.shape), images.stride(), comm.gather(comm.scatter(images, [0, 1]), 0, -1).device)
    print(comm.reduce_add([torch.ones(500, 5, device=f"cuda:{place}") for place in range(2)], 1).device)
    parts, wholes = ([torch.ones(rows, device=f"cuda:{place}") for place in range(2)] for rows in (50, 100))
    torch.cuda.nccl.all_gather(parts, wholes)
    torch.cuda.nccl.reduce_scatter(wholes, parts)


def split_model():
    """A model's halves on two GPUs."""
    first, second = nn.Linear(1024, 4096).to("cuda:0"), nn.Linear(4096, 1024).to("cuda:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for _ in range(2):
        second(first(torch.randn(64, 1024, device="cuda:0")).to("cuda:1")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def data_parallel():
    layers = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
    model = nn.DataParallel(nn.Sequential(*layers).cuda())
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cuda")
    for _ in range(2):
        inputs, labels = torch.randn(11, 3, 64, 64), torch.zeros(11, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda"):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        said("data_parallel's step")
    with torch.no_grad():
        print(model.eval()(torch.randn(7, 3, 64, 64, device="cuda")).device)


def storages():
    """torch.load and copy.deepcopy make storages where they are told, or where the first ones were."""
    there = torch.ones(999, device="cuda:1")
    print(copy.deepcopy(there).device, torch.UntypedStorage(16, device="cuda:1").device)
    print(there.untyped_storage().clone().device, torch.ones(3).untyped_storage().cuda(1).device)
    file = io.BytesIO()
    torch.save({"weight": nn.Parameter(torch.ones(77777, device="cuda:0"))}, file)
    for place in "cuda:1", {"cuda:0": "cuda:1"}, torch.device("cuda:1"), lambda storage, _: storage.cuda(1), None, "cpu":
        file.seek(0)
        print(torch.load(file, map_location=place)["weight"].device)


def out_of_memory():
    torch.cuda.set_per_process_memory_fraction(0.01, 1)
    kept = torch.empty(1 << 28, device="cuda:0")
    try:
        torch.empty(1 << 28, device="cuda:1")
    except torch.OutOfMemoryError as error:
        print(str(error)[:90], "on GPU", kept.device.index, "there is room")
    print([free < total - (1 << 30) for free, total in map(torch.cuda.mem_get_info, range(2))])
    segments = torch.cuda.memory._snapshot()["segments"]
    print([sum(one["total_size"] for one in segments if one["device"] == gpu) for gpu in range(2)])


print(torch.cuda.device_count(), torch.cuda.current_device())
for part in copies, current, streams, refused, lists, between, split_model, data_parallel, storages, out_of_memory:
    part()
    said(part.__name__)
torch.cuda.empty_cache()
said("empty_cache")
