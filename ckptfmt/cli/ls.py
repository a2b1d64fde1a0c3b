"""`ckptfmt ls STORE`: the checkpoints of a store."""

from __future__ import annotations

import argparse

from ckptfmt.cli.exit_codes import OK, PARTIAL
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import format_nbytes

DESCRIPTION = "List the checkpoints of a store by step, then name."
EPILOG = """\
examples:
  ckptfmt ls runs/a
  ckptfmt ls s3://bucket/run --storage-option anon=true
  ckptfmt ls runs/a --json | jq '.checkpoints[].step'

A damaged checkpoint is left out with a warning, and the exit code is 3."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="directory or URL; with @NAME only that one")
    parser.add_argument("--quarantined", action="store_true", help="those that are set aside")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import check_store, open_store

    store, at = open_store(args)
    tags: dict[str, list[str]] = {}
    for tag, name in sorted(store.tags().items()):
        tags.setdefault(name, []).append(tag)
    infos = store.checkpoints(quarantined=args.quarantined)
    if not infos and at is None:
        check_store(store, args.store)
    if at is not None:
        with store.open(at) as checkpoint:
            infos = [i for i in infos if i.name == checkpoint.info.name]
    latest = store.latest() if infos and not args.quarantined else None
    latest_name = latest.name if latest is not None else None
    table = Table(
        [
            Column("CHECKPOINT", shrink_to=12, middle=True, keep=True),
            Column("CREATED"),
            Column("TENSORS", right=True),
            Column("SIZE", right=True),
            *([Column("FILES", right=True)] if out.verbose else []),
            Column("TAGS", shrink_to=12),
            Column("METRICS", shrink_to=12),
        ]
    )
    for info in infos:
        marks = (["latest"] if info.name == latest_name else []) + tags.get(info.name, [])
        table.add(
            str(info.step) if info.step is not None else info.name,
            f"{info.created:%Y-%m-%d %H:%M}",
            f"{info.tensors:,}",
            format_nbytes(info.nbytes),
            *([format_nbytes(info.stored_nbytes)] if out.verbose else []),
            ", ".join(marks),
            ", ".join(f"{key}={value:.4g}" for key, value in info.metrics.items()),
        )
    document = {
        "command": "ls",
        "url": store.url,
        "latest": latest_name,
        "checkpoints": [info_form(info, tags.get(info.name, [])) for info in infos],
    }
    shown = [table] if infos else []
    out.result(document, *shown)
    if not infos:
        out.note(f"no checkpoint in {store.url}")
    return PARTIAL if out.warnings else OK


def info_form(info: object, tags: list[str]) -> dict[str, object]:
    """A CheckpointInfo as JSON has it."""
    from ckptfmt.cli.json_form import json_value

    form: dict[str, object] = json_value(info)
    return {**form, "tags": tags}
