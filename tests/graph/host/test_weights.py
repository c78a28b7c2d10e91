"""Weights that are never read, tensors that are never written, and host memory that nobody touches."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import mmap
import pickle
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver  # noqa: E402

from graph.fake_cuda.device import Runtime, fake_cuda  # noqa: E402
from graph.hardware.profile import profile  # noqa: E402
from graph.host import pages  # noqa: E402
from graph.host.memory import LARGE, untouched  # noqa: E402
from graph.host.weights import _saved, _StandIn, never_read  # noqa: E402
from graph.recorder.checkpoints import Saving  # noqa: E402
from graph.recorder.program import ProgramRecorder  # noqa: E402
from simulator.allocator.releases import parse_release  # noqa: E402
from simulator.recording.allocator import LiveAllocator  # noqa: E402
from traces.model import Device  # noqa: E402

GIB = 1 << 30
#: Libraries whose loading and saving is another while a program runs.
CHANGED = ("safetensors", "safetensors.torch", "torch.distributed.checkpoint.filesystem", "transformers.modeling_utils")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    live = LiveAllocator(Device("A100-80GB", 80 * GIB), parse_release("2.13"), "", torch.OutOfMemoryError)
    stand_ins = tmp_path / "stand-ins"
    stand_ins.mkdir()
    with fake_cuda(profile("A100", "2.13"), live) as made, never_read(made, stand_ins), untouched(made):
        made.observer = ProgramRecorder(made, live)
        monkeypatch.setattr(torch, "save", Saving(torch.save, made.values.of))
        yield made


def grown(before: int) -> int:
    """Bytes by which the peak memory of this process has grown."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def blocks(path: Path) -> int:
    """Bytes that a file takes on the disk."""
    return path.stat().st_blocks * 512


def test_what_is_changed_of_libraries_is_as_it_was_in_the_end(tmp_path: Path) -> None:
    parts: list[Any] = [importlib.import_module(name) for name in CHANGED]
    parts.append(parts[2].FileSystem)
    before = [dict(vars(part)) for part in parts]
    with fake_cuda(profile("A100", "2.13")) as made, never_read(made, tmp_path):
        assert any(vars(part)[name] is not old[name] for part, old in zip(parts, before, strict=True) for name in old)
    assert [{name: vars(part)[name] for name in old} for part, old in zip(parts, before, strict=True)] == before


def test_large_tensors_on_the_host_are_not_touched(runtime: Runtime) -> None:
    before = peak()
    layer = torch.nn.Linear(16384, 16384)  # 1 GiB, with an initialiser
    torch.nn.init.trunc_normal_(layer.weight)
    torch.nn.init.zeros_(layer.weight)
    half = layer.weight.data.to(torch.bfloat16).clone()
    moved = torch.nn.Parameter(half.cuda())
    back = moved.detach().cpu()
    assert (back.shape, back.dtype) == (layer.weight.shape, torch.bfloat16)
    assert torch.cuda.memory_allocated() == 512 << 20
    assert grown(before) < 64 << 20


def test_small_tensors_and_integers_have_their_values(runtime: Runtime) -> None:
    x = torch.zeros(1000).add_(0.1).mul_(2).fill_(3).clamp_(max=2.5).div_(torch.tensor(2))
    assert torch.equal(x, torch.full((1000,), 1.25))
    assert (10 / torch.arange(1, 3, dtype=torch.float)).tolist() == [10, 5]
    assert 0.9 < torch.randn(10_000).std() < 1.1
    assert torch.arange(1 << 22).fill_(7).sum() == 7 << 22


def test_truncated_numbers_are_drawn_until_all_are_inside(runtime: Runtime) -> None:
    there = torch.nn.init.trunc_normal_(torch.empty(1 << 20, device="cuda"), a=-2, b=2)
    assert torch.cuda.max_memory_allocated() >= 3 * there.nbytes  # what is drawn anew, and the result of both
    here = torch.nn.init.trunc_normal_(torch.empty(1000), a=-2, b=2)
    assert 1 < here.abs().max() <= 2


