"""Out and in again: what an export wrote is the tree that it was, for every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError
from ckptfmt.foreign import ForeignTree
from ckptfmt.foreign.exporters import base, exporting

TARGETS = ["x.pt", "x.safetensors", "st", "x.npz", "ck.index", "x.weights.h5", "dcp", "orbax"]
METADATA = {"run": "a", "epoch": 3, "nested": {"lr": [0.1, 0.2]}, "on": True}


class Point(NamedTuple):
    x: Any
    y: Any


def format_of(target: str) -> str | None:
    return {"st": "safetensors", "dcp": "dcp", "orbax": "orbax"}.get(target)


def state(target: str) -> dict[str, Any]:
    """A training state, with all that a tree may be made of; of Keras a model and an optimizer."""
    rng = np.random.default_rng(0)
    w = rng.random((6, 4), np.float32)
    half = rng.random(5).astype(ml_dtypes.bfloat16)
    if target.endswith(".h5"):
        return {
            "model": {"dense": {"kernel": w, "bias": np.ones(4, np.float32)}, "dense_1": {"kernel": half}},
            "optimizer": {
                "iterations": np.array(3),
                "learning_rate": np.array(0.1),
                "state": {"dense": {"kernel": {"momentum": w * 2}}},
            },
            "epoch": 3,
            "list": [1, None, {"a": (True, "x")}],
        }  # fmt: skip
    return {
        "model": {"a.weight": w, "head": {"weight": w, "bias": np.ones(3)}},
        "optimizer": {"state": {0: {"m": np.arange(5)}, 7: {"m": np.arange(3)}}, (1, "k"): np.ones(1)},
        "list": [np.zeros(2), {"x": w[:1]}, (np.ones(1), 5, None)],
        "point": Point(np.zeros(2), "y"),
        "half": half,
        "eighth": rng.integers(0, 100, 6, np.uint8).view(ml_dtypes.float8_e4m3fn),
        "values": {"epoch": 3, "lr": 0.5, "on": True, "none": None, "text": "hällo", "raw": b"\0a"},
        "plain": [1, "a", None, {"k": (True, 0.5)}, {1, 2}],
        "big": 1 << 70,
        "empty": {},
        "scalar": np.float32(2),
        "zero": np.zeros((0, 3), np.int16),
    }  # fmt: skip


def assert_same(found: Any, tree: Any, path: str = "") -> None:
    if isinstance(tree, np.ndarray):
        assert isinstance(found, np.ndarray), path
        assert (found.dtype, found.shape) == (tree.dtype, tree.shape), path
        assert found.tobytes() == tree.tobytes(), path
    elif isinstance(tree, dict):
        assert list(found) == list(tree), path
        for key, value in tree.items():
            assert_same(found[key], value, f"{path}/{key!r}")
    elif isinstance(tree, list | tuple):
        assert type(found).__name__ == type(tree).__name__, path
        assert len(found) == len(tree), path
        for at, value in enumerate(tree):
            assert_same(found[at], value, f"{path}/{at}")
    else:
        assert (type(found), found) == (type(tree), tree), path


def out_and_in(tree: Any, tmp_path: Path, target: str) -> tuple[Any, Any]:
    """(report of the export, the checkpoint that an import of it makes)."""
    for part in ("h5py", "tensorstore"):
        if part == {"x.weights.h5": "h5py", "orbax": "tensorstore"}.get(target):
            pytest.importorskip(part)
    store = tmp_path / "s"
    ckptfmt.save(tree, store, step=7, durable=False, metadata=METADATA, metrics={"loss": 0.25})
    report = ckptfmt.export(store, tmp_path / target, target_format=format_of(target))
    ckptfmt.convert(tmp_path / target, tmp_path / "again", durable=False)
    return report, ckptfmt.open(tmp_path / "again")


@pytest.mark.parametrize("target", TARGETS)
def test_a_training_state_is_the_same_again(tmp_path: Path, target: str) -> None:
    tree = state(target)
    if target == "x.pt":  # torch's own kinds: these become a tuple, and a Python number
        tree["point"], tree["scalar"] = tuple(tree["point"]), 2.0
    report, again = out_and_in(tree, tmp_path, target)
    assert not report.skipped
    with again, ckptfmt.open(tmp_path / "s") as before:
        assert_same(again.load(), before.load())
        assert again.ties() == before.ties()
        assert again.info.step == 7
        assert again.info.metadata == METADATA
        assert again.info.metrics == {"loss": 0.25}
        if not target.endswith((".pt", ".h5")):
            assert list(again) == list(before)
            assert again.info.digest == before.info.digest


@pytest.mark.parametrize("target", ["x.npz", "ck.index", "dcp", "orbax"])
def test_what_others_see_otherwise_is_reported(tmp_path: Path, target: str) -> None:
    w = np.ones(2)
    tree = {"a": w, "b": w, "opt": {0: np.zeros(1)}, "v": {"l": [1, b"x"]}, "e": 3}
    report, _ = out_and_in(tree, tmp_path, target)
    changed = report.transformed
    copy = "another path to a" if target == "ck.index" else "a copy of a"
    assert changed["b"] == copy
    note = "v/l/1" if target == "orbax" else "v/l"
    if target != "dcp":
        assert changed[note] == "a note that an import reads"
    if target != "x.npz":
        assert changed["opt"] == "keys that are no text become text"


def test_a_copy_that_somebody_has_changed_holds(tmp_path: Path) -> None:
    """An archive with our comment, whose arrays are others' now."""
    import zipfile

    w = np.arange(4.0)
    ckptfmt.save({"a": w, "b": w, "n": 5}, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as found:
        arrays = {name: found[name] for name in found.files}
    assert set(arrays) == {"a", "b", "n"}
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        comment = archive.comment
    np.savez(tmp_path / "y.npz", **{**arrays, "b": w + 1, "n": np.array(6)})
    with zipfile.ZipFile(tmp_path / "y.npz", "a") as archive:
        archive.comment = comment
    found = ckptfmt.open_foreign(tmp_path / "y.npz")
    assert found["b"].read().tolist() == [1, 2, 3, 4]
    assert found["n"].read() == 6
    assert not found.ties()


def test_a_record_too_long_for_a_comment_is_an_entry(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = {f"v{n}": rng.bytes(120).hex() for n in range(600)}
    tree = {"w": np.zeros(2), "notes": {0: texts}}
    _, again = out_and_in(tree, tmp_path, "x.npz")
    with again:
        assert_same(again.load(), tree)


LIES = [
    *(
        "[]",
        "{",
        "3",
        '{"leaves": 5}',
        '{"dtypes": 3}',
        '{"about": "AA=="}',
        '{"about": "gaF4gA=="}',
    ),
    '{"leaves": [["x", "no such", ""]]}',
    '{"leaves": [[["x"], null, "AA=="]]}',
    '{"beside": {"no": "x"}, "leaves": []}',
    '{"dtypes": {"no": "bfloat16"}}',
    '{"leaves":' + "[" * 5000 + "]" * 5000 + "}",
    '{"leaves": [], "containers": [["", "list", "AA==", ""]]}',
]


@pytest.mark.parametrize("target", ["x.npz", "ck.index", "dcp", "orbax", "x.pt", "x.weights.h5"])
def test_a_record_that_lies_is_an_error(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("h5py", "tensorstore"):
        if part == {"x.weights.h5": "h5py", "orbax": "tensorstore"}.get(target):
            pytest.importorskip(part)
    tree = {"dense": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    # Nothing would be written otherwise: the comparison finds it.
    monkeypatch.setattr(base.Exporter, "read_back", lambda *args: ForeignTree("", {}))
    monkeypatch.setattr(exporting, "_compare_values", lambda *args: None)
    monkeypatch.setattr(exporting._Comparison, "run", lambda *args: None)
    for number, lie in enumerate(LIES):
        for name in ("bundle", "dcp", "keras", "numpy", "orbax", "pytorch"):
            place = f"ckptfmt.foreign.exporters.{name}.record_of"
            monkeypatch.setattr(place, lambda *args, lie=lie, **options: lie)
        path = tmp_path / f"{number}{target}"
        ckptfmt.export(tmp_path / "s", path, target_format=format_of(target))
        with pytest.raises(CorruptError):
            ckptfmt.open_foreign(path)
