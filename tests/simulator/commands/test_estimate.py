"""The commands `estimate` and `sweep`, with graphs written by hand in the place of captured ones."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome

import traces
from graph.case import KEYS, Case
from graph.errors import CaptureError
from graph.model import StepGraph
from simulator.cli import COMMANDS, main
from simulator.estimator.estimate import ANSWER_KEYS
from simulator.reports.estimate import case_line
from simulator.reports.schemas import schema
from tests.support.step_graphs import in_place_of_captures, stub

MIB = 1 << 20
#: What six tensors of 3 MiB make the default run of three steps need: four of them are alive at once.
PEAK = 12 * MIB


@pytest.fixture(autouse=True)
def _written(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(case: Case, progress: Any = None, method: Any = None) -> StepGraph:
        if progress is not None:
            progress("forward", 0, 12)
        return stub(case)

    yield from in_place_of_captures(monkeypatch, made)


def call(*arguments: str) -> Outcome:
    outcome = CliRunner().invoke(main, list(arguments))
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.output
    return outcome


# estimate -----------------------------------------------------------------------------------------------------------


def test_the_report_names_case_peaks_and_terms() -> None:
    outcome = call("estimate", "m", "--batch", "2", "--gpu", "V100", "--min-memory")
    assert outcome.exit_code == 0
    shown = outcome.stdout
    assert shown.startswith("m, dtype fp32, batch 2, seq 512, optimizer adamw, gpu V100\n")
    for text in (
        "peak allocated        12.00 MiB   12,582,912 B  at event 13",
        "Outside the allocator\n",
        "+ CUDA context",
        "+ loaded kernels",
        "allocated on a GPU    12.00 MiB",
        "220.00 MiB to 520.00 MiB",  # the context's range on 80 multiprocessors of 2048 threads
        "\nfits: needs 510.00 MiB of 15.77 GiB (15.27 GiB left)\n",  # 360 + 130 outside, 20 reserved
        "smallest GPU: 510.00 MiB",
        "on V100-16GB",
    ):
        assert text in shown, shown
    assert outcome.stderr.splitlines() == [
        "note: GPU V100 is taken to be V100-16GB; there is V100-32GB too",
        "note: routers spread tokens evenly",
    ]


def test_json_has_the_answer_and_the_replay() -> None:
    outcome = call("estimate", "m", "--batch", "2", "--no-sync", "--json", "-q")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    document = json.loads(outcome.stdout)
    assert (document["model"], document["batch"], document["sync"]) == ("m", 2, False)
    assert document["peak_allocated"] == PEAK
    assert document["phases"]["fwd_first"]["peak"] == 6 * MIB
    assert document["verdict"] == "fits"
    assert document["device_total"] == document["ranks"][0]["device_total"]
    assert document["assumptions"] == ["routers spread tokens evenly"]
    stats = document["ranks"][0]["memory_stats"]
    assert stats["allocated_bytes.all.peak"] == PEAK
    terms = document["ranks"][0]["outside"]
    assert [term["name"] for term in terms] == ["CUDA context", "loaded kernels"]
    assert all(term["low"] < term["bytes"] <= term["high"] for term in terms)
    case = document["metadata"]["case"]
    assert list(case) == list(KEYS)  # also what nobody gave
    assert (case["batch"], case["sync"], case["seq"], case["optimizer"], case["gpu"]) == (
        *(2, False, 512, "adamw"),
        KEYS["gpu"].default,
    )
    jsonschema.validate(document, schema("estimate"))
    jsonschema.validate(
        json.loads(call("estimate", "m", "--memory", "1MiB", "--no-remedies", "--json").stdout), schema("estimate")
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "peak_alocated": 1}, schema("estimate"))


def test_the_headline_says_what_nobody_gave() -> None:
    (line, *_) = call("estimate", "m", "--accum", "2").stdout.splitlines()
    assert line.startswith("m, dtype ")
    assert line.endswith(", batch 1, seq 512, optimizer adamw, accum 2, gpu A100-80GB")
    own = case_line({"model": "mine:make", "task": "train"})  # its inputs have their own size
    assert own.startswith("mine:make, dtype ")
    assert own.endswith(", optimizer adamw, gpu A100-80GB")
    assert "batch" not in own
    inference = case_line({"model": "m", "task": "inference", "new": 8})
    assert inference.endswith(", batch 1, prompt 512, new 8, gpu A100-80GB")


def test_out_of_memory_exits_with_three() -> None:
    outcome = call("estimate", "m", "--memory", "8MiB", "--no-remedies", "--json")
    assert outcome.exit_code == 3
    document = json.loads(outcome.stdout)
    assert document["verdict"] == "oom"
    assert document["peak_allocated"] is document["peak_reserved"] is document["phases"] is None
    assert document["ranks"][0]["oom"]["phase"] == "load"


def test_out_of_memory_says_where_what_would_fit_and_what_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")  # FSDP2 is tried
    monkeypatch.setenv("COLUMNS", "200")
    outcome = call("estimate", "m", "--memory", "19MiB", "--context", "0", "--batch", "2")
    lines = outcome.stdout.splitlines()
    assert outcome.exit_code == 3
    assert lines[1] == "out of memory: needs 20.00 MiB, lacks 1.00 MiB (the GPU has 19.00 MiB)"
    words = " ".join(outcome.stdout.split())
    assert "it fails in load (event " in words
    assert ": asked for 3.00 MiB with 19.00 MiB left on the GPU What would fit, each tried by a capture and a" in words
    assert "--gpu RTX4060-8GB" in words[words.index("What would fit") : words.index("rank 0 on A100-80GB")]
    assert outcome.stdout.index("What would fit") < outcome.stdout.index("rank 0 on A100-80GB")
    quiet = call("estimate", "m", "--memory", "19MiB", "--context", "0", "--batch", "2", "--no-remedies")
    assert quiet.exit_code == 3
    assert quiet.stdout.splitlines()[:4] == lines[:4]
    assert "What would fit" not in quiet.stdout
    assert "What would fit" not in call("estimate", "m").stdout


def test_remedies_are_in_json_and_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # FSDP2 is tried
    path = tmp_path / "page.html"
    outcome = call("estimate", "m", "--memory", "19MiB", "--context", "0", "--json", "--html", str(path))
    document = json.loads(outcome.stdout)
    first = document["remedies"][0]
    assert first["verdict"] == "fits"
    assert first["change"] == {"gpu": "RTX4060-8GB", "memory": None}
    assert (first["options"], first["needs"]) == ("--gpu RTX4060-8GB, without --memory", 20 * MIB)
    assert all(one["needs"] == 20 * MIB and one["verdict"] == "oom" for one in document["remedies"][1:])
    assert "remedies" not in json.loads(call("estimate", "m", "--json").stdout)
    page = path.read_text()
    assert "What would fit, each tried by a capture and a replay" in page
    assert "--gpu RTX4060-8GB, without --memory" in page


def test_markdown_has_what_would_fit() -> None:
    pytest.importorskip("torch")  # FSDP2 is tried
    outcome = call("estimate", "m", "--memory", "19MiB", "--context", "0", "--markdown", "-q")
    assert outcome.exit_code == 3
    heading, _, _, _, case, *rest = outcome.stdout.splitlines()
    assert heading == "### ❌ out of memory: needs 20.00 MiB, lacks 1.00 MiB (the GPU has 19.00 MiB)"
    assert case.startswith("`m, dtype ")
    at = rest.index("**What would fit, each tried by a capture and a replay**")
    assert rest[at + 2] == "| options | verdict | needs | of | time | what changes |"
    assert rest[at + 4].startswith("| --gpu RTX4060-8GB, without --memory | fits | 20.00 MiB | 7.6")
    assert any(line.startswith("it fails in ") for line in rest[:at])
    assert outcome.stdout.count("<details>") == outcome.stdout.count("</details>") >= 2
    assert call("estimate", "m", "--markdown", "--json").exit_code == 2


def test_ctrl_c_while_remedies_are_tried_keeps_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def made(case: Case, progress: Any = None, method: Any = None) -> StepGraph:
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return stub(case)

    monkeypatch.setattr("simulator.estimator.estimate.capture_of", made)
    outcome = call("estimate", "m", "--memory", "19MiB", "--context", "0", "--json")
    document = json.loads(outcome.stdout)
    assert outcome.exit_code == 130
    assert document["verdict"] == "oom"
    changes = [one["change"] for one in document["remedies"]]
    captured = [{k: v for k, v in one.items() if k != "alloc_conf"} for one in changes if "optimizer" in one]
    assert captured
    assert all(one.items() <= calls[1].document().items() for one in captured)  # the capture that was finished
    assert all(one["optimizer"] == "adamw-fused" for one in captured)
    assert all("alloc_conf" in one or "optimizer" in one for one in changes)  # settings need no capture
    assert len(calls) == 3


def test_a_context_that_takes_the_room() -> None:
    assert call("estimate", "m", "--memory", "30MiB", "--context", "10MiB").exit_code == 0
    outcome = call("estimate", "m", "--memory", "30MiB", "--context", "11MiB", "--no-remedies")
    assert outcome.exit_code == 3
    assert "\nout of memory: needs 31.00 MiB, lacks 1.00 MiB (the GPU has 30.00 MiB)\n" in outcome.stdout
    assert "+ context" in outcome.stdout
    assert call("estimate", "m", "--context", "auto").stdout == call("estimate", "m").stdout
    outcome = call("estimate", "m", "--memory", "30MiB", "--no-remedies")  # all of it is taken by others
    assert outcome.exit_code == 3
    assert "\nout of memory: needs 5" in outcome.stdout


def test_every_output(tmp_path: Path) -> None:
    names = {
        "-o": "trace.json.gz",
        "--events": "events.csv",
        "--calls": "calls.csv",
        "--timeline": "timeline.json",
        "--snapshot": "snapshot.pickle",
        "--html": "page.html",
    }
    words = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert call("estimate", "m", *words).exit_code == 0
    trace = traces.read(tmp_path / "trace.json.gz")
    assert trace.metadata["case"] == {"model": "m"}
    with open(tmp_path / "events.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(trace.ranks[0].events)
    assert max(int(row["allocated_bytes"]) for row in rows) == PEAK
    assert (tmp_path / "calls.csv").read_text().count("A,") == 1
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["segments"][0]["total_size"] == 20 * MIB
    assert "<html" in (tmp_path / "page.html").read_text()
    outcome = call("estimate", "m", *words)
    assert outcome.exit_code == 1
    assert "exists already" in outcome.stderr
    assert call("estimate", "m", *words, "--force").exit_code == 0


def test_the_trace_replays_to_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.npz")
    first = json.loads(call("estimate", "m", "--accum", "2", "--gpu", "T4", "-o", path, "--json").stdout)
    second = json.loads(call("run", path, "--json").stdout)
    assert second["ranks"][0]["memory_stats"] == first["ranks"][0]["memory_stats"]
    assert second["ranks"][0]["device"]["name"] == "T4-16GB"
    assert second["release"] == first["release"] == "2.13"


def test_settings_reach_the_allocator() -> None:
    outcome = call("estimate", "m", "--allocator", "expandable_segments:True", "--release", "2.9", "--json")
    document = json.loads(outcome.stdout)
    assert (document["conf"], document["release"]) == ("expandable_segments:True", "2.9")
    assert document["alloc_conf"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--allocator", "a:1", "--alloc-conf", "b:1"], 2, "are the same"),
        (["--allocator", "no_such_option:1"], 1, "no_such_option"),
        (["--gpu", "A1000"], 1, "unknown GPU"),
        (["--dtype", "fp31"], 1, "dtype"),
        (["--batch", "0"], 1, "batch"),
        (["--memory", "80g"], 1, "--memory"),
        (["--context", "much"], 1, "--context"),
        (["--context", "90GiB"], 1, "does not fit a device"),
        (["--release", "1.13"], 1, "1.13"),
        (["-o", "trace.txt"], 1, "must end in one of .json, .json.gz, .npz"),
        (["-o", "x.json", "--timeline", "x.json"], 1, "would replace the file of --output"),
        (["--no-such-option"], 2, "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("estimate", "m", *words)
    assert outcome.exit_code == code
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_what_the_capture_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(case: Case, progress: Any, method: Any) -> StepGraph:
        raise CaptureError("model 'm': is in no catalogue; the nearest is 'opt-125m'")

    monkeypatch.setattr("simulator.estimator.estimate.capture_of", refused)
    outcome = call("estimate", "m")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr == "error: model 'm': is in no catalogue; the nearest is 'opt-125m'\n"


# sweep --------------------------------------------------------------------------------------------------------------

THREADS = ["--executor", "concurrent.futures:ThreadPoolExecutor"]


def cases(tmp_path: Path, *documents: Any) -> str:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def test_a_sweep_and_its_continuation(tmp_path: Path) -> None:
    path, out = cases(tmp_path, {"model": "m"}, {"model": "m", "memory": MIB}, {"model": "fails"}), str(tmp_path / "r")
    outcome = call("sweep", path, "-o", out, *THREADS)
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("3 cases: 1 fit, 0 tight, 1 out of memory, 1 failed; ")
    assert f"note: 1 of 3 cases failed: see 'error' in {out}" in outcome.stderr
    again = call("sweep", path, "-o", out, "--json", "-q", *THREADS)
    document = json.loads(again.stdout)
    assert (again.exit_code, again.stderr) == (0, "")
    assert {key: document[key] for key in ("total", "kept", "fits", "oom", "failed")} == {
        **{"total": 3, "kept": 3, "fits": 1},
        **{"oom": 1, "failed": 1},
    }
    jsonschema.validate(document, schema("sweep"))
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert ["error" in line for line in lines].count(True) == 1
    assert len(lines) == 3
    for line in lines:
        jsonschema.validate(line, schema("sweep-line"))
        assert set(line) <= {*KEYS, *ANSWER_KEYS}


def test_a_sweep_in_which_nothing_fits_says_what_would(tmp_path: Path) -> None:
    """Of the case that lacks least; not where another case fits, nor where nobody wants it."""
    pytest.importorskip("torch")  # FSDP2 is tried
    small = [{"model": "m", "memory": size * MIB} for size in (12, 19)]
    path, out = cases(tmp_path, *small), str(tmp_path / "r")
    outcome = call("sweep", path, "-o", out, "--context", "0", *THREADS)
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[1:] == [
        "nearest: m, dtype fp32, batch 1, seq 512, optimizer adamw, gpu A100-80GB: needs 20.00 MiB, lacks 1.00 MiB "
        "(the GPU has 19.00 MiB)",
        "nearest: it would fit with --gpu RTX4060-8GB, without --memory (20.00 MiB)",
    ]
    document = json.loads(call("sweep", path, "-o", out, "--context", "0", "--json", *THREADS).stdout)
    jsonschema.validate(document, schema("sweep"))
    assert document["nearest"]["memory"] == 19 * MIB
    assert document["nearest"]["needs"] == 20 * MIB
    assert document["nearest"]["remedies"][0]["change"] == {"gpu": "RTX4060-8GB", "memory": None}
    plain = call("sweep", path, "-o", out, "--no-remedies", *THREADS).stdout.splitlines()
    assert len(plain) == 2
    more = cases(tmp_path, *small, {"model": "m"})
    assert len(call("sweep", more, "-o", out, "--context", "0", *THREADS).stdout.splitlines()) == 1


def test_a_sweep_in_which_all_fail(tmp_path: Path) -> None:
    path = cases(tmp_path, {"model": "fails"}, {"modle": "m"})
    outcome = call("sweep", path, "-o", str(tmp_path / "r"), *THREADS)
    assert outcome.exit_code == 1
    assert outcome.stdout.startswith("2 cases: 0 fit, 0 tight, 0 out of memory, 2 failed")


def test_sweeps_with_a_context_and_the_smallest_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # FSDP2 is tried
    path, out = cases(tmp_path, {"model": "m", "memory": 30 * MIB}), tmp_path / "r"
    assert call("sweep", path, "-o", str(out), "--context", "11MiB", "--min-memory", *THREADS).exit_code == 0
    (answer,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (answer["verdict"], answer["min_fit"]) == ("oom", (20 + 11) * MIB)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "Missing option '-o'"),
        (["-o", "cases.jsonl"], 1, "is the input itself"),
        (["-o", "none/r"], 1, "no folder"),
        (["-o", "r", "--jobs", "0"], 2, "--jobs"),
        (["-o", "r", "--executor", "x"], 1, "write module:attribute"),
        (["-o", "r", "--executor", "a:b", "--dask", "c"], 2, "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_of_sweep(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases(tmp_path, {"model": "m"})
    outcome = call("sweep", "cases.jsonl", *words)
    assert outcome.exit_code == code
    assert message in outcome.stderr


def test_no_cases(tmp_path: Path) -> None:
    outcome = call("sweep", str(tmp_path / "none"), "-o", str(tmp_path / "r"))
    assert outcome.exit_code == 1
    assert "cannot be read" in outcome.stderr
    assert not (tmp_path / "r").exists()


def test_both_commands_are_told() -> None:
    assert {"estimate", "sweep"} <= set(COMMANDS)
    for name in ("estimate", "sweep"):
        assert call(name, "--help").exit_code == 0
