"""Axolotl's examples: what they find in their folder, what is read of their log, and which runs are kept."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.accuracy.axolotl import KEPT, MODELS, TABLE, Compared, Logged, kept, logged, prepare, summary
from tests.accuracy.sft import read

ROWS = read(TABLE)
STEP = "{'loss': 0.0, 'memory/max_active (GiB)': %s, 'memory/device_reserved (GiB)': %s, 'epoch': 0.06}"


def test_what_is_read_of_a_log() -> None:
    steps = [STEP % figures for figures in (("4.5", "5.0"), ("4.75", "5.25"))]
    evaluation = "{'eval_loss': 0.0, 'memory/max_active (GiB)': 9.0, 'memory/device_reserved (GiB)': 9.5}"
    assert logged("\n".join(["begins", *steps, evaluation])) == Logged(4.75, 5.25)
    assert logged(evaluation) is None


def test_what_is_printed() -> None:
    row = {"id": "one", "gib": "5.0"}
    found = [Compared(row, Logged(5.5, 6.0)), Compared(row, Logged(failure="ImportError: x"))]
    assert str(found[0]).split(maxsplit=1)[1] == "5.50 for 5.0 GiB +10.0%, reserved 6.00"
    assert str(found[1]).endswith("FAILED: ImportError: x")
    assert summary(found) == "1 of 2 rows ran: median 10.00%, worst 10.00%"


@pytest.mark.parametrize("model", ["tencent/Hunyuan-0.5B-Instruct", "mistralai/Ministral-8B-Instruct-2410"])
def test_an_example_finds_its_model_and_texts(model: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    prepare(model, tmp_path)
    lines = (tmp_path / "fozziethebeat" / "alpaca_messages_2k_test" / "data.jsonl").read_text().splitlines()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / model)
    turns = json.loads(lines[0])["messages"]
    whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]
    assert whole.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == len(turns) == 2
    assert max(whole) < json.loads((tmp_path / model / "config.json").read_text())["vocab_size"]
    if (own := tmp_path / model / "tekken.json").exists():
        told = json.loads(own.read_text())
        tokens = {base64.b64decode(one["token_bytes"]).decode("latin-1") for one in told["vocab"]}
        assert {f" {word}" for word in turns[0]["content"].split()} <= tokens
        assert told["config"]["default_vocab_size"] == len(tokens) + told["config"]["default_num_special_tokens"]


def test_configurations_have_as_many_parameters_as_the_models() -> None:
    """In thousands of millions, as their pages on the hub say."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    published = {"apertus": 8.05, "mistral": 23.6, "qwen3": 4.02, "seed_oss": 36.2, "olmo3": 7.30}
    found = {}
    for model in json.loads(MODELS.read_text()).values():
        kind = model["model_type"]
        if kind in published and kind not in found:
            with torch.device("meta"):
                made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**model))
            found[kind] = sum(one.numel() for one in made.parameters()) / 1e9
    assert found == pytest.approx(published, rel=2e-3)


def test_every_row_has_a_run_that_is_kept() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    assert len(kept()) == 2
