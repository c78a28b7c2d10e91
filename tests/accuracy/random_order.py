"""Random cases, captured one after another in one process, beside each captured in a process of its own.

    python -m tests.accuracy.random_order [--cases N] [--seed N] [--jobs N]

A capture must leave nothing behind that changes the next one, nor one that is stopped in the middle. The cases are
tiny models (decoders, experts, encoders, pictures, speech) under every strategy, mesh, checkpointing, adapters,
quantization, dtype, optimizer, GPU and release, and their inference; what is compared are the events of every rank,
their groups, the assumptions, and the text of errors. Processes are forked from a server that has imported the
libraries but captured nothing. Exit code 1 and the differing cases if any differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graph.case import Case
from graph.optimizers import OPTIMIZERS
from strategies import registry
from traces.errors import ConfigError, LLMemError
from traces.model import Op, RankEvents, Strings, Trace

#: What the server imports: everything heavy but `graph.fake_cuda`, which starts threads that no fork keeps.
PRELOADED: Final = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("llama", "mixtral", "gemma3", "bert", "t5", "vit", "whisper")
    ),
    "peft",
)
_LLAMA: Final = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
_SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 256,
}
_GPT2: Final = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_head": 8,
    "vocab_size": 256,
    "n_positions": 128,
}
#: File name -> configuration.
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-2": {**_LLAMA, "num_hidden_layers": 2},
    "llama-4": {**_LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 4},
    "gpt2-2": {**_GPT2, "n_layer": 2},
    "gpt2-4": {**_GPT2, "n_layer": 4},
    "mixtral": {**_SMALL, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4,
                "num_local_experts": 4},
    "gemma3": {**_SMALL, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 4,
               "head_dim": 8, "sliding_window": 16},
    "bert": {**_SMALL, "model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 128},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "d_kv": 8,
           "num_layers": 2, "num_heads": 8, "vocab_size": 256},
    "vit": {**_SMALL, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32,
            "patch_size": 8},
    "whisper": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 64,
                "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
                "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256, "max_source_positions": 50,
                "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}  # fmt: skip
#: Those whose layers every method and quantization takes.
_PLAIN: Final = ("llama-2", "llama-4")
#: Meshes, drawn as often as all strategies together: most of what torch keeps between jobs is by mesh.
MESHES: Final[tuple[Mapping[str, int], ...]] = (
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "fsdp2": 2, "tp": 2},
    {"pp": 2, "dp": 4},
    {"pp": 2, "tp": 2},
    {"pp": 2, "fsdp2": 2},
    {"dp": 4, "tp": 2},
    {"dp": 2, "tp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "fsdp2": 2, "tp": 2},
    {"dp": 2, "fsdp2": 4},
    {"hsdp": 4},
    {"hsdp": 4, "tp": 2},
    {"fsdp2": 4, "tp": 2},
    {"fsdp2": 2, "tp": 2},
    {"tp": 2},
    {"dp": 2},
)
_GPUS: Final = ("A100-80GB", "T4-16GB", "H100-80GB")
_RELEASES: Final = ("2.13", "2.11", "2.6")
#: Keys of training and inference, and what each is drawn from; the first is its usual value.
_TRAINING: Final[Mapping[str, Sequence[Any]]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "autocast": ("", "", "bf16", "fp16"),
    "attn": ("sdpa", "eager"),
    "checkpointing": ("", "nonreentrant", "reentrant"),
    "optimizer": tuple(OPTIMIZERS),
    "lora": (0, 4),
    "quant": ("", "nf4", "int8"),
    "accum": (1, 2),
    "clip": (0.0, 1.0),
    "batch": (1, 4),
    "attention_mask": (False, True),
    "gpu": _GPUS,
    "release": _RELEASES,
    "cudnn_sdp": (False, True),
}
_INFERENCE: Final[Mapping[str, Sequence[Any]]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "quant": ("", "nf4", "int8"),
    "cache": ("dynamic", "static"),
    "mode": ("generate", "manual"),
    "gpu": _GPUS,
    "release": _RELEASES,
}


@dataclass(frozen=True)
class Outcome:
    """What a case came to: a digest of its trace, events and peak of bytes alive of every kind of rank; or an error."""

    digest: str = ""
    events: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    error: str = ""


def write_models(folder: Path) -> None:
    """The configurations of `MODELS`, each in a folder of its own."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")


def sizes(case: Mapping[str, Any]) -> dict[str, Any]:
    """How long the sequences of a case are."""
    return {"prompt": 16, "new": 4} if case.get("task") == "inference" else {"seq": 32}


