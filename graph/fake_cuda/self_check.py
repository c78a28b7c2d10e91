"""One small training step whose storages are known: whether this PyTorch behaves under `graph.fake_cuda` as on a GPU.

It goes through what could go wrong without a word: gradients added in place where paths meet, operators that are one
kernel on CUDA and several elsewhere (RMSNorm, backward of SiLU, dropout), dtypes of statistics, autocast and its cache,
recomputation, and the foreach form of AdamW.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graph.errors import UnsupportedTorch
from graph.fake_cuda.torch_private import CHECKED, next_sequence_number
from traces.release import version_of

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.fake_cuda.kernels import Kind
    from graph.fake_cuda.torch_private import Operator

_WIDTH: Final = 48
_TOKENS: Final = (2, 24)

#: Births (+) and deaths (-) of storages by bytes, from the release on that stands before them, as CUDA builds asked
#: their caching allocator for them (2.6.0+cu124, 2.7.1+cu126 and 2.13.0+cu130; 2.8.0 does as 2.7.1, 2.9.1 to 2.15.0 as
#: 2.13.0): the memory history of the step below, without the workspace of cuBLAS. Births that follow one another are
#: sorted: two outputs of one kernel come in either order.
_EXPECTED: Final[Mapping[tuple[int, int], str]] = {
    (2, 6): """
+64 +96 +96 +160 +160 +192 +192 +192 +192 +384 +3072 +4608 +7680 +7680 +7680 +7680 +9216 +9216 -192 -9216 +4608
+9216 -9216 +4608 -192 -9216 +4608 +4608 +7680 +7680 -4608 +4608 -4608 +192 +192 +9216 +9216 -192 -9216 +4608 +9216
-9216 +4608 -4608 -192 -9216 +7680 +7680 -7680 +4608 -7680 +4608 -4608 +4608 -4608 -4608 +192 +192 +2304 +9216 +9216
+9216 -9216 +32 +1536 +1536 +4608 -9216 +3072 -1536 +4 +4 +3072 -3072 -32 -4608 +4 +3072 -4 +3072 -3072 -3072 +1536
-3072 +32 +1536 +4608 -1536 -4608 -1536 +9216 -4608 +3072 -1536 +64 -32 +9216 -9216 -2304 +192 +192 +9216 -9216
-9216 -192 -192 +4608 -9216 +192 +192 +9216 +9216 -192 -9216 +4608 +9216 -9216 +4608 +7680 +7680 +7680 +7680 -7680
+7680 -7680 -7680 +4608 +7680 -4608 +160 -7680 +4608 -4608 +4608 +4608 -4608 +96 -4608 -4608 +9216 -4608 +192 +9216
+9216 -9216 -9216 +192 +192 +192 -192 -192 -192 -192 +9216 -192 +9216 +9216 +9216 -9216 -9216 -9216 -9216 -4608
-9216 +4608 -9216 -4608 +7680 +7680 -7680 +7680 -7680 -7680 +160 +4608 +7680 -7680 -4608 -4608 +96 +4608 -4608 -4608
-4608 -4 +64 +64 +64 +96 +96 +96 +96 +96 +96 +160 +160 +160 +160 +160 +160 +192 +192 +192 +192 +192 +192 +3072 +3072
+3072 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 -64 -3072 -192 -192 -7680 -160 -7680
-96 -7680 -160 -7680 -96 -96 -7680 -160 -7680 -96 -7680 -160 -7680 -192 -192 -3072 -64 -96 -96 -7680 -7680 -160 -160
-7680 -7680 -96 -96 -7680 -7680 -160 -160 -7680 -7680 -192 -192 -192 -192 -3072 -3072 -64 -64 -4608 -384 -3072 -192
-192 -7680 -7680 -96 -7680 -7680 -96 -160 -160 -64 -4
""",
    (2, 7): """
