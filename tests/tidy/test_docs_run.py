"""What the documentation shows is run as it stands.

Every ```python block of README.md, and those of docs/*.md that follow a line `<!-- run -->`, runs in
a process of its own; a ```console block runs its `$ ckptfmt ...` lines. The blocks of one file share
one folder, in their order, so that a later block opens what an earlier one saved.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(<!-- run -->\n)?^```(python|console)\n(.*?)^```", re.M | re.S)


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of what is to be run in a file, in order."""
    everything = path.name == "README.md"
    return [
        (language, text)
        for marked, language, text in FENCE.findall(path.read_text())
        if marked or everything
    ]


def commands(text: str) -> list[list[str]]:
    """The `$ ckptfmt ...` lines of a console block; other commands are not ours to run."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ ckptfmt ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def run(argv: list[str], folder: Path, *, codes: tuple[int, ...] = (0,)) -> None:
    """Run one process that must end with one of these exit codes, and warn of nothing of ours."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode in codes, f"{argv[:3]}\n{done.stdout}\n{done.stderr}"
    assert "CkptWarning" not in done.stderr, done.stderr


FILES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks(p)]


@pytest.mark.integration
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_code_in_documentation_runs(path: Path, tmp_path: Path) -> None:
    for language, text in blocks(path):
        if language == "python":
            run(["-W", "error::ckptfmt.CkptWarning", "-c", text], tmp_path)
        else:
            for arguments in commands(text):
                codes = (0, 1) if arguments[0] == "diff" else (0,)  # 1: they differ
                run(["-m", "ckptfmt", *arguments], tmp_path, codes=codes)


def test_readme_shows_code_for_both_frameworks() -> None:
    text = "".join(text for language, text in blocks(ROOT / "README.md") if language == "python")
    assert "ckptfmt.torch" in text
    assert "ckptfmt.tensorflow" in text


def test_blocks_and_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na\n```\n<!-- run -->\n```python\nb\n```\n```console\n$ ckptfmt ls x\n```\n"
    )
    assert blocks(page) == [("python", "b\n")]
    assert blocks(page.rename(tmp_path / "README.md")) == [
        ("python", "a\n"),
        ("python", "b\n"),
        ("console", "$ ckptfmt ls x\n"),
    ]
    assert commands("$ make demo\n$ ckptfmt show 'a b' # all of it\nout\n") == [["show", "a b"]]
