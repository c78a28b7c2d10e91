"""Results in a notebook: a table in HTML, a pandas frame, a matplotlib plot; libraries are loaded when asked for."""

from __future__ import annotations

from html import escape
from typing import Any

from simulator.engine.result import RankResult, Result
from simulator.reports.verdict import headline, label_of
from traces.errors import ConfigError
from traces.units import format_bytes

_COLUMNS = ("allocated", "active", "reserved")


def html_of(result: Result, title: str) -> str:
    """The verdict, and a row of peaks for every kind of rank."""
    heads = "".join(f"<th>{name}</th>" for name in ("", "allocated", "reserved", "device total", "of GPU"))
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(rank))}</tr>" for rank in result.ranks)
    said = f"<b>{escape(title)}</b><br>{escape(headline(result))}"
    return f"<p>{said}</p><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(rank: RankResult) -> tuple[str, ...]:
    sizes = (rank.peak_allocated, rank.peak_reserved, rank.device_total)
    share = f"{100 * rank.device_total / rank.device.total_bytes:.1f}%"
    return label_of(rank.ranks), *map(format_bytes, sizes), share


def frame_of(result: Result, rank: int | None) -> Any:
    """A pandas DataFrame of one rank, a row an event: bytes allocated, active and reserved, the phase, its step.

    `step` is -1 outside of steps; `time_ns` is there where the replay has simulated time. Raises ConfigError without
    pandas, and for a rank that is not there.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise ConfigError("to_pandas needs pandas; install it with: pip install pandas") from None
    timeline = _of(result, rank).timeline
    frame = pandas.DataFrame({name: getattr(timeline, name) for name in _COLUMNS})
    frame.index.name = "event"
    if timeline.time_ns is not None:
        frame["time_ns"] = timeline.time_ns
    frame["phase"], frame["step"] = "", -1
    for span in timeline.phases:
        rows = slice(span.start, span.stop - 1)  # `loc` takes both ends in
        frame.loc[rows, "phase"] = span.name
        frame.loc[rows, "step"] = -1 if span.step is None else span.step
    return frame


def plot_of(result: Result, title: str, rank: int | None) -> Any:
    """Allocated and reserved memory of one rank over its events, with the limit of its device; the matplotlib Axes.

    Raises ConfigError without matplotlib, and for a rank that is not there.
    """
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        raise ConfigError("plot needs matplotlib; install it with: pip install matplotlib") from None
    timeline = _of(result, rank).timeline
    _, axes = pyplot.subplots()
    for name in ("reserved", "allocated"):
        axes.plot(getattr(timeline, name) / 2**30, label=name, drawstyle="steps-post")
    axes.axhline(timeline.limit_bytes / 2**30, color="red", linestyle="--", label="limit")
    axes.set(title=f"{title}: {headline(result)}", xlabel="event", ylabel="GiB")
    axes.legend()
    return axes


def _of(result: Result, rank: int | None) -> RankResult:
    if rank is None:
        return result.decisive
    try:
        return result.for_rank(rank)
    except KeyError:
        raise ConfigError(f"there is no rank {rank}") from None
