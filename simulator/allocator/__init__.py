"""PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) as numba kernels over one array of int64.

`layout` names the words of the array. Above it, in the order in which they use each other: `free_lists` (ordered sets),
`driver` (the device under the allocator), `statistics`, `sizes` (rounding), `private_pools`, `checkpoints`, `blocks`,
`expandable_segments`, `free`, `release_blocks`, `garbage_collection`, `malloc`. What differs between releases
(`releases`) and what the option string says (`conf`) are switches and numbers in the array.

`simulator.engine` serves a trace's events with these; other rooms import `releases`, `conf` and the names of `layout`.
"""
