"""Kernels of the Hugging Face Hub (`kernels`, transformers' `attn_implementation="kernels-community/flash-attn2"`).

Their Python code runs from where the user has them; the compiled operators of flash-attn 2 and 3 allocate what they
would (`flash_attn.py`, `flash_attn3.py`). Each build has a library of operators with a name of its own, that of the
extension which would register it: kernels-community's flash-attn2/torch-ext/torch_binding_stable.cpp and
flash-attn3/flash-attn/flash_api.cpp.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from graph.host.extensions import flash_attn, flash_attn3

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: An extension's name: the kernel's, and of which build it is.
_BUILD: Final = re.compile(r"_flash_attn(?P<generation>[23]?)_\w+")
_FOUR: Final = "(Tensor, Tensor, Tensor, Tensor)"
_MASK: Final = "bool is_causal, int window_size_left, int window_size_right, float softcap, bool {}, Generator? gen_"
_ENDS: Final = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_LONGEST: Final = "int max_seqlen_q, int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors"
_GRADIENTS: Final = (
    "Tensor! dout, Tensor! q, Tensor! k, Tensor! v, Tensor! out, Tensor! softmax_lse, "
    "Tensor? dq_, Tensor? dk_, Tensor? dv_"
)
#: The operators of flash-attn2.
_SECOND: Final = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor(out_!)? out_, Tensor? alibi_slopes_, float p_dropout, "
    f"float softmax_scale, {_MASK.format('return_softmax')}) -> {_FOUR}",
    f"varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor? out_, {_ENDS}, Tensor? seqused_k_, Tensor? leftpad_k_, "
    f"Tensor? block_table_, Tensor? alibi_slopes_, {_LONGEST}, {_MASK.format('return_softmax')}) -> {_FOUR}",
    f"bwd({_GRADIENTS}, Tensor? alibi_slopes_, float p_dropout, float softmax_scale, "
    f"{_MASK.format('deterministic')}, Tensor? rng_state) -> {_FOUR}",
    f"varlen_bwd({_GRADIENTS}, {_ENDS}, Tensor? alibi_slopes_, {_LONGEST}, {_MASK.format('deterministic')}, "
    f"Tensor? rng_state) -> {_FOUR}",
    "fwd_kvcache(Tensor! q, Tensor! kcache, Tensor! vcache, Tensor? k_, Tensor? v_, Tensor? seqlens_k_, "
    "Tensor? rotary_cos_, Tensor? rotary_sin_, Tensor? cache_batch_idx_, Tensor? leftpad_k_, Tensor? block_table_, "
    "Tensor? alibi_slopes_, Tensor? out_, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, int num_splits) -> (Tensor, Tensor)",
)


class _Extension(Loader):
    """Registers the operators instead of what would."""

    def __init__(self, runtime: Runtime, library: str, generation: str) -> None:
        self.runtime, self.library, self.generation = runtime, library, generation

    def create_module(self, spec: ModuleSpec) -> None:
        """An empty one."""

    def exec_module(self, module: ModuleType) -> None:
        """Only the operators are used, as `torch.ops.<library>`."""
        if self.generation == "3":
            flash_attn3.register(self.runtime, self.library)
        else:
            flash_attn3.define(self.runtime, self.library, _SECOND)
            for name, kernel in flash_attn.functions()["flash_attn_2_cuda"].items():
                self.runtime.override(f"{self.library}::{name}", kernel)


class _Extensions(MetaPathFinder):
    """Finds the extensions of the Hub's builds of flash-attn."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.rpartition(".")[2]
        build = _BUILD.fullmatch(name)
        if build is None or not any(found for folder in path or () for found in Path(folder).glob(f"{name}.*")):
            return None
        return ModuleSpec(fullname, _Extension(self.runtime, name, build["generation"]))


@contextlib.contextmanager
def found(runtime: Runtime) -> Iterator[None]:
    """Inside, these extensions are found before those that are compiled."""
    finder = _Extensions(runtime)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
