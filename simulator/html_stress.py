"""The picture of `stress`: one self-contained HTML page of SVG bars and tables, without scripts and without a network.

A pure function of the `Stress`. Style, escaping and pieces of HTML are those of the page of a replay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from simulator import html_page as frame
from simulator.html_pieces import size, table, text
from simulator.report_stress import by_kind, name_of, ordered, verdict
from simulator.settings import format_bytes
from simulator.stressing import Row, Stress
from traces.files import write_atomically

#: Rows drawn at most; the best ones.
MOST_ROWS: Final = 200
#: The parts of reserved memory at its peak, from the left: key, words, colour in light and in dark mode.
PARTS: Final = (
    ("requested", "asked for by tensors", "#0072b2", "#56b4e9"),
    ("rounding", "rounding", "#7a5195", "#c7a0e0"),
    ("unsplit_remainder", "rest of unsplit blocks", "#8a6d00", "#e0c040"),
    ("pending", "waiting for another stream", "#a3005c", "#ff8cc6"),
    ("stranded", "free in segments in use", "#d55e00", "#f0a840"),
    ("cached_segments", "segments wholly free", "#8c959f", "#6e7a86"),
)
_STYLE: Final = (
    """
.chart { display: grid; grid-template-columns: minmax(9em, max-content) 1fr max-content; gap: 5px 12px; }
.chart { align-items: center; font-size: .9rem; }
.chart svg { width: 100%; height: 20px; display: block; }
.chart .own { font-weight: 600; } .chart .bad { color: var(--oom); font-weight: 600; }
.chart .track { fill: var(--line); opacity: .45; } .chart .tick { stroke: var(--ink); stroke-width: 2; }
.chart circle { fill: var(--allocated); fill-opacity: .6; stroke: var(--page); } .chart circle.bad { fill: var(--oom); }
.keys { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; padding: 0; margin: 6px 0 10px; }
.keys { font-size: .88rem; } .keys i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
td.fits { color: var(--good); } td.oom { color: var(--oom); font-weight: 600; }
.scroll { overflow-x: auto; }
.row { display: contents; }
@media (max-width: 600px) { .chart { display: block; }
 .row { display: grid; grid-template-columns: 1fr max-content; margin-bottom: 6px; }
 .row svg { grid-row: 2; grid-column: 1 / -1; } .scroll table { min-width: 620px; } }
"""
    + "".join(f".{key} {{ fill: {light}; background: {light}; }}" for key, _, light, _ in PARTS)
    + "@media (prefers-color-scheme: dark) {"
    + "".join(f".{key} {{ fill: {dark}; background: {dark}; }}" for key, _, _, dark in PARTS)
    + "} .keys i, .chart rect { print-color-adjust: exact; -webkit-print-color-adjust: exact; }"
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def write_html(stress: Stress, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the page of `stress` to `path` (UTF-8), whole or not at all.

    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    page = render_html(stress).encode("utf-8", "backslashreplace")
    with write_atomically(path, force=force) as file:
        file.write(page)


def render_html(stress: Stress) -> str:
    """The page of `stress` as text."""
    rows = [row for row in ordered(stress) if row.memory is None][:MOST_ROWS]
    sized = [row for row in ordered(stress) if row.memory is not None][:MOST_ROWS]
    sections = [_header(stress)]
    if rows:
        sections += [_peaks(stress, rows), _spread(stress, rows), _figures(stress, rows)]
    if sized:
        sections.append(_sizes(stress, rows, sized))
    sections.append(_notes(stress))
    return html_page("Memory under other settings", _STYLE, "".join(sections))


def html_page(title: str, style: str, body: str) -> str:
    """A page without scripts in the style of all pages."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{frame.static('page.css')}</style>\n<style>{style}</style>\n</head>\n<body>\n<main>{body}</main>\n"
        "</body>\n</html>\n"
    )


def _header(stress: Stress) -> str:
    best = stress.best()
    fits = best is not None and best.fits
    badge = '<span class="badge fits">Runs</span>' if fits else '<span class="badge oom">Out of memory</span>'
    facts = (
        f"{len(stress.outcomes):,} of {stress.total:,} replays of {stress.events:,} events",
        f"PyTorch {stress.release}",
        f"{format_bytes(stress.device_bytes)} GPU",
        f"own settings: {stress.conf or 'default'}",
    )
    sentence = verdict(stress)
    return (
        f"<h1>{badge} Memory under other settings</h1>"
        f"<p class=lead>{text(sentence[0].upper() + sentence[1:], 600)}.</p>"
        f"<p class=facts>{' · '.join(text(fact, 300) for fact in facts)}</p>"
    )


def _label(row: Row, stress: Stress) -> str:
    own = row.conf == stress.conf and row.memory is None and row.release == stress.release
    name = text(name_of(row, stress)) + (" (own)" if own else "")
    conf = escape(row.conf or "default settings")
    return f'<span class="{"own" if own else ""}" title="{conf}">{name}</span>'


def _line(label: str, said: str, picture: str, right: str) -> str:
    """A line of a chart: its label, the picture (told in words by `said`), and a figure."""
    return f'<div class=row>{label}<svg role=img aria-label="{escape(said)}">{picture}</svg><span>{right}</span></div>'


