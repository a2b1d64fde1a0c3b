"""`ckptfmt diff A B`: what differs between two checkpoints."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ckptfmt.cli.exit_codes import NO, OK, PARTIAL
from ckptfmt.cli.grouping import automatic_depth, build, rows_to_depth
from ckptfmt.cli.leaves import TENSOR, Leaf
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import escape, format_count, format_nbytes

if TYPE_CHECKING:
    from ckptfmt.cli.comparison import Comparison, Difference

DESCRIPTION = """\
Compare two checkpoints by the digests in their indexes: no data is read,
also from a remote store. Leaves are added, removed, changed, the same, or
unknown (cut into chunks differently, or another digest). A is the old side,
B the new one. Files of other formats have no digests: with --read what is
unknown is read on both sides."""
EPILOG = """\
examples:
  ckptfmt diff runs/a@1000 runs/a@2000
  ckptfmt diff runs/a s3://bucket/run@best --names model
  ckptfmt diff runs/a model.safetensors --read

exit codes: 0 the same, 1 they differ, 3 nothing is known to differ, and
something is unknown"""

STATUSES = ("added", "removed", "changed", "unknown")
_ROWS_MIN, _SIBLINGS_MAX = 24, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="STORE[@NAME]: the old side")
    parser.add_argument("b", metavar="B", help="STORE[@NAME]: the new side")
    parser.add_argument(
        "--names", action="append", metavar="GLOB", help="only leaves that match; repeatable"
    )
    parser.add_argument("--read", action="store_true", help="read what digests cannot decide")
    parser.add_argument("--all", action="store_true", help="every leaf that differs, no grouping")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.sources import compare_sources, open_source

    with (
        open_source(args.a, args.storage_options) as a,
        open_source(args.b, args.storage_options) as b,
        out.progress("diff") as progress,
    ):
        found = compare_sources(a, b, args.names, read=args.read, progress=progress)
        titles = a.title, b.title
    if out.json:
        out.result(_document(found, titles))
    else:
        out.result({}, *_shown(found, titles, None if args.all else out.height))
    if found.count("unknown") and not args.read:
        out.note("what is unknown can be read and compared: --read")
    if found.equal is None:
        return PARTIAL
    return OK if found.equal else NO


def _document(found: Comparison, titles: tuple[str, str]) -> dict[str, object]:
    return {
        "command": "diff",
        "a": titles[0],
        "b": titles[1],
        "equal": found.equal,
        "same": {"leaves": found.same, "nbytes": found.same_nbytes},
        **{
            status: {
                "leaves": [_form(d) for d in found.differences if d.status == status],
                "nbytes": found.nbytes(status),
            }
            for status in STATUSES
        },
        "structure": found.structure,
        "notes": found.notes,
    }


def _form(difference: Difference) -> dict[str, object]:
    leaf = difference.leaf
    return {
        "name": leaf.name,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "what": difference.what,
        "nbytes": leaf.nbytes,
        "changed_nbytes": difference.changed_nbytes,
    }


def _shown(found: Comparison, titles: tuple[str, str], height: int | None) -> list[Table | str]:
    """All rows, or what fits a screen of so many lines."""
    shown: list[Table | str] = [f"A  {escape(titles[0])}", f"B  {escape(titles[1])}"]
    if found.differences:
        shown += ["", _flat(found) if height is None else _tree(found, height)]
    shown += ["", *(escape(line) for line in found.structure)] if found.structure else []
    shown += [f"note: {escape(line)}" for line in found.notes]
    parts = [
        f"{found.count(status):,} {status} ({format_nbytes(found.nbytes(status))})"
        for status in STATUSES
        if found.count(status)
    ]
    if not parts and not found.structure:
        shown.append(
            f"the same: {format_count(found.same, 'leaf').replace('leafs', 'leaves')}, "
            f"{format_nbytes(found.same_nbytes)}"
        )
    else:
        parts.append(f"{found.same:,} same ({format_nbytes(found.same_nbytes)})")
        shown += ["", ", ".join(parts)]
    return shown


def _flat(found: Comparison) -> Table:
    table = Table(
        [
            Column("STATUS"),
            Column("NAME", shrink_to=20, middle=True, keep=True),
            Column("WHAT", shrink_to=14),
            Column("BYTES", right=True),
        ]
    )
    for d in found.differences:
        what = d.what or d.leaf.content
        table.add(d.status, d.leaf.name or "(root)", what, format_nbytes(d.changed_nbytes))
    return table


def _tree(found: Comparison, height: int) -> Table:
    """The differences as the tree that `show` draws, with the status in place of the dtype."""
    root = build(
        [
            Leaf(
                d.leaf.name,
                TENSOR,
                d.status,
                d.leaf.shape,
                d.changed_nbytes,
                remark=d.what or d.leaf.content,
            )
            for d in found.differences
        ]
    )
    depth = automatic_depth(root, max(_ROWS_MIN, height - 12), _SIBLINGS_MAX)
    table = Table(
        [
            Column("NAME", shrink_to=20, middle=True, keep=True),
            Column("LEAVES", right=True),
            Column("STATUS", shrink_to=9),
            Column("WHAT", shrink_to=14),
            Column("BYTES", right=True),
        ]
    )
    for row in rows_to_depth(root, depth, _SIBLINGS_MAX):
        table.add(
            "  " * row.level + (row.label or "(root)"),
            f"{row.tensors:,}",
            row.dtype,
            row.content,
            format_nbytes(row.nbytes),
        )
    return table
