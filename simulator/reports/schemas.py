"""The JSON Schemas of what the commands print under `--json`, and of a line of a sweep's results.

`result_schema.json` beside this module is that of a replay. The others derive from it, from the keys of a case
(`graph.case.KEYS`), and from the records below, which declare documents and are never made.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from graph.analysis import Saved, Tensor, Total
from graph.case import KEYS
from graph.summary import Parameters
from simulator.explain.judgement import Cause
from simulator.explain.message import Source
from traces.errors import ConfigError

Bytes = Annotated[int, Meta(ge=0)]
Verdict = Literal["fits", "tight", "oom"]


class _Document(Struct, forbid_unknown_fields=True):
    """A document of its own, with the version of its layout."""

    schema_version: Literal[1]


class _Part(Struct, forbid_unknown_fields=True):
    """An object inside of one."""


class Peak(_Part):
    """Allocated bytes of a phase: at most, and at its end."""

    peak: Bytes
    left: Bytes


class Facts(_Part):
    """What was built: its class, parameters in all and trained, their dtype; another class that the case names.

    Empty for a graph that does not say.
    """

    parameters: int = 0
    trained: int = 0
    dtype: str = ""
    kind: str = msgspec.field(name="class", default="")
    named: str = ""


class ClosedForm(_Part):
    """The estimate of a closed form, in bytes, by terms."""

    total: int
    terms: dict[str, int]


class Remedy(_Part):
    """A change of the case that was tried where it does not fit, what it needs then, and what it costs."""

    change: dict[str, Any]
    options: str
    needs: Bytes | None
    gpu_bytes: Bytes
    verdict: Verdict
    time: Annotated[float | None, Meta(description="nanoseconds a token, as a share of the case's own")]
    costs: str
    what: str


class OnGpu(_Part):
    """Peaks as on a GPU: with workspaces that libraries have there, and addresses as its driver gives them."""

    peak_allocated: Bytes
    peak_reserved: Bytes
    retries: int


class Figures(_Part):
    """Figures of some ranks of several GPUs; null where they run out of memory."""

    ranks: list[int]
    peak_allocated: Bytes | None
    peak_reserved: Bytes | None
    device_total: Bytes | None
    on_gpu: OnGpu | None
    phases: dict[str, Peak] | None
    verdict: Verdict


class PeaksOfBatches(Struct):
    """Allocated bytes of a batch: the most, of 99 and of 50 of 100 batches at most."""

    max: Bytes
    p99: Bytes
    median: Bytes


class Batch(Struct):
    """A batch of an epoch and the samples in it, numbered from 0, and the tokens that each is padded to."""

    number: int
    tokens: int
    samples: list[int]


class Epoch(Struct):
    """Peaks of a data set's batches; between the lengths that were run they are taken as linear."""

    batches: int
    peak_allocated: PeaksOfBatches
    worst_batch: Batch
    lengths_run: int


class Answer(Struct):
    """What an estimate adds to its case: bytes of the largest rank; null where it runs out of memory."""

    peak_allocated: Bytes | None
    peak_reserved: Bytes | None
    device_total: Bytes | None
    on_gpu: Annotated[OnGpu | None, Meta(description="where what lies outside the allocator is counted")]
    phases: dict[str, Peak] | None
    verdict: Verdict
    summary: Annotated[str, Meta(description="what the verdict rests on: needed, the GPU's size, what is left")]
    needs: Annotated[Bytes | None, Meta(description="of the GPU that needs most, also where it runs out of memory")]
    gpu_bytes: Bytes
    model_facts: Facts
    events: int
    seconds: float
    min_fit: Annotated[Bytes, Meta(description="the smallest GPU, where it was asked for")] = 0
    step_time_ns: int = 0
    tokens_per_second: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    first_token_ns: int = 0
    decode_tokens_per_second: float = 0.0
    step_time_note: str = ""
    estimators: dict[str, ClosedForm] = {}
    remedies: list[Remedy] = []
    epoch: Epoch | None = None


