"""`ckptfmt verify STORE[@NAME]`: read every byte and name what is damaged."""

from __future__ import annotations

import argparse

from ckptfmt.cli.exit_codes import NO, OK
from ckptfmt.cli.json_form import json_value
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import format_count, format_nbytes

DESCRIPTION = """\
Read every byte of all checkpoints (or of one): chunks, tables, padding,
indexes. Each damage is named by file, byte range, checkpoint and tensor.
Damaged files are marked, so that the next save writes them anew. Nothing is
repaired here."""
EPILOG = """\
examples:
  ckptfmt verify runs/a
  ckptfmt verify runs/a@1000 --json

exit codes: 0 all is well, 1 damage was found"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE[@NAME]", help="all checkpoints, or that one")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import open_store

    store, at = open_store(args, read_only=False)
    with out.progress("verify") as progress:
        report = store.verify(at, progress=progress)
    document = {
        "command": "verify",
        "url": store.url,
        "ok": report.ok,
        "checkpoints": report.checkpoints,
        "files": report.files,
        "nbytes": report.nbytes,
        "problems": [json_value(problem) for problem in report.problems],
    }
    read = (
        f"{format_count(report.checkpoints, 'checkpoint')}, "
        f"{format_count(report.files, 'file')}, {format_nbytes(report.nbytes)} read"
    )
    if report.ok:
        out.result(document, f"ok: {read}")
        return OK
    table = Table(
        [
            Column("FILE", shrink_to=12, name=True),
            Column("BYTES", shrink_to=11),
            Column("CHECKPOINT", shrink_to=10, name=True),
            Column("TENSOR", shrink_to=12, name=True),
            Column("DAMAGE", shrink_to=14),
        ]
    )
    for problem in report.problems:
        table.add(
            problem.file,
            f"[{problem.start}:{problem.stop})",
            problem.checkpoint,
            problem.tensor,
            problem.reason,
        )
    count = format_count(len(report.problems), "damage")
    out.result(document, table, f"DAMAGED: {count}; {read}")
    return NO
