"""`ckptfmt rm STORE@NAME`: delete a checkpoint."""

from __future__ import annotations

import argparse

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.text import escape, format_nbytes

DESCRIPTION = "Delete one checkpoint. Its space comes back by `ckptfmt gc`."
EPILOG = """\
examples:
  ckptfmt rm runs/a@1000
  ckptfmt rm runs/a@best --force     although it has a tag
  ckptfmt rm runs/a@1000 --dry-run   say what would be deleted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE@NAME", help="which checkpoint: it must be named")
    parser.add_argument("--force", action="store_true", help="delete it although a tag names it")
    parser.add_argument("--dry-run", action="store_true", help="change nothing")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import open_store
    from ckptfmt.errors import UsageError

    store, at = open_store(args, read_only=args.dry_run)
    if at is None:
        raise UsageError(
            "rm needs the checkpoint's name",
            reason="selector",
            where=args.store,
            do=f"write {args.store}@NAME; see ckptfmt ls {args.store}",
        )
    with store.open(at) as checkpoint:
        info = checkpoint.info
    tags = sorted(tag for tag, name in store.tags().items() if name == info.name)
    if tags and not args.force:
        raise UsageError(
            "the checkpoint is tagged",
            reason="tagged",
            where=info.name,
            found=", ".join(tags),
            do="untag it first, or --force",
        )
    if not args.dry_run:
        store.delete(info.name, force=args.force)
    document = {
        "command": "rm",
        "url": store.url,
        "name": info.name,
        "step": info.step,
        "tags": tags,
        "nbytes": info.nbytes,
        "dry_run": args.dry_run,
    }
    done = "would be deleted" if args.dry_run else "deleted"
    out.result(document, f"{escape(info.name)} {done} ({format_nbytes(info.nbytes)})")
    if not args.dry_run:
        out.note(f"the space comes back by: ckptfmt gc {store.url}")
    return OK