class Sweep(_Document):
    """How many cases there were, had an answer already, and have which verdict."""

    total: int
    kept: int
    fits: int
    tight: int
    oom: int
    failed: int
    seconds: float
    nearest: Annotated[dict[str, Any] | None, Meta(description="where none fits: the answer that lacks least")]


class Row(_Part):
    """A setting over all variants of the events: the worst of each figure, or why there is none."""

    conf: str
    release: str
    memory: Bytes | None
    replays: int
    error: str = ""
    fits: bool = True
    peak_reserved: Bytes = 0
    peak_allocated: Bytes = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    device_calls: int = 0
    fragmented: Bytes = 0
    min_fit: Bytes | None = None
    saves: Annotated[int | None, Meta(description="of peak reserved, against the trace's own setting")] = None


class Stress(_Document):
    """A trace under many settings."""

    release: str
    conf: str
    device_bytes: Bytes
    events: int
    scenarios: int
    finished: int
    seconds: float
    notes: list[str]
    best: Row | None
    own: Row | None
    settings: list[Row]
    outcomes: list[dict[str, Any]]


class Change(_Part):
    """A figure before and after."""

    before: int | None
    after: int | None
    difference: int | None
    share: float | None


class PhaseChange(_Part):
    """Allocated bytes of a phase before and after."""

    peak: Change
    left: Change


class Pair(_Part):
    """Ranks that are compared, and what changed."""

    before: list[int]
    after: list[int]
    figures: dict[str, Change]
    phases: dict[str, PhaseChange]
    categories: dict[str, Change]
    modules: dict[str, Change]
    tensors: dict[str, Change]


class Compared(_Part):
    """One side of a comparison."""

    name: str
    kind: str
    verdict: str


class Compare(_Document):
    """Two runs, and what grew over the limit."""

    before: Compared
    after: Compared
    limit: str | None
    regressions: list[str]
    ranks: list[Pair]


class Check(_Document):
    """A run against a budget and a baseline."""

    exit_code: Literal[0, 3, 4]
    name: str
    verdict: Verdict
    summary: str
    needed: Bytes | None
    budget: Bytes | None
    peak_allocated: Bytes | None
    peak_reserved: Bytes | None
    remedies: list[Remedy]
    comparison: Compare | None


class Divergence(_Part):
    """The first entry of a snapshot that the replay does not have so."""

    entry: int
    text: str


class Device(_Part):
    """One device of a snapshot: entries it has, consequences compared, peaks of the replay."""

    rank: int
    entries: int
    compared: int
    peak_allocated: Bytes
    peak_reserved: Bytes
    divergence: Divergence | None


class Verify(_Document):
    """A snapshot whose consequences were compared."""

    verdict: Literal["equal", "diverges"]
    release: str
    conf: str
    notes: list[str]
    ranks: list[Device]


class CapturedPhase(_Part):
    """A phase of a captured graph: allocated bytes, and the work of its operators."""

    name: str
    step: int
    peak: Bytes
    left: Bytes
    event: int
    operators: int
    flops: int
    moved: int
    allocated: int


class LastStep(_Part):
    """The work of the last step."""

    step: int
    flops: int
    moved: int


class Path(_Part):
    """The longest chain of operators that wait for each other."""

    flops: int
    operators: int


class CapturedPeak(_Part):
    """What is alive at the peak."""

    bytes: Bytes
    event: int
    phase: str | None
    step: int
    by_category: dict[str, Bytes]
    largest: list[Tensor]


class Kept(_Part):
    """What forward keeps for backward."""

    bytes: Bytes
    rows: list[Saved]


class Capture(_Document):
    """A captured graph; bytes and counts."""

    case: dict[str, Any]
    environment: dict[str, Any]
    parameters: Parameters
    operators: int
    storages: int
    events: int
    flops: int
    moved: int
    last_step: LastStep
    critical_path: Path
    peak: CapturedPeak
    phases: list[CapturedPhase]
    modules: list[Total]
    saved_for_backward: Kept
    assumptions: list[str]


class Left(_Part):
    """Bytes that are left of a GPU, by what lies outside the allocator."""

    likely: int
    low: int
    high: int


