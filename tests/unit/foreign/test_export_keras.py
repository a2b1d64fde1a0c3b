"""What is exported as `.weights.h5` is what Keras loads into the same model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, NotFoundError, UnsupportedError
from ckptfmt.foreign.exporters import tree as tree_module

h5py = pytest.importorskip("h5py")
keras = pytest.importorskip("keras")

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def automatic() -> Any:
    """A model whose layers nobody named."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3),
            layers.BatchNormalization(),
            layers.Reshape((3, 1)),
            layers.Bidirectional(layers.LSTM(2)),
            layers.Dense(2),
        ]
    )


def chosen() -> Any:
    """A model with names, inner models and parts."""
    layers = keras.layers
    start = keras.Input((6, 4))
    x = layers.Dense(4, name="first")(start)
    x = layers.MultiHeadAttention(2, 3)(x, x)
    x = layers.LayerNormalization()(x)
    inner = keras.Sequential([layers.Dense(2), layers.Dense(3, name="last")], name="inner")
    x = layers.Dense(2)(inner(x))
    return keras.Model(start, x)


def scrambled(model: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    for variable in model.variables:
        if "seed" not in variable.path:
            variable.assign(rng.random(variable.shape).astype("float32"))
    return [np.array(w) for w in model.get_weights()]


def saved(tree: Any, path: Path) -> Path:
    import ckptfmt.tensorflow as ckf

    ckf.save(tree, path, durable=False)
    return path


def test_layers_with_keras_s_own_names_need_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = automatic()
    before = scrambled(model)
    monkeypatch.setattr(tree_module, "PIECE_NBYTES", 37)
    store = saved({"model": model}, tmp_path / "s")
    report = ckptfmt.export(store, tmp_path / "x.weights.h5", allow_partial=True)
    assert set(report.skipped) == {n for n in ckptfmt.open(store) if "seed_generator" in n}
    assert report.renamed["model/dense_1/kernel"] == "layers/dense_1/vars/0"
    fresh = automatic()
    fresh.load_weights(tmp_path / "x.weights.h5")
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, fresh.get_weights()))


def test_a_file_of_the_same_model_says_which_layer_is_which(tmp_path: Path) -> None:
    model = chosen()
    model.compile("adam")
    model.optimizer.build(model.trainable_variables)
    before = scrambled(model)
    for number, variable in enumerate(model.optimizer.variables[2:]):
        variable.assign(np.full(variable.shape, number, np.float32))
    state = [v.numpy() for v in model.optimizer.variables]
    store = saved({"model": model, "opt": model.optimizer, "epoch": 3}, tmp_path / "s")
    with pytest.raises(UnsupportedError, match=r"model/first/kernel.*like="):
        ckptfmt.export(store, tmp_path / "x.weights.h5")
    fresh = chosen()
    fresh.compile("adam")
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.save_weights(tmp_path / "fresh.weights.h5")
    report = ckptfmt.export(
        store,
        tmp_path / "x.weights.h5",
        like=tmp_path / "fresh.weights.h5",
        allow_partial=True,
    )
    assert not {n for n in report.skipped if "seed_generator" not in n}
    assert report.transformed["epoch"] == "a note that an import reads"
    again = ckptfmt.open_foreign(tmp_path / "x.weights.h5")
    assert again["epoch"] == 3
    assert set(again) == set(ckptfmt.open(store)) - set(report.skipped)
    fresh.load_weights(tmp_path / "x.weights.h5")
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, fresh.get_weights()))
    after = [v.numpy() for v in fresh.optimizer.variables]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(state, after))
    with h5py.File(tmp_path / "x.weights.h5") as file:
        assert file["layers/dense/vars"].attrs["name"] == "first"


def test_root_chooses_the_model_and_another_model_is_refused(tmp_path: Path) -> None:
    model = chosen()
    store = saved({"a": {"b": model}}, tmp_path / "s")
    model.save_weights(tmp_path / "same.weights.h5")
    ckptfmt.export(
        store,
        tmp_path / "x.weights.h5",
        root="a/b",
        like=tmp_path / "same.weights.h5",
        allow_partial=True,
    )
    chosen().load_weights(tmp_path / "x.weights.h5")
    automatic().save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(UnsupportedError, match="other variables than the file"):
        ckptfmt.export(
            store, tmp_path / "y.weights.h5", root="a/b", like=tmp_path / "other.weights.h5"
        )
    with pytest.raises(NotFoundError, match="absent"):
        ckptfmt.export(store, tmp_path / "y.weights.h5", root="a/b", like=tmp_path / "absent")
    (tmp_path / "text").write_text("no hdf5")
    with pytest.raises(CorruptError, match="no file of weights"):
        ckptfmt.export(store, tmp_path / "y.weights.h5", root="a/b", like=tmp_path / "text")
    assert not (tmp_path / "y.weights.h5").exists()


def test_bfloat16_is_stored_as_keras_does_and_other_dtypes_are_named(tmp_path: Path) -> None:
    kernel = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    tree = {"dense": {"kernel": kernel, "bias": np.zeros(3, np.float16)}}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "x.weights.h5")
    with h5py.File(tmp_path / "x.weights.h5") as file:
        found = file["layers/dense/vars/0"]
        assert found.attrs["dtype"] == "bfloat16"
        assert np.array(found).tobytes() == kernel.tobytes()
    for dtype in ("datetime64[s]", "float8_e5m2"):
        ckptfmt.save({"dense": {"kernel": np.zeros(2, dtype)}}, tmp_path / "t", durable=False)
        with pytest.raises(UnsupportedError, match=f"no dtype {re.escape(dtype)}"):
            ckptfmt.export(tmp_path / "t", tmp_path / "y.weights.h5")


def test_what_is_left_once_others_are_skipped_is_looked_at_again(tmp_path: Path) -> None:
    """Beside `b` the array is a variable of a layer; alone it is none."""
    texts = np.array([b"a", b"bc"], dtype=object)
    ckptfmt.save({"w": np.ones((2, 2), "f4"), "b": texts}, tmp_path / "s")
    with pytest.raises(
        UnsupportedError, match=r"nothing is left.*\s.*b: .*no dtype bytes; w: no variable"
    ):
        ckptfmt.export(tmp_path / "s", tmp_path / "x.weights.h5", allow_partial=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
