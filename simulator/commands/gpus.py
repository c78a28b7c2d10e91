"""`gpus [NAME]`: the GPUs that `--gpu` takes, or what is known of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import click

from graph.hardware.gpus import GIGA, GPUS, TERA, Gpu, gpu
from simulator.options.case import cards_like

_GIB: Final = 1 << 30


@click.command("gpus")
@click.argument("name", required=False, shell_complete=cards_like)
def command(name: str | None) -> int:
    """List the GPUs that are known, or tell what is known of NAME and from where.

    A GPU goes by any of its names in upper or lower case, with or without NVIDIA, GeForce, Tesla or RTX in front, and
    without its size where that is clear.
    """
    for line in _list() if name is None else _one(gpu(name)):
        click.echo(line)
    return 0


def _list() -> Iterator[str]:
    yield f"{'name':20} {'memory':>10}  {'architecture':16} other names"
    for card in GPUS.values():
        yield f"{card.name:20} {card.total_bytes / _GIB:6.2f} GiB  {_architecture(card):16} {_names(card)}"


def _one(card: Gpu) -> Iterator[str]:
    peaks = {"fp16": card.half, "fp32": card.single, "tf32": card.tf32, "fp64": card.double, "fp8 or int8": card.eight}
    speeds = ", ".join(f"{name} {peak / TERA:g}" for name, peak in peaks.items() if peak)
    yield f"name          {card.name}"
    yield f"other names   {_names(card)}"
    yield f"memory        {card.total_bytes:,} bytes ({card.total_bytes / _GIB:.2f} GiB); {card.total_source}"
    yield f"architecture  {_architecture(card)}, {card.sm_count} multiprocessors, {card.threads:,} threads"
    yield f"TFLOP/s       {speeds}; {card.speed_source}"
    yield f"bandwidth     {card.memory / GIGA:,.0f} GB/s; to other GPUs: {card.link}"
    if card.context is not None:
        found = card.context
        yield f"CUDA context  {found.likely} MiB ({found.low} to {found.high}); {found.source}"


def _architecture(card: Gpu) -> str:
    return f"{card.architecture.generation} ({card.arch[0]}.{card.arch[1]})"


def _names(card: Gpu) -> str:
    return ", ".join((card.product, *card.aliases))
