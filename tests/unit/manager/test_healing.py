"""How far a restore looks for a good checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptfmt import CheckpointInfo, CkptWarning, Manager, Store


def test_after_so_many_bad_ones_the_trouble_is_elsewhere(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for step in range(1, 14):
            manager.save({"w": np.full(3000, step)}, step=step)
    tried: list[int | None] = []

    def refuse(_: object, info: CheckpointInfo) -> None:
        tried.append(info.step)
        raise ArithmeticError(f"not {info.step}")

    mine = {"w": np.zeros(3000, np.int64)}
    manager = Manager(tmp_path, validate=[refuse])
    with (
        pytest.warns(CkptWarning, match="is passed over"),
        pytest.raises(ArithmeticError, match="not 4"),
    ):
        manager.restore(mine)
    assert tried == list(range(13, 3, -1))  # ten, and no scan of a whole history
    assert not mine["w"].any()
    assert Store(tmp_path).steps() == list(range(1, 14))
