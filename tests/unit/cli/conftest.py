"""A small store, and the program as a call: exit code, stdout, stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document; anything beside it on stdout fails."""
        return json.loads(self.out, parse_constant=lambda text: pytest.fail(text))


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("ls", path, ...) -> Result."""
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: object) -> Result:
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def tree(step: int, layers: int = 3) -> dict[str, Any]:
    """A model with tied embeddings, an optimizer and plain values; `head` changes with the step."""
    embed = np.arange(12, dtype=np.float32).reshape(4, 3)
    model: dict[str, Any] = {"embed.weight": embed}
    for layer in range(layers):
        model[f"layer.{layer}.weight"] = np.full((3, 3), layer, ml_dtypes.bfloat16)
        model[f"layer.{layer}.bias"] = np.zeros(3, np.float32)
    model["head.weight"] = np.full((2, 3), step, np.float32)
    model["out.weight"] = embed
    return {
        "model": model,
        "step": step,
        "lr": float("nan"),
        "note": "a\x1b[31mb",
        "shape": (1, [2, 3]),
        "counts": np.array([1, -1], np.int64),
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Steps 1 and 2 and `best`, which is step 2; step 2 is tagged `prod`."""
    path = tmp_path / "run"
    ckptfmt.save(tree(1), path, step=1, metrics={"loss": 0.5}, durable=False)
    ckptfmt.save(tree(2), path, step=2, metadata={"who": "me\x1b]0;x\x07"}, durable=False)
    ckptfmt.Store(path).tag("prod", 2)
    return path
