"""`ckptfmt gc STORE`: give back the space of what no checkpoint refers to."""

from __future__ import annotations

import argparse

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.text import format_count, format_nbytes, parse_duration

DESCRIPTION = """\
Collect data files that no checkpoint refers to, in two phases, so that a
save in flight never loses what it is about to use: this run lists them, a
run at least the grace later deletes them."""
EPILOG = """\
examples:
  ckptfmt gc runs/a            list now, delete what was listed 10 minutes ago
  ckptfmt gc runs/a --wait     list, sleep the grace, delete
  ckptfmt gc runs/a --grace 0  at once: only while nobody else uses the store
  ckptfmt gc runs/a --dry-run  say what would be done"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="directory or URL")
    parser.add_argument(
        "--grace", default="10m", metavar="TIME", help="between listing and deleting (default 10m)"
    )
    parser.add_argument("--wait", action="store_true", help="sleep the grace and do both phases")
    parser.add_argument("--dry-run", action="store_true", help="change nothing")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import open_whole_store

    grace_s = parse_duration(args.grace)
    store = open_whole_store(args, read_only=args.dry_run)
    if args.wait and grace_s and not args.dry_run:
        out.note(f"listing, then waiting {grace_s:g} s before anything is deleted")
    report = store.gc(grace_s=grace_s, wait=args.wait, dry_run=args.dry_run)
    document = {
        "command": "gc",
        "url": store.url,
        "dry_run": report.dry_run,
        "deleted": list(report.deleted),
        "freed_nbytes": report.freed_nbytes,
        "listed": list(report.listed),
        "listed_nbytes": report.listed_nbytes,
        "spared": list(report.spared),
        "open_saves": report.open_saves,
        "abandoned": list(report.abandoned),
    }
    would = "would be " if report.dry_run else ""
    freed, listed = format_nbytes(report.freed_nbytes), format_nbytes(report.listed_nbytes)
    lines = [f"{format_count(len(report.deleted), 'file')} {would}deleted, {freed} freed"]
    waiting = set(report.listed) - set(report.deleted)
    if waiting:
        lines.append(
            f"{format_count(len(waiting), 'file')} {would}listed ({listed}): deleted by a run "
            f"at least {args.grace} from now"
        )
    if report.spared:
        lines.append(f"{format_count(len(report.spared), 'file')} spared: in use again")
    if report.open_saves:
        lines.append(f"{format_count(report.open_saves, 'save')} in flight, left alone")
    if report.abandoned:
        lines.append(f"{format_count(len(report.abandoned), 'abandoned save')} {would}cleaned up")
    out.result(document, *lines)
    return OK