+64 +96 +96 +160 +160 +192 +192 +192 +192 +384 +3072 +4608 +7680 +7680 +7680 +7680 +9216 +9216 -192 -9216 +9216
+9216 -192 -9216 +4608 -9216 +4608 +4608 +7680 +7680 -4608 +4608 -4608 +192 +192 +9216 +9216 -192 -9216 +9216 +9216
-9216 -192 -9216 +4608 -9216 +7680 +7680 -7680 +4608 -7680 +4608 -4608 +4608 -4608 -4608 +192 +192 +2304 +9216 +9216
+9216 -9216 +32 +1536 +1536 +4608 -9216 +3072 -1536 +4 +4 +3072 -3072 -32 -4608 +4 +3072 -4 +3072 -3072 -3072 +1536
-3072 +32 +1536 +4608 -1536 -4608 -1536 +9216 -4608 +3072 -1536 +64 -32 +9216 -9216 -2304 +192 +192 +9216 -9216
-9216 -192 -192 +4608 -9216 +192 +192 +9216 +9216 -192 -9216 +4608 +9216 +9216 -9216 +7680 +7680 +7680 +7680 -7680
+7680 -7680 -7680 +4608 +7680 -4608 +160 -7680 +4608 -4608 +9216 -4608 +9216 +9216 -9216 +192 -9216 +96 -192 -9216
+192 +9216 +9216 -9216 -9216 +192 +192 +192 -192 -192 -192 -192 +9216 -192 +9216 +9216 +9216 -9216 -9216 -9216 -9216
-4608 -9216 +4608 -9216 -4608 +7680 +7680 -7680 +7680 -7680 -7680 +160 +4608 +7680 -7680 -4608 -4608 +9216 -4608
+192 +9216 -9216 +96 -192 -9216 -9216 -4 +64 +64 +64 +96 +96 +96 +96 +96 +96 +160 +160 +160 +160 +160 +160 +192 +192
+192 +192 +192 +192 +3072 +3072 +3072 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 -64
-3072 -192 -192 -7680 -160 -7680 -96 -7680 -160 -7680 -96 -96 -7680 -160 -7680 -96 -7680 -160 -7680 -192 -192 -3072
-64 -96 -96 -7680 -7680 -160 -160 -7680 -7680 -96 -96 -7680 -7680 -160 -160 -7680 -7680 -192 -192 -192 -192 -3072
-3072 -64 -64 -4608 -384 -3072 -192 -192 -7680 -7680 -96 -7680 -7680 -96 -160 -160 -64 -4
""",
    (2, 9): """
+64 +96 +96 +160 +160 +192 +192 +192 +384 +3072 +4608 +4608 +4608 +4608 +7680 +7680 +7680 +7680 +7680 +7680 -4608
+4608 -4608 +192 +4608 -192 +7680 +7680 -7680 +4608 -7680 +4608 -4608 +4608 -4608 -4608 +192 +192 +2304 +9216 +9216
+9216 -9216 +32 +1536 +1536 +4608 -9216 +3072 -1536 +4 +4 +3072 -3072 -32 -4608 +4 +3072 -4 +3072 -3072 -3072 +1536
-3072 +32 +1536 +4608 -1536 -4608 -1536 +9216 -4608 +3072 -1536 +64 -32 +9216 -9216 -2304 +192 +192 +9216 -9216 -9216
-192 -192 +4608 -9216 +192 +4608 +7680 +7680 +7680 +7680 -7680 +7680 -7680 -7680 +4608 +7680 -4608 +160 -7680 +4608
-4608 +96 +4608 -192 -4608 -4608 -4608 +7680 +7680 -7680 +7680 -7680 -7680 +160 +4608 +7680 -7680 -4608 -4608 +96
-4608 -192 -4 +64 +64 +64 +96 +96 +96 +96 +96 +96 +160 +160 +160 +160 +160 +160 +192 +192 +192 +192 +192 +192 +3072
+3072 +3072 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 +7680 -64 -3072 -192 -192 -7680 -160
-7680 -96 -7680 -160 -7680 -96 -96 -7680 -160 -7680 -96 -7680 -160 -7680 -192 -192 -3072 -64 -96 -96 -7680 -7680 -160
-160 -7680 -7680 -96 -96 -7680 -7680 -160 -160 -7680 -7680 -192 -192 -192 -192 -3072 -3072 -64 -64 -4608 -384 -3072
-192 -192 -7680 -7680 -96 -7680 -7680 -96 -160 -160 -64 -4
""",
}


class _Block(nn.Module):
    """A residual block: the normed input is used twice, so that gradients meet in two places."""

    def __init__(self) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.norm = nn.RMSNorm(_WIDTH, **kind)
        self.up = nn.Linear(_WIDTH, 80, **kind)
        self.down = nn.Linear(80, _WIDTH, bias=False, **kind)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as `hidden`."""
        normed = self.norm(hidden)
        out: torch.Tensor = hidden + self.down(functional.silu(self.up(normed))) + normed
        return out


