"""The page of `ckptfmt report`: one HTML file that needs no other, light and dark.

The tables are HTML; the charts are drawn in the browser by uPlot, which is bundled with the package
(`report_assets/`, its licence beside it), from the story in the page. Nothing is fetched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from ckptfmt.cli.story import ASIDE, DELETED, TAGGED, THERE, Commit, Story, short_step
from ckptfmt.cli.text import format_nbytes

ROWS_MAX = 300
"""Of a table: the newest."""
METRICS_MAX = 8
NUMBERS = ("step", "size", "written", "held", "durable")
"""Heads of columns whose numbers say nothing without."""
LOOKS = {THERE: "a", TAGGED: "good", DELETED: "pale", ASIDE: "bad"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the page may do: nothing that leaves it."""


def page(story: Story, now_s: float) -> str:
    """The whole document.

    Args:
        now_s: When it is made, in seconds since the epoch.
    """
    names = sorted({name for c in story.commits for name in c.metrics})[:METRICS_MAX]
    sections = [_facts(story)]
    if not story.commits:
        sections.append("<p>No checkpoint was committed here yet.</p>")
    sections += [_timeline(story), _costs(story.commits), _volumes(story.commits)]
    sections += [_metric(name, at, story.commits) for at, name in enumerate(names)]
    sections.append(_section("What the newest checkpoint holds", _sizes(story.groups)))
    sections += [_told(story), _decisions(story.commits)]
    title = f"{escape(story.url)} · checkpoints"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_asset('uplot.min.css')}{_asset('report.css')}</style></head><body>"
        f"<h1>{escape(story.url)}</h1>"
        f'<p class="note">made {_clock(now_s)} UTC by ckptfmt report; point at a chart for its'
        " numbers, drag to zoom, double-click to zoom out</p>"
        "<noscript><p>The charts need JavaScript; the tables have the numbers.</p></noscript>"
        f"{''.join(sections)}"
        f'<script type="application/json" id="story">{_data(story, names)}</script>'
        f"<script>{_asset('uplot.min.js')}</script><script>{_asset('report.js')}</script>"
        "</body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("ckptfmt.cli") / "report_assets" / name).read_text(encoding="utf-8").strip()


def _data(story: Story, names: Sequence[str]) -> str:
    """The story for the charts, as JSON that no HTML parser can take for an end of the script."""
    commits = [
        {
            **{key: getattr(c, key) for key in ("name", "step", "fate", "nbytes")},
            "reason": short_step(c.reason),
            **{key: _number(getattr(c, key)) for key in ("time_s", "written_nbytes")},
            **{key: _number(getattr(c, key)) for key in ("stall_s", "stage_s", "durable_s")},
            "metrics": {name: _number(c.metrics.get(name)) for name in names},
        }
        for c in story.commits
    ]
    told = [
        {
            "kind": row["kind"],
            "time_s": row["time_s"],
            "step": row.get("step"),
            "text": ": ".join(filter(None, (_kind(row), _why(row)))),
        }
        for row in story.told
    ]
    text = json.dumps({"commits": commits, "told": told, "metrics": names}, allow_nan=False)
    return text.replace("<", "\\u003c")


def _number(value: float | None) -> float | None:
    """A gap where there is no number to draw."""
    return value if value is not None and math.isfinite(value) else None


def _section(title: str, inner: str, note: str = "") -> str:
    if not inner:
        return ""
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{inner}</section>"


def _chart(place: str, title: str, legend: Mapping[str, str], kind: str = "chart") -> str:
    """Where the page's script draws, below what each colour stands for."""
    items = "".join(
        f'<span><i class="{look}"></i>{escape(text)}</span>' for text, look in legend.items()
    )
    label = escape(title)
    return (
        f'<p class="legend">{items}</p>'
        f'<div class="{kind}" id="{place}" role="img" aria-label="{label}"></div>'
    )


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} s"


