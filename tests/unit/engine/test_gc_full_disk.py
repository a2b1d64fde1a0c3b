"""A disk that a killed save has filled is emptied by the collector, which needs space for its list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.owner import Owner
from ckptfmt.errors import StorageError
from ckptfmt.storage.local import LocalBackend
from ckptfmt.types import Key

DEAD = "5" * 32


def _kill_a_save(path: Path) -> None:
    owner = Owner.here().to_json() | {"pid": 4_000_001, "start_time": 1}
    document = {"step": 2, "name": "x", "bases": [], **owner}
    backend = LocalBackend(path)
    backend.put(Key(f"parts/{DEAD}/open"), json.dumps(document).encode())
    backend.put(Key(f"tmp/{DEAD}-0"), bytes(100_000))


def _fill(monkeypatch: pytest.MonkeyPatch, path: Path, file: Path) -> None:
    """No object can be made while `file` takes the space."""
    create = LocalBackend.create

    def full(self: LocalBackend, key: Key, nbytes: int | None = None) -> Any:
        if file.exists():
            raise StorageError("no space left", reason="no-space", where=key)
        return create(self, key, nbytes)

    monkeypatch.setattr(LocalBackend, "create", full)


def test_what_a_killed_save_left_makes_room_for_the_collectors_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.save({"a": np.arange(500)}, tmp_path, step=1)
    ckptfmt.save({"a": np.arange(900)}, tmp_path, step=2)
    ckptfmt.Store(tmp_path).delete(1)
    _kill_a_save(tmp_path)
    _fill(monkeypatch, tmp_path, tmp_path / "tmp" / f"{DEAD}-0")
    report = ckptfmt.Store(tmp_path).gc(grace_s=0)
    assert len(report.deleted) == 1
    assert DEAD in report.abandoned
    assert not (tmp_path / "tmp" / f"{DEAD}-0").exists()
    assert ckptfmt.load(tmp_path)["a"][-1] == 899


def test_where_there_is_nothing_to_clean_the_error_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.save({"a": np.arange(500)}, tmp_path, step=1)
    _fill(monkeypatch, tmp_path, tmp_path / "ckptfmt.json")
    with pytest.raises(StorageError, match="no space"):
        ckptfmt.Store(tmp_path).gc(grace_s=0)
    assert ckptfmt.Store(tmp_path).verify().ok
