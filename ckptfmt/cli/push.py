"""`ckptfmt push STORE[@NAME] OTHER`: copy checkpoints into another store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.text import escape, format_count, format_nbytes

if TYPE_CHECKING:
    from ckptfmt.engine import Store
    from ckptfmt.types import At

DESCRIPTION = """\
Copy checkpoints into another store: only the data files that it lacks, each
byte checked on the way, the checkpoint itself last. What is there already
costs nothing; a push that was cut off goes on where it was."""
EPILOG = """\
examples:
  ckptfmt push runs/a s3://bucket/run          the latest
  ckptfmt push runs/a@1000 /archive/a          one
  ckptfmt push runs/a /archive/a --all         all of them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="where from; with @NAME only that one")
    parser.add_argument("other", metavar="OTHER", help="where to: directory or URL")
    add_choice(parser)


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="all checkpoints, not only the latest")


def run(args: argparse.Namespace, out: Output) -> int:
    return copy(args, out, args.store, args.other)


def copy(args: argparse.Namespace, out: Output, source: str, target: str) -> int:
    """Copy what is chosen of the source into the target, and say what was done."""
    from ckptfmt.cli.where import parse_store
    from ckptfmt.errors import UsageError

    store, at = parse_store(source, args.storage_options, read_only=True)
    other, there = parse_store(target, args.storage_options, read_only=False)
    if there is not None or (args.all and at is not None):
        raise UsageError(
            "a checkpoint is named where a whole store is meant",
            reason="selector",
            where=target if there is not None else source,
            do="name it at the store where it is copied from, or leave it out with --all",
        )
    chosen = _chosen(store, at, everything=args.all)
    with out.progress("copy") as progress:
        report = store.push(other, chosen, progress=progress)
    document = {
        "command": args.command,
        "url": report.url,
        "copied": list(report.copied),
        "kept": list(report.kept),
        "files": report.files,
        "nbytes": report.nbytes,
        "reused_nbytes": report.reused_nbytes,
    }
    written, there_already = format_nbytes(report.nbytes), format_nbytes(report.reused_nbytes)
    lines = [
        f"{format_count(len(report.copied), 'checkpoint')} copied to {escape(report.url)}",
        f"{format_count(report.files, 'file')}, {written} written, {there_already} were there",
    ]
    if report.kept:
        lines.append(f"{format_count(len(report.kept), 'checkpoint')} there already")
    out.result(document, *lines)
    return OK


def _chosen(store: Store, at: At | None, *, everything: bool) -> list[At]:
    if everything:
        # The newest last: whoever looks meanwhile never finds it before the ones it follows.
        return [info.name for info in store.checkpoints()]
    return ["latest" if at is None else at]
