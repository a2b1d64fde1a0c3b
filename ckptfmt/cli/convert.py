"""`ckptfmt convert SRC DST`: a checkpoint from a file of another format, and back to one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptfmt.cli.convert_rules import (
    add_rule_arguments,
    count_table,
    detail_table,
    plan_table,
    rule_table,
    rules_of,
    summary,
)
from ckptfmt.cli.exit_codes import OK, PARTIAL
from ckptfmt.cli.json_form import json_value
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import escape, format_count, format_nbytes, format_shape

if TYPE_CHECKING:
    from ckptfmt.engine import Checkpoint
    from ckptfmt.foreign import ForeignTree
    from ckptfmt.reports import ConvertReport

DESCRIPTION = """\
Carry a file or folder of another format into a store: every tensor bit for
bit, or an error and nothing written. Values are streamed, then compared
with the source once more. A folder of shards is read as its *.index.json
says. Nothing in the file is ever run: an object of an unknown class becomes
the plain data it consists of.
The other way a checkpoint becomes a file of another format: where SRC is a
store, or DST has a suffix of such a file, or --to names the format. It is
written beside DST, read back and compared before it has its name."""
EPILOG = """\
examples:
  ckptfmt convert model.safetensors runs/base
  ckptfmt convert pytorch_model.pt runs/base
  ckptfmt convert model/ runs/base --name llama --if-exists replace
  ckptfmt convert old.pt runs/base --rename '^module\\.='
  ckptfmt convert keras.h5 runs/base --preset keras-to-torch --plan
  ckptfmt convert runs/a@7 runs/b --map rules.toml
  ckptfmt convert model.safetensors --list      what would be carried
  ckptfmt convert --list                        the formats
  ckptfmt convert runs/a@best model.pt --root model
  ckptfmt convert runs/a out/ckpt-7 --to tensorbundle
  ckptfmt convert pytorch_model.bin model.safetensors