class Method(_Part):
    """A method at its micro-batch (0: not one sample fits): peaks in bytes, time and speed; `tried` are micro-batches
    and whether they fit, `short` the bytes that one sample lacks."""

    method: str
    verdict: Literal["fits", "tight", "oom", "error"]
    case: dict[str, Any]
    batch: int
    largest: int
    accum: int
    samples: int
    peak_allocated: Bytes
    peak_reserved: Bytes
    on_gpu: OnGpu | None
    worst_ranks: list[int]
    limit: Bytes
    left: Left
    retries: int
    step_retries: int
    step_seconds: float
    tokens_per_second: float
    score: float
    tried: dict[str, bool]
    short: Bytes
    seconds: float
    error: str = ""


class Spared(_Part):
    """A method that cannot win, and so was not tried."""

    method: str
    at_most_tokens_per_second: float


class AskedFor(_Part):
    """Bytes that are alive at the peak, and the line that asks for them."""

    where: str
    bytes: Bytes


class Advice(_Part):
    """Bytes of a kind that are alive at a program's peak, and what one would change there: advice, not tried."""

    kind: str
    bytes: Bytes
    lines: list[AskedFor]
    words: str


class Fit(_Document):
    """The cheapest changes that make a case, or a program, fit."""

    verdict: Verdict
    needs: Bytes | None
    gpu_bytes: Bytes
    keep: list[str]
    says: str
    tokens_per_second: Annotated[float | None, Meta(description="of a case on a GPU without end, as predicted")]
    plans: Annotated[list[Remedy], Meta(description="those that fit, the cheapest first")]
    short: Annotated[list[Remedy], Meta(description="those that do not fit")]
    untried: list[str]
    case: Annotated[dict[str, Any] | None, Meta(description="what is to fit, where that is a case")] = None
    program: Annotated[list[str] | None, Meta(description="or a program, with its arguments")] = None
    advice: Annotated[list[Advice] | None, Meta(description="where the memory of a program goes")] = None


class Term(_Part):
    """Bytes outside the allocator, with their range and source."""

    name: str
    bytes: Bytes
    low: Bytes | None
    high: Bytes | None
    source: str


class Select(_Document):
    """Methods for a model on given GPUs, best first, and why the winner is it."""

    model: str | None
    gpus: list[str]
    policy: str
    global_batch: int | None
    margin: float
    winner: str | None
    runner_up: str | None
    reason: str
    advice: str
    remedies: list[Remedy]
    methods: list[Method]
    within: float
    not_tried: list[Spared]
    unfinished: list[str]
    outside: list[Term]
    seconds: float


class RecordedPhase(_Part):
    """A phase of a recorded program, in bytes; nanoseconds where time was asked for."""

    name: str
    step: int | None
    peak_allocated: Bytes
    peak_reserved: Bytes
    left: Bytes
    duration_ns: int = 0


class StepPeaks(_Part):
    """Allocated bytes of steps: the most, in which step, of 99 of 100 steps at most, of half of them."""

    max: Bytes
    step: int
    p99: Bytes
    median: Bytes


class RecordedRank(_Part):
    """Ranks of a recorded program that did the same, in bytes and counts."""

    ranks: list[int]
    peak_allocated: Bytes
    peak_reserved: Bytes
    end_allocated: Bytes
    end_reserved: Bytes
    allocations: int
    num_alloc_retries: int
    num_ooms: int
    on_gpu: Annotated[OnGpu | None, Meta(description="where what lies outside the allocator is counted")]
    step_peaks: Annotated[StepPeaks | None, Meta(description="where steps are not alike")]
    phases: list[RecordedPhase]


class Record(_Document):
    """A program that ran on a GPU that is not there."""

    exit_code: int
    steps: int
    release: Annotated[str, Meta(description="of PyTorch: whose allocator and kernels it had")]
    gpu: str
    gpu_bytes: Bytes
    conf: Annotated[str, Meta(description="allocator settings, as PYTORCH_ALLOC_CONF has them")]
    ranks: list[RecordedRank]
    assumptions: list[str]
    notices: list[str]
    step_time_ns: int = 0
    step_time_note: str = ""


class ListedProcess(_Part):
    """A process on the card; null bytes where NVML does not tell."""

    pid: int
    bytes: Bytes | None


