"""Keras's files without Keras: the names of this package's own checkpoints, so that they restore."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign import detect_format, read_foreign
from ckptfmt.foreign.keras.optimizer import name_numbered

FILES = Path(__file__).parents[2] / "compat/import/keras"
Unpacked = Callable[[Path], Path]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("model.keras", "model"), ("model.h5", "model"), ("model.weights.h5", "weights")],
)
def test_a_model_is_read_as_keras_reads_it(
    name: str, expected: str, unpacked: Unpacked, same_as_expected: Any
) -> None:
    path = unpacked(FILES / f"{name}.xz")
    assert detect_format(str(path)) == "keras"
    tree = same_as_expected(path, FILES / f"expected-{expected}.json")
    words = tree.tensors["model/words/embeddings"]
    assert words.attributes["tf.full_name"] == "words/embeddings"


def make(scale: float = 1.0) -> keras.Model:
    keras.utils.set_random_seed(int(scale))
    inputs = keras.Input((3,))
    x = keras.layers.Dense(3, name="first")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


@pytest.mark.filterwarnings("ignore")  # Keras's own
def test_a_converted_model_restores_into_a_new_one(tmp_path: Path) -> None:
    model = make(1)
    model.fit(np.eye(3), np.ones((3, 1)), verbose=0)
    model.save(tmp_path / "m.keras")
    model.save(tmp_path / "m.h5")
    for name in ("m.keras", "m.h5"):
        fresh = make(2)
        fresh.optimizer.build(fresh.trainable_variables)
        ckptfmt.convert(tmp_path / name, tmp_path / f"{name}-s", durable=False)
        report = ckf.restore({"model": fresh, "optimizer": fresh.optimizer}, tmp_path / f"{name}-s")
        report.assert_consumed()
        for mine, theirs in zip(fresh.variables, model.variables, strict=True):
            assert np.array_equal(mine.numpy(), theirs.numpy())
        for mine, theirs in zip(fresh.optimizer.variables, model.optimizer.variables, strict=True):
            assert np.array_equal(mine.numpy(), theirs.numpy())
    model.save_weights(tmp_path / "m.weights.h5")
    ckf.restore({"model": make(3)}, ckptfmt.open_foreign(tmp_path / "m.weights.h5"), names="model")


@pytest.mark.filterwarnings("ignore")  # Keras's own
def test_weights_in_several_files_are_one_model(tmp_path: Path) -> None:
    model = make(1)
    model.save_weights(tmp_path / "m.weights.h5")
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=1e-7)
    assert len(list(tmp_path.glob("m_*.weights.h5"))) > 1
    want = ckptfmt.open_foreign(tmp_path / "m.weights.h5")
    found = ckptfmt.open_foreign(tmp_path / "m.weights.json")
    assert set(found) == set(want)
    ckptfmt.convert(tmp_path / "m.weights.json", tmp_path / "s", durable=False)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        for name in want:
            assert np.array_equal(found[name].read(), want[name].read())
            assert np.array_equal(checkpoint[name].read(), want[name].read()), name
        assert not checkpoint.ties()
    index = tmp_path / "m.weights.json"
    index.write_text(index.read_text().replace("m_00001", "../m_00001"))
    with pytest.raises(CorruptError, match="step up"):
        ckptfmt.open_foreign(index)
    index.write_text('{"weight_map": {"/vars": 7}}')
    with pytest.raises(CorruptError, match="no table of files"):
        ckptfmt.open_foreign(index)


def test_an_optimizer_whose_shapes_do_not_agree_keeps_its_numbers(unpacked: Unpacked) -> None:
    """A guess would give one variable the state of another."""
    assert name_numbered([], None, {"class_name": "Adam", "config": {}}) is None
    assert name_numbered([], [], {"class_name": "Adam", "config": {}}) is None
    assert name_numbered([], [], None) is None
    tree = read_foreign(unpacked(FILES / "model.weights.h5.xz"))
    assert "optimizer/vars/2" in tree.tensors


def archive(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name, data in entries:
            file.writestr(name, data)
    return made.getvalue()


def test_a_deflated_archive_is_read(unpacked: Unpacked, tmp_path: Path) -> None:
    path = unpacked(FILES / "model.keras.xz")
    want = ckptfmt.open_foreign(path)
    with zipfile.ZipFile(path) as file:
        entries = [(name, file.read(name)) for name in file.namelist()]
    (tmp_path / "z.keras").write_bytes(archive(*entries, method=zipfile.ZIP_DEFLATED))
    found = ckptfmt.open_foreign(tmp_path / "z.keras")
    assert set(found) == set(want)
    for name in want:
        assert found[name].read().tobytes() == want[name].read().tobytes()


def test_damage_in_an_archives_weights_is_found_when_they_are_first_read(
    unpacked: Unpacked, tmp_path: Path
) -> None:
    path = unpacked(FILES / "model.keras.xz")
    want = ckptfmt.open_foreign(path)
    name = next(n for n in want.foreign.tensors if want[n].nbytes > 64)
    data = bytearray(path.read_bytes())
    data[data.index(want[name].read().tobytes()) + 5] ^= 1
    (tmp_path / "x.keras").write_bytes(data)
    found = ckptfmt.open_foreign(tmp_path / "x.keras")
    assert list(found) == list(want)
    with pytest.raises(CorruptError, match=r"model\.weights\.h5.*CRC-32"):
        found[name].read()


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ((("config.json", b"{}"), ("model.weights.npz", b"")), "another format"),
        ((("config.json", b"{"), ("model.weights.h5", b"")), "not a JSON"),
        ((("config.json", b'{"a": 1, "a": 2}'), ("model.weights.h5", b"")), "not a JSON"),
        ((("config.json", b"[" * 100_000), ("model.weights.h5", b"")), "not a JSON"),
        ((("config.json", b"{}"), ("model.weights.h5", b"no")), "cut off|signature"),
        ((("model.weights.h5", b"x"),), "no config"),
    ],
)
def test_an_archive_that_does_not_hold_is_refused(
    entries: tuple[tuple[str, bytes], ...], text: str, tmp_path: Path
) -> None:
    (tmp_path / "x.keras").write_bytes(archive(*entries))
    with pytest.raises((CorruptError, UnsupportedError), match=text):
        read_foreign(tmp_path / "x.keras", source_format="keras")


def test_configurations_that_lie_cost_names_only(
    unpacked: Unpacked, tmp_path: Path, hostile: Any, seed: int
) -> None:
    """Whatever the configuration says, every variable comes, under a name of its own."""
    path = unpacked(FILES / "model.keras.xz")
    with zipfile.ZipFile(path) as file:
        config, weights = file.read("config.json"), file.read("model.weights.h5")
    count = len(read_foreign(path).tensors)
    lies = [
        b"{}",
        b"[]",
        b'{"class_name": 7}',
        config.replace(b'"Dense"', b'"LSTM"'),
        config.replace(b'"Embedding"', b'"Dense"'),
        config.replace(b'"name": "words"', b'"name": "a/b"'),
        config.replace(b'"layers"', b'"lay"'),
        config.replace(b'"Adam"', b'"SGD"'),
        config.replace(b'"trainable": true', b'"trainable": false'),
    ]
    for lie in lies:
        (tmp_path / "x.keras").write_bytes(
            archive(("config.json", lie), ("model.weights.h5", weights))
        )
        assert len(read_foreign(tmp_path / "x.keras").tensors) == count


@pytest.mark.slow
def test_mutated_files_give_values_or_a_typed_error(
    unpacked: Unpacked,
    hostile: Any,
    mutations: Callable[[bytes, int, int], list[bytes]],
    seed: int,
) -> None:
    for name, least in (("model.keras", 5), ("model.h5", 5), ("model.weights.h5", 5)):
        good = unpacked(FILES / f"{name}.xz").read_bytes()
        assert hostile("keras", name[5:], mutations(good, seed, 70)) > least
