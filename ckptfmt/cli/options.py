"""Options that every command has."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ckptfmt.errors import UsageError


def add_common(parser: argparse.ArgumentParser) -> None:
    """`--json -q -v --no-color --storage-option`, before or after the command's name."""
    group = parser.add_argument_group("output and storage")
    # SUPPRESS below the main parser: a default of the command would undo what stood before it.
    top = parser.prog == "ckptfmt"

    def default(value: object) -> object:
        return value if top else argparse.SUPPRESS

    group.add_argument(
        "--json", action="store_true", default=default(False), help="one JSON document on stdout"
    )
    group.add_argument(
        "-q", "--quiet", action="store_true", default=default(False), help="no notes, no progress"
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=default(0),
        help="more, and the log; -vv: tracebacks",
    )
    group.add_argument(
        "--no-color", action="store_true", default=default(False), help="as NO_COLOR=1: plain text"
    )
    group.add_argument(
        "--storage-option",
        action="append",
        metavar="KEY=VALUE",
        default=default([]),
        help="for the store's driver, repeatable: endpoint_url=http://localhost:9000",
    )


def parse_storage_options(items: Sequence[str]) -> dict[str, object]:
    """KEY=VALUE pairs. A value that reads as JSON is that (true, 3, {...}), else it is text."""
    options: dict[str, object] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise UsageError(
                "not a storage option",
                reason="storage-option",
                expected="KEY=VALUE",
                found=repr(item),
            )
        if key in options:
            raise UsageError("storage option given twice", reason="storage-option", where=key)
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options
