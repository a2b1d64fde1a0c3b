"""Where a command's words go: stdout is the result, stderr is all else.

With `--json` stdout is exactly one JSON document. On a terminal rich draws; in a pipe, with
NO_COLOR or --no-color, plain text.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from ckptfmt.cli.json_form import json_value, write_json
from ckptfmt.cli.table import Table, draw, plain_lines
from ckptfmt.cli.text import escape, truncate_end
from ckptfmt.errors import CheckpointError, CkptWarning

if TYPE_CHECKING:
    from ckptfmt.events import Progress


@dataclass(slots=True)
class Output:
    """How to speak, settled once per call.

    Attributes:
        json: One JSON document instead of text.
        quiet: No notes, warnings and progress.
        verbose: 1: more columns and the log; 2: tracebacks too.
        color: False: no escape sequence at all.
        warnings: What was warned of, for the JSON document.
    """

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: bool = True
    stdout: IO[str] = field(default_factory=lambda: sys.stdout)
    stderr: IO[str] = field(default_factory=lambda: sys.stderr)
    warnings: list[str] = field(default_factory=list)

    @property
    def styled(self) -> bool:
        """Escape sequences are welcome on stdout."""
        return self._may_style(self.stdout)

    def _may_style(self, file: IO[str]) -> bool:
        plain = not self.color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return not plain and file.isatty()

    @property
    def width(self) -> int | None:
        """Columns to fit, or None where nothing must be cut: a pipe, unless COLUMNS is set."""
        columns = os.environ.get("COLUMNS", "")
        if columns.isdecimal() and int(columns) > 0:
            return max(20, int(columns))
        return max(20, self._screen()[0] or 80) if self.stdout.isatty() else None

    @property
    def height(self) -> int:
        """Lines of the terminal; 60 where there is none, unless LINES is set."""
        lines = os.environ.get("LINES", "")
        if lines.isdecimal() and int(lines) > 0:
            return int(lines)
        return self._screen()[1] or 60

    def _screen(self) -> tuple[int, int]:
        # Not by shutil, which brings all compressors along: 2 ms of a start.
        try:
            return os.get_terminal_size(self.stdout.fileno())
        except (OSError, ValueError):
            return 0, 0

    def result(
        self, document: Mapping[str, object], *shown: Table | str, whole: bool = False
    ) -> None:
        """The result: `document` with --json, else tables and lines; `whole` lines are not cut."""
        if self.json:
            extra = {"warnings": self.warnings} if self.warnings else {}
            write_json({**document, **extra}, self.stdout)
            return
        for part in shown:
            if isinstance(part, Table):
                self._table(part)
            else:
                self.stdout.write((part if whole else self._fit(part)) + "\n")

    def _table(self, table: Table) -> None:
        width = self.width
        if self.styled and width is not None:
            draw(table, self.stdout, width)
        else:
            self.stdout.writelines(line + "\n" for line in plain_lines(table, width))

    def _fit(self, line: str) -> str:
        width = self.width
        return line if width is None else truncate_end(line, width)

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        if not self.quiet:
            self.stderr.write(f"ckptfmt: {escape(text)}\n")

    def error(self, error: BaseException) -> None:
        """One line, and with --json an object after it."""
        message = _message(error)
        self.stderr.write(f"ckptfmt: error: {escape(message)}\n")
        if self.json:
            write_json({"error": _error_form(error, message)}, self.stderr, indent=None)
        if self.verbose >= 2:
            import traceback  # here: whoever needs it has time

            lines = traceback.format_exception(error)
            self.stderr.write("\n".join(escape(x) for x in "".join(lines).splitlines()) + "\n")

    @contextmanager
    def warnings_shown(self) -> Iterator[None]:
        """Each CkptWarning is a line on stderr, once; the rest goes its usual way."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", CkptWarning)
            usual = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: object) -> None:
                if not issubclass(category, CkptWarning):
                    usual(message, category, *place)  # type: ignore[arg-type]
                elif str(message) not in self.warnings:
                    self.warnings.append(str(message))
                    if not self.quiet:
                        self.stderr.write(f"ckptfmt: warning: {escape(str(message))}\n")

            warnings.showwarning = show  # type: ignore[assignment]
            yield

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A bar on stderr while a long job runs, if a person looks at it."""
        if self.quiet or not self.stderr.isatty():
            yield False
            return
        from ckptfmt.cli.progress import bar

        with bar(what, self.stderr, color=self._may_style(self.stderr)) as report:
            yield report


def _message(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{(error.strerror or str(error)).lower()}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"unexpected {type(error).__name__}: {error}; this is a bug, please report it with -vv"


def _error_form(error: BaseException, message: str) -> dict[str, object]:
    from ckptfmt.cli.exit_codes import exit_code

    form: dict[str, object] = {
        "class": type(error).__name__,
        "exit_code": exit_code(error),
        "message": message,
    }
    if isinstance(error, CheckpointError):
        form["kind"] = error.kind
        form["what"] = error.what
        form["where"] = error.where
        form["do"] = error.do
        for side in ("expected", "found"):
            value = getattr(error, side)
            form[side] = None if value is None else str(json_value(value))
    return form
