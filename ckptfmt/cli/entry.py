"""The program: arguments in, exit code out. `--help` and `--version` import nothing heavy."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, NoReturn

from ckptfmt.cli.exit_codes import BROKEN_PIPE, OK, exit_code
from ckptfmt.cli.options import add_common, parse_storage_options
from ckptfmt.cli.output import Output
from ckptfmt.errors import UsageError

COMMANDS = {
    "ls": "list the checkpoints of a store",
    "show": "show what a checkpoint holds: names, dtypes, shapes, sizes",
    "cat": "print the values of one tensor, or statistics of them",
    "diff": "compare two checkpoints by their digests, reading no data",
    "verify": "read every byte and name what is damaged",
    "gc": "give back the space of what no checkpoint refers to",
    "rm": "delete a checkpoint",
    "prune": "delete the checkpoints that no rule keeps",
    "tag": "give a checkpoint a second name: best, production",
    "push": "copy checkpoints into another store",
    "pull": "copy checkpoints from another store",
    "watch": "a run, live in the terminal",
    "report": "one HTML page about a run",
    "convert": "make a checkpoint from a file of another format",
}

_DESCRIPTION = """\
Look at, check and clean checkpoint stores.

STORE is a directory or a URL (s3://bucket/run). STORE@NAME chooses a
checkpoint: a step (runs/a@1000), latest, a name or a tag (runs/a@best).
Without @NAME it is the latest."""

_EPILOG = """\
examples:
  ckptfmt ls runs/a                          what is there
  ckptfmt show runs/a@1000 --names 'model'   a part of one checkpoint
  ckptfmt cat runs/a model/w[0:8,3]          values
  ckptfmt diff runs/a@1000 runs/a@2000       exit 1 if they differ
  ckptfmt verify runs/a                      exit 1 if anything is damaged
  ckptfmt ls runs/a --json | jq .            for programs

exit codes: 0 ok, 1 the answer is no, 2 usage, 3 partial, 4 corrupt,
10 not found, 11 exists or lost a race, 12 unsupported, 13 access denied,
14 storage, 15 no space, 70 a bug, 130 interrupted"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """As its base, which loads all of shutil, compressors too, to ask for the terminal's width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=(Output().width or 80) - 2)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that usage errors look like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, reason="arguments", do=f'see "{self.prog} --help"')


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of the program.

    Args:
        argv: What it is going to parse: commands that are not in it have a name and a summary, and
            their modules are not loaded. None: all of them.
    """
    from ckptfmt import __version__

    parser = _Parser(
        prog="ckptfmt",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ckptfmt {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands", parser_class=_Parser
    )
    for name, summary in COMMANDS.items():
        if argv is not None and name not in argv:
            commands.add_parser(name, help=summary, formatter_class=_Formatter)
            continue
        module = importlib.import_module(f"ckptfmt.cli.{name}")
        sub = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        add_common(sub)
        sub.set_defaults(run=module.run)
    add_common(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None: those of the process.
    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for file in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end the program.
        reconfigure = getattr(file, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    out = Output(json="--json" in argv)
    try:
        return _run(argv, out)
    except BrokenPipeError:
        # The reader of our output has gone: `ckptfmt ls | head`. Nobody is left to tell.
        _silence(sys.stdout)
        return BROKEN_PIPE
    except SystemExit as request:
        # argparse leaves this way after --help and --version.
        return _leave(request)
    except (Exception, KeyboardInterrupt) as error:
        out.error(error)
        return exit_code(error)


def _run(argv: list[str], out: Output) -> int:
    args = build_parser(argv).parse_args(argv)
    out.json, out.quiet, out.verbose = args.json, args.quiet, args.verbose
    out.color = not args.no_color
    args.storage_options = parse_storage_options(args.storage_option)
    with _log_shown(out), out.warnings_shown():
        code: int = args.run(args, out)
    sys.stdout.flush()
    return code


@contextmanager
def _log_shown(out: Output) -> Iterator[None]:
    """With -v the log is on stderr while a command runs."""
    if not out.verbose:
        yield
        return
    import logging  # here: who asks for no log need not load it

    logger = logging.getLogger("ckptfmt")
    handler = logging.StreamHandler(out.stderr)
    handler.setFormatter(logging.Formatter("ckptfmt: %(levelname)s: %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if out.verbose >= 2 else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _leave(request: SystemExit) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
        return BROKEN_PIPE
    return request.code if isinstance(request.code, int) else OK


def _silence(file: IO[str]) -> None:
    """What is still buffered must not fail once more when the interpreter ends."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, file.fileno())
        os.close(descriptor)
    except (OSError, ValueError):
        pass
