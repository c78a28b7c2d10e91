"""The options of a case: what shells complete, and the names of other tools that are taken."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from graph.case import Case
from simulator.cli import main
from simulator.options.case import case_from
from traces.text import number


def completed(words: str) -> list[str]:
    """What a shell offers for the last of the words."""
    *before, last = words.split(" ")
    return [one.value for one in ShellComplete(main, {}, "llmem", "_LLMEM_COMPLETE").get_completions(before, last)]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("verif", "verify"),
        ("estimate gpt2-x", "gpt2-xl"),
        ("estimate meta-llama/llama-3.1-8", "meta-llama/Llama-3.1-8B"),
        ("estimate gpt2 --gpu rtx409", "RTX4090-24GB"),
        ("estimate gpt2 --strategy fsdp1", "fsdp1"),
        ("select gpt2 --optimizer adamw-fu", "adamw-fused"),
        ("capture gpt2 --dtype bf", "bf16"),
        ("check gpt2 --attention-mask pad", "padded"),
        ("gpus rtx409", "RTX4090-24GB"),
        ("models opt-1.3", "opt-1.3b"),
    ],
)
def test_a_shell_completes_commands_and_values(words: str, offered: str) -> None:
    assert offered in completed(words)
    assert all(one.casefold().startswith(words.split(" ")[-1]) for one in completed(words))


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("--compile", "default"),
        ("--compile --batch 2", "default"),
        ("--compile max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
        ("--torch-compile", "default"),
        ("--torch_compile_mode default", "default"),
        ("--compile none", ""),
        ("", ""),
    ],
)
def test_compile_needs_no_mode(words: str, mode: str) -> None:
    context = main.get_command(click.Context(main), "estimate")
    assert context is not None
    assert case_from("gpt2", context.make_context("estimate", ["gpt2", *words.split()]).params).compile == mode


def test_what_is_no_model_of_the_catalogue_may_be_a_file() -> None:
    (found,) = ShellComplete(main, {}, "llmem", "_LLMEM_COMPLETE").get_completions(["estimate"], "./folder/co")
    assert (found.type, found.value) == ("file", "./folder/co")


@pytest.mark.parametrize("command", ["estimate", "capture", "check"])
@pytest.mark.parametrize(
    ("other", "own"),
    [
        ("--gpus 2 --strategy ddp", {"world": 2, "strategy": "ddp"}),
        ("--nproc-per-node 2 --strategy fsdp", {"world": 2, "strategy": "fsdp2"}),
        ("--num_processes 2 --strategy zero3", {"world": 2, "strategy": "deepspeed-3"}),
        ("--per_device_train_batch_size 4 --max_length 64", {"batch": 4, "seq": 64}),
        ("--gradient-accumulation-steps 2 --max-grad-norm 1", {"accum": 2, "clip": 1.0}),
        ("--optim adamw_torch", {"optimizer": "adamw"}),
        ("--optim adamw_bnb_8bit --torch_dtype bfloat16", {"optimizer": "adamw-8bit", "dtype": "bf16"}),
    ],
)
def test_names_of_other_tools_are_taken(command: str, other: str, own: dict[str, Any]) -> None:
    context = main.get_command(click.Context(main), command)
    assert context is not None
    made = context.make_context(command, ["gpt2", *other.split()])
    case = case_from("gpt2", made.params)
    assert {name: getattr(case, name) for name in own} == own
    assert case == Case.of({"model": "gpt2", **{word: value for word, value in json_form(other)}})


def json_form(options: str) -> list[tuple[str, Any]]:
    """The same as the keys of a line of CASES.jsonl."""
    words = options.split()
    return [
        (name.removeprefix("--").replace("-", "_"), number(value))
        for name, value in zip(words[::2], words[1::2], strict=True)
    ]


def test_select_takes_the_number_of_gpus_by_every_name() -> None:
    select = main.get_command(click.Context(main), "select")
    assert select is not None
    for name in ("--gpus", "--world", "--nproc-per-node", "--num_processes"):
        assert select.make_context("select", ["gpt2", name, "4"]).params["gpus"] == 4
