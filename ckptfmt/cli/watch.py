"""`ckptfmt watch STORE`: a run, live in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.story import TAGGED, THERE, short_step
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import escape, format_age, format_count, format_nbytes

if TYPE_CHECKING:
    from ckptfmt.cli.story import Story

DESCRIPTION = """\
Show the newest checkpoints and what went wrong, again every few seconds,
until interrupted. In a pipe each new checkpoint and each trouble is a line."""
EPILOG = """\
examples:
  ckptfmt watch runs/a
  ckptfmt watch runs/a --once       one look
  ckptfmt watch s3://bucket/run --events logs/events.jsonl --every 30"""

CLEAR = "\x1b[H\x1b[2J"
SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="directory or URL")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds; default 2")
    parser.add_argument("--once", action="store_true", help="one look; --json means that too")
    parser.add_argument(
        "--events", metavar="FILE", help="default: events.jsonl in the store's folder, if there"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    import time

    from ckptfmt.cli.story import event_file, read_story
    from ckptfmt.cli.where import open_whole_store
    from ckptfmt.errors import UsageError

    if not args.every > 0:
        raise UsageError("--every is not above 0", reason="arguments", found=repr(args.every))
    # Who waits for a job to begin may be here before its store.
    once = args.once or out.json
    store = open_whole_store(args, read_only=True, must_exist=once)
    seen: set[str] = set()
    first = True
    try:
        while True:
            story = read_story(store, event_file(store, args.events), groups=False)
            if out.styled and not once:
                out.stdout.write(CLEAR)
                _frame(story, out, time.time())
            elif first:
                _frame(story, out, time.time())
            new = [line for line in _lines(story) if line not in seen]
            if not (first or out.styled):
                out.result({}, *new, whole=True)
            seen.update(new)
            first = False
            out.stdout.flush()
            if once:
                return OK
            time.sleep(args.every)
    except KeyboardInterrupt:
        return OK  # how one leaves it


def _frame(story: Story, out: Output, now_s: float) -> None:
    table = Table(
        [
            Column("CHECKPOINT", shrink_to=12, middle=True, keep=True),
            Column("AGE", right=True),
            Column("SIZE", right=True),
            Column("WRITTEN", right=True),
            Column("STALL", right=True),
            Column("DURABLE", right=True),
            Column("FATE"),
            Column("METRICS", shrink_to=12),
        ]
    )
    for commit in story.commits[-SHOWN:]:
        table.add(
            commit.label,
            format_age(now_s - commit.time_s),
            format_nbytes(commit.nbytes),
            "" if commit.written_nbytes is None else format_nbytes(commit.written_nbytes),
            "" if commit.stall_s is None else f"{commit.stall_s:.3g} s",
            "" if commit.durable_s is None else f"{commit.durable_s:.3g} s",
            commit.fate,
            ", ".join(f"{key}={value:.4g}" for key, value in commit.metrics.items()),
        )
    trouble = [
        f"{_clock(row['time_s'])} {escape(_sentence(row))}"
        for row in story.told
        if row["kind"] != "restore.done"
    ]
    document = {
        "command": "watch",
        "url": story.url,
        "latest": story.latest,
        "saving": story.saving[0] if story.saving is not None else None,
        "checkpoints": [
            {"name": c.name, "step": c.step, "time_s": c.time_s, "fate": c.fate, "nbytes": c.nbytes}
            for c in story.commits
        ],
        "trouble": trouble[-SHOWN:],
    }
    out.result(
        document, _heading(story, now_s), *([table] if story.commits else []), *trouble[-SHOWN:]
    )
    if not story.commits:
        out.note(f"no checkpoint in {story.url}")


def _heading(story: Story, now_s: float) -> str:
    """Where, how many, and what is going on: what one looks for first."""
    left = sum(commit.fate in (THERE, TAGGED) for commit in story.commits)
    parts = [escape(story.url), f"{left} of {format_count(len(story.commits), 'checkpoint')} kept"]
    if story.commits:
        parts.append(f"the last {format_age(now_s - story.commits[-1].time_s)} ago")
    if story.saving is not None:
        name, since_s = story.saving
        parts.append(f"saving {short_step(name)} for {format_age(now_s - since_s)}")
    return " · ".join(parts)


def _lines(story: Story) -> list[str]:
    """What has happened, each once, oldest first."""
    rows = [(c.time_s, f"checkpoint {c.label}, {format_nbytes(c.nbytes)}") for c in story.commits]
    rows += [(row["time_s"], _sentence(row)) for row in story.told]
    return [f"{_clock(time_s)} {escape(text)}" for time_s, text in sorted(rows)]


def _clock(time_s: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%H:%M:%S")


def _sentence(row: Mapping[str, Any]) -> str:
    data, error = row.get("data", {}), row.get("error", {})
    reason, message = str(data.get("reason", "")), str(error.get("message", ""))
    said = "; ".join(filter(None, (reason, "" if message in reason else message)))
    what = short_step(" ".join(filter(None, (row["kind"], row.get("checkpoint")))))
    return short_step(f"{what}: {said}") if said else what
