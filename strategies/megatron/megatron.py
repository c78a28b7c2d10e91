"""Tensor parallel as Megatron-LM has it: `tp-megatron`, and `tp-megatron-sp` with sequence parallelism.

Linear layers that make heads or the inner dimension of the MLP are split by columns, those that take them by rows, and
embedding, head and loss by vocabulary (padded to a multiple of 128 a rank). Norms and the biases of row layers are on
every rank. The layers of the Hugging Face model are replaced one by one (`strategies.megatron.parts`), so query, key
and value are three products where Megatron has one; weights, gradients and optimizer are those of the case (no flat
gradient buffer, no fused weight gradients). The labels are taken as shifted already, as Megatron's data is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.errors import CaptureError
from graph.loop.method import layers
from strategies.parallel.native import Native, place_all
from strategies.parallel.tp import COLUMNS, ROWS, check_heads, divides, fewer_heads, give_positions, role_of
from strategies.strategy import Kind, Launch, Share, Strategy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from graph.models.sources import Built
    from graph.recorder.recorder import Recorder
    from strategies.megatron.parts import Shared

#: The vocabulary is padded to a multiple of this many rows a rank (make-vocab-size-divisible-by).
ROWS_A_RANK: Final = 128


class Megatron(Native):
    """One rank of tensor parallelism over all ranks."""

    def __init__(self, case: Case, rank: int, *, sequence: bool = False) -> None:
        super().__init__(case, rank)
        self.sequence = sequence
        self._replicated: list[torch.nn.Parameter] = []

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """Split on meta, then placed."""
        from strategies.megatron.parts import Shared

        if built.head != "causal-lm":
            raise CaptureError(
                f"strategy {self.case.strategy!r} is for decoders (head causal-lm), not {built.head or 'a function'}"
            )
        sequence = self.sequence
        shared = Shared(self.rank, self.case.world, sequence=sequence)
        module: PreTrainedModel = built.module
        if sequence and not _learned(module):
            give_positions(built, self.case.seq)
        split_layers(module, layers(module), shared)
        _split_ends(module, shared)
        built.loss = functools.partial(_loss, {"use_cache": self.case.use_cache}, shared)
        placed = place_all(recorder, built)
        self._replicated = _whole(placed) if sequence else []
        return placed

    @contextlib.contextmanager
    def micro_step(self, module: torch.nn.Module, micro: int, last: bool) -> Iterator[None]:
        """After the last micro-batch the gradients of norms are summed, where each rank saw a part of the sequence."""
        from strategies.megatron.parts import reduce_gradients

        yield
        if last:
            reduce_gradients(self._replicated)


def _loss(extra: dict[str, Any], shared: Shared, module: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    from strategies.megatron.parts import cross_entropy

    given = dict(inputs)
    labels = given.pop("labels")
    return cross_entropy(module(**given, **extra).logits, labels, shared)


def split_layers(module: torch.nn.Module, blocks: list[torch.nn.Module], shared: Shared) -> None:
    """Replace the linear layers of `blocks`, parts of `module`, by this rank's slices of them (meta tensors).

    Raises CaptureError for a model without layers of the known names, or whose sizes the ranks do not divide.
    """
    check_heads(module, shared.size)
    found = False
    for block in blocks:
        for path, part in list(block.named_modules()):
            role = role_of(block, path)
            if role:
                owner, _, name = path.rpartition(".")
                setattr(block.get_submodule(owner), name, sliced(path, part, column=role == "column", shared=shared))
                found = True
        for attention in fewer_heads(block, shared.size):
            if shared.sequence:  # it reads the length of the sequence off its input
                attention.register_forward_pre_hook(functools.partial(_gather, shared), with_kwargs=True)
    if not found:
        names = ", ".join(sorted(COLUMNS | ROWS))
        raise CaptureError(f"tensor parallelism knows linear layers called {names}; this model has none of them")


def _gather(shared: Shared, part: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give an attention module the whole of its input, in the shared buffer."""
    if args:
        return (shared.gather(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": shared.gather(kwargs["hidden_states"])}


def sliced(path: str, part: Any, *, column: bool, shared: Shared) -> torch.nn.Module:
    """This rank's slice of a linear layer (nn.Linear, or GPT-2's Conv1D, whose weight is transposed)."""
    import torch

    from strategies.megatron.parts import ColumnParallel, RowParallel

    weight = part.weight
    if isinstance(part, torch.nn.Linear):
        rows, columns = weight.shape
    elif type(part).__name__ == "Conv1D":
        columns, rows = weight.shape
    else:
        raise CaptureError(f"'{path}' is a {type(part).__name__}; only linear layers are split by tensor parallelism")
    divides(path, "out_features" if column else "in_features", rows if column else columns, shared.size)
    shape = (rows // shared.size, columns) if column else (rows, columns // shared.size)
    bias = None if part.bias is None else _parameter(part.bias, (shape[0],))
    return (ColumnParallel if column else RowParallel)(_parameter(weight, shape), bias, shared)


def _parameter(like: torch.Tensor, shape: tuple[int, ...]) -> torch.nn.Parameter:
    import torch

    return torch.nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), requires_grad=like.requires_grad)


def _split_ends(module: Any, shared: Shared) -> None:
    """Embedding and head by vocabulary; tied ones stay tied. With sequence parallelism, who splits first."""
    import torch

    from strategies.megatron.parts import ColumnParallel, VocabularyParallel, scatter

    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or not isinstance(head, torch.nn.Linear):
        raise CaptureError("vocabulary parallelism needs a plain embedding and a linear head (torch.nn.Linear)")
    learned = _learned(module)
    step = ROWS_A_RANK * shared.size
    rows = -(-embedding.num_embeddings // step) * ROWS_A_RANK
    weight = _parameter(embedding.weight, (rows, embedding.embedding_dim))
    tied = head.weight is embedding.weight
    bias = None if head.bias is None else _parameter(head.bias, (rows,))
    final = weight if tied else _parameter(head.weight, (rows, head.in_features))
    module.set_output_embeddings(ColumnParallel(final, bias, shared))
    module.set_input_embeddings(VocabularyParallel(weight, shared, whole=learned))
    if not shared.sequence:
        return
    inside = {id(part) for block in layers(module) for part in block.modules()}
    norms = [part for part in module.modules() if "norm" in type(part).__name__.lower() and id(part) not in inside]
    if norms:  # what comes after the last one may ask for the length of the sequence
        norms[-1].register_forward_hook(lambda part, args, out: shared.gather(out))
    if learned:  # positions are added to whole activations

        def hook(part: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (scatter(args[0], shared), *args[1:])

        layers(module)[0].register_forward_pre_hook(hook)


def _learned(module: PreTrainedModel) -> bool:
    """Whether the model has embeddings beside that of its vocabulary: positions that are added to it."""
    import torch

    vocabulary = module.get_input_embeddings()
    return any(isinstance(part, torch.nn.Embedding) and part is not vocabulary for part in module.modules())


def _whole(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of the layers that every rank has whole: norms, and biases of row layers."""
    from strategies.megatron.parts import ColumnParallel, RowParallel, VocabularyParallel

    split = {
        id(one)
        for part in module.modules()
        if isinstance(part, ColumnParallel | RowParallel | VocabularyParallel)
        for name, one in part.named_parameters(recurse=False)
        if not (isinstance(part, RowParallel) and name == "bias")
    }
    return [one for one in module.parameters() if one.requires_grad and id(one) not in split]


_LAUNCH = Launch("MEGATRON_LM", no_script="Megatron-LM has its own training script, pretrain_gpt.py")


@dataclass(frozen=True)
class MegatronStyle(Strategy):
    """All ranks are alike, since the sizes divide."""

    kind: Kind = Kind.TENSOR | Kind.OWN_LOSS
    share: Share = Share.ALL
    launch: Launch = _LAUNCH
    sequence: bool = False

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return Megatron(case, rank, sequence=self.sequence)

    def refused(self, case: Case) -> Iterator[tuple[str, str]]:
        """What its layers and loss cannot do."""
        for key in ("lora", "quant"):
            if getattr(case, key):
                yield key, f"{self.name} splits plain linear layers, not adapted or quantized ones"
        if case.loss:
            yield "loss", f"{self.name} has a loss of its own, over the split vocabulary"
        if case.task != "train":
            yield "task", f"{self.name} is for training"
        if self.sequence and case.seq % case.world:
            yield "seq", f"{case.world} ranks do not divide {case.seq} tokens"
        if self.sequence and (case.attn == "eager" or case.attention_mask):
            yield "attn", f"{self.name} needs 'sdpa' and no attention mask"


STRATEGIES = (
    MegatronStyle("tp-megatron", "tensor parallelism in the manner of Megatron"),
    MegatronStyle("tp-megatron-sp", "... with sequence parallelism", sequence=True),
)
