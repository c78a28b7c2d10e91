"""What README and docs show is what the commands print; their commands, options, links and paths are there."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from statistics import median

import click
import pytest

from simulator.cli import COMMANDS, command_of, main
from tests.places import ROOT
from tests.support import warm

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if not page.startswith("docs/reference/")]
#: Commands whose output is shown and not run here, and why.
NOT_RUN = {
    "select gpt2 --gpus 2 --gpu RTX4090 --dtype bf16": "captures twenty methods, minutes on two cores",
    "estimate llama-2-7b --dtype fp32 --lora 16 --gpu RTX4090 --html page.html": "tries a dozen changes for a minute",
    "fit gpt2 --dtype fp32 --batch 8 --gpu RTX4060-8GB": "tries thirty changes",
}
#: What the README says to run, and CI runs.
RUN = (
    "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e . "
    "&& .venv/bin/llmem run traces/samples/tiny.json"
)
FENCED = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def commands(page: str) -> list[str]:
    """Every command of ours on a page, without `llmem` and what stands before it."""
    lines = [line for kind, text in FENCED.findall(text_of(page)) if kind == "sh" for line in text.splitlines()]
    return [found for line in lines if (found := command(line))]


def command(line: str) -> str:
    """The arguments of a line that runs `llmem`; empty where it runs something else."""
    found = re.search(r"(?:^|&& )(?:\.venv/bin/)?llmem (.*)$", line)
    return re.sub(r" > .*", "", found[1]) if found else ""


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def shown() -> list[tuple[str, str, str]]:
    """(page, command, output) of every block of output, which stands after the block that prints it."""
    found = []
    for page in WRITTEN:
        last = ""
        for kind, text in FENCED.findall(text_of(page)):
            if kind == "sh":
                last = next((one for line in reversed(text.strip().splitlines()) if (one := command(line))), last)
            elif kind == "text":
                found.append((page, last, text))
    return found


@cache
def printed(line: str) -> list[str]:
    """What a command prints, 80 columns wide; the files that it would write are left out."""
    words = shlex.split(re.sub(r" (?:--html|-o) \S+", "", line))
    if words[0] in ("estimate", "capture", "select", "record"):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    if words[0] == "record":  # what the program prints, then what is told of it
        ran = warm.llmem(words)
        ran.check_returncode()
        return [*ran.stdout.splitlines(), *ran.stderr.splitlines()]
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(ROOT)
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as done:
            main(words)
    assert done.value.code in (0, 3)
    return [row.rstrip() for row in out.getvalue().strip().splitlines()]


@pytest.mark.parametrize(
    ("page", "line", "output"), [pytest.param(*one, id=f"{one[0]} {one[1][:30]}") for one in shown()]
)
def test_output_shown_is_output_printed(page: str, line: str, output: str) -> None:
    assert line, f"{page}: no command stands before this output: {output[:60]}"
    if line in NOT_RUN:
        return
    rows = [row.rstrip() for row in output.strip().splitlines()]
    assert rows == printed(line)[: len(rows)]
    assert len(rows) > 3


def test_what_is_not_run_is_shown() -> None:
    assert set(NOT_RUN) <= {line for _, line, _ in shown()}


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_have_their_options(page: str) -> None:
    for line in commands(page):
        name, *words = shlex.split(line, comments=True)
        assert name in COMMANDS, line
        command = command_of(name)
        parent = click.Context(main, **main.context_settings)
        command.make_context(name, words, parent=parent)  # raises UsageError


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_are_there(page: str) -> None:
    prose = FENCED.sub("", text_of(page))
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        assert link.startswith("http") or (folder / link).exists(), link
    for path in re.findall(r"`((?:traces|graph|strategies|simulator|tests|scripts|docs)/[\w./-]*)`", prose):
        assert page == "CHANGELOG.md" or (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [page for page in WRITTEN if page not in ("README.md", "CONTRIBUTING.md")])
def test_the_index_has_the_page(page: str) -> None:
    index = text_of("docs/README.md")
    assert page == "docs/README.md" or f"({Path(page).relative_to('docs')})" in index


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 220
    assert f"\n```sh\n{RUN}\n```\n" in text
    assert "\n```sh\nscripts/test\n```\n" in text
    assert text.index("docs/images/") < text.index("\n## ")


def test_sentences_are_short() -> None:
    words = []
    for page in WRITTEN:
        prose = re.sub(r"^(?:\||#|!).*$", "", FENCED.sub("", text_of(page)), flags=re.MULTILINE)
        words += [len(one.split()) for one in re.split(r"(?<=[.?!])\s+|\n\n|\n- ", prose) if len(one.split()) > 1]
    assert median(words) < 18
