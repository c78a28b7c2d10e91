"""What the commands print under `--json` is as their schemas say; `estimate` and `sweep` are in test_estimate."""

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


def test_phases_are_found_by_name_and_by_key() -> None:
    for rank in printed("run", TINY)["ranks"]:
        keys = [key for phase in rank["all_phases"] for key in phase["keys"]]
        assert sorted(keys) == sorted(rank["phases"])
        for phase in rank["all_phases"]:
            assert all(rank["phases"][key]["peak"] == phase["peak"] for key in phase["keys"])


def test_an_unknown_document_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no schema of 'estmate'; there are run, estimate"):
        schema("estmate")
