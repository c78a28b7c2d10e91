"""The project's shell: what the wheel holds, what is imported when, which way imports run, and what the README says."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.places import ROOT

PACKAGES = ("traces", "graph", "strategies", "simulator")
#: What each package may import of the others.
ALLOWED = {"traces": set[str](), "graph": {"traces"}, "strategies": {"traces", "graph"}, "simulator": set(PACKAGES)}
#: Rooms of the simulator that know traces alone, so that `run trace.json` brings nothing of a model.
TRACES_ALONE = ("simulator/allocator/", "simulator/engine/", "simulator/snapshots/", "simulator/what_if/")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The absolute names of every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    built = python("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        yield archive


def test_wheel_holds_the_packages_and_their_data(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"vramsim", *PACKAGES, f"vramsim-{PROJECT['version']}.dist-info"}
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
        expected = {str(path.relative_to(ROOT)) for path in sources(package)}
        assert expected <= names
    data = [
        ROOT / "traces/schema.json",
        ROOT / "graph/models/catalogue.json",
        *(ROOT / "traces/samples").iterdir(),
        *(ROOT / "simulator/reports/html/static").iterdir(),
        *(ROOT / "simulator").rglob("templates/*"),
    ]
    assert {str(path.relative_to(ROOT)) for path in data} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("uPlot-LICENSE.txt") for name in names)


def test_repository_holds_no_large_file() -> None:
    """Checkpoints and recordings that a program left in the checkout are not committed with it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    assert len(paths) > len(PACKAGES)
    assert [path for path in paths if path.is_file() and path.stat().st_size > 1 << 20] == []


def test_wheel_holds_no_tests_and_no_leavings(wheel: zipfile.ZipFile) -> None:
    odd = [name for name in wheel.namelist() if re.search(r"(^|/)(test_|conftest|__pycache__)|\.(pyc|nbi|nbc)$", name)]
    assert odd == []


def test_wheel_asks_for_no_torch_unless_asked(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    asked = [line for line in wheel.read(name).decode().splitlines() if line.startswith("Requires-Dist:")]
    plain = [Requirement(line.split(":", 1)[1]).name for line in asked if "extra ==" not in line]
    assert sorted(plain) == ["click", "jinja2", "msgspec", "numba", "numpy", "rich"]
    assert any("torch>=2.6" in line and "extra == 'torch'" in line for line in asked)


HEAVY = frozenset({"torch", "numba", "llvmlite", "networkx", "transformers", "numpy", "rich", "jinja2", "pyarrow"})


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from simulator.cli import main; main(['--help'], standalone_mode=False)"
    report = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    shown = python("-c", report)
    assert shown.returncode == 0, shown.stderr
    assert "Usage" in shown.stdout
    assert HEAVY & set(shown.stderr.split()) == set()


def test_an_unknown_model_is_told_before_anything_heavy_is_imported() -> None:
    code = "from simulator.cli import main; main(['estimate', 'nosuch-model'])"
    shown = python("-c", f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}")
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: model 'nosuch-model' is neither in the catalogue")
    slow = {"asyncio", "multiprocessing", "concurrent.futures", "importlib.resources", "traceback"}
    assert (HEAVY | slow) & set(shown.stdout.split()) == set()


def test_estimates_without_torch_say_what_is_missing(tmp_path: Path) -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'networkx', 'transformers')))"
    shown = python("-c", f"{block}; from simulator.cli import main; main(['estimate', 'gpt2'])")
    assert shown.returncode == 1
    assert "pip install 'vramsim[torch]'" in shown.stderr, shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("run",),
        ("convert", "{folder}/trace.npz"),
        ("stress", "--html", "{folder}/page.html"),
        ("compare", "traces/samples/tiny.json"),
        ("check", "--budget", "1GiB"),
    ],
    ids=lambda words: words[0],
)
def test_commands_need_neither_torch_nor_networkx(command: tuple[str, ...], tmp_path: Path) -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'networkx', 'transformers', 'pyarrow')))"
    words = [command[0], "traces/samples/tiny.json", *(word.format(folder=tmp_path) for word in command[1:])]
    shown = python("-c", f"{block}; from simulator.cli import main; main({words})")
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    for path in sources(package):
        place = str(path.relative_to(ROOT))
        allowed = {"traces", "simulator"} if place.startswith(TRACES_ALONE) else ALLOWED[package] | {package}
        ours = {name.split(".")[0] for name in imported(path)} & {*PACKAGES, "tests"}
        assert ours <= allowed, f"{place} imports {sorted(ours - allowed)}"


def test_torch_is_never_imported_with_a_module() -> None:
    for path in sources("traces", "simulator"):
        body = ast.parse(path.read_text("utf-8")).body
        top = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in names} & {"torch", "networkx", "transformers"}, path


def test_every_module_says_what_it_is_for() -> None:
    without = [
        path for path in sources(*PACKAGES, "tests") if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert without == []


def test_constraints_pin_every_requirement() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").split():
        name, _, version = line.partition("==")
        assert re.fullmatch(r"[\d.]+", version), line
        pins[canonicalize_name(name)] = version
    for text in [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]:
        wanted = Requirement(text)
        assert pins[canonicalize_name(wanted.name)] in wanted.specifier, text


# README and CONTRIBUTING ---------------------------------------------------------------------------------------------


def told() -> str:
    """What the README and CONTRIBUTING say."""
    return "".join((ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md"))


def readme_commands() -> Iterator[list[str]]:
    """The commands of `sh` blocks, word by word; a prompt, comments and settings before them apart."""
    for block in re.findall(r"```sh\n(.*?)```", told(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if words:
                    yield words


def ours(words: list[str]) -> list[str] | None:
    """The arguments of a call of this project's command line, or None for another command."""
    if Path(words[0]).name in PROJECT["scripts"]:
        return words[1:]
    if Path(words[0]).name.startswith("python") and words[1:3] == ["-m", "simulator"]:
        return words[3:]
    return None


def test_readme_commands_exist() -> None:
    known = {"python3", "cd", "git", "apt-get", "pip"}
    found = 0
    for words in readme_commands():
        if ours(words) is not None or words[0] in known or words[0].startswith(".venv/bin/"):
            continue
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), words
        else:
            assert (ROOT / words[0]).stat().st_mode & 0o111, f"{words[0]} cannot be run"
        found += 1
    assert found


def test_scripts_are_safe_and_told() -> None:
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]:
        text = path.read_text("utf-8")
        assert text.startswith("#!/usr/bin/env bash\n# "), path
        assert "set -euo pipefail" in text, path
        assert path.stat().st_mode & 0o111, path
    for line in (ROOT / ".ci/run").read_text("utf-8").splitlines():
        if "scripts/" in line:
            assert f"\n{line}\n" in told(), f"neither README nor CONTRIBUTING tells: {line}"
