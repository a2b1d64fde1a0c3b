"""A foreign tree may hold values, lists, ties, attributes and records of unknown classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CkptWarning, ExistsError, UnsupportedError, UsageError
from ckptfmt.foreign import (
    ForeignCheckpoint,
    ForeignContainer,
    ForeignTensor,
    ForeignTree,
    ForeignValue,
    Importer,
    registry,
    tree_of,
)


def lazy(array: Any, identity: object = None, **attributes: object) -> ForeignTensor:
    array = np.asarray(array)
    return ForeignTensor(
        name="",
        foreign_name="",
        dtype=array.dtype.name,
        shape=array.shape,
        nbytes=array.nbytes,
        where="x",
        fetch=lambda: array,
        identity=identity,
        attributes=attributes,
    )


def rich(value: object = 3, **options: Any) -> ForeignTree:
    shared = np.arange(4, dtype=np.float32)
    root = {
        "model": ForeignContainer(
            {"a.w": lazy(shared, 1), "b.w": lazy(shared, 1)}, {"torch.module_versions": {"": 2}}
        ),
        "opt": {"state": {0: {"step": lazy(np.float32(7))}}, "groups": [{"lr": 0.1}]},
        "mixed": [lazy(np.arange(2)), "text", (1, 2)],
        "value": value,
        "long": ["x" * 5000],
        "size": ForeignValue("torch.Size", [2, 3]),
    }
    return tree_of(root, "rich", **options)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """imported(tree) -> a path that converts as if a file held that tree."""
    made: dict[str, ForeignTree] = {}

    class Fake(Importer):
        def detect(self, path: str) -> bool:
            return path in made

        def read(self, path: str) -> ForeignTree:
            return made[path]

    monkeypatch.setattr(registry, "get_importer", lambda name: Fake())

    def add(tree: ForeignTree) -> Path:
        path = tmp_path / f"{len(made)}.rich"
        path.touch()
        made[str(path)] = tree
        return path

    return add


def test_values_lists_and_ties_come_through(imported: Any, tmp_path: Path) -> None:
    report = ckptfmt.convert(imported(rich()), tmp_path / "s", durable=False)
    assert report.renamed == {"opt/state/0/step": "opt/state/~3i0/step"}
    assert report.nbytes == 16 + 4 + 16
    loaded = ckptfmt.load(tmp_path / "s")
    assert loaded["model"]["a.w"] is loaded["model"]["b.w"]
    assert loaded["opt"] == {"state": {0: {"step": 7}}, "groups": [{"lr": 0.1}]}
    assert loaded["mixed"][0].tolist() == [0, 1]
    assert loaded["mixed"][1:] == ["text", (1, 2)]
    assert loaded["long"] == ["x" * 5000]
    assert list(loaded) == ["model", "opt", "mixed", "value", "long", "size"]


def test_the_open_file_is_the_same_tree() -> None:
    foreign = ForeignCheckpoint("x", rich())
    assert foreign["value"] == 3
    assert foreign["long"] == ["x" * 5000]
    assert foreign["model/a.w"].read().tolist() == [0, 1, 2, 3]
    assert foreign.ties() == [["model/a.w", "model/b.w"]]
    loaded = foreign.load()
    assert loaded["model"]["a.w"] is loaded["model"]["b.w"]
    assert loaded["mixed"][2] == (1, 2)
    assert list(foreign.load(names="opt")) == ["opt"]
    target = {"opt": {"state": {0: {"step": np.zeros((), np.float32)}}, "groups": [{"lr": 0.0}]}}
    ckptfmt.restore(target, foreign, names="opt")
    assert target["opt"]["state"][0]["step"] == 7  # type: ignore[index]
    with pytest.raises(UsageError, match="cannot be restored into"):
        ckptfmt.restore(foreign.tree(), foreign)


def test_attributes_reach_the_checkpoint(imported: Any, tmp_path: Path) -> None:
    root = {"m": ForeignContainer({"w": lazy([1], **{"torch.requires_grad": True})}, {"x.y": 1})}
    ckptfmt.convert(imported(tree_of(root, "rich")), tmp_path / "s", durable=False)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        tree = checkpoint.index.tree
        assert set(tree.leaf_attributes) == {"torch.requires_grad"}
        assert set(tree.container_attributes) == {"x.y"}


def test_what_is_left_out_must_be_allowed(imported: Any, tmp_path: Path) -> None:
    path = imported(rich(skipped={"meta.w": "it has no data"}))
    with pytest.raises(UnsupportedError, match=r"meta\.w: it has no data.*allow_partial=True"):
        ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert not (tmp_path / "s").exists()
    report = ckptfmt.convert(path, tmp_path / "s", durable=False, allow_partial=True)
    assert report.skipped == {"meta.w": "it has no data"}


def test_unknown_classes_are_plain_data_or_refused(imported: Any, tmp_path: Path) -> None:
    path = imported(rich({"class": "pkg.C", "state": {"a": 1}}, opaque={"value": "pkg.C"}))
    with pytest.raises(UnsupportedError, match=r"classes that are code.*value: pkg\.C"):
        ckptfmt.convert(path, tmp_path / "s", durable=False, unknown="refuse")
    with pytest.raises(UsageError, match="expected opaque or refuse"):
        ckptfmt.convert(path, tmp_path / "s", durable=False, unknown="run")  # type: ignore[arg-type]
    assert ckptfmt.convert(path, tmp_path / "s", durable=False).opaque == {"value": "pkg.C"}
    assert ckptfmt.load(tmp_path / "s")["value"] == {"class": "pkg.C", "state": {"a": 1}}


def test_a_kept_checkpoint_with_another_value_is_refused(imported: Any, tmp_path: Path) -> None:
    ckptfmt.convert(imported(rich(3)), tmp_path / "s", name="base", durable=False)
    with pytest.raises(ExistsError, match="the value value differs"):
        ckptfmt.convert(
            imported(rich(4)), tmp_path / "s", name="base", if_exists="keep", durable=False
        )


def test_what_no_checkpoint_can_hold_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"no checkpoint can.*a/b"):
        tree_of({"a": {"b": object()}}, "rich")


def test_framework_values_come_back_where_the_framework_is(imported: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ckptfmt.convert(imported(rich()), tmp_path / "s", durable=False)
    assert ckptfmt.load(tmp_path / "s")["size"] == torch.Size([2, 3])
    odd = ForeignCheckpoint("x", tree_of({"a": ForeignValue("nowhere.X", 1)}, "rich"))
    with pytest.warns(CkptWarning):
        odd["a"]
