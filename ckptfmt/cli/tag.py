"""`ckptfmt tag STORE@NAME TAG`: give a checkpoint a second name, or take it away."""

from __future__ import annotations

import argparse

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import escape

DESCRIPTION = """\
Tag a checkpoint, so that STORE@TAG finds it and it is not deleted by
accident. A tag that exists is moved. Without TAG, list the tags."""
EPILOG = """\
examples:
  ckptfmt tag runs/a@1000 best
  ckptfmt tag runs/a                 list them
  ckptfmt tag runs/a best --delete"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE[@NAME]", help="which checkpoint (default: latest)")
    parser.add_argument("tag", metavar="TAG", nargs="?", help="lower case: best, production")
    parser.add_argument("--delete", action="store_true", help="take the tag away")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import check_store, open_store
    from ckptfmt.engine import read_tags
    from ckptfmt.errors import UsageError

    store, at = open_store(args, read_only=args.tag is None)
    document: dict[str, object] = {"command": "tag", "url": store.url}
    if args.tag is None:
        if at is not None or args.delete:
            raise UsageError("TAG is missing", reason="arguments", do='see "ckptfmt tag --help"')
        check_store(store, args.store)
        table = Table([Column("TAG"), Column("CHECKPOINT", shrink_to=12, middle=True, keep=True)])
        tags = store.tags()
        for tag, name in sorted(tags.items()):
            table.add(tag, name)
        out.result({**document, "tags": tags}, *([table] if tags else []))
        for tag in sorted(read_tags(store.backend).keys() - tags.keys()):
            out.note(
                f"{escape(tag)} does not hold: ckptfmt show {escape(store.url)}@{tag} says why"
            )
        return OK
    if args.delete:
        if at is not None:
            raise UsageError(
                "a tag is deleted by its own name",
                reason="selector",
                where=args.store,
                do="write STORE TAG --delete, without @NAME",
            )
        store.untag(args.tag)
        out.result({**document, "deleted": args.tag}, f"tag {escape(args.tag)} deleted")
        return OK
    with store.open(at) as checkpoint:
        name = checkpoint.info.name
    store.tag(args.tag, name)
    out.result({**document, "tag": args.tag, "name": name}, f"{escape(args.tag)} -> {name}")
    return OK
