"""`ckptfmt verify STORE[@NAME]`: read every byte and name what is damaged."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptfmt.cli.exit_codes import NO, OK
from ckptfmt.cli.json_form import json_value
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import format_count, format_nbytes

if TYPE_CHECKING:
    from ckptfmt.reports import Damage

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
    parser.add_argument("--all", action="store_true", help="a row for each tensor that is hit")


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
    ranges = len({(p.file, p.start, p.stop) for p in report.problems})
    files = format_count(len({p.file for p in report.problems}), "file")
    found = f"DAMAGED: {format_count(ranges, 'range')} in {files}; {read}"
    out.result(document, _table(report.problems, each=args.all), found)
    return NO


def _table(problems: Sequence[Damage], *, each: bool) -> Table:
    """A row per damaged range, however many tensors it hits; `each`: a row per tensor."""
    table = Table(
        [
            Column("FILE", shrink_to=14, middle=True),
            Column("BYTES"),
            Column("CHECKPOINT", shrink_to=13),
            Column("TENSOR", shrink_to=12, middle=True, keep=True),
            Column("DAMAGE", shrink_to=14),
        ]
    )
    groups: dict[object, list[Damage]] = {}
    for number, problem in enumerate(problems):
        place = (problem.file, problem.start, problem.stop, problem.reason)
        groups.setdefault(number if each else place, []).append(problem)
    for group in groups.values():
        first = group[0]
        table.add(
            first.file,
            f"[{first.start}:{first.stop})",
            _one_or_count([_short(damage.checkpoint) for damage in group], "checkpoint"),
            _one_or_count([damage.tensor for damage in group], "tensor"),
            first.reason,
        )
    return table


def _one_or_count(names: Sequence[str], noun: str) -> str:
    different = set(names)
    return names[0] if len(different) == 1 else format_count(len(different), noun)


def _short(name: str) -> str:
    """A step's name is its number, as STORE@NUMBER takes it."""
    from ckptfmt.format import step_of

    step = step_of(name)
    return name if step is None else str(step)
