"""`unchanged=`: tensors that the caller vouches for are not looked at, and nothing else is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import ConflictError, Store, UsageError
from ckptfmt.engine.plan import packed_bytes
from ckptfmt.types import Key


def tree(step: int) -> dict[str, Any]:
    frozen = {f"layer{n}": np.full(200_000, n, np.float32) for n in range(3)}
    small = {f"norm{n}": np.full(10, n, np.float32) for n in range(20)}
    return {"frozen": frozen | small, "tied": frozen["layer0"], "w": np.full(1000, step), "n": step}


def saved(store: Path, step: int, **options: Any) -> Any:
    return ckptfmt.save(tree(step), store, step=step, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_vouched_for_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    saved(tmp_path, 1)
    seen: list[str] = []

    def packed(source: Any, name: str) -> memoryview:
        seen.append(name)
        return packed_bytes(source, name)

    monkeypatch.setattr("ckptfmt.engine.stage.packed_bytes", packed)
    mine = tree(2)
    mine["frozen"]["layer1"][:] = 9  # the caller's word counts, also where it is wrong
    if asynchronous:
        info = ckptfmt.save_async(mine, tmp_path, step=2, unchanged="frozen").result()
    else:
        info = ckptfmt.save(mine, tmp_path, step=2, unchanged="frozen")
    assert set(seen) == {"w"}
    assert info.written_nbytes < 20_000
    loaded = ckptfmt.load(tmp_path)
    for name, value in tree(2)["frozen"].items():
        np.testing.assert_array_equal(loaded["frozen"][name], value)
    assert loaded["w"][0] == loaded["n"] == 2
    assert loaded["tied"] is loaded["frozen"]["layer0"]
    assert Store(tmp_path).verify().ok
    assert info.digest == saved(tmp_path / "other", 2).digest


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t["frozen"].update(layer0=np.zeros(7, np.float32)), r"found float32 \[200000\]"),
        (lambda t: t["frozen"].update(layer0=np.zeros(200_000)), r"found float32 \[200000\]"),
        (lambda t: t["frozen"].update(new=np.zeros(3)), "found no tensor of this name"),
    ],
)
def test_what_the_base_has_not_so_is_refused_before_anything_is_written(
    tmp_path: Path, change: Any, found: str
) -> None:
    saved(tmp_path, 1)
    before = sorted(path.name for path in (tmp_path / "data").iterdir())
    mine = tree(2)
    change(mine)
    with pytest.raises(UsageError, match=found):
        ckptfmt.save(mine, tmp_path, step=2, unchanged="frozen")
    assert Store(tmp_path).steps() == [1]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == before


def test_other_cuts_another_digest_or_no_base_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    wrong: list[dict[str, Any]] = [{"chunk_nbytes": 65536}, {"digest": "sha256"}, {"bases": []}]
    for options in wrong:
        with pytest.raises(UsageError, match="is not in the base as it is now"):
            saved(tmp_path, 2, unchanged="frozen", **options)
    with pytest.raises(UsageError, match="names no tensor: 'froozen'"):
        saved(tmp_path, 2, unchanged=["frozen", "froozen"])
    with pytest.raises(UsageError, match="names no tensor"):
        saved(tmp_path, 2, unchanged="n")  # a plain value is always the live one


@pytest.mark.damaged_store
def test_data_that_is_gone_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    info = saved(tmp_path, 1)
    (file,) = ckptfmt.open(tmp_path).index.files.ids
    Store(tmp_path).backend.put(Key(f"damaged/{file}"), b"")
    with pytest.raises(ConflictError, match="said to be unchanged is gone"):
        saved(tmp_path, 2, unchanged="frozen")
    assert Store(tmp_path).steps() == [1]
    assert saved(tmp_path, 2).nbytes == info.nbytes  # which heals the store
    assert Store(tmp_path).verify().ok


def test_a_part_of_a_group_is_refused(tmp_path: Path) -> None:
    from ckptfmt import FileGroup

    with pytest.raises(UsageError, match="one process alone"):
        saved(tmp_path, 1, unchanged="frozen", group=FileGroup(0, 1))