def step() -> None:
    """One training step on "cuda"."""
    first, second = _Block(), _Block()
    head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Dropout(0.5), nn.Linear(_WIDTH, 16)).to_empty(device="cuda")
    optimizer = torch.optim.AdamW(parameter for part in (first, second, head) for parameter in part.parameters())
    inputs = torch.zeros(*_TOKENS, _WIDTH, dtype=torch.bfloat16).to("cuda")
    targets = torch.zeros(_TOKENS[0] * _TOKENS[1], dtype=torch.long).to("cuda")
    hidden = checkpoint(second, first(inputs), use_reentrant=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = functional.cross_entropy(head(hidden.float()).flatten(0, 1).float(), targets)
    del hidden
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def normal(events: str) -> list[str]:
    """`events` with births that follow one another sorted by size."""
    births = re.compile(r"\+\d+(?: \+\d+)*")
    return births.sub(lambda run: " ".join(sorted(run[0].split(), key=int)), " ".join(events.split())).split()


class _Log:
    """Observer that writes births and deaths by size."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.bytes: dict[int, int] = {}
        self.events: list[str] = []

    def operator(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, born: list[int], memo: Kind
    ) -> None:
        """Births."""
        for storage in born:
            self.bytes[storage] = self.runtime.bytes(storage)
            self.events.append(f"+{self.bytes[storage]}")

    def freed(self, storage: int) -> None:
        """A death."""
        self.events.append(f"-{self.bytes.get(storage, 0)}")


def _expected() -> str:
    """The storages of the step under the installed PyTorch: of the release since which they are the same."""
    return _EXPECTED[max(since for since in _EXPECTED if since <= version_of(torch.__version__))]


def verify(runtime: Runtime, taken: int = 0) -> None:
    """Raise UnsupportedTorch unless the step behaves on `runtime` as it does on a GPU, and leaves nothing behind.

    `taken` are the numbers of nodes that this thread has taken for us before, and autograd's has not.
    """
    torch.cuda.is_bf16_supported()  # asks with a tensor, once, on older GPUs
    first = next_sequence_number() - taken
    log = _Log(runtime)
    runtime.observer = log
    try:
        with torch.enable_grad():
            step()
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise UnsupportedTorch(f"PyTorch {torch.__version__} cannot be captured from: {reason}") from error
    finally:
        runtime.observer = None
    expected, found = normal(_expected()), normal(" ".join(log.events))
    if found != expected:
        same = next(
            (place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(found)),
        )
        there, here = (" ".join(events[same : same + 3]) or "nothing" for events in (expected, found))
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} does not behave as on a GPU: storages {there} expected at event {same} of a "
            f"known training step, {here} found; {CHECKED}"
        )
    if runtime.memory.live:
        raise UnsupportedTorch(f"PyTorch {torch.__version__} keeps storages of a training step that has ended")
    _level(first)


def _level(first: int) -> None:
    """Have the numbers of nodes go on from as many on autograd's thread as this one has taken since `first`: they stand
    as before the step. By them autograd orders nodes that a backward makes among those of a forward."""
    most = next_sequence_number() + 2 - first  # with the two nodes of this

    def take(gradient: torch.Tensor) -> None:
        spare = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            while next_sequence_number() < most:
                spare.view(0)

    with torch.enable_grad():
        nothing = torch.empty(0, device="cuda", requires_grad=True)
        result = nothing.view(0)
        result.register_hook(take)  # type: ignore[no-untyped-call]
        torch.autograd.backward(result, nothing)