class HeldTensors(_Part):
    """Live tensors of one stack at a snapshot's end."""

    name: str
    count: int
    bytes: Bytes


class Message(_Part):
    """An out-of-memory message and its cause, in bytes; null where it does not say a figure."""

    cause: Cause
    because: str
    first: list[str]
    also: list[str]
    source: Source
    party: str
    said: str
    line: int
    times: int
    rank: int | None
    gpu: int | None
    releases: str
    conf: str
    asked: Bytes | None
    total: Bytes | None
    free: Bytes | None
    allowed: Bytes | None
    allocated: Bytes | None
    reserved: Bytes | None
    unallocated: Bytes | None
    private: Bytes | None
    own: Bytes | None
    processes: list[ListedProcess]
    largest: Bytes | None
    tensors: list[HeldTensors]
    held: Bytes | None
    pieces: Bytes | None
    process: Bytes | None
    outside: Bytes | None
    others: Bytes | None
    elsewhere: Bytes | None
    shortage: Bytes | None


class Explain(_Document):
    """Why memory ran out: every message of a text, or every device of a snapshot."""

    messages: list[Message]
    fit: Annotated[Fit | None, Meta(description="the plans for the case beside it, where one was given")] = None


#: Commands with a document of their own record.
_RECORDS: Final[Mapping[str, type[Struct]]] = {
    "record": Record,
    "capture": Capture,
    "select": Select,
    "fit": Fit,
    "sweep": Sweep,
    "stress": Stress,
    "compare": Compare,
    "check": Check,
    "verify": Verify,
    "explain": Explain,
}
#: Every document: a command's, or `sweep-line`, a line of RESULTS.jsonl.
DOCUMENTS: Final = ("run", "estimate", "sweep-line", *_RECORDS)


def schema(document: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of `DOCUMENTS`. Raises ConfigError for another name."""
    if document not in DOCUMENTS:
        raise ConfigError(f"no schema of {document[:40]!r}; there are {', '.join(DOCUMENTS)}")
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"The document of `llmem {document} --json`",
    }
    if document == "run":
        return dict(_replay())
    if document == "estimate":
        return about | _estimate()
    if document == "sweep-line":
        return about | {"title": "A line of the results of `llmem sweep`"} | _line()
    return about | msgspec.json.schema(_RECORDS[document])


@functools.cache
def _replay() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((files("simulator.reports") / "result_schema.json").read_text("utf-8"))
    return found


def _answer() -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of an answer, and the definitions that it needs."""
    (_,), parts = msgspec.json.schema_components([Answer], ref_template="#/$defs/{name}")
    return parts.pop("Answer"), parts


def _keys() -> dict[str, Any]:
    """The keys of a case, as JSON has them."""
    return {name: {**msgspec.json.schema(key.kind), "description": key.about.help} for name, key in KEYS.items()}


def _estimate() -> dict[str, Any]:
    answer, parts = _answer()
    replay = _replay()
    assumed = {"assumptions": {"type": "array", "items": {"type": "string"}, "description": "what was assumed"}}
    return {
        "type": "object",
        "required": ["model", *assumed, *dict.fromkeys([*answer["required"], *replay["required"]])],
        "additionalProperties": False,
        "properties": {**_keys(), **answer["properties"], **assumed, **replay["properties"]},
        "$defs": {**parts, **replay["$defs"]},
    }


def _line() -> dict[str, Any]:
    """An answer, or why there is none, beside the keys that the line of the case has; those may be wrong ones."""
    answer, parts = _answer()
    (figures,), more = msgspec.json.schema_components([Figures], ref_template="#/$defs/{name}")
    own = {
        "schema_version": {"const": 1},
        "error": {"type": "string", "description": "why there is no answer"},
        "ranks": {"type": "array", "items": figures, "description": "of several GPUs: every kind of rank"},
    }
    return {
        "type": "object",
        "required": ["schema_version"],
        "anyOf": [{"required": ["error"]}, {"required": ["model", *answer["required"]]}],
        "properties": {**answer["properties"], **own},
        "$defs": {**parts, **more},
    }
