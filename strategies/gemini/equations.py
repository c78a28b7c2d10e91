"""Closed-form estimates beside the simulation: LLMem's equations, and DNNMem's simpler sum.

LLMem: Kim et al., "LLMem: Estimating GPU Memory Usage for Fine-Tuning Pre-Trained LLMs" (IJCAI 2024, arXiv
2404.10933). Its setting is fp16 training on Colossal-AI's Gemini with Adam and full gradient checkpointing. The
released code (size_estimator.py of github.com/taehokim20/LLMem) differs from the paper, which is what stands here.
Each term is a number of bytes by its symbol there.

Where the paper leaves a choice, what is taken here:

- `cs` (chunk size) is a count of elements, found by Gemini's search (`strategies.gemini.chunk_layout`), never "32 MiB".
- `B` in m_lm is the size of the logits that the loss sees: 2 bytes, or 4 where the model casts them to fp32.
- `lm_p`, called a count and added to bytes, is the bytes of the head's weight in fp16; a tied head is counted again.
- `embed_p` is the input token embedding; position embeddings are among `other_p`.
- m_os runs over the parameters of Embedding and Linear operators, one sum rounded tensor by tensor; a tied head once.
- `e_n` is 1, or 2 with learned positions.
- For DP+TP the paper subtracts m_p16 * tp / gpus = m_p16 / dp. A rank needs m_p16 / tp, so m_p16 * (1 - 1 / tp) is what
  is to be taken away; both agree for 2 x 2, the only split it ran. `physical=False` gives the printed form.
- m_base is measured there, after set-up, with the chunks already in it, and yet m_p is added: the equation must mean
  context and framework. It is an argument here, 0 unless given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from strategies.gemini.chunk_layout import Parameter, search
from traces.errors import ConfigError

#: cu_p, the granularity of CUDA's allocations, and B16, B32: bytes an element.
GRAIN: Final = 2 * 2**20
HALF: Final = 2
SINGLE: Final = 4


@dataclass(frozen=True)
class Description:
    """What the equations need to know of a model.

    `tensors` are names and shapes of all parameters in the order of the model's modules, tied ones once; `layers` the
    transformer layers (l_n), `hidden` the width of their output (o_n); `logits_bytes` is B of the logits the loss sees.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    logits_bytes: int = HALF

    @classmethod
    def of(
        cls, tensors: Sequence[tuple[str, Sequence[int]]], *, layers: int | None = None, logits_bytes: int = HALF
    ) -> Description:
        """Describe a decoder by its parameters: the first matrix is the token embedding [vocabulary, width].

        The hidden size is the width of the last vector but the head's bias, which is a norm of the last layers. The
        head is tied unless another matrix of the same first dimension comes last. `layers` is counted by the numbers in
        the names (`layers.11.fc1.weight`) where it is not given.
        Raises ConfigError where there is no matrix or no layer.
        """
        shapes = tuple((name, tuple(int(size) for size in shape)) for name, shape in tensors)
        matrices = [(name, shape) for name, shape in shapes if len(shape) == 2]
        layers = numbered(name for name, _ in shapes) if layers is None else layers
        if not matrices or layers < 1:
            raise ConfigError(
                f"a model of {len(matrices)} matrices and {layers} layers: the equations need one of each"
            )
        vocabulary = matrices[0][1][0]
        tied = len(matrices) == 1 or matrices[-1][1][0] != vocabulary
        inner = matrices[1:] if tied else matrices[1:-1]
        hidden = inner[-1][1][0] if inner else matrices[0][1][1]
        return cls(shapes, layers, hidden, vocabulary, tied, logits_bytes)

    @property
    def embedding(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of the token embedding."""
        return next(one for one in self.tensors if len(one[1]) == 2)

    @property
    def head(self) -> tuple[int, ...]:
        """Shape of the head's weight: [vocabulary, width of what it reads]."""
        if self.tied:
            return self.embedding[1]
        return next(shape for _, shape in reversed(self.tensors) if len(shape) == 2)

    @property
    def embeddings(self) -> int:
        """e_n: the token embedding, and the position embedding where there is one.

        A position embedding is a matrix that directly follows the token embedding and is as wide as the layers' input.
        """
        matrices = [(name, shape) for name, shape in self.tensors if len(shape) == 2]
        return 2 if len(matrices) > 1 and is_position(matrices[1][0]) else 1

    def operators(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters of Embedding and Linear operators: matrices and their biases, in order."""
        weights = {name.removesuffix(".weight") for name, shape in self.tensors if len(shape) == 2}
        return tuple(shape for name, shape in self.tensors if len(shape) == 2 or name.removesuffix(".bias") in weights)


def numbered(names: Iterable[str]) -> int:
    """How many layers names tell: the largest list of modules by the numbers that stand in paths (0: none do)."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = re.match(r"(.*?\.)(\d+)\.", name)
        if match:
            found.setdefault(match[1], set()).add(int(match[2]))
    return max((len(numbers) for numbers in found.values()), default=0)


def is_position(name: str) -> bool:
    """Whether a matrix is a table of learned positions, by the names that transformers gives them."""
    return any(word in name.lower() for word in ("position", "wpe"))


def up(count: float) -> int:
    """Bytes rounded up to CUDA's granularity."""
    return -int(-count // GRAIN) * GRAIN


@dataclass(frozen=True)
class Breakdown:
    """An estimate: its `terms`, bytes by the paper's symbol, and their sum."""

    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        """The estimated peak in bytes."""
        return sum(self.terms.values())


def llmem_peak(
    model: Description,
    batch: int,
    seq: int,
    *,
    dp: int = 1,
    tp: int = 1,
    base: int = 0,
    sharded: bool = True,
    physical: bool = True,
    chunk: int | None = None,
) -> Breakdown:
    """The paper's m_peak in bytes for `batch` samples of `seq` tokens on each of `dp` x `tp` GPUs.

    dp = tp = 1 is the equation of one GPU; `sharded=False` is CDP, which is the same on each GPU. With `sharded` dp
    alone is ADP, tp alone is TP, both are DP+TP. `base` is m_base in bytes; `chunk` overrides cs (elements).

    Raises ConfigError for sizes below 1 and for tp beside `sharded=False`.
    """
    _check(batch=batch, seq=seq, dp=dp, tp=tp)
    if not sharded and tp > 1:
        raise ConfigError(f"tp={tp}: conventional data parallelism has no tensor parallel form in LLMem")
    m_p16, m_p32 = parameter_terms(model, dp * tp, chunk)
    m_os = optimizer_term(model)
    terms = {"m_base": base}
    ranks = dp * tp if sharded else 1
    if tp == 1:
        terms |= {"m_p16": m_p16, "m_p32": m_p32 // ranks, "m_os": m_os // ranks}
    else:
        whole = m_p16 // ranks if dp == 1 else m_p16 - (m_p16 * (tp - 1) // tp if physical else m_p16 // dp)
        terms |= {"m_p16": whole, "m_p32": m_p32 // ranks, "m_os": m_os // ranks}
    terms |= {"m_out": output_term(model, batch, seq), "m_lm": loss_term(model, batch, seq)}
    if tp > 1:
        terms["m_back"] = up(model.layers * batch * seq * model.hidden * (tp - 1) / tp * HALF)
    return Breakdown(terms)


def parameter_terms(model: Description, ranks: int, chunk: int | None = None) -> tuple[int, int]:
    """m_p,16 and m_p,32 in bytes: embed_p and other_p in whole chunks, the sum rounded up once."""
    sizes = [Parameter(name, prod(shape), ranks) for name, shape in model.tensors]
    cs = chunk if chunk is not None else max(config.elements for config in search(sizes).values())
    embed = prod(model.embedding[1])
    other = sum(one.elements for one in sizes) - embed
    elements = embed + -(-other // cs) * cs
    both = up(elements * (HALF + SINGLE))
    half = elements * HALF
    return half, both - half


def optimizer_term(model: Description) -> int:
    """m_os in bytes: Adam's two fp32 states of every Embedding and Linear parameter, each tensor rounded up."""
    return sum(up(prod(shape) * 2 * SINGLE) for shape in model.operators())


def output_term(model: Description, batch: int, seq: int) -> int:
    """m_out in bytes: one fp16 output an embedding and a layer, kept as checkpoints."""
    return up((model.embeddings + model.layers) * batch * seq * model.hidden * HALF)


def loss_term(model: Description, batch: int, seq: int) -> int:
    """m_lm in bytes: the logits, two copies shifted by one position, and the head's weight (lm_p)."""
    size = model.logits_bytes
    logits = up(batch * seq * model.vocabulary * size)
    shifted = up(batch * (seq - 1) * model.vocabulary * size)
    return logits + 2 * shifted + up(prod(model.head) * HALF)


def dnnmem_peak(
    model: Description, batch: int, seq: int, *, size: int = HALF, state_size: int = SINGLE, base: int = 0
) -> Breakdown:
    """A sum in the manner of DNNMem (Gao et al., ESEC/FSE 2020) in bytes: what a static graph shows, and nothing else.

    Weights and their gradients of `size` bytes an element, Adam's two states of `state_size`, the outputs of every
    Embedding and Linear operator, and the loss's log-probabilities; each tensor rounded up to 512 B. It knows neither
    master copies, chunks, checkpointing nor workspaces, as the paper's comparison has it.
    """
    _check(batch=batch, seq=seq)
    tokens = batch * seq
    operators = [shape for _, shape in model.tensors if len(shape) == 2]
    tables = model.embeddings
    widths = [shape[1] for shape in operators[:tables]] + [shape[0] for shape in operators[tables:]]
    if model.tied:
        widths.append(model.vocabulary)

    def rounded(count: int) -> int:
        return -(-count // 512) * 512

    weights = sum(rounded(size * prod(shape)) for _, shape in model.tensors)
    return Breakdown(
        {
            "m_base": base,
            "weights": weights,
            "gradients": weights,
            "optimizer": sum(2 * rounded(state_size * prod(shape)) for _, shape in model.tensors),
            "outputs": sum(rounded(size * tokens * width) for width in widths),
            "loss": rounded(model.logits_bytes * tokens * model.vocabulary),
        }
    )


def _check(**values: int) -> None:
    """Every value is at least 1."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
