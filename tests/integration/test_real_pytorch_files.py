"""Checkpoints of other people, as they are published: bit for bit what torch reads.

`python tests/compat/import/fetch.py FOLDER` gets them; CKPTFMT_REAL_FILES names the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptfmt
from ckptfmt.engine import flatten
from ckptfmt.format import pack_array

FOLDER = os.environ.get("CKPTFMT_REAL_FILES", "")
FILES = sorted(p for p in Path(FOLDER).rglob("*.pt*") if p.is_file()) if FOLDER else []

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # theirs
    pytest.mark.skipif(not FILES, reason="set CKPTFMT_REAL_FILES: see fetch.py"),
]


def test_both_formats_are_there() -> None:
    heads = {path.read_bytes()[:2] for path in FILES}
    assert heads == {b"PK", b"\x80\x02"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_published_file_is_read_as_torch_reads_it(path: Path, tmp_path: Path) -> None:
    expected = flatten(torch.load(path, weights_only=False, map_location="cpu"))
    foreign = ckptfmt.open_foreign(path)
    assert list(foreign) == expected.names
    assert foreign.flat.rows == expected.rows
    assert foreign.flat.values == expected.values
    for mine, theirs in zip(foreign.flat.tensors, expected.tensors, strict=True):
        assert (mine.dtype, tuple(mine.shape)) == (theirs.dtype, tuple(theirs.shape))
        assert bytes(pack_array(mine.fetch())) == bytes(pack_array(theirs.fetch()))
    report = ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert not report.skipped
    assert not report.opaque