def _facts(story: Story) -> str:
    there = [c for c in story.commits if c.fate in (THERE, TAGGED)]
    alarms = sum(row["kind"] == "alarm" for row in story.told)
    rejected = sum(row["kind"] == "restore.rejected" for row in story.told)
    newest = next((c for c in reversed(there) if c.name == story.latest), None)
    facts = [
        (newest.label if newest else "none", "newest checkpoint"),
        (_clock(newest.time_s)[5:16] if newest else "never", "committed, UTC"),
        (f"{len(there):,} of {len(story.commits):,}", "checkpoints kept"),
        (format_nbytes(newest.nbytes) if newest else "0 B", "state"),
        (f"{alarms:,}", "alarms"),
        (f"{rejected:,}", "passed over by a restore"),
    ]
    cells = "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in facts)
    return f'<div class="facts">{cells}</div>'


def _timeline(story: Story) -> str:
    if not story.commits:
        return ""
    title = "Checkpoints over time"
    legend = {**LOOKS, "a resume": "b", "alarm or trouble": "ring"}
    return _section(title, _chart("timeline", title, legend), "step over time, UTC")


def _costs(commits: Sequence[Commit]) -> str:
    if all(c.step is None or (c.stall_s is None and c.durable_s is None) for c in commits):
        return ""
    title = "What saves took"
    legend = {"until durable": "a", "held the loop": "b", "of that, staging": "c"}
    return _section(title, _chart("costs", title, legend), "seconds, by step")


def _volumes(commits: Sequence[Commit]) -> str:
    if all(c.written_nbytes is None for c in commits):
        return ""
    title = "Bytes of each save"
    legend = {"written": "a", "there already": "pale"}
    return _section(
        title, _chart("volumes", title, legend, "chart low"), "oldest to newest, by step"
    )


def _metric(name: str, at: int, commits: Sequence[Commit]) -> str:
    if all(c.step is None or _number(c.metrics.get(name)) is None for c in commits):
        return ""
    title = f"Metric {name}"
    inner = _chart(f"metric-{at}", title, LOOKS, "chart low")
    return _section(title, inner, "at each checkpoint, by step")


def _sizes(groups: Sequence[tuple[str, int]]) -> str:
    if not groups:
        return ""
    most = max(nbytes for _, nbytes in groups)
    rows = "".join(
        f'<div class="name">{escape(label)}</div>'
        f'<div class="bar"><i style="width:{70 * nbytes / most:.1f}%"></i>{format_nbytes(nbytes)}</div>'
        for label, nbytes in groups
    )
    return f'<div class="bars">{rows}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    # What a number is, where the head is not in sight; dates and words speak for themselves.
    said = [f' data-head="{text}"' if text in NUMBERS else "" for text in heads]
    body = "".join(
        "<tr>"
        + "".join(f"<td{what}>{escape(text)}</td>" for what, text in zip(said, row, strict=True))
        + "</tr>"
        for row in rows[:ROWS_MAX]
    )
    more = f'<p class="note">and {len(rows) - ROWS_MAX:,} older</p>' if len(rows) > ROWS_MAX else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{more}'


def _kind(row: Mapping[str, Any]) -> str:
    if row["kind"] == "restore.done":
        return f"resumed from {short_step(str(row.get('checkpoint', '')))}"
    return f"alarm: {row.get('data', {}).get('alarm')}" if row["kind"] == "alarm" else row["kind"]


def _why(row: Mapping[str, Any]) -> str:
    """The reason that an event gives, and its error where that says more."""
    reason = str(row.get("data", {}).get("reason", ""))
    error = str(row.get("error", {}).get("message", ""))
    return short_step("; ".join(filter(None, (reason, "" if error in reason else error))))


def _told(story: Story) -> str:
    rows = []
    for row in reversed(story.told):
        if row["kind"] == "restore.done":
            continue
        where = row.get("step") if row.get("step") is not None else row.get("checkpoint", "")
        where = short_step(str(where)).removeprefix("step ")
        rows.append((_clock(row["time_s"]), _kind(row), where, _why(row)))
    return _section("Alarms and trouble", _table(("UTC", "what", "step", "why"), rows))


def _decisions(commits: Sequence[Commit]) -> str:
    rows = [
        (
            c.label,
            _clock(c.time_s),
            format_nbytes(c.nbytes),
            "" if c.written_nbytes is None else format_nbytes(c.written_nbytes),
            _seconds(c.stall_s),
            _seconds(c.durable_s),
            c.fate,
            short_step(c.reason),
        )
        for c in reversed(commits)
    ]
    heads = ("step", "UTC", "size", "written", "held", "durable", "fate", "why")
    return _section("What became of each", _table(heads, rows))
