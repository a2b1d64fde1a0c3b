"""The page of `ckptfmt report`: one HTML file that needs no other, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from ckptfmt.cli.charts import Line, Point, bars, legend, lines, stacks, timeline
from ckptfmt.cli.story import ASIDE, DELETED, TAGGED, THERE, Commit, Story
from ckptfmt.cli.text import format_nbytes

ROWS_MAX = 300
"""Of a table: the newest."""
METRICS_MAX = 8
LOOKS = {THERE: "a", TAGGED: "good", DELETED: "pale", ASIDE: "bad"}
STYLE = """
:root { color-scheme: light dark; --back: #fff; --front: #1c2128; --soft: #667; --line: #dde1e6;
  --card: #f6f7f9; --a: #2a6fb0; --b: #c4661b; --good: #2c8a4b; --bad: #c62f3b; --pale: #a9b6c6 }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --front: #e3e7ec; --soft: #98a2b0;
  --line: #2c333c; --card: #1b2026; --a: #66aef0; --b: #f0a05a; --good: #5cc583; --bad: #f2707a;
  --pale: #566577 } }
body { background: var(--back); color: var(--front); font: 15px/1.5 system-ui, sans-serif;
  max-width: 860px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem }
p.note, p.legend { color: var(--soft); margin: .2rem 0 .5rem; font-size: .85rem }
.facts { display: flex; flex-wrap: wrap; gap: .6rem } .facts div { background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem }
.facts b { display: block; font-size: 1.15rem } .facts span { color: var(--soft); font-size: .8rem }
svg { width: 100%; height: auto; display: block } svg text { font-size: 11px; fill: var(--soft) }
.grid { stroke: var(--line) } .axis { stroke: var(--soft) } .line { fill: none; stroke-width: 1.6 }
circle.a, rect.a { fill: var(--a) } circle.b { fill: var(--b) } circle.good { fill: var(--good) }
circle.bad { fill: var(--bad) } circle.pale, rect.pale { fill: var(--pale) }
polyline.a { stroke: var(--a) } polyline.b { stroke: var(--b) }
.legend span { margin-right: 1rem } .legend i { display: inline-block; width: .7rem; height: .7rem;
  border-radius: 3px; margin-right: .35rem } i.a { background: var(--a) } i.b { background: var(--b) }
i.good { background: var(--good) } i.bad { background: var(--bad) } i.pale { background: var(--pale) }
.scroll { overflow-x: auto; max-height: 26rem } table { border-collapse: collapse; width: 100%;
  font-size: .85rem } td, th { text-align: left; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top } th { color: var(--soft) }
"""


def page(story: Story, now_s: float) -> str:
    """The whole document.

    Args:
        now_s: When it is made, in seconds since the epoch.
    """
    sections = [_facts(story)]
    if not story.commits:
        sections.append("<p>No checkpoint was committed here yet.</p>")
    sections += [_timeline(story), _costs(story.commits), _bytes(story.commits)]
    sections += _metrics(story.commits)
    groups = bars("sizes", story.groups, format_nbytes)
    sections.append(_section("What the newest checkpoint holds", groups))
    sections += [_told(story), _decisions(story.commits)]
    title = f"{escape(story.url)} · checkpoints"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(story.url)}</h1>"
        f'<p class="note">made {_clock(now_s)} UTC by ckptfmt report; point at anything for its'
        f" numbers</p>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, inner: str, note: str = "") -> str:
    if not inner:
        return ""
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{inner}</section>"


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _step(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else ""


def _facts(story: Story) -> str:
    there = [c for c in story.commits if c.fate in (THERE, TAGGED)]
    alarms = sum(row["kind"] == "alarm" for row in story.told)
    rejected = sum(row["kind"] == "restore.rejected" for row in story.told)
    newest = next((c for c in reversed(there) if c.name == story.latest), None)
    facts = [
        (newest.label if newest else "none", "newest checkpoint"),
        (_clock(newest.time_s) if newest else "never", "committed, UTC"),
        (f"{len(there):,} of {len(story.commits):,}", "checkpoints kept"),
        (format_nbytes(newest.nbytes) if newest else "0 B", "state"),
        (f"{alarms:,}", "alarms"),
        (f"{rejected:,}", "passed over by a restore"),
    ]
    cells = "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in facts)
    return f'<div class="facts">{cells}</div>'


def _timeline(story: Story) -> str:
    points = [
        Point(
            c.time_s,
            float(c.step or 0),
            f"{c.label}: {c.fate}, {_clock(c.time_s)}" + (f"; {c.reason}" if c.reason else ""),
            LOOKS[c.fate],
        )
        for c in story.commits
    ] + [
        Point(
            row["time_s"],
            float(row.get("step") or 0),
            f"resumed here, {_clock(row['time_s'])}",
            "b",
        )
        for row in story.told
        if row["kind"] == "restore.done"
    ]
    days = bool(points) and points[-1].x - points[0].x > 86400
    shown = slice(5, 16) if days else slice(11, 19)
    drawn = timeline("checkpoints over time", points, lambda s: _clock(s)[shown], _step)
    names = [*((fate, look) for fate, look in LOOKS.items()), ("a resume", "b")]
    return _section("Checkpoints over time", drawn and legend(names) + drawn, "step over time, UTC")


def _costs(commits: Sequence[Commit]) -> str:
    def line(label: str, look: str, pick: str) -> Line:
        rows = ((c, getattr(c, pick)) for c in commits if c.step is not None)
        return Line(
            label,
            [
                Point(float(c.step or 0), s, f"{c.label}: {_seconds(s)}")
                for c, s in rows
                if s is not None
            ],
            look,
        )

    drawn = lines(
        "cost of saves",
        [
            line("stall: the loop stood still", "b", "stall_s"),
            line("until durable", "a", "durable_s"),
        ],
        _step,
        _seconds,
        from_zero=True,
    )
    return _section("What saves took", drawn, "seconds, by step")


def _bytes(commits: Sequence[Commit]) -> str:
    rows = []
    for c in commits:
        if c.written_nbytes is not None:
            reused = max(0, c.nbytes - c.written_nbytes)
            tip = f"{c.label}: {format_nbytes(c.written_nbytes)} written, {format_nbytes(reused)} reused"
            rows.append((tip, float(c.written_nbytes), float(reused)))
    drawn = stacks("bytes", rows, lambda n: format_nbytes(int(n)))
    names = legend([("written", "a"), ("already there", "pale")])
    return _section("Bytes of each save", drawn and names + drawn, "oldest to newest")


def _metrics(commits: Sequence[Commit]) -> list[str]:
    names = sorted({name for c in commits for name in c.metrics})[:METRICS_MAX]
    made = []
    for name in names:
        points = [
            Point(
                float(c.step),
                c.metrics[name],
                f"{c.label}: {c.metrics[name]:.6g}, {c.fate}",
                LOOKS[c.fate],
            )
            for c in sorted(commits, key=lambda c: c.step or 0)
            if c.step is not None and name in c.metrics
        ]
        drawn = lines(name, [Line(name, points, "a")], _step, lambda v: f"{v:.4g}", from_zero=False)
        made.append(_section(f"Metric {name}", drawn, "at each checkpoint, by step"))
    return made


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>"
        for row in rows[:ROWS_MAX]
    )
    more = f'<p class="note">and {len(rows) - ROWS_MAX:,} older</p>' if len(rows) > ROWS_MAX else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{more}'


def _told(story: Story) -> str:
    rows = []
    for row in reversed(story.told):
        if row["kind"] == "restore.done":
            continue
        data, error = row.get("data", {}), row.get("error", {})
        said = [str(data.get("reason", "")), str(error.get("message", ""))]
        kind = f"alarm: {data.get('alarm')}" if row["kind"] == "alarm" else row["kind"]
        where = row.get("step") if row.get("step") is not None else row.get("checkpoint", "")
        rows.append((_clock(row["time_s"]), kind, str(where), "; ".join(filter(None, said))))
    return _section("Alarms and trouble", _table(("UTC", "what", "step", "why"), rows))


def _decisions(commits: Sequence[Commit]) -> str:
    rows = [
        (c.label, _clock(c.time_s), format_nbytes(c.nbytes), c.fate, c.reason)
        for c in reversed(commits)
    ]
    return _section("What became of each", _table(("step", "UTC", "size", "fate", "why"), rows))
