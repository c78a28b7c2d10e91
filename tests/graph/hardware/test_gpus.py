"""The table of GPUs: every spelling that people and drivers use, what is said where one is unclear, and added GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from graph.hardware import gpus
from graph.hardware.gpus import GPUS, Gpu, Measured, assumed, gpu, register
from graph.hardware.profile import profile
from simulator.commands.gpus import command
from simulator.estimator.devices import device
from simulator.estimator.estimate import estimate
from simulator.estimator.step_time import StepTime
from strategies.timing.clock import Clock
from tests.support.step_graphs import stub
from traces.errors import ConfigError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("P100-16GB", "P100|Tesla P100-PCIE-16GB|p100 16gb"),
        ("V100-16GB", "V100|V100-16|Tesla V100-SXM2-16GB|V100-SXM2-16GB"),
        ("V100-32GB", "V100 32GB|Tesla V100-SXM2-32GB|v100-32"),
        ("V100-PCIe-32GB", "Tesla V100-PCIE-32GB|V100-PCIe-32GB"),
        ("T4-16GB", "T4|Tesla T4|NVIDIA T4"),
        ("RTX2080Ti-11GB", "2080 Ti|RTX 2080 Ti|NVIDIA GeForce RTX 2080 Ti|GeForce RTX 2080 Ti"),
        ("TitanRTX-24GB", "Titan RTX|TITAN RTX|NVIDIA TITAN RTX"),
        ("A10-24GB", "A10|NVIDIA A10"),
        ("A10G-24GB", "A10G|NVIDIA A10G|a10g 24GB"),
        ("A30-24GB", "A30|NVIDIA A30"),
        ("A40-48GB", "A40|NVIDIA A40"),
        ("A100-40GB", "A100-40|A100 40GB|A100-SXM4-40GB|NVIDIA A100-SXM4-40GB"),
        ("A100-80GB", "A100|a100-80|a100 80g|A100 80GB|A100-SXM|A100-SXM4-80GB|NVIDIA A100-SXM4-80GB"),
        ("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB"),
        ("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe|A100 PCIe 80GB|A100 80GB PCIe"),
        ("RTXA4000-16GB", "RTX A4000|A4000|NVIDIA RTX A4000"),
        ("RTXA5000-24GB", "RTX A5000|A5000|NVIDIA RTX A5000"),
        ("RTXA6000-48GB", "A6000|RTX A6000|NVIDIA RTX A6000"),
        ("RTX3060-12GB", "3060|RTX 3060|NVIDIA GeForce RTX 3060"),
        ("RTX3070-8GB", "3070|RTX3070|NVIDIA GeForce RTX 3070"),
        ("RTX3080-10GB", "3080|RTX 3080|GeForce RTX 3080"),
        ("RTX3080Ti-12GB", "3080 Ti|3080ti|NVIDIA GeForce RTX 3080 Ti"),
        ("RTX3090-24GB", "3090|RTX_3090|GeForce RTX 3090|NVIDIA GeForce RTX 3090"),
        ("RTX3090Ti-24GB", "3090 Ti|NVIDIA GeForce RTX 3090 Ti"),
        ("RTX4060Ti-16GB", "4060 Ti 16GB|RTX 4060 Ti|NVIDIA GeForce RTX 4060 Ti"),
        ("RTX4070-12GB", "4070|RTX 4070|NVIDIA GeForce RTX 4070"),
        ("RTX4060-8GB", "4060|NVIDIA GeForce RTX 4060"),
        ("RTX4070TiSUPER-16GB", "4070 Ti Super|NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("RTX4080-16GB", "4080|RTX4080|NVIDIA GeForce RTX 4080"),
        ("RTX4090-24GB", "4090|RTX 4090|rtx_4090|GeForce RTX 4090|NVIDIA GeForce RTX 4090"),
        ("L4-24GB", "L4|NVIDIA L4"),
        ("L40-48GB", "L40|NVIDIA L40"),
        ("L40S-48GB", "L40S|NVIDIA L40S|l40s-48gb"),
        ("RTX6000Ada-48GB", "RTX6000Ada|RTX 6000 Ada|NVIDIA RTX 6000 Ada Generation"),
        ("H20-96GB", "H20|NVIDIA H20"),
        ("H100-80GB", "h100|H100-SXM|H100 SXM5|H100 80GB|NVIDIA H100 80GB HBM3"),
        ("H100-PCIe-80GB", "H100 PCIe|NVIDIA H100 PCIe"),
        ("H100-NVL-94GB", "H100 NVL|NVIDIA H100 NVL"),
        ("GH200-96GB", "GH200|NVIDIA GH200 480GB"),
        ("H200-141GB", "H200|H200 SXM|NVIDIA H200"),
        ("B200-192GB", "B200|NVIDIA B200"),
        ("GB200-192GB", "GB200|NVIDIA GB200"),
        ("B300-288GB", "B300|NVIDIA B300 SXM6 AC"),
        ("GB300-288GB", "GB300|NVIDIA GB300"),
        ("RTX5080-16GB", "5080|RTX 5080|NVIDIA GeForce RTX 5080"),
        ("RTX5090-32GB", "5090|RTX5090|NVIDIA GeForce RTX 5090"),
        ("RTXPRO6000-96GB", "RTX PRO 6000|RTX PRO 6000 Blackwell|NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_spellings(name: str, spellings: str) -> None:
    for spelling in (name, *spellings.split("|")):
        assert gpu(spelling).name == name, spelling
        assert device(spelling).name == name


@pytest.mark.parametrize(
    ("name", "arch", "sm_count", "total_mib"),
    [  # as torch.cuda.get_device_properties printed them on such cards
        ("P100", (6, 0), 56, 16280),
        ("A10G", (8, 6), 80, 22587),
        ("A40", (8, 6), 84, 45416),
        ("RTX A5000", (8, 6), 64, 24138),
        ("RTX A6000", (8, 6), 84, 48676),
        ("RTX 4080", (8, 9), 76, 16049),
        ("RTX 6000 Ada", (8, 9), 142, 48622),
        ("H20", (9, 0), 78, 97285),
        ("H100 PCIe", (9, 0), 114, 81008),
        ("RTX PRO 6000", (12, 0), 188, 97250),
    ],
)
def test_properties(name: str, arch: tuple[int, int], sm_count: int, total_mib: int) -> None:
    found = profile(name, "2.13")
    assert (found.arch, found.sm_count, found.total_bytes // MIB) == (arch, sm_count, total_mib)


def test_what_is_assumed_is_said() -> None:
    assert assumed("A100") == "GPU A100 is taken to be A100-80GB; there is A100-40GB too"
    assert assumed("v100") == "GPU v100 is taken to be V100-16GB; there is V100-32GB too"
    for sure in ("A100-80GB", "a100 40gb", "NVIDIA A100-SXM4-80GB", "4090", "H100"):
        assert assumed(sure) is None


@pytest.mark.parametrize("name", ["M3Max", "TPU v4", "gpu", "", "RTX", "x" * 1000])
def test_far_names_suggest_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown GPU") as caught:
        gpu(name)
    assert "nearest" not in str(caught.value)
    assert "llmem gpus" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"), [("4091", "RTX4090-24GB"), ("L40SS", "L40S-48GB"), ("B2000", "B200-192GB")]
)
def test_near_names_suggest_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"nearest is '{nearest}'"):
        gpu(name)


@pytest.mark.parametrize("name", ["MI300X", "AMD Instinct MI250", "mi325x", "Radeon RX 7900 XTX"])
def test_cards_of_amd_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="AMD's GPUs do not run CUDA"):
        gpu(name)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers is gone after it."""
    before, names = dict(GPUS), dict(gpus._NAMES)
    yield
    for table, kept in ((GPUS, before), (gpus._NAMES, names)):
        table.clear()
        table.update(kept)  # type: ignore[arg-type]


