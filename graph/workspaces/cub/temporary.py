"""Temporary storage of CUB's device-wide algorithms, as PyTorch asks for it: radix sort, scan, selection, sum.

An algorithm asks for one block that holds its parts, each rounded up to 256 bytes, plus 255 bytes to align the first
(`AliasTemporaries`, cub/util_temporary_storage.cuh). Tile sizes are CUB's tuned policies by compute capability
(cub/device/dispatch/tuning); they were read off recordings of the CUDA builds 2.9.1 (CUDA 12.8), 2.11.0 and 2.13.0
(CUDA 13.0), since they differ with the version of CUB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from graph.hardware.profile import Profile
from graph.workspaces.metadata import up, upper

_ALIGN: Final = 256
_DIGITS: Final = 256
_PORTION: Final = 1 << 28

#: items a tile of the one-sweep sort, by bytes of key and value: compute capability 7.x, 8.x, from 9.0
_SORT_TILES: Final[Mapping[tuple[int, int], tuple[int, int, int]]] = {
    (8, 8): (2816, 3840, 4608),
    (4, 4): (11776, 6528, 6528),
    (4, 8): (2816, 3072, 5376),
    (2, 8): (2816, 3072, 5632),
    (1, 8): (2816, 3072, 5632),
    (8, 0): (2816, 3840, 5760),
    (4, 0): (5888, 8064, 7296),
    (2, 0): (9728, 9728, 9728),
    (1, 0): (9728, 9728, 9728),
}
_SINGLE_TILES: Final[Mapping[int, int]] = {8: 2304, 4: 4864, 2: 4864, 1: 4864}


def storage(*parts: int) -> int:
    """The block that holds parts of these sizes."""
    return sum(upper(part, _ALIGN) for part in parts) + _ALIGN - 1


def _generation(profile: Profile) -> int:
    return min(max(profile.arch[0], 7), 9) - 7


def sort_pairs(
    profile: Profile, count: int, key: int, value: int, bits: int | None = None, *, doubled: bool = False
) -> int:
    """Bytes for `cub::DeviceRadixSort::SortPairs` of `count` keys of `key` and values of `value` bytes (0: `SortKeys`).

    `bits` is how many bits of the key are sorted (all). One tile needs none: CUB asks for 1 byte. `doubled`: the caller
    has a second pair of arrays (`cub::DoubleBuffer`).
    """
    if count <= _SINGLE_TILES[max(key, value)]:
        return 1
    if key < 4 and profile.arch < (9, 0):
        second = [] if doubled else [count * key, count * value]
        return storage(*second, 4 * _spine(profile, key))
    passes = up(8 * key if bits is None else max(bits, 1), 8)
    tile = _SORT_TILES.get((key, value), _SORT_TILES[8, 8])[_generation(profile)]
    portions = up(count, _PORTION)
    parts = [portions * passes * _DIGITS * 8, up(min(count, _PORTION), tile) * _DIGITS * 4]
    if passes > 1 and not doubled:
        parts += [count * key, count * value]
    return storage(*parts, portions * passes * 4)


def sort_rows(profile: Profile, count: int) -> int:
    """Bytes for the sort by row that puts rows sorted together apart again: pairs of 32 bits, one pass."""
    tile = 5760 if profile.arch >= (9, 0) else _SORT_TILES[8, 8][_generation(profile)]
    return storage(_DIGITS * 8, up(count, tile) * _DIGITS * 4, 4)


def _spine(profile: Profile, key: int) -> int:
    """Counters of the sort that reads its keys twice, which CUB takes for keys of less than 4 bytes."""
    return _blocks(profile) * (_DIGITS if key > 1 else _DIGITS // 2) + 11264


def _blocks(profile: Profile) -> int:
    """The most blocks that algorithms in two passes start: five waves of blocks of 256 threads."""
    return 5 * profile.sm_count * (profile.max_threads_per_sm // 256)


def segmented_sort(count: int, key: int, value: int) -> int:
    """Bytes for `cub::DeviceSegmentedRadixSort::SortPairs`: a second pair of arrays."""
    return storage(count * key, count * value)


def merge_sort_pairs(profile: Profile, count: int, key: int, value: int) -> int:
    """Bytes for `thrust::sort_by_key` with an order of its own (values of 0 bytes: `thrust::sort`), or of numbers that
    are not of C++: a merge sort, with tiles of 256 threads."""
    place = 4 if profile.release >= (2, 11) else 8
    return storage(count * key, count * value, (up(count, 256 * min(17, 68 // key)) + 1) * place)


def sort_pairs_of_thrust(profile: Profile, count: int, key: int, value: int) -> int:
    """Bytes for `thrust::sort_by_key` of numbers of C++ in their order: a radix sort into a second pair of arrays."""
    second = upper(count * key, 128) + upper(count * value, 128)
    return second + sort_pairs(profile, count, key, value, doubled=True)


def reduce_by_key_of_thrust(count: int) -> int:
    """Bytes for `thrust::reduce_by_key` with sums of 4 bytes."""
    return storage(4, storage((up(count, 2304) + 32) * 16))


def reduce_of_thrust(profile: Profile, count: int, item: int) -> int:
    """Bytes for `thrust::reduce` to a result of `item` bytes, and all that is made of it: `inner_product`, `count_if`,
    `find`."""
    return item + total(profile, count, item)


def unique_by_key_of_thrust(profile: Profile, count: int) -> int:
    """Bytes for `thrust::unique_by_key` with keys and values of 8 bytes."""
    tuned = profile.release >= (2, 7)
    tile = 2688 if tuned and profile.arch == (8, 0) else 9856 if tuned and profile.arch >= (9, 0) else 640
    return storage((up(count, tile) + 32) * 16, 1, *extra(profile))


def unique_of_thrust(profile: Profile, count: int) -> int:
    """The same for `thrust::unique`."""
    return storage((up(count, 640) + 32) * 16, 1, *extra(profile))


def scan_of_thrust(profile: Profile, count: int) -> int:
    """Bytes for `thrust::inclusive_scan` of integers of 8 bytes."""
    tuned = profile.release >= (2, 11)
    tile = {(8, 0): 3168, (9, 0): 2688}.get(profile.arch, 4576 if profile.arch >= (10, 0) else 896) if tuned else 896
    return storage((up(count, tile) + 32) * 16, *extra(profile))


def extra(profile: Profile) -> tuple[int, ...]:
    """A further part that CUB has with CUDA 13 (PyPI's wheels of PyTorch 2.10 have CUDA 12.8)."""
    return (1,) if profile.release >= (2, 11) else ()


def scan(profile: Profile, count: int, width: int, *, apart: bool = False) -> int:
    """Bytes for `cub::DeviceScan` of `count` numbers of `width` bytes: each of 128 threads has 15 of 4 bytes, or as
    many bytes of others. A tile's sum and status are one word; `apart`: three arrays, which CUB has for numbers that
    are not its own, such as PyTorch's floats of 16 bits and complex ones (`ScanTileState`, cub/agent)."""
    tiles = up(count, 128 * min(60 // width, 30)) + 32
    if apart:
        return storage(storage(tiles * 4, tiles * width, tiles * width))
    return storage(tiles * max(4, 2 * width), *extra(profile))


def ordered_scan(profile: Profile, count: int, width: int) -> int:
    """Bytes for sums of `count` numbers of `width` bytes in one order: a sum for each block of threads
    (`inclusive_deterministic_scan`, aten/src/ATen/cuda/cub.cuh)."""
    threads = {8: 256, 16: 128}.get(width, 512)
    return width * min(up(count, threads * 16), profile.sm_count)


def _tuned_for(profile: Profile) -> tuple[int, int]:
    """The compute capability whose tiles are taken: CUB of CUDA 12 has none of Blackwell's own."""
    return (9, 0) if profile.arch >= (10, 0) and profile.release < (2, 11) else profile.arch


def scan_by_key(profile: Profile, count: int, key: int) -> int:
    """Bytes for `cub::DeviceScan::InclusiveScanByKey` with keys and sums of `key` bytes."""
    tiles = {(8, 0): (2240, 3840), (9, 0): (2464, 4032)}
    arch = _tuned_for(profile)
    wide, narrow = tiles.get(arch, (5888, 4480) if arch >= (10, 0) else (2304, 2304))
    blocks = up(count, wide if key == 8 else narrow)
    return storage((blocks + 32) * 16, (blocks + 1) * key)


def unique_by_key(profile: Profile, count: int, key: int) -> int:
    """Bytes for `cub::DeviceSelect::UniqueByKey` with keys of `key` bytes."""
    arch, recent = _tuned_for(profile), profile.release >= (2, 13)
    if arch == (8, 0):
        wide, narrow = (1344 if recent else 1792), 2816
    elif arch >= (9, 0):
        wide, narrow = 4928 if recent else 4480 if arch == (9, 0) else 3840, 7168
    else:
        wide, narrow = 320, 704
    tile, word = wide if key == 8 else narrow, 8 if profile.release < (2, 7) else 16
    return storage((up(count, tile) + 32) * word, *extra(profile))


def total(profile: Profile, count: int, item: int = 4) -> int:
    """Bytes for `cub::DeviceReduce` to a result of `item` bytes; one tile needs none: CUB asks for 1 byte."""
    return 1 if count * item <= 16384 else storage(_blocks(profile) * item)


def selected(profile: Profile, count: int) -> int:
    """Bytes for `cub::DeviceSelect::Flagged` of places of 8 bytes among `count` flags."""
    tiles = {(8, 0): 2304, (9, 0): 4224}
    arch = _tuned_for(profile)
    tile = tiles.get(arch, 3520 if arch >= (10, 0) else 640)
    return storage((up(count, tile) + 32) * 8, *extra(profile))
