"""Where configurations are found: files, the Hub cache, the catalogue; and what is said where there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graph.case import Case
from graph.models.lookup import configuration
from traces.errors import ConfigError

Cache = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Writes a config.json into a Hub cache as huggingface_hub lays it out, and answers its path."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    def write(model: str, revision: str = "abc", main: str = "abc", hub: Path | None = None, **config: object) -> Path:
        folder = (hub or tmp_path / "home" / "hub") / f"models--{model.replace('/', '--')}"
        path = folder / "snapshots" / revision / "config.json"
        path.parent.mkdir(parents=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(main)
        path.write_text(json.dumps(config))
        return path

    return write


def test_an_id_of_the_hub_cache_is_found(cache: Cache) -> None:
    path = cache("somebody/Some-Model-9B", model_type="llama")
    found = configuration("somebody/Some-Model-9B")
    assert (found.document, found.place) == ({"model_type": "llama"}, str(path))
    assert found.note == f"somebody/Some-Model-9B is what the Hub cache has as {path}"


@pytest.mark.parametrize("part", ["transformer", "unet"])
def test_a_pipeline_of_diffusers_has_its_denoiser_in_a_folder(part: str, cache: Cache) -> None:
    path = cache("somebody/pictures", _class_name="AutoencoderKL").parent / part / "config.json"
    path.parent.mkdir()
    (path.parents[1] / "config.json").rename(path)
    assert configuration("somebody/pictures").place == str(path)
    assert configuration(str(path.parents[1])).place == str(path)


def test_the_hub_cache_comes_before_the_catalogue_and_says_so(cache: Cache) -> None:
    cache("Qwen/Qwen3-8B", model_type="qwen3", dtype="float16")
    found = configuration("Qwen/Qwen3-8B")
    assert found.document["dtype"] == "float16"
    assert found.note.endswith(", not the qwen3-8b of the catalogue")
    assert Case(model="Qwen/Qwen3-8B").dtype == "fp16"
    assert configuration("qwen3-8b").place == "catalogue: qwen3-8b"


def test_the_snapshot_of_main_is_taken_else_the_newest(cache: Cache) -> None:
    older = cache("a/b", revision="one", main="one", number=1)
    newer = cache("a/b", revision="two", main="one", number=2)
    os.utime(older, (1, 1))
    assert configuration("a/b").document == {"number": 1}
    (newer.parents[2] / "refs" / "main").write_text("gone")
    assert configuration("a/b").document == {"number": 2}


def test_hf_hub_cache_names_the_folder(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache("a/b", hub=tmp_path / "elsewhere", number=3)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert configuration("a/b").document == {"number": 3}


def test_a_folder_comes_before_a_copy_of_an_entry(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unsloth" / "Llama-3.2-1B").mkdir(parents=True)
    (tmp_path / "unsloth" / "Llama-3.2-1B" / "config.json").write_text('{"model_type": "opt"}')
    monkeypatch.chdir(tmp_path)
    assert configuration("unsloth/Llama-3.2-1B").document == {"model_type": "opt"}
    assert configuration("meta-llama/Llama-3.2-1B").place == "catalogue: llama-3.2-1b"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("somebody/New-Model", "`hf download somebody/New-Model config.json`, then the same again"),
        ("sora", "`hf download OWNER/NAME config.json`"),
        ("llama-4", "(near it: 'llama-4-scout', 'llama-4-maverick')"),
    ],
)
def test_what_nobody_has_is_said_with_the_way_on(cache: Cache, model: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(model)
    assert said in str(caught.value)
    assert ("near it" in str(caught.value)) == (model == "llama-4")