exit codes: 0 all carried, 3 something was left out with --allow-partial (it is
listed), 12 something cannot be carried"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", nargs="?", help="file, folder, or STORE[@NAME]")
    parser.add_argument("dst", metavar="DST", nargs="?", help="store, or file of another format")
    parser.add_argument(
        "--from", dest="source_format", metavar="FORMAT", help="instead of finding it out"
    )
    parser.add_argument(
        "--to", dest="target_format", metavar="FORMAT", help="write DST in this format"
    )
    parser.add_argument(
        "--names", action="append", metavar="PATTERN", help="export these leaves; repeatable"
    )
    parser.add_argument(
        "--root", default="", metavar="NAME", help="export the content of this dict or list"
    )
    parser.add_argument(
        "--shard-nbytes", type=int, metavar="N", help="cut a folder of safetensors into such files"
    )
    parser.add_argument(
        "--like", metavar="FILE", help="a .weights.h5 of the same model: where which layer is"
    )
    parser.add_argument("--list", action="store_true", help="list what would be carried; no DST")
    add_rule_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="save it as this step")
    which.add_argument("--name", metavar="NAME", help="save it under this name (default: main)")
    parser.add_argument(
        "--if-exists", choices=("error", "replace", "keep"), help="where the name is taken"
    )
    parser.add_argument(
        "--unknown",
        default="opaque",
        choices=("opaque", "refuse"),
        help="objects of classes that are code: carry their plain data (default), or refuse",
    )
    parser.add_argument(
        "--allow-partial", action="store_true", help="go on without what cannot be carried"
    )
    parser.add_argument("--codec", default="raw", metavar="CODEC", help="raw (default) or zstd")
    parser.add_argument(
        "--digest", default="xxh3-128", choices=("xxh3-128", "sha256"), help="sha256 to be signed"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.errors import UsageError

    if args.list:
        if args.dst is not None:
            raise UsageError("--list takes no DST", reason="arguments", found=args.dst)
        return _list_formats(out) if args.src is None else _list_content(args, out)
    if args.plan and args.src is not None:
        return _plan(args, out)
    if args.src is None or args.dst is None:
        raise UsageError(
            "SRC and DST are needed", reason="arguments", do='see "ckptfmt convert --help"'
        )
    return _export(args, out) if _is_export(args) else _convert(args, out)


def _is_export(args: argparse.Namespace) -> bool:
    from ckptfmt.foreign import format_for, is_store

    if args.target_format is not None or format_for(args.dst) is not None:
        return True
    if args.rules or is_store(args.dst):
        return False  # from a store to a store
    return args.source_format is None and is_store(args.src)


_OF_A_STORE = {"step": None, "name": None, "codec": "raw", "digest": "xxh3-128"}
_OF_A_FILE = {"names": None, "root": "", "shard_nbytes": None, "like": None}
"""Options that say something of what is written -> their defaults."""


def _refuse(args: argparse.Namespace, options: Mapping[str, object], written: str) -> None:
    from ckptfmt.errors import UsageError

    for option, default in options.items():
        if getattr(args, option) != default:
            raise UsageError(
                f"--{option.replace('_', '-')} is not for {written}",
                reason="arguments",
                do="leave it out; a checkpoint that is exported is named STORE@NAME",
            )


def _export(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import parse_store
    from ckptfmt.errors import UnsupportedError, UsageError
    from ckptfmt.foreign import export, is_foreign, open_foreign

    _refuse(args, _OF_A_STORE, "a file of another format")
    if args.if_exists == "keep":
        raise UsageError(
            "--if-exists keep is for a store", reason="arguments", do="error or replace"
        )
    source, at = args.src, None
    if args.source_format is None and not is_foreign(args.src):
        source, at = parse_store(args.src, args.storage_options, read_only=True)
    rules, lost = rules_of(args), {}
    if rules:
        opened = open_foreign(_source(args), source_format=args.source_format, rules=rules)
        source, at, lost = opened, None, dict(opened.foreign.skipped)
    if lost and not args.allow_partial:
        raise UnsupportedError(
            f"{format_count(len(lost), 'item')} cannot be carried",
            reason="foreign-partial",
            where=args.src,
            found="; ".join(f"{name}: {reason}" for name, reason in lost.items()),
            do="--allow-partial carries the rest",
        )
    more = {"shard_nbytes": args.shard_nbytes} if args.shard_nbytes is not None else {}
    with out.progress("export") as progress:
        report = export(
            source,
            args.dst,
            target_format=args.target_format,
            source_format=None if rules else args.source_format,
            at=at,
            names=args.names,
            root=args.root,
            if_exists=args.if_exists or "error",
            like=args.like,
            allow_partial=args.allow_partial,
            progress=progress,
            **more,
        )
    skipped = {**lost, **report.skipped}
    document = {
        "command": "convert",
        "source": args.src,
        "destination": args.dst,
        "format": report.format,
        "loaded": list(report.loaded),
        "renamed": dict(report.renamed),
        "transformed": dict(report.transformed),
        "skipped": skipped,
        "nbytes": report.nbytes,
    }
    size = f"{format_count(len(report.loaded), 'item')}, {format_nbytes(report.nbytes)}"
    shown = [
        f"{escape(args.dst)} ({report.format})",
        f"  from   {escape(args.src)}",
        f"  size   {size}",
        "  check  the importer finds the values of the source, by digest",
    ]
    if report.renamed:
        shown.append(f"  {format_count(len(report.renamed), 'name')} as the format has them")
    out.result(document, *shown)
    for name, what in report.transformed.items():
        out.note(f"carried as something else: {name}: {what}")
    for name, reason in skipped.items():
        out.note(f"not carried: {name}: {reason}")
    return PARTIAL if skipped else OK


_OTHER_SUFFIXES = (".onnx", ".pb", ".tflite", ".mlmodel", ".zip", ".tar", ".json")


def _refuse_file_name(dst: str) -> None:
    """A store that would be called `model.h5` is hardly what was meant."""
    from ckptfmt.errors import UsageError
    from ckptfmt.foreign import EXPORTERS, IMPORTERS

    read = [suffix for row in IMPORTERS.values() for suffix in row.suffixes]
    if "://" not in dst and not os.path.exists(dst) and dst.endswith((*read, *_OTHER_SUFFIXES)):
        raise UsageError(
            "no format that can be written has this suffix",
            reason="arguments",
            found=dst,
            expected=", ".join(suffix for row in EXPORTERS.values() for suffix in row.suffixes),
            do="--to FORMAT writes another; a store is a folder: leave the suffix out",
        )


def _convert(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import store_for_writing
    from ckptfmt.foreign import convert

    _refuse(args, _OF_A_FILE, "a checkpoint of a store")
    _refuse_file_name(args.dst)
    store, at = store_for_writing(args.dst, args.storage_options, step=args.step, name=args.name)
    with out.progress("convert") as progress:
        report = convert(
            _source(args),
            store,
            source_format=args.source_format,
            **at,
            if_exists=args.if_exists,
            codec=args.codec,
            digest=args.digest,
            unknown=args.unknown,
            allow_partial=args.allow_partial,
            rules=rules_of(args),
            progress=progress,
        )
    assert report.info is not None
    size = f"{format_count(len(report.loaded), 'tensor')}, {format_nbytes(report.nbytes)}"
    shown: list[Table | str] = [
        f"{escape(store.url)}@{report.info.name}",
        f"  from   {escape(args.src)} ({report.format})",
        f"  size   {size}",
        "  check  digests are those of the source",
    ]
    shown += ["", count_table(report)]
    if report.rules:
        shown += ["", rule_table(report)]
    if out.verbose and detail_table(report).rows:
        shown += ["", detail_table(report)]
    out.result(_document(args, report), *shown)
    return _notes(report, out)


def _source(args: argparse.Namespace) -> str | Checkpoint:
    """The path, or the checkpoint of a store, opened with the options of its storage."""
    from ckptfmt.cli.where import parse_store
    from ckptfmt.foreign import is_store

    if args.source_format is not None or not is_store(args.src):
        return str(args.src)
    store, at = parse_store(args.src, args.storage_options, read_only=True)
    return store.open(at)


def _plan(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.foreign import convert

    report = convert(
        _source(args),
        args.dst or "",
        source_format=args.source_format,
        unknown=args.unknown,
        rules=rules_of(args),
        dry_run=True,
    )
    shown: list[Table | str] = [f"{escape(args.src)} ({report.format})", summary(report)]
    if report.rules:
        shown += ["", rule_table(report), "", plan_table(report)]
    out.result(_document(args, report), *shown)
    return _notes(report, out)


def _document(args: argparse.Namespace, report: ConvertReport) -> dict[str, object]:
    return {
        "command": "convert",
        "source": args.src,
        "format": report.format,
        "checkpoint": json_value(report.info),
        "loaded": list(report.loaded),
        "renamed": dict(report.renamed),
        "transformed": dict(report.transformed),
        "dropped": dict(report.dropped),
        "skipped": dict(report.skipped),
        "opaque": dict(report.opaque),
        "rules": [
            {
                "rule": rule.rule,
                "touched": rule.touched,
                "changes": [
                    {
                        "before": dict(zip(change.before, change.was)),
                        "after": dict(zip(change.after, change.now)),
                        "what": change.what,
                    }
                    for change in rule.changes
                ],
            }
            for rule in report.rules
        ],
        "notes": list(report.notes),
        "nbytes": report.nbytes,
    }


def _notes(report: ConvertReport, out: Output) -> int:
    """Say on stderr what is to be minded; the exit code."""
    _note_opaque(report.opaque, out)
    for name, reason in report.skipped.items():
        out.note(f"not carried: {name}: {reason}")
    for note in report.notes:
        out.note(note)
    return PARTIAL if any(not r.startswith("file ") for r in report.skipped.values()) else OK


def _list_formats(out: Output) -> int:
    from ckptfmt.foreign import EXPORTERS, IMPORTERS, importer_names

    table = Table([Column("FORMAT"), Column("SUFFIXES"), Column("NEEDS"), Column("WAYS")])
    formats = []
    for name in dict.fromkeys([*importer_names(), *EXPORTERS]):
        row = IMPORTERS.get(name) or EXPORTERS.get(name)
        suffixes, extra = (list(row.suffixes), row.extra) if row is not None else ([], "")
        ways = ["in"] * (name in importer_names()) + ["out"] * (name in EXPORTERS)
        needs = f'pip install "ckptfmt[{extra}]"' if extra else ""
        table.add(name, ", ".join(suffixes), needs, ", ".join(ways))
        formats.append({"format": name, "suffixes": suffixes, "extra": extra, "ways": ways})
    out.result({"command": "convert", "formats": formats}, table)
    return OK


def _list_content(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.errors import UsageError
    from ckptfmt.foreign import is_store, read_foreign

    if args.source_format is None and is_store(args.src):
        raise UsageError(
            "--list is for files of other formats",
            reason="arguments",
            where=args.src,
            do=f'"ckptfmt show {args.src}" lists a checkpoint; --plan what rules match',
        )
    tree = read_foreign(args.src, source_format=args.source_format)
    document = {
        "command": "convert",
        "source": args.src,
        "format": tree.format,
        "metadata": json_value(tree.metadata),
        "tensors": [
            {
                "name": t.name,
                "foreign_name": t.foreign_name,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "nbytes": t.nbytes,
            }
            for t in tree.tensors.values()
        ],
        "skipped": {**tree.skipped, **tree.ignored},
        "opaque": dict(tree.opaque),
        "nbytes": tree.nbytes,
    }
    out.result(
        document,
        _tensor_table(tree),
        "",
        f"{format_count(len(tree.tensors), 'tensor')}, {format_nbytes(tree.nbytes)}",
    )
    _note_opaque(tree.opaque, out)
    for name, reason in {**tree.skipped, **tree.ignored}.items():
        out.note(f"not carried: {name}: {reason}")
    return OK


def _note_opaque(opaque: Mapping[str, str], out: Output) -> None:
    for name, of in opaque.items():
        out.note(f"as plain data: {name or '(root)'}: {of}")


def _tensor_table(tree: ForeignTree) -> Table:
    table = Table(
        [
            Column("NAME", shrink_to=20, middle=True, keep=True),
            Column("DTYPE", shrink_to=7, keep=True),
            Column("SHAPE", shrink_to=10),
            Column("SIZE", right=True),
        ]
    )
    for tensor in tree.tensors.values():
        size = format_nbytes(tensor.nbytes)
        table.add(tensor.name, tensor.dtype, format_shape(tensor.shape), size)
    return table
