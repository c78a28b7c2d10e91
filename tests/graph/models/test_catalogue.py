"""Names of models: by family, as the hub, Ollama and people spell them, and of copies; and none that is not meant."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from graph.models import catalogue

#: Ids that are asked for most (text, embeddings, vision and language, speech), each with the entry that it means; ""
#: where the catalogue has none: transformers needs timm for Gemma 3n, and the class of nomic-embed is not in it.
POPULAR = """
meta-llama/Llama-3.1-8B-Instruct llama-3.1-8b
meta-llama/Meta-Llama-3-8B-Instruct llama-3-8b
meta-llama/Llama-3.2-1B-Instruct llama-3.2-1b
meta-llama/Llama-3.2-3B-Instruct llama-3.2-3b
meta-llama/Llama-3.3-70B-Instruct llama-3.3-70b
meta-llama/Llama-2-7b-chat-hf llama-2-7b
meta-llama/Llama-4-Scout-17B-16E-Instruct llama-4-scout
meta-llama/Llama-4-Maverick-17B-128E-Instruct llama-4-maverick
Qwen/Qwen2.5-0.5B-Instruct qwen2.5-0.5b
Qwen/Qwen2.5-7B-Instruct qwen2.5-7b
Qwen/Qwen2.5-72B-Instruct qwen2.5-72b
Qwen/Qwen2.5-Coder-7B-Instruct qwen2.5-coder-7b
Qwen/Qwen2.5-VL-3B-Instruct qwen2.5-vl-3b
Qwen/Qwen2.5-VL-7B-Instruct-AWQ qwen2.5-vl-7b
Qwen/Qwen3-0.6B qwen3-0.6b
Qwen/Qwen3-8B-Base qwen3-8b
Qwen/Qwen3-32B-FP8 qwen3-32b
Qwen/Qwen3-4B-Instruct-2507 qwen3-4b-2507
Qwen/Qwen3-4B-Thinking-2507 qwen3-4b-2507
Qwen/Qwen3-30B-A3B-Instruct-2507 qwen3-30b-a3b-2507
Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 qwen3-235b-a22b-2507
Qwen/Qwen3-Coder-30B-A3B-Instruct qwen3-coder-30b-a3b
Qwen/Qwen3-Next-80B-A3B-Instruct qwen3-next-80b-a3b
Qwen/Qwen3-VL-8B-Instruct qwen3-vl-8b
Qwen/Qwen3-Embedding-0.6B qwen3-embedding-0.6b
openai/gpt-oss-20b gpt-oss-20b
openai/gpt-oss-120b gpt-oss-120b
deepseek-ai/DeepSeek-V2-Lite-Chat deepseek-v2-lite
deepseek-ai/DeepSeek-V3 deepseek-v3
deepseek-ai/DeepSeek-R1-0528 deepseek-r1-0528
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B deepseek-r1-distill-qwen-1.5b
deepseek-ai/DeepSeek-R1-Distill-Llama-8B deepseek-r1-distill-llama-8b
google/gemma-2-2b-it gemma-2-2b
google/gemma-3-1b-it gemma-3-1b
google/gemma-3-4b-it gemma-3-4b
google/gemma-3n-E4B-it
mistralai/Mistral-7B-Instruct-v0.2 mistral-7b-v0.2
mistralai/Mistral-7B-Instruct-v0.3 mistral-7b-v0.3
mistralai/Mistral-Nemo-Instruct-2407 mistral-nemo
mistralai/Mistral-Small-24B-Instruct-2501 mistral-small-24b
mistralai/Mixtral-8x7B-Instruct-v0.1 mixtral-8x7b
microsoft/phi-4 phi-4
microsoft/Phi-4-mini-instruct phi-4-mini
microsoft/Phi-3.5-mini-instruct phi-3.5-mini
TinyLlama/TinyLlama-1.1B-Chat-v1.0 tinyllama-1.1b
HuggingFaceTB/SmolLM2-135M-Instruct smollm2-135m
HuggingFaceTB/SmolLM3-3B smollm3-3b
ibm-granite/granite-3.3-8b-instruct granite-3.3-8b
tiiuae/Falcon3-7B-Instruct falcon3-7b
allenai/OLMo-2-1124-7B-Instruct olmo2-7b
zai-org/GLM-4.5-Air glm-4.5-air
moonshotai/Kimi-K2-Instruct kimi-k2
unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit llama-3.1-8b
NousResearch/Llama-2-7b-hf llama-2-7b
FacebookAI/xlm-roberta-base xlm-roberta-base
distilbert/distilbert-base-uncased distilbert-base
microsoft/deberta-v3-base deberta-v3-base
answerdotai/ModernBERT-base modernbert-base
sentence-transformers/all-MiniLM-L6-v2 all-minilm-l6-v2
BAAI/bge-m3 bge-m3
nomic-ai/nomic-embed-text-v1.5
openai/whisper-large-v3 whisper-large-v3
openai/clip-vit-base-patch32 clip-vit-base-patch32
google/siglip-so400m-patch14-384 siglip-so400m-patch14-384
facebook/dinov2-base dinov2-base
"""
#: ... and of pictures: pipelines of diffusers, copies of them, and those whose denoiser is of another shape.
PICTURES = """
black-forest-labs/FLUX.1-dev flux.1-dev
black-forest-labs/FLUX.1-Krea-dev flux.1-dev
black-forest-labs/FLUX.1-schnell flux.1-schnell
black-forest-labs/FLUX.1-Kontext-dev
black-forest-labs/FLUX.2-dev
unsloth/FLUX.1-dev-GGUF flux.1-dev
Comfy-Org/flux1-dev flux.1-dev
stabilityai/stable-diffusion-3-medium stable-diffusion-3-medium
stabilityai/stable-diffusion-3.5-medium stable-diffusion-3.5-medium
stabilityai/stable-diffusion-3.5-large-turbo stable-diffusion-3.5-large
stabilityai/stable-diffusion-xl-base-1.0 sdxl-base
stabilityai/stable-diffusion-xl-refiner-1.0
runwayml/stable-diffusion-v1-5 stable-diffusion-v1-5
CompVis/stable-diffusion-v1-4 stable-diffusion-v1-5
stabilityai/stable-diffusion-2-1 stable-diffusion-2-1
"""


def test_popular_ids_resolve_without_torch() -> None:
    wanted = {line.split()[0]: line.split()[1:] for line in POPULAR.strip().splitlines()}
    assert len(wanted) == 65
    assert sum(map(bool, wanted.values())) >= 60
    wanted |= {line.split()[0]: line.split()[1:] for line in PICTURES.strip().splitlines()}
    script = (
        "import json, sys; from graph.models import lookup, catalogue; ids = json.load(sys.stdin);"
        "found = {one: [catalogue.find(one)] if catalogue.find(one) else [] for one in ids};"
        "[lookup.configuration(one) for one in ids if found[one]];"
        "heavy = {'torch', 'numpy', 'transformers', 'diffusers', 'huggingface_hub'};"
        "assert not heavy & set(sys.modules); print(json.dumps(found))"
    )
    run = subprocess.run([sys.executable, "-c", script], input=json.dumps(list(wanted)), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == wanted


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("llama3.1-8b", "llama-3.1-8b"),
        ("llama3.1:8b-instruct-q4_K_M", "llama-3.1-8b"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("gemma3-4b", "gemma-3-4b"),
        ("gemma3:27b-it-qat", "gemma-3-27b"),
        ("qwen2.5:7b", "qwen2.5-7b"),
        ("qwen2.5vl:7b", "qwen2.5-vl-7b"),
        ("qwen3:30b-a3b", "qwen3-30b-a3b"),
        ("mistral:latest", "mistral-7b"),
        ("mixtral:8x22b", "mixtral-8x22b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("phi3:mini", "phi-3-mini"),
        ("phi4", "phi-4"),
        ("deepseek-r1:7b", "deepseek-r1-distill-qwen-7b"),
        ("llama4:scout", "llama-4-scout"),
        ("bartowski/Qwen2.5-14B-Instruct-GGUF", "qwen2.5-14b"),
        ("TheBloke/Llama-2-13B-chat-GPTQ", "llama-2-13b"),
        ("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int4", "qwen2.5-32b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "llama-3.3-70b"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b"),
        ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "llama-3.1-8b"),
        ("unsloth/Qwen3-8B-BF16", "qwen3-8b"),
        ("sdxl", "sdxl-base"),
        ("sd1.5", "stable-diffusion-v1-5"),
        ("sd3.5-large", "stable-diffusion-3.5-large"),
    ],
)
def test_spellings_of_ollama_and_copies(spelled: str, name: str) -> None:
    assert catalogue.find(spelled) == name


@pytest.mark.parametrize(
    "name", ["llama-27b", "qwen3-2b", "gemma-34b", "bert", "whisper", "llama-4", "gguf", "", "-it"]
)
def test_what_is_not_meant_is_not_found(name: str) -> None:
    assert catalogue.find(name) is None


@pytest.mark.parametrize("path", ["./gpt2", "~/llama-2-7b", "/models/gpt2", "runs/models/gpt2"])
def test_paths_are_not_names(path: str) -> None:
    assert catalogue.find(path) is None


def test_every_entry_is_found_by_its_name_its_repository_and_its_aliases() -> None:
    owners: dict[str, str] = {}
    for name, entry in catalogue.entries().items():
        assert catalogue.resolve(name) == (name, "")
        for alias in entry.get("aliases", ()):
            assert catalogue.find(alias) == name, alias
        if entry["repository"]:
            owner = owners.setdefault(entry["repository"], name)
            assert catalogue.resolve(entry["repository"]) == (owner, "")


def test_published_numbers_are_met() -> None:
    published = {name: entry for name, entry in catalogue.entries().items() if "published" in entry}
    assert len(published) > 100
    for name, entry in published.items():
        counted = entry["parameters"] + entry.get("apart", 0)
        assert counted == pytest.approx(entry["published"], rel=0.005), name
        assert entry["source"], name


def test_notes_say_what_a_name_is_taken_for() -> None:
    tuned = catalogue.resolve("meta-llama/Llama-3.1-8B-Instruct")
    copy = catalogue.resolve("unsloth/Llama-3.1-8B-Instruct-bnb-4bit")
    part = catalogue.resolve("google/gemma-3-4b-it")
    assert tuned is not None
    assert copy is not None
    assert part is not None
    assert tuned.note == "meta-llama/Llama-3.1-8B-Instruct is taken for llama-3.1-8b of the catalogue"
    assert copy.note.endswith("; the copy's own quantisation is not honoured (--quant says one)")
    assert "(the text model; without the vision tower)" in part.note


@pytest.mark.parametrize(
    ("word", "begins"),
    [
        ("whisper", "whisper-"),
        ("llama-4", "llama-4-"),
        ("qwen3-next-80b-a3c", "qwen3-next"),
        ("flux", "flux"),
        ("a", ""),
    ],
)
def test_suggestions_are_near(word: str, begins: str) -> None:
    near = catalogue.nearest(word)
    assert bool(near) == bool(begins)
    assert all(one.startswith(begins) for one in near)
