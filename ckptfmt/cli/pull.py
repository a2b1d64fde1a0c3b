"""`ckptfmt pull STORE OTHER[@NAME]`: copy checkpoints out of another store."""

from __future__ import annotations

import argparse

from ckptfmt.cli.output import Output
from ckptfmt.cli.push import add_choice, copy

DESCRIPTION = "Copy checkpoints from another store into this one, as push does."
EPILOG = """\
examples:
  ckptfmt pull runs/a s3://bucket/run          its latest
  ckptfmt pull runs/a s3://bucket/run@1000     one
  ckptfmt pull runs/a s3://bucket/run --all    all of them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="where to: directory or URL")
    parser.add_argument("other", metavar="OTHER", help="where from; with @NAME only that one")
    add_choice(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    return copy(args, out, args.other, args.store)