def test_files_of_torch_have_holes_and_only_integers_are_read(runtime: Runtime, tmp_path: Path) -> None:
    before = peak()
    tensors = {
        "weight": torch.randn(1 << 28),
        "there": torch.ones(1 << 20, device="cuda"),
        "ids": torch.arange(1 << 18),
    }
    path = tmp_path / "model.pt"
    torch.save(tensors, path)
    assert path.stat().st_size >= GIB + (6 << 20)
    assert blocks(path) < 4 << 20
    with (tmp_path / "stream.pt").open("wb") as file:
        torch.save(tensors, file)
    assert blocks(tmp_path / "stream.pt") < 4 << 20
    for name in ("model.pt", "stream.pt"):
        found = torch.load(tmp_path / name)
        assert torch.equal(found["ids"], tensors["ids"])
        assert (found["weight"].shape, found["there"].device.type) == ((1 << 28,), "cuda")
    assert torch.load(path, map_location="cuda", mmap=True)["weight"].nbytes == GIB
    assert grown(before) < 64 << 20


def test_small_tensors_go_through_memory(runtime: Runtime) -> None:
    stream = io.BytesIO()
    torch.save({"step": torch.tensor(5), "lr": torch.tensor([0.5])}, stream)
    stream.seek(0)
    found = torch.load(stream)
    assert (found["step"].item(), found["lr"].item()) == (5, 0.5)


def test_the_old_format_is_written(runtime: Runtime, tmp_path: Path) -> None:
    """In which `pickle` has tensors. The CUDA build of 2.13 wrote 419 and 536 bytes beside the numbers, a few more or
    less by the addresses among them."""
    host = torch.arange(6.0).reshape(2, 3)
    assert pickle.loads(pickle.dumps(host)).tolist() == host.tolist()
    on_device = torch.ones(1000, 300, device="cuda")
    written = pickle.dumps(on_device)
    again = pickle.loads(written)
    assert (again.shape, again.is_cuda, len(written) - on_device.nbytes) == (
        (1000, 300),
        True,
        pytest.approx(419, abs=20),
    )
    layer, place = torch.nn.Linear(100, 50, device="cuda"), tmp_path / "old.pt"
    for _ in range(2):
        torch.save(layer.state_dict(), place, _use_new_zipfile_serialization=False)
    assert place.stat().st_size - 4 * 50 * 101 == pytest.approx(536, abs=20)
    assert {name: tuple(one.shape) for name, one in torch.load(place).items()} == {"weight": (50, 100), "bias": (50,)}
    theirs = tmp_path / "theirs.pt"
    theirs.write_bytes(b"a real run")
    torch.save(host, theirs, pickle, 2, False)
    assert theirs.read_bytes() == b"a real run"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_distributed_checkpoints_have_holes_and_stay_as_they_were(runtime: Runtime, tmp_path: Path) -> None:
    before = peak()
    state: dict[str, Any] = {"weight": torch.zeros(1 << 28, device="cuda"), "steps": torch.tensor([3])}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "own")
    (file,) = (tmp_path / "own").glob("*.distcp")
    assert file.stat().st_size >= GIB
    assert blocks(file) < 1 << 20
    state["steps"] = torch.tensor([0])
    state_dict_loader.load(state, checkpoint_id=tmp_path / "own")
    assert state["steps"].item() == 3
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in (file.name, ".metadata"):
        (theirs / name).write_text("precious")
    state_dict_saver.save(state, checkpoint_id=theirs)
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {
        file.name: "precious",
        ".metadata": "precious",
    }
    assert grown(before) < 64 << 20


