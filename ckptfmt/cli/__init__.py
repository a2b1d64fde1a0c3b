"""The command line. A *command* is a module with `add_arguments` and `run`; `Output` is how it speaks.

`main` parses, runs one command and turns every error into one line and an exit code.
"""

from __future__ import annotations

from ckptfmt.cli.entry import main

__all__ = ["main"]