def draw(seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Cases without end, the same for a seed, over the models of `write_models`."""
    rng = random.Random(seed)
    while True:
        case = _drawn(rng)
        split = "tp" in str(case) or case.get("quant")  # what splits or quantizes nn.Linear, which GPT-2 has not
        model = rng.choice(_PLAIN if split else sorted(MODELS))
        case |= {"model": str(folder / model), **sizes(case)}
        try:
            Case.of(case)
        except ConfigError:  # keys that contradict each other
            continue
        yield case


def _drawn(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(("inference", "single", "strategy", "strategy", "mesh", "mesh"))
    if kind == "inference":
        return {"task": "inference", **_some(rng, _INFERENCE, 4)}
    case = _some(rng, _TRAINING, 4)
    if case.get("quant"):
        case["lora"] = 4
    if kind == "mesh":
        mesh = rng.choice(MESHES)
        return case | {"mesh": dict(mesh), "world": math.prod(mesh.values())}
    if kind == "strategy":
        case |= {"strategy": rng.choice(tuple(registry.known())[1:]), "world": rng.choice((2, 4))}
    return case


def _some(rng: random.Random, keys: Mapping[str, Sequence[Any]], most: int) -> dict[str, Any]:
    """A few keys with values of chance; too many of them contradict each other."""
    return {key: rng.choice(keys[key]) for key in rng.sample(sorted(keys), rng.randint(0, most))}


def outcome(case: Mapping[str, Any]) -> Outcome:
    """Capture a case in this process."""
    from strategies.lowering import lower

    try:
        made = lower(Case.of(case))
    except LLMemError as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome(
        digest=_digest(made),
        events=tuple(len(rank.events) for rank in made.ranks),
        peaks=tuple(_peak(rank) for rank in made.ranks),
    )


def _digest(trace: Trace) -> str:
    found = hashlib.sha256()
    for rank in trace.ranks:
        found.update(f"{rank.ranks}".encode() + rank.events.op.tobytes())
        for name, column in sorted(rank.events.columns.items()):
            values = column.codes if isinstance(column, Strings) else column
            found.update(f"{name} {column.table if isinstance(column, Strings) else ''}".encode() + values.tobytes())
    found.update(repr((trace.groups, trace.metadata.get("assumptions"))).encode())
    return found.hexdigest()


def _peak(rank: RankEvents) -> int:
    """The most bytes alive, by an account of the events that knows nothing of an allocator."""
    events = rank.events
    sizes: dict[int, int] = {}
    alive = peak = 0
    for op, number, size in zip(events.op, events.ints("id").tolist(), events.ints("bytes").tolist(), strict=True):
        if op == Op.ALLOC:
            sizes[number] = size
            alive += size
            peak = max(peak, alive)
        elif op == Op.FREE:
            alive -= sizes.pop(number)
    return peak


def stop_midway(case: Mapping[str, Any]) -> None:
    """Begin to capture a case in this process, and stop it in the middle of its run, as Ctrl-C does."""
    from graph.recorder.capture import capture
    from strategies.lowering import lower

    calls = itertools.count()

    def progress(phase: str, step: int, operators: int) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt, LLMemError):
        lower(Case.of(case), capture=lambda part, method: capture(part, method=method, progress=progress))


def _after_others(cases: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The cases one after another in this process; between them, every fifth is begun and stopped."""
    found = []
    for place, case in enumerate(cases):
        found.append(outcome(case))
        if place % 5 == 0:
            stop_midway(case)
    return found


def in_one_process(cases: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The cases one after another in one new process."""
    with _server().Pool(1) as pool:
        found: list[Outcome] = pool.apply(_after_others, (cases,))
        return found


def in_fresh_processes(cases: Sequence[Mapping[str, Any]], jobs: int) -> list[Outcome]:
    """Each case in a new process, `jobs` at a time."""
    with _server().Pool(jobs, maxtasksperchild=1) as pool:
        found: list[Outcome] = pool.map(outcome, cases, chunksize=1)
        return found


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.accuracy.random_order", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="fresh processes at a time")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        cases = list(itertools.islice(draw(asked.seed, folder), asked.cases))
        together, alone = in_one_process(cases), in_fresh_processes(cases, asked.jobs)
    differ = [place for place in range(len(cases)) if together[place] != alone[place]]
    for place in differ:
        print(f"case {place}: {json.dumps(cases[place])}\n  in one process: {together[place]}\n  alone: {alone[place]}")
    refused = sum(1 for one in alone if one.error)
    print(f"{len(cases)} cases in one process: {len(cases) - len(differ)} equal fresh ones, {len(differ)} differ;")
    print(f"{refused} are errors, the same alone, {sum(map(sum, (one.events for one in alone)))} events compared")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