def _peaks(stress: Stress, rows: Sequence[Row]) -> str:
    """A bar for each setting: reserved bytes at their peak, by cause."""
    top = max(max(row.most("peak_reserved"), row.min_fit or 0) for row in rows) or 1
    cells = []
    for row in rows:
        worst, left = row.worst, 0.0
        parts = ['<rect class=track width="100%" height="20" rx="2"/>']
        for key, words, _, _ in PARTS:
            held = int(worst[key])
            wide = 100 * held / top
            if held:
                title = f"<title>{words}: {format_bytes(held)}</title>"
                parts.append(f'<rect class={key} x="{left:.3f}%" width="{wide:.3f}%" height="20">{title}</rect>')
            left += wide
        if row.min_fit is not None:
            place = 100 * row.min_fit / top
            title = f"<title>smallest GPU: {format_bytes(row.min_fit)}</title>"
            parts.append(f'<line class=tick x1="{place:.3f}%" x2="{place:.3f}%" y1="0" y2="20">{title}</line>')
        right = size(row.most("peak_reserved")) + ("" if row.fits else " <span class=bad>OOM</span>")
        said = f"{name_of(row, stress)}: {format_bytes(row.most('peak_reserved'))} reserved"
        cells.append(_line(_label(row, stress), said, "".join(parts), right))
    used = [part for part in PARTS if any(row.worst[part[0]] for row in rows)]
    keys = "".join(f"<li><i class={key}></i>{words}</li>" for key, words, _, _ in used)
    tick = "<li>| smallest GPU on which it runs</li>" if any(row.min_fit is not None for row in rows) else ""
    return f"<h2>Peak reserved, by cause</h2><ul class=keys>{keys}{tick}</ul><div class=chart>{''.join(cells)}</div>"


def _spread(stress: Stress, rows: Sequence[Row]) -> str:
    """A dot for each variant of the events, on one line a setting."""
    if all(len(row.good) < 2 for row in rows):
        return ""
    values = [int(one["peak_reserved"]) for row in rows for one in row.good]
    low, high = min(values), max(values)
    low -= (high - low) // 20
    span = max(high - low, 1) * 1.04
    cells = []
    for row in rows:
        dots = []
        for kind, outcomes in by_kind(row).items():
            for one in outcomes:
                place = 1 + 98 * (int(one["peak_reserved"]) - low) / span
                bad = "bad" if one["num_ooms"] else ""
                title = f"<title>{kind}: {format_bytes(one['peak_reserved'])}</title>"
                dots.append(f'<circle class="{bad}" cx="{place:.2f}%" cy="10" r="6">{title}</circle>')
        line = '<rect class=track y="9" width="100%" height="2"/>'
        ooms = sum(one["num_ooms"] > 0 for one in row.good)
        note = f"<span class=bad>{ooms} of {len(row.good)} OOM</span>" if ooms else f"{len(row.good)} replays"
        said = f"{name_of(row, stress)}: {len(row.good)} replays"
        cells.append(_line(_label(row, stress), said, line + "".join(dots), f"<span>{note}</span>"))
    title = "Peak reserved of every variant of the events"
    scale = f"<p class=caption>From {format_bytes(low)} to {format_bytes(high)}; a dot is a replay.</p>"
    return f"<h2>{title}</h2>{scale}<div class=chart>{''.join(cells)}</div>"


def _figures(stress: Stress, rows: Sequence[Row]) -> str:
    """All figures as a table."""
    cells = []
    for row in rows:
        least = "-" if row.min_fit is None else size(row.min_fit)
        counts = (f"{row.most(name):,}" for name in ("num_alloc_retries", "num_ooms", "device_calls"))
        peak = row.most("peak_reserved")
        share = f"{100 * row.worst.fragmented / peak:.1f} %" if peak else "-"
        conf = f"<code>{text(row.conf or 'default', 300)}</code>"
        release = "" if row.release == stress.release else f" PyTorch {escape(row.release)}"
        cells.append((conf + release, size(peak), share, *counts, least))
    head = (
        "setting",
        "peak reserved",
        "not asked for",
        "retries",
        "out of memory",
        "calls of the device",
        "smallest GPU",
    )
    return f"<h2>Figures</h2><div class=scroll>{table(head, cells)}</div>"


def _sizes(stress: Stress, rows: Sequence[Row], sized: Sequence[Row]) -> str:
    """Whether each setting runs on each size of the GPU, with its retries."""
    memories = sorted({row.memory for row in sized if row.memory is not None})
    known: Mapping[tuple[str, str, int | None], Row] = {(row.conf, row.release, row.memory): row for row in sized}
    names = list(dict.fromkeys((row.conf, row.release) for row in (*rows, *sized)))
    body = ""
    for conf, release in names:
        found = [known.get((conf, release, memory)) for memory in memories]
        if not any(found):
            continue
        body += f"<tr><td class=long><code>{text(conf or 'default', 300)}</code></td>"
        for row in found:
            if row is None:
                body += "<td></td>"
            elif row.fits:
                retries = row.most("num_alloc_retries")
                said = f", {retries} {'retry' if retries == 1 else 'retries'}" if retries else ""
                body += f"<td class=fits>runs{said}</td>"
            else:
                body += f"<td class=oom>{row.most('num_ooms')} OOM</td>"
        body += "</tr>"
    head = "".join(f"<th scope=col>{format_bytes(memory)}</th>" for memory in memories)
    return (
        "<h2>On other sizes of the GPU</h2><div class=scroll><table><thead><tr><th scope=col>setting</th>"
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _notes(stress: Stress) -> str:
    failed = [f"{row.conf or 'default'}: {row.error}" for row in stress.rows() if row.error is not None]
    notes = [*stress.notes, *failed][:40]
    if not notes:
        return ""
    return f"<h2>Notes</h2><ul>{''.join(f'<li>{text(note, 600)}</li>' for note in notes)}</ul>"
