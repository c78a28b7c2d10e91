"""The record of Gemini: what it takes, what it cannot do, the defaults of LLMem's setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from graph.case import Case
from graph.optimizers import ADAMW, OPTIMIZERS
from strategies.parallel.mesh import Mesh
from strategies.strategy import Capture, Kind, Launch, Lowered, Share, Strategy
from traces.errors import ConfigError

if TYPE_CHECKING:
    from strategies.timing.roofline import Speed

#: What Gemini cannot do, or LLMem never did with it: key of the case, values that are possible, why.
POSSIBLE: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "dtype": (("fp16", "bf16"), "its chunks hold parameters in 16 bits beside an fp32 copy"),
    "autocast": (("",), "its parameters are in 16 bits already"),
    "quant": (("",), "its chunks hold no quantized weights"),
    "lora": ((0,), "its chunks hold trainable parameters only"),
    "accum": ((1,), "gradients overwrite the parameters in its chunks"),
    "optimizer": (tuple(key for key, one in OPTIMIZERS.items() if one.path == ADAMW), "it has HybridAdam"),
    "offload": (("",), "LLMem keeps its chunks on the GPU"),
    "clip": ((0.0,), "LLMem does not clip"),
}


_LAUNCH = Launch(
    no_accelerate="Colossal-AI has a launcher of its own",
    no_script="Colossal-AI's GeminiPlugin is set up in a script of its own",
)


NAME: Final = "gemini"
#: The axes that LLMem's methods have: one of data parallelism, and tp.
AXES: Final = ("dp", "adp", NAME, "cdp", "tp")


@dataclass(frozen=True)
class GeminiChunks(Strategy):
    """Chunks of Gemini: the graph of one GPU is rewritten for every rank."""

    share: Share = Share.NO
    launch: Launch = _LAUNCH
    own_mesh: bool = True

    def kinds(self, case: Case) -> Kind:
        """Conventional data parallelism keeps all on every rank."""
        return Kind.WHOLE if "cdp" in case.mesh else Kind.NONE

    def micro_batches(self, case: Case) -> int:
        """One for each rank of data parallelism."""
        return max(1, case.world // case.mesh.get("tp", 1))

    def refused(self, case: Case) -> Iterator[tuple[str, str]]:
        """What Gemini cannot do, or LLMem never did with it."""
        for key, (values, why) in POSSIBLE.items():
            if getattr(case, key) not in values:
                yield key, f"it takes {', '.join(map(repr, values))}: {why}"

    def lower(self, case: Case, capture: Capture, speed: Speed | None, rank: int | None = None) -> Lowered:
        """The events of every rank, equal ones once. Raises ConfigError for a mesh or model that it cannot have."""
        from strategies.gemini.gemini import lowered

        return lowered(case, mesh_of(case), capture, speed)


def mesh_of(case: Case) -> Mesh:
    """The mesh of a case: one axis of data parallelism, and tp. Raises ConfigError for another."""
    axes = Mesh.of(case.mesh or {"dp": case.world}, AXES)
    axes.check_world(case.world)
    along = [name for name, size in axes.axes if size > 1 and name != "tp"]
    if len(along) > 1:
        raise ConfigError(f"mesh: {axes} has {along[0]} and {along[1]}; give one axis of data parallelism, and tp")
    return axes


#: LLMem's own setting: Colossal-AI with transformers 4.29 and PyTorch 2.0. The GPU stays the user's.
_USUAL = {
    "dtype": "fp16",
    "attn": "eager",
    "checkpointing": "reentrant",
    "loss": "transformers-4.29",
    "attention_mask": True,
    "release": "2.0",
}
STRATEGIES = (
    GeminiChunks(
        "gemini", "Colossal-AI's chunks, as LLMem ran them", usual=_USUAL, clones_dropout=True, half_weights=True
    ),
)
