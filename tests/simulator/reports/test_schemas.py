"""What the commands print under `--json` is as their schemas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from simulator.cli import main
from simulator.reports.schemas import DOCUMENTS, schema
from tests.places import DATA, ROOT
from traces.errors import ConfigError

TINY = str(ROOT / "traces" / "samples" / "tiny.json")
SNAPSHOT = str(DATA / "snapshots" / "opt-125m_fp32_sdpa_b2_s512_sgd_A100.pickle.gz")


def printed(*arguments: str) -> Any:
    outcome = CliRunner().invoke(main, [*arguments, "--json", "-q"])
    assert outcome.exit_code in (0, 3, 4), outcome.output
    return json.loads(outcome.stdout)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_schema_is_one(document: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(document))


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", TINY),
        ("run", TINY, "--memory", "16MiB"),
        ("stress", TINY),
        ("compare", TINY, TINY),
        ("check", TINY, "--budget", "80GB"),
        ("check", TINY, "--budget", "20MiB", "--against", TINY),
        ("verify", SNAPSHOT),
        ("explain", str(DATA / "out_of_memory" / "four_ranks.log")),
    ],
    ids=lambda arguments: " ".join(Path(one).name for one in arguments),
)
def test_the_document_is_as_its_schema_says(arguments: tuple[str, ...]) -> None:
    document = printed(*arguments)
    expected = schema(arguments[0])
    jsonschema.validate(document, expected)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({name: value for name, value in document.items() if name != "schema_version"}, expected)
    if arguments[0] != "run":  # its own tests are of its parts
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "another": 1}, expected)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
PROGRAM = """
import torch

layer = torch.nn.Linear(8, 8).cuda()
layer(torch.ones(4, 8, device="cuda")).sum().backward()
torch.optim.SGD(layer.parameters(), lr=0.1).step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a program that trains, and a file of cases."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("real")
    (path / "config.json").write_text(json.dumps(LLAMA))
    (path / "train.py").write_text(PROGRAM)
    cases: list[dict[str, Any]] = [{}, {"world": 2, "strategy": "pp"}, {"memory": 40 << 20}, {"task": "inference"}]
    cases.append({"dtype": "fp99"})
    (path / "cases").write_text("".join(json.dumps({"model": str(path), **case}) + "\n" for case in cases))
    return path


SMALL = ("--memory", "40MiB", "--context", "0")


@pytest.mark.parametrize(
    "words",
    [
        ("capture", "--seq", "32"),
        ("capture", "--task", "inference", "--lora", "0"),
        ("estimate", "--seq", "32", "--time", "--estimator", "llmem", "--estimator", "dnnmem", "--min-memory"),
        ("estimate", "--seq", "32", "--world", "2", "--strategy", "pp", "--time"),
        ("estimate", "--task", "inference", "--time"),
        ("estimate", "--seq", "32", "--batch", "4", *SMALL),
        ("select", "--seq", "32", "--gpus", "2", "--gpu", "T4", "--methods", "ddp,fsdp2", "--jobs", "1"),
        ("select", "--seq", "32", "--gpu", "T4", "--methods", "single", "--jobs", "1", "--memory", "20MiB", *SMALL[2:]),
        ("check", "--seq", "32", "--budget", "4MiB"),
    ],
    ids=" ".join,
)
def test_a_real_model_s_document_is_as_its_schema_says(folder: Path, words: tuple[str, ...]) -> None:
    document = printed(words[0], str(folder), *words[1:])
    expected = schema(words[0])
    jsonschema.validate(document, expected)
    for name in expected["$defs"].get(words[0].capitalize(), expected)["required"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({key: value for key, value in document.items() if key != name}, expected)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "another": 1}, expected)


def test_lines_of_a_sweep_are_as_their_schema_says(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    jsonschema.validate(printed("sweep", str(folder / "cases"), "-o", str(out), "--jobs", "1"), schema("sweep"))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line.get("verdict", "failed") for line in lines) == ["failed", "fits", "fits", "fits", "oom"]
    for line in lines:
        jsonschema.validate(line, schema("sweep-line"))


def test_the_document_of_a_recorded_program_is_as_its_schema_says(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    outcome = CliRunner().invoke(main, ["record", "-q", "--json", str(path), str(folder / "train.py")])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(path.read_text())
    assert document["steps"] == 1
    assert (document["gpu"], document["gpu_bytes"], document["release"]) == ("A100-80GB", 85_097_971_712, "2.13")
    jsonschema.validate(document, schema("record"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "another": 1}, schema("record"))


def test_phases_are_found_by_name_and_by_key() -> None:
    for rank in printed("run", TINY)["ranks"]:
        keys = [key for phase in rank["all_phases"] for key in phase["keys"]]
        assert sorted(keys) == sorted(rank["phases"])
        for phase in rank["all_phases"]:
            assert all(rank["phases"][key]["peak"] == phase["peak"] for key in phase["keys"])


def test_an_unknown_document_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no schema of 'estmate'; there are run, estimate"):
        schema("estmate")
