"""`ckptfmt report STORE`: what happened, as one HTML page."""

from __future__ import annotations

import argparse

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.text import format_count

DESCRIPTION = """\
Write one HTML page about a run: checkpoints over time, what saves took and
wrote, metrics, alarms, retention. It needs no network and no other file.
With an event file (hooks.jsonl) it also shows what is gone by now."""
EPILOG = """\
examples:
  ckptfmt report runs/a                 writes report.html
  ckptfmt report runs/a -o a.html --events logs/events.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="directory or URL")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="default: report.html"
    )
    parser.add_argument(
        "--events", metavar="FILE", help="default: events.jsonl in the store's folder, if there"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    import time

    from ckptfmt.cli.page import page
    from ckptfmt.cli.story import event_file, read_story
    from ckptfmt.cli.where import open_whole_store

    # An event file tells of a run whose store is gone.
    store = open_whole_store(args, read_only=True, must_exist=args.events is None)
    events = event_file(store, args.events)
    story = read_story(store, events)
    with open(args.output, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(page(story, time.time()))
    document = {
        "command": "report",
        "url": store.url,
        "output": args.output,
        "events": events,
        "checkpoints": len(story.commits),
        "alarms": sum(row["kind"] == "alarm" for row in story.told),
    }
    out.result(document, args.output, whole=True)
    if events is None:
        out.note("no event file: the page shows only what the store has; see hooks.jsonl")
    out.note(f"{format_count(len(story.commits), 'checkpoint')} of {store.url}")
    return OK