def test_safetensors_have_holes_and_are_mapped(runtime: Runtime, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    before = peak()
    tensors = {"weight": torch.randn(1 << 29, dtype=torch.bfloat16), "there": torch.ones(8, 4, device="cuda")}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    assert blocks(path) < 1 << 20
    found = load_file(path)
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in tensors.items()
    }
    assert load_file(path, device="cuda")["weight"].device.type == "cuda"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("there")[:2].shape == (2, 4)
    path.write_bytes(b"precious")
    (tmp_path / "theirs").write_bytes(b"precious")
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "theirs").read_bytes() == b"precious"
    assert grown(before) < 64 << 20
    assert runtime.assumptions == {}


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def test_no_device_is_the_host(runtime: Runtime, tmp_path: Path) -> None:
    """As transformers 4.57 opens a file for `device_map="cuda"`."""
    save_file({"weight": torch.ones(4)}, tmp_path / "weights")
    with safetensors.safe_open(tmp_path / "weights", "pt", device=None) as file:
        assert file.get_tensor("weight").is_cpu


def test_where_a_byte_is_looked_at_the_rest_is_not_read(runtime: Runtime, tmp_path: Path) -> None:
    """safetensors looks at the first byte of each tensor that it cuts out."""
    path, size, step = tmp_path / "weights", 64 << 20, 2 << 20
    with path.open("wb") as file:
        file.truncate(size)
    storage = torch.UntypedStorage.from_file(str(path), False, size)
    assert [storage[place] for place in range(0, size, step)] == [0] * (size // step)
    assert cached(path, size) < 2 * size // step * mmap.PAGESIZE


def test_experts_of_a_file_are_made_one_tensor_and_not_read(runtime: Runtime, tmp_path: Path) -> None:
    path, size = tmp_path / "experts", 192 << 20
    with path.open("wb") as file:
        file.truncate(size)
    before = peak()
    whole = torch.empty(0, dtype=torch.bfloat16).set_(torch.UntypedStorage.from_file(str(path), False, size))
    experts = whole.view(64, 1024, 1536).unbind()
    assert experts[0].nbytes < LARGE
    joined = torch.cat([torch.stack(experts[:32]), torch.stack(experts[32:])], 1)
    assert joined.shape == (32, 2048, 1536)
    assert grown(before) < 64 << 20
    assert cached(path, size) < 1 << 20


def test_what_joins_experts_takes_no_memory_that_was_written_before(runtime: Runtime, tmp_path: Path) -> None:
    plain, size = torch.empty_strided, 8 << 20

    def written(*args: Any, **kwargs: Any) -> Any:
        """As where the C library gives away again what was freed."""
        made = plain(*args, **kwargs)
        if made.device.type == "cpu":
            ctypes.memset(made.data_ptr(), 1, made.nbytes)
        return made

    path = tmp_path / "experts"
    path.write_bytes(bytes(size))
    whole = torch.empty(0, dtype=torch.bfloat16).set_(torch.UntypedStorage.from_file(str(path), False, size))
    with mock.patch.object(torch, "empty_strided", written):
        joined = torch.stack(whole.view(4, 1024, 1024).unbind())
    assert not pages.is_written(joined)


def cached(path: Path, size: int) -> int:
    """Bytes of a file that the system has in memory (mincore(2))."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as pages:
        where = ctypes.c_char.from_buffer(pages)
        found = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(where)), ctypes.c_size_t(size), found) == 0
        del where
        return sum(page & 1 for page in found) * mmap.PAGESIZE


def test_a_model_without_weights_is_loaded_as_if_it_had_them(runtime: Runtime, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    load = transformers.AutoModelForCausalLM.from_pretrained
    without = load(tmp_path / "model")
    assert without.dtype == torch.bfloat16
    assert [told for told in runtime.assumptions if "are not on this machine" in told]
    without.save_pretrained(tmp_path / "saved")
    runtime.assumptions.clear()
    with_them = load(tmp_path / "saved")
    assert runtime.assumptions == {}
    shapes = [(name, one.shape, one.dtype) for name, one in without.named_parameters()]
    assert shapes == [(name, one.shape, one.dtype) for name, one in with_them.named_parameters()]
    whole = sum(one.nbytes for one in with_them.parameters())
    with_them.cuda()
    assert torch.cuda.memory_allocated() >= whole


def test_tied_weights_are_loaded_once(runtime: Runtime, tmp_path: Path) -> None:
    """A file of both would have both on the GPU for a while, and releases from 5.0 on would not tie them."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, device_map="cuda")
    load(tmp_path / "model").save_pretrained(tmp_path / "saved")
    peaks = []
    for folder in ("model", "saved"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = load(tmp_path / folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
        gc.collect()
    assert peaks[0] == peaks[1]


def test_the_meta_device_of_transformers_before_5_6(runtime: Runtime) -> None:
    """Of 5.0 to 5.5 its own `initialization` has no `meta_device_safe_creation_ops`."""
    transformers = pytest.importorskip("transformers")
    module = transformers.modeling_utils
    older: Any = SimpleNamespace(
        **vars(module) | {"init": SimpleNamespace(no_init_weights=module.init.no_init_weights)}
    )
    made = partial(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA))
    assert [*_saved(older, made, torch.bfloat16)] == [*_saved(module, made, torch.bfloat16)]


def test_a_model_without_weights_may_take_more_than_its_configuration(runtime: Runtime, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Scored(transformers.LlamaPreTrainedModel):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, scores: int, *, depth: int = 1) -> None:
            super().__init__(config)
            self.model = transformers.LlamaModel(config)
            self.heads = torch.nn.ModuleList(torch.nn.Linear(config.hidden_size, scores) for _ in range(depth))
            self.post_init()

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    made = Scored.from_pretrained(tmp_path, 7, depth=2)
    assert [head.weight.shape for head in made.heads] == [(7, 1024)] * 2
    assert any("they count as those that Scored saves" in told for told in runtime.assumptions)


def test_a_configuration_may_hold_what_no_file_does(runtime: Runtime, tmp_path: Path) -> None:
    """Unsloth puts functions there."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.told = print
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert made.config.vocab_size == LLAMA["vocab_size"]


def test_a_buffer_of_a_model_without_weights_is_saved(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers up to 5.13 asks for it as for a parameter, where it is on the meta device (Gemma 4)."""
    transformers = pytest.importorskip("transformers", "5.0.0")
    plain = transformers.modeling_utils.remove_tied_weights_from_state_dict
    asked: list[str] = []

    def without_tied(state: dict[str, Any], model: Any) -> Any:
        asked.extend(name for name in state if model.get_parameter(name).is_meta)
        return plain(state, model)

    class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("scale", torch.ones(3))
            self.post_init()

    monkeypatch.setattr(transformers.modeling_utils, "remove_tied_weights_from_state_dict", without_tied)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert Scaled.from_pretrained(tmp_path).scale.shape == (3,)
    assert "scale" in asked


def test_a_model_that_reads_a_number_as_it_is_made_has_weights_too(runtime: Runtime, tmp_path: Path) -> None:
    """As transformers' xIELU does up to 4.57, which are made on the meta device here alone."""
    transformers = pytest.importorskip("transformers")

    class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("beta", torch.tensor(0.5))
            self.scale = float(self.beta.detach().cpu().item())

    config, before = transformers.LlamaConfig(**LLAMA), peak()
    state = _saved(transformers.modeling_utils, lambda: Scaled(config), torch.bfloat16)
    plain = _saved(transformers.modeling_utils, lambda: transformers.LlamaForCausalLM(config), torch.bfloat16)
    assert [(name, one.shape) for name, one in state.items() if name != "beta"] == [
        (name, one.shape) for name, one in plain.items()
    ]
    assert state.keys() - plain.keys() == {"beta"}
    assert grown(before) < sum(one.nbytes for one in state.values())


def test_a_model_of_diffusers_without_weights_is_loaded_as_if_it_had_them(runtime: Runtime, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    kind = diffusers.AutoencoderKL
    with torch.device("meta"):
        made = kind(block_out_channels=(32, 64), norm_num_groups=8, latent_channels=4)
    made.save_config(tmp_path / "pipeline" / "vae")
    loaded = kind.from_pretrained(tmp_path / "pipeline", subfolder="vae", torch_dtype=torch.bfloat16)
    (told,) = runtime.assumptions
    assert "pipeline are not on this machine: they count as those that AutoencoderKL saves, in torch.bfloat16" in told
    assert [(name, one.shape) for name, one in loaded.state_dict().items()] == [
        (name, one.shape) for name, one in made.state_dict().items()
    ]
    assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}
    assert not loaded.training
    with pytest.raises(OSError, match="config"):
        kind.from_pretrained(tmp_path / "elsewhere")


class Settings:
    """A configuration, as transformers had them before 4.50."""

    name_or_path = "someone/tiny"
    torch_dtype = "bfloat16"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        return cls()

    @classmethod
    def from_pretrained(cls, name: object, **kwargs: object) -> Settings:
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return {}


class Tiny(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model of such a release: from_pretrained finds the file itself, or there is an OSError."""

    config_class = Settings
    name_or_path = ""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.up = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(64, 32, bias=False)

    def tie_weights(self) -> None:
        """As `from_pretrained` asks for it in the end."""
        self.head.weight = self.up.weight

    @classmethod
    def from_pretrained(cls, name: str | Path, config: Settings | None = None, **kwargs: object) -> Tiny:
        file = Path(name) / "model.safetensors"
        if not file.exists():
            raise OSError(f"no file named model.safetensors in {name}")
        model = cls(config or Settings()).to(torch.bfloat16)
        found = load_file(file)
        assert {name: (tuple(one.shape), one.dtype) for name, one in found.items()} == {
            "up.weight": ((32, 64), torch.bfloat16),
            "up.bias": ((32,), torch.bfloat16),
        }
        return model


def test_releases_of_transformers_that_find_the_files_themselves(runtime: Runtime, tmp_path: Path) -> None:
    module = SimpleNamespace(
        PreTrainedModel=Tiny,
        PretrainedConfig=Settings,
        SAFE_WEIGHTS_NAME="model.safetensors",
        no_init_weights=contextlib.nullcontext,
    )
    stand_in = _StandIn(runtime, tmp_path)
    stand_in.install(module)
    for _ in range(2):
        model = module.PreTrainedModel.from_pretrained(tmp_path / "model")
        assert model.name_or_path == model.config.name_or_path == str(tmp_path / "model")
    assert [told for told in runtime.assumptions if "they count as those that Tiny saves, in torch.bfloat16" in told]


def test_releases_of_transformers_that_say_alone_what_is_downloaded(runtime: Runtime, tmp_path: Path) -> None:
    """From 4.50 on a function finds the files, which before 5 takes `local_files_only` itself."""
    asked = []

    def _get_resolved_checkpoint_files(
        pretrained_model_name_or_path: str, token: str | None = None, local_files_only: bool = False
    ) -> tuple[list[str], None]:
        asked.append(local_files_only)
        return [str(tmp_path)], None

    module = SimpleNamespace(_get_resolved_checkpoint_files=_get_resolved_checkpoint_files)
    _StandIn(runtime, tmp_path).install(module)
    found = module._get_resolved_checkpoint_files(pretrained_model_name_or_path="llama", local_files_only=False)
    assert (found, asked) == (([str(tmp_path)], None), [True])


def test_a_name_of_the_hub_needs_its_configuration_alone(runtime: Runtime, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    place = tmp_path / "models--someone--llama"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load("someone/llama", cache_dir=tmp_path, local_files_only=True)
    assert model.config.hidden_size == 1024
    assert "the weights of someone/llama are not on this machine" in next(iter(runtime.assumptions))
