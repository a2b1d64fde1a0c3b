"""The program as a process: what it imports, pipes that close, terminals, encodings."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt.cli import main
from ckptfmt.cli.entry import COMMANDS

HEAVY = ("numpy", "msgpack", "rich", "fsspec", "torch", "tensorflow", "tensorstore", "xxhash")


def modules_after(*args: str) -> set[str]:
    """Modules that a run of the program has imported at its end."""
    code = (
        "import sys, atexit\n"
        "from ckptfmt.cli import main\n"
        f"code = main({list(args)!r})\n"
        "sys.stderr.write('\\nMODULES ' + ' '.join(sys.modules))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("show", "--help")])
def test_help_and_version_import_nothing_heavy(args: tuple[str, ...]) -> None:
    modules = modules_after(*args)
    assert "ckptfmt.cli" in modules
    assert not modules & set(HEAVY)
    assert not {
        m for m in modules if m.startswith(("ckptfmt.engine", "ckptfmt.format", "ckptfmt.storage"))
    }


def test_a_command_in_a_pipe_imports_neither_a_framework_nor_rich(tmp_path: Path) -> None:
    ckptfmt.save({"w": np.zeros(3)}, tmp_path / "s", durable=False)
    modules = modules_after("show", str(tmp_path / "s"))
    assert "numpy" in modules
    assert not modules & {
        "rich",
        "torch",
        "tensorflow",
        "tensorstore",
        "fsspec",
        "ckptfmt.foreign.safetensors",
    }


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns_and_has_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*([command] if command else []), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "examples:" in text


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 tensors."""
    model = {
        f"encoder.layer.{layer}.block_{part}.attention.self.query_projection.{kind}": np.full(
            (2, 2), layer, np.float32
        )
        for layer in range(250)
        for part in range(10)
        for kind in ("weight", "bias")
    }
    path = tmp_path_factory.mktemp("big") / "s"
    ckptfmt.save({"model": model}, path, step=1, durable=False)
    return path


def test_a_reader_that_leaves_ends_the_program_quietly(big: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "ckptfmt", "show", str(big), "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() in (141, 0)


def test_a_terminal_without_unicode_gets_escapes_not_an_error(big: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptfmt", "show", str(big), "--all"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"},
        check=True,
    )
    assert b"\\u2026" in done.stdout


def in_terminal(
    *args: str, columns: int = 80, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and everything that the program wrote to a terminal of this width."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, columns)) if hasattr(termios, "tcsetwinsize") else _resize(
        slave, columns
    )
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfmt", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**env, "TERM": "xterm-256color", **(environment or {})},
    )
    os.close(slave)
    data = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        data += part
    os.close(master)
    return process.wait(), data.decode()


def _resize(descriptor: int, columns: int) -> None:
    import fcntl

    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").splitlines()


def test_on_a_terminal_5000_tensors_fit_a_screen_and_its_width(big: Path) -> None:
    code, text = in_terminal("show", str(big))
    lines = plain(text)
    assert code == 0
    assert "\x1b[" in text
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("model/encoder.layer") and " 5,000 " in line for line in lines)
    assert any(line.startswith("  weight") and " 2,500 " in line for line in lines)


def test_on_a_narrow_terminal_no_row_wraps(big: Path) -> None:
    _, text = in_terminal("show", str(big), "--all", columns=60)
    lines = plain(text)
    assert len([line for line in lines if "float32" in line]) >= 5000
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("how", ["--no-color", "NO_COLOR", "dumb"])
def test_no_color_means_no_escape_sequence_at_all(big: Path, how: str) -> None:
    environment = {"NO_COLOR": {"NO_COLOR": "1"}, "dumb": {"TERM": "dumb"}}.get(how, {})
    args = ["verify", str(big), *(["--no-color"] if how == "--no-color" else [])]
    code, text = in_terminal(*args, "--quiet", environment=environment)
    assert code == 0
    assert "\x1b" not in text
    _, text = in_terminal("show", *args[1:], environment=environment)
    assert "\x1b" not in text
