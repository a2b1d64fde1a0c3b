"""A model that others published as safetensors, read as their library reads it.

`python tests/compat/import/fetch.py FOLDER` gets it; CKPTFMT_REAL_FILES names the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors

import ckptfmt

FOLDER = os.environ.get("CKPTFMT_REAL_FILES", "")
FILES = sorted(Path(FOLDER).rglob("*.safetensors")) if FOLDER else []

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(not FILES, reason="set CKPTFMT_REAL_FILES: see fetch.py"),
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_published_file_is_read_bit_for_bit(path: Path, tmp_path: Path) -> None:
    report = ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert report.format == "safetensors"
    assert not report.skipped
    with (
        safetensors.safe_open(path, "np") as theirs,
        ckptfmt.open(tmp_path / "s") as checkpoint,
    ):
        assert len(checkpoint) == len(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118
            want, found = np.asarray(theirs.get_tensor(name)), checkpoint[name].read()
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert found.tobytes() == want.tobytes()