TOY = Gpu(
    name="Toy-2GB",
    product="NVIDIA Toy 9000",
    arch=(8, 9),
    sm_count=10,
    l2_bytes=4 * MIB,
    total_bytes=2000 * MIB,
    total_source="nvidia-smi",
    half=20e12,
    single=10e12,
    tf32=10e12,
    double=1e12,
    eight=40e12,
    memory=100e9,
    link="pcie4",
    speed_source="made up",
    aliases=("Plaything",),
    context=Measured(111, 100, 120, "measured here"),
)


@pytest.mark.usefixtures("forgotten")
def test_a_gpu_added_from_outside_works_everywhere() -> None:
    register(TOY)
    for spelling in ("toy", "Toy-2GB", "nvidia toy 9000", "plaything"):
        assert device(spelling).total_bytes == 2000 * MIB
    assert profile("toy", "2.13").max_threads_per_sm == 1536
    found = estimate({"model": "written", "gpu": "Toy"}, capture=stub, time_steps=True)
    assert found.trace.devices[0].name == "Toy-2GB"
    assert found.result.ranks[0].device.total_bytes == 2000 * MIB
    assert found.outside[0].bytes == 111 * MIB
    assert Clock.of("toy").speed().bytes_per_second == pytest.approx(85e9)
    slow, fast = (
        estimate({"model": "written", "gpu": name}, capture=stub, time_steps=True) for name in ("toy", "H100")
    )
    assert isinstance(slow.step, StepTime)
    assert isinstance(fast.step, StepTime)
    assert slow.step.step_ns > fast.step.step_ns


@pytest.mark.usefixtures("forgotten")
def test_what_cannot_be_added() -> None:
    with pytest.raises(ConfigError, match="is a name of H100-80GB"):
        register(replace(TOY, aliases=("H100",)))
    with pytest.raises(ConfigError, match=r"compute capability \(3, 5\) is not known"):
        register(replace(TOY, arch=(3, 5)))
    with pytest.raises(ConfigError, match="unknown GPU"):
        gpu("toy")


def test_bf16_where_tensor_cores_lack_it_is_said() -> None:
    def notes(**keys: str) -> str:
        return "\n".join(estimate({"model": "written", **keys}, capture=stub).assumptions)

    assert "T4-16GB has no tensor cores for bf16" in notes(gpu="T4", dtype="bf16")
    assert "V100-32GB has no tensor cores for bf16" in notes(gpu="V100-32GB", autocast="bf16")
    assert "bf16" not in notes(gpu="T4", dtype="fp16") + notes(gpu="A10", dtype="bf16")
    assert "taken to be V100-16GB" in notes(gpu="V100")


def test_gpus_lists_all_without_torch() -> None:
    code = (
        "import sys; from simulator.cli import main; sys.argv = ['llmem', 'gpus']\n"
        "try: main()\n"
        "finally: print({'torch', 'networkx', 'numba', 'numpy'} & {*sys.modules})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[-1] == "set()"
    assert [line.split()[0] for line in told[1:-1]] == list(GPUS)
    assert any(line.split()[:4] == ["RTX4090-24GB", "23.64", "GiB", "Ada"] for line in told)


def test_gpus_tells_of_one_where_figures_come_from() -> None:
    told = CliRunner().invoke(command, ["a100 pcie 80gb"]).output
    assert "84,986,036,224 bytes" in told  # 81,049 MiB
    assert "ekondis/mixbench#47" in told
    assert "A100 data sheet" in told


def test_the_table_needs_neither_torch_nor_networkx() -> None:
    code = "import sys, graph.hardware.gpus as g; g.gpu('4090'); print({'torch', 'networkx', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
