"""Out-of-memory messages as PyTorch of each release and other libraries print them, from figures as they print them.

Written after `c10/cuda/CUDACachingAllocator.cpp` of 1.2, 1.8, 1.11, 2.1, 2.2, 2.5 and 2.11, apart from the code that
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_SPLIT_ADVICE: Final = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
_SEE: Final = "  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
_OLD_LINK: Final = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
_NEW_LINK: Final = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)

#: Forms of messages that are words and a request at most.
FIXED: Final[Mapping[str, str]] = {
    "1eb": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    "cuda-error": "RuntimeError: CUDA error: out of memory",
    "cublas": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "gpuassert": "GPUassert: out of memory mean.cu 377",
    "ggml": "CUDA error: out of memory\n  current device: 0, in function ggml_cuda_pool_malloc_leg",
    "ggml-malloc": (
        "ggml_backend_cuda_alloc_buffer: allocating {asked} on device {gpu}: cudaMalloc failed: out of memory"
    ),
    "jax": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate {asked}.",
    "jax-allocating": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating {asked}.",
    "tensorflow": "I cuda_driver.cc:789] failed to allocate 2.46G ({asked}) from device: CUDA_ERROR_OUT_OF_MEMORY",
    "tensorflow-shape": "ResourceExhaustedError: OOM when allocating tensor with shape[16,112,112,147] and type float",
    "cupy": "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating {asked} (allocated so far: {allocated}).",
    "cupy-old": "cupy.cuda.memory.OutOfMemoryError: out of memory to allocate {asked} (total {allocated})",
    "host-windows": "RuntimeError: [enforce fail at alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: "
    "you tried to allocate {asked}.",
    "host-linux": "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate {asked}. Error code 12 (Cannot allocate memory)",
    "numpy": "numpy.core._exceptions._ArrayMemoryError: Unable to allocate {asked} for an array with shape (9, 9)",
    "killed": "100%|##########| 205944/205944 [18:54<00:00, 181.58it/s]\nKilled",
    "sigkill": "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)",
    "slurm": "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0.",
}


def written(row: Mapping[str, Any]) -> str:
    """The text of a row of tests/data/out_of_memory/texts.jsonl."""
    text, prefix = _message(row), row.get("prefix") or (f"[rank{row['rank']}]:" if "rank" in row else "")
    if row.get("dress") == "wrapped":
        text = "\n".join(_broken(text, 72)) if prefix else "\n".join(f"# {line}" for line in _broken(text, 72))
    return f"{prefix} {text}" if prefix else text


def _message(row: Mapping[str, Any]) -> str:
    form, said = row["form"], {"gpu": row.get("gpu"), **row["figures"]}
    if form in FIXED:
        return FIXED[form].format(**said)
    if form == "nccl":
        calloc = "\nnode:1:1 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc {asked}" if "asked" in said else ""
        return "node:1:1 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n" + calloc.format(**said)
    if form == "kernel":
        memory = "total-vm:53312244kB, anon-rss:{allocated}, file-rss:74816kB".format(**said).replace(" kB", "kB")
        return f"[2059991.491542] Out of memory: Killed process 25315 (python3) {memory}"
    if form == "onnxruntime":
        return f"BFCArena Failed to allocate memory for requested buffer of size {said['asked'].removesuffix(' bytes')}"
    if form == "async":
        return (
            "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            f"Currently allocated     : {said['allocated']}\nRequested               : {said['asked']}\n"
            f"Device limit            : {said['total']}\nFree (according to CUDA): {said['free']}\n"
            "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
        )
    processes = row.get("processes", [])
    return caching_allocator(
        form, said, processes, row.get("backend", "CUDA"), row.get("variable"), row.get("dress") == "bare"
    )


def caching_allocator(
    form: str,
    said: Mapping[str, Any],
    processes: Sequence[tuple[int | str, str]] = (),
    backend: str = "CUDA",
    variable: str | None = None,
    bare: bool = False,
) -> str:
    """The message of PyTorch's allocator of a release, from figures as c10's format_size prints them."""
    limit = f"{said['allowed']} allowed; " if "allowed" in said else ""
    if form in ("cached", "1.4", "1.10", "1.10s"):
        head = "" if bare else f"RuntimeError: {backend} out of memory. "
        rest = (
            f"{said['unallocated']} cached)"
            if form == "cached"
            else f"{said['reserved']} reserved in total by PyTorch)"
        )
        advice = {"1.10": _SPLIT_ADVICE + _SEE, "1.10s": _SPLIT_ADVICE}.get(form, "")
        return (
            f"{head}Tried to allocate {said['asked']} (GPU {said['gpu']}; {said['total']} total capacity; "
            f"{said['allocated']} already allocated; {said['free']} free; {limit}{rest}{advice}"
        )
    own = "Including non-PyTorch memory, this process has {} memory in use. "
    others = "Process {} has {} memory in use. "
    listed = "".join(own.format(size) if pid == "this" else others.format(pid, size) for pid, size in processes)
    private = f"with {said['private']} allocated in private pools (e.g., CUDA Graphs), " if "private" in said else ""
    setting = variable or ("PYTORCH_ALLOC_CONF" if form == "2.10" else "PYTORCH_CUDA_ALLOC_CONF")
    advice = (
        f"max_split_size_mb to avoid fragmentation.{_SEE}"
        if form == "2.1"
        else f"{setting}=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management "
        f" ({_NEW_LINK if form == '2.9' else _OLD_LINK})"
    )
    return (
        f"torch.OutOfMemoryError: {backend} out of memory. Tried to allocate {said['asked']}. GPU {said['gpu']} has a "
        f"total {'capacty' if form == '2.1' else 'capacity'} of {said['total']} of which {said['free']} is free. "
        f"{listed}{limit}Of the allocated memory {said['allocated']} is allocated by PyTorch, {private}and "
        f"{said['unallocated']} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
        f"try setting {advice}"
    )


def _broken(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` characters, broken at blanks."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word + " "
    return lines
