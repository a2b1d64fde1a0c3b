"""What a save takes from its bases, and what it must not. Spec: 08-protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.reuse import Bases
from ckptfmt.testing import difference


def saved(path: Path, tree: Any, **options: Any) -> Any:
    ckptfmt.save(tree, path, durable=False, **options)
    return ckptfmt.open(path).index


def test_a_chunk_is_found_by_its_content_and_length(tmp_path: Path) -> None:
    index = saved(tmp_path, {"a": np.arange(5000)}, chunk_nbytes=4096)
    bases = Bases([index], "xxh3-128", set())
    for row, digest in enumerate(index.tree.chunk_digests):
        place = bases.find(digest.tobytes(), int(index.tree.chunk_raw[row]))
        assert place is not None
        assert place.file == index.files.ids[0]
        assert place.offset == int(index.placement.offsets[row])
        assert bases.find(digest.tobytes(), 17) is None
    assert bases.find(b"\0" * 16, 4096) is None
    assert bases.files == {index.files.ids[0]: int(index.files.nbytes[0])}


def test_nothing_of_a_refused_file_or_of_another_digest_is_found(tmp_path: Path) -> None:
    index = saved(tmp_path, {"a": np.arange(50)})
    digest = index.tree.chunk_digests[0].tobytes()
    for bases in (
        Bases([index], "xxh3-128", {index.files.ids[0]}),
        Bases([index], "sha256", set()),
        Bases([], "xxh3-128", set()),
    ):
        assert bases.find(digest, 400) is None
        assert bases.files == {}
        assert not bases.has_any([digest])


def test_a_base_without_a_chunk_is_no_trouble(tmp_path: Path) -> None:
    index = saved(tmp_path, {"v": 1})
    assert Bases([index], "xxh3-128", set()).files == {}


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_save_of_a_slowly_changing_tree_writes_little_and_reads_right(
    tmp_path: Path, codec: str
) -> None:
    """Chunks of many earlier saves end up in one checkpoint."""
    rng = np.random.default_rng(1)
    tree = {f"{i}": rng.random(4096) for i in range(8)}
    options = {"chunk_nbytes": 4096, "codec": codec, "durable": False}
    ckptfmt.save(tree, tmp_path, step=0, **options)  # type: ignore[arg-type]
    for step in range(1, 12):
        tree[f"{step % 8}"][step * 300] = step
        info = ckptfmt.save(tree, tmp_path, step=step, **options)  # type: ignore[arg-type]
        assert info.written_nbytes <= 3 * 4096
        assert not difference(ckptfmt.load(tmp_path), tree)
    assert len(ckptfmt.open(tmp_path).index.files.ids) > 8
    store = ckptfmt.Store(tmp_path)
    for step in range(11):
        store.delete(step)
    store.gc(grace_s=0)
    assert store.verify().ok
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_chunks_of_another_codec_are_reused_as_they_are(tmp_path: Path) -> None:
    tree = {"a": np.zeros(50_000), "b": np.arange(3)}
    ckptfmt.save(tree, tmp_path, step=1, codec="zstd")
    info = ckptfmt.save(tree, tmp_path, step=2, codec="raw")
    assert info.written_nbytes == 0
    assert ckptfmt.open(tmp_path)["a"].codec == "zstd"
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_another_cut_shares_nothing_and_is_right(tmp_path: Path) -> None:
    tree = {"a": np.arange(50_000)}
    ckptfmt.save(tree, tmp_path, step=1, chunk_nbytes=4096)
    info = ckptfmt.save(tree, tmp_path, step=2, chunk_nbytes=8192)
    assert info.written_nbytes > 400_000
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_a_name_that_moves_takes_its_bytes_along(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((50, 100))
    ckptfmt.save({"old": array}, tmp_path, step=1)
    info = ckptfmt.save({"new": array.reshape(-1), "same": array}, tmp_path, step=2)
    assert info.written_nbytes == 0
    loaded = ckptfmt.load(tmp_path)
    assert not difference(loaded, {"new": array.reshape(-1), "same": array})
    loaded["new"][:] = 0
    assert loaded["same"].all()


def test_a_file_named_by_a_collector_is_not_reused(tmp_path: Path) -> None:
    tree = {"a": np.arange(5000)}
    ckptfmt.save(tree, tmp_path, step=1)
    [file] = os.listdir(tmp_path / "data")
    ckptfmt.Store(tmp_path).delete(1)
    report = ckptfmt.Store(tmp_path).gc(grace_s=600)
    assert list(report.listed) == [file]
    info = ckptfmt.save(tree, tmp_path, step=2)
    assert info.written_nbytes > 0
    assert file not in ckptfmt.open(tmp_path).index.files.ids, "the same content, another id"
    assert not difference(ckptfmt.load(tmp_path), tree)
    assert ckptfmt.Store(tmp_path).verify().ok


def test_the_latest_and_the_checkpoint_of_the_name_are_the_bases(tmp_path: Path) -> None:
    a, b, c = (np.random.default_rng(i).random(5000) for i in range(3))
    ckptfmt.save({"a": a}, tmp_path, step=1)
    ckptfmt.save({"b": b}, tmp_path, name="best")
    ckptfmt.save({"c": c}, tmp_path, step=2)
    info = ckptfmt.save({"b": b, "c": c, "n": 1}, tmp_path, name="best", if_exists="replace")
    assert info.written_nbytes == 0
    info = ckptfmt.save({"a": a}, tmp_path, name="other")
    assert info.written_nbytes > 0
