"""`ckptfmt show STORE[@NAME]`: what a checkpoint holds, without reading its data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.grouping import Row, automatic_depth, build, rows_to_depth
from ckptfmt.cli.json_form import json_value
from ckptfmt.cli.leaves import TENSOR, Leaf, Totals, totals
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import escape, format_count, format_nbytes

if TYPE_CHECKING:
    from ckptfmt.types import CheckpointInfo

DESCRIPTION = """\
Show what a checkpoint holds: a tree of names with dtypes, shapes and sizes,
and totals. Reads the index only. Layers that are alike share a row; counts
and sizes of a row are those of all that it stands for. Also for files of
other formats: see ckptfmt convert --list."""
EPILOG = """\
examples:
  ckptfmt show runs/a                        as deep as fits a screen
  ckptfmt show runs/a@1000 --depth 2
  ckptfmt show runs/a --names 'model/*.weight' --all
  ckptfmt show model.safetensors

--names: * is anything within one key, ** across keys; a name takes all below."""

_ROWS_MIN, _SIBLINGS_MAX = 24, 40
"""A screen may be tiny; a level without any likeness is cut after so many siblings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE[@NAME]", help="which checkpoint (default: latest)")
    parser.add_argument(
        "--names", action="append", metavar="GLOB", help="only leaves that match; repeatable"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--depth", type=int, metavar="N", help="levels to show; 0: totals only")
    how.add_argument("--all", action="store_true", help="every leaf by its whole name, no grouping")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.sources import open_source
    from ckptfmt.errors import UsageError

    if args.depth is not None and args.depth < 0:
        raise UsageError("depth is negative", reason="arguments", found=args.depth)
    with open_source(args.store, args.storage_options) as source:
        leaves = source.leaves(args.names)
        info, title = source.info, source.title
    sums = totals(leaves)
    if out.json:
        out.result(_document(title, info, leaves, sums))
        return OK
    head = _head(title, info, sums, verbose=out.verbose > 0)
    if args.depth == 0 or not leaves:
        out.result({}, *head)
        return OK
    table = _flat(leaves) if args.all else _tree(leaves, args.depth, out)
    out.result({}, *head, "", table)
    return OK


def _document(
    title: str, info: CheckpointInfo | None, leaves: Sequence[Leaf], sums: Totals
) -> dict[str, object]:
    return {
        "command": "show",
        "source": title,
        "checkpoint": json_value(info),
        "totals": {
            "tensors": sums.tensors,
            "values": sums.values,
            "nbytes": sums.nbytes,
            "dtypes": {
                name: {"tensors": count, "nbytes": size}
                for name, (count, size) in sums.by_dtype.items()
            },
        },
        "leaves": [_leaf_form(leaf) for leaf in leaves],
    }


def _leaf_form(leaf: Leaf) -> dict[str, object]:
    form: dict[str, object] = {"name": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype}
    if leaf.kind == TENSOR:
        form |= {"shape": list(leaf.shape), "nbytes": leaf.nbytes}
        if leaf.tied_to:
            form["tied_to"] = leaf.tied_to
    elif leaf.nbytes:
        form["nbytes"] = leaf.nbytes
    else:
        form["value"] = json_value(leaf.value)
    return form


def _head(title: str, info: CheckpointInfo | None, sums: Totals, *, verbose: bool) -> list[str]:
    size = f"{format_nbytes(sums.nbytes)} in {format_count(sums.tensors, 'tensor')}"
    if sums.values:
        size += f" and {format_count(sums.values, 'value')}"
    by_size = sorted(sums.by_dtype.items(), key=lambda item: -item[1][1])
    lines = [escape(title)]

    def line(label: str, text: str) -> None:
        if text:
            lines.append(f"  {label:<9} {escape(text)}")

    if info is not None:
        line("step", "" if info.step is None else str(info.step))
        line("created", f"{info.created:%Y-%m-%d %H:%M:%S} UTC")
    line("size", size)
    line("dtypes", ", ".join(f"{name} {format_nbytes(n)}" for name, (_, n) in by_size))
    if info is not None:
        line("metrics", ", ".join(f"{k}={v:.6g}" for k, v in info.metrics.items()))
        line("metadata", ", ".join(f"{k}={v!r}" for k, v in info.metadata.items()))
    if info is not None and verbose:
        line("stored", format_nbytes(info.stored_nbytes))
        line("digest", info.digest)
        line("parent", "" if info.parent is None else f"{info.parent[0]} ({info.parent[1]})")
        line("writer", info.writer)
    return lines


def _flat(leaves: Sequence[Leaf]) -> Table:
    table = Table(
        [
            Column("NAME", shrink_to=20, middle=True, keep=True),
            Column("DTYPE", shrink_to=7, keep=True),
            Column("SHAPE/VALUE", shrink_to=16),
            Column("SIZE", right=True),
        ]
    )
    for leaf in leaves:
        size = format_nbytes(leaf.nbytes) if leaf.kind == TENSOR or leaf.nbytes else ""
        table.add(leaf.name or "(root)", leaf.dtype, leaf.content, size)
    return table


def _tree(leaves: Sequence[Leaf], depth: int | None, out: Output) -> Table:
    verbose = out.verbose > 0
    root = build(leaves)
    if depth is None:
        depth = automatic_depth(root, max(_ROWS_MIN, out.height - 10), _SIBLINGS_MAX)
        rows = rows_to_depth(root, depth, _SIBLINGS_MAX)
    else:
        rows = rows_to_depth(root, depth)
    table = Table(
        [
            Column("NAME", shrink_to=20, middle=True, keep=True),
            Column("TENSORS", right=True),
            *([Column("VALUES", right=True)] if verbose else []),
            Column("DTYPE", shrink_to=8, keep=True),
            Column("SHAPE/VALUE", shrink_to=16),
            Column("SIZE", right=True),
        ]
    )
    for row in rows:
        table.add(*_cells(row, verbose=verbose))
    return table


def _cells(row: Row, *, verbose: bool) -> tuple[str, ...]:
    return (
        "  " * row.level + (row.label or "(root)"),
        f"{row.tensors:,}" if row.tensors else "",
        *([f"{row.values:,}" if row.values else ""] if verbose else []),
        row.dtype,
        row.content,
        format_nbytes(row.nbytes) if row.nbytes or row.tensors else "",
    )
