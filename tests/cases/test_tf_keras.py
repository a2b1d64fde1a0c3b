"""Cases 13 to 17: TensorFlow's and Keras's checkpoints by all of their names, and models by theirs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import CorruptError, MismatchError, NotFoundError

layers = keras.layers
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

# -- case 13 ------------------------------------------------------------------------------------

SHARDS = "a[b]*?-1"
"""The wildcards in it are letters like others."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one bundle in two data files, and a state file that leads to it."""
    folder = tmp_path_factory.mktemp("bundle")
    parts = []
    for number in range(2):
        parts.append(str(folder / f"part-{number}"))
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=[f"v{number}"],
            shape_and_slices=[""],
            tensors=[tf.fill((3,), float(number))],
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=str(folder / SHARDS), delete_old_dirs=False
    )
    for part in folder.glob("part-*"):
        part.unlink()
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{SHARDS}"\n')
    return folder


def test_five_names_of_one_bundle_have_one_digest(bundle: Path, tmp_path: Path) -> None:
    data = next(bundle.glob("*.data-00000-of-*"))
    names = [bundle / SHARDS, bundle / f"{SHARDS}.index", data, bundle, bundle / "checkpoint"]
    digests = []
    for number, name in enumerate(names):
        info = ckptfmt.convert(name, tmp_path / str(number), durable=False).info
        assert info is not None
        digests.append(info.digest)
    assert len(set(digests)) == 1
    assert ckptfmt.load(tmp_path / "0")["v1"].tolist() == [1.0, 1.0, 1.0]


def test_what_is_not_there_is_named(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no-such-7"):
        ckptfmt.open_foreign(bundle / "no-such-7")
    shutil.copytree(bundle, tmp_path / "copy")
    lost = sorted((tmp_path / "copy").glob("*.data-0000[1-9]*"))[-1]
    lost.unlink()
    with pytest.raises((NotFoundError, CorruptError), match=r"data-00001-of-00002"):
        ckptfmt.convert(tmp_path / "copy" / SHARDS, tmp_path / "out", durable=False)


# -- case 14 ------------------------------------------------------------------------------------


def test_a_partitioned_variable_and_its_slot_are_one_tensor_each(tmp_path: Path) -> None:
    whole = np.arange(10, dtype=np.float32).reshape(5, 2)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "p"),
        tensor_names=["w", "w", "w/Adam", "w/Adam", "w/Adam"],
        shape_and_slices=[
            "5 2 3,2:0,2",
            "5 2 0,3:0,2",
            "5 2 4,1:0,2",
            "5 2 0,2:0,2",
            "5 2 2,2:0,2",
        ],
        tensors=[whole[3:], whole[:3], -whole[4:], -whole[:2], -whole[2:4]],
    )
    with ckptfmt.open_foreign(tmp_path / "p") as foreign:
        assert len(foreign) == 2
        assert np.array_equal(foreign["w"].read(np.s_[2:4]), whole[2:4])
    ckptfmt.convert(tmp_path / "p", tmp_path / "s", durable=False)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        (slot,) = [name for name in checkpoint.names() if "Adam" in name]
        assert np.array_equal(checkpoint[slot].read(), -whole)


@pytest.mark.parametrize(
    ("second", "said"),
    [("5 2 4,1:0,2", r"\[3"), ("5 2 2,3:0,2", "")],
    ids=["a gap", "an overlap with other values"],
)
def test_slices_that_are_no_tensor_are_refused(tmp_path: Path, second: str, said: str) -> None:
    rows = int(second.split()[2].split(",")[1].split(":")[0])
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "p"),
        tensor_names=["w", "w"],
        shape_and_slices=["5 2 0,3:0,2", second],
        tensors=[np.zeros((3, 2), np.float32), np.ones((rows, 2), np.float32)],
    )
    with pytest.raises(CorruptError, match=f"w.*{said}"):
        ckptfmt.convert(tmp_path / "p", tmp_path / "s", durable=False)


# -- case 15 ------------------------------------------------------------------------------------

ODD = ["a/b", "a", "x.y", "x.S", "\u00fc\u540d", "~", " ", "."]


def odd_module(scale: float, extra: dict[Any, Any]) -> Any:
    module = tf.Module()
    keys = {**dict.fromkeys(ODD), **extra}
    module.table = {key: tf.Variable([scale * n]) for n, key in enumerate(keys, 1)}
    module.items = [tf.Variable(scale)]
    return module


@pytest.mark.parametrize(
    "extra", [{}, {"": 0}, {7: 0, "7": 0}], ids=["text", "an empty key", "an integer"]
)
def test_odd_keys_come_back_each_to_its_own(tmp_path: Path, extra: dict[Any, Any]) -> None:
    first, second = odd_module(1.0, extra), odd_module(0.0, extra)
    ckf.save({"m": first}, tmp_path, step=1)
    assert len(ckptfmt.open(tmp_path).names()) == len(first.table) + 1
    ckf.restore({"m": second}, tmp_path).assert_consumed()
    for key, variable in first.table.items():
        assert np.array_equal(variable, second.table[key])


def test_names_that_tensorflow_escapes_are_imported_one_to_one(tmp_path: Path) -> None:
    first, second = odd_module(1.0, {}), odd_module(0.0, {})
    prefix = tf.train.Checkpoint(m=first).write(str(tmp_path / "tf"))
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    status = ckf.restore({"m": second}, tmp_path / "s", names="m")
    status.assert_existing_objects_matched()
    for key, variable in first.table.items():
        assert np.array_equal(variable, second.table[key])


class Nested(keras.Model):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.grid: list[Any] = [[layers.Dense(3) for _ in range(count)], {"k": layers.Dense(3)}]

    def call(self, x: Any) -> Any:
        for layer in (*self.grid[0], self.grid[1]["k"]):
            x = layer(x)
        return x


def test_layers_in_nested_lists_and_dicts_are_all_there(tmp_path: Path) -> None:
    first, second = Nested(), Nested()
    first(X)
    ckf.save({"model": first}, tmp_path, step=1)
    assert len(ckptfmt.open(tmp_path).names()) == len(first.variables) == 6
    ckf.restore({"model": second}, tmp_path, build=True).assert_consumed()
    assert np.array_equal(first(X), second(X))


def test_a_list_that_grew_after_the_save_says_what_it_lacks(tmp_path: Path) -> None:
    first, second = Nested(2), Nested(3)
    first(X)
    second(X)
    ckf.save({"model": first}, tmp_path, step=1)
    with pytest.raises(MismatchError, match="missing in the checkpoint: model/grid/0/2/kernel"):
        ckf.restore({"model": second}, tmp_path)
    status = ckf.restore({"model": second}, tmp_path, allow_missing="model/grid/0/2/**")
    assert sorted(status.report.missing) == ["model/grid/0/2/bias", "model/grid/0/2/kernel"]


# -- case 16 ------------------------------------------------------------------------------------


def named(*names: str | None, units: int = 3) -> Any:
    return keras.Sequential(
        [keras.Input((3,)), *(layers.Dense(3, name=name) for name in names), layers.Dense(units)]
    )


def same(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


@pytest.mark.filterwarnings("ignore")  # Keras's own
def test_automatic_names_of_another_process_do_not_matter(tmp_path: Path) -> None:
    first = named(None, None)
    layers.Dense(1), layers.Dense(1)  # Keras goes on counting
    second, third = named(None, None), named(None, None)
    first.save(tmp_path / "old.h5")
    ckf.save({"model": first}, tmp_path / "s", step=1)
    ckf.restore({"model": second}, tmp_path / "s").assert_consumed()
    ckf.restore({"model": third}, ckptfmt.open_foreign(tmp_path / "old.h5"), names="model")
    assert same(first, second)
    assert same(first, third)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
def test_names_of_which_none_matches_raise_in_every_mode(tmp_path: Path, strict: bool) -> None:
    first, second = named("a", "b", units=2), named("c", "d", units=2)
    first.layers[-1].name, second.layers[-1].name = "e", "f"
    first.save_weights(tmp_path / "w.weights.h5")
    ckf.save({"model": first}, tmp_path / "s", step=1)
    before = second.get_weights()
    for source in (tmp_path / "s", ckptfmt.open_foreign(tmp_path / "w.weights.h5")):
        with pytest.raises(MismatchError, match="nothing in the checkpoint matches"):
            ckf.restore({"model": second}, source, strict=strict, names="model")
    assert all(np.array_equal(a, b) for a, b in zip(second.get_weights(), before))


def test_a_part_that_matches_raises_with_full_lists_and_can_be_asked_for(tmp_path: Path) -> None:
    first, second = named("a", "b"), named("a", "c")
    ckf.save({"model": first}, tmp_path, step=1)
    with pytest.raises(MismatchError) as caught:
        ckf.restore({"model": second}, tmp_path)
    report: Any = caught.value.report
    assert list(report.missing) == ["model/c/kernel", "model/c/bias"]
    assert list(report.unexpected) == ["model/b/kernel", "model/b/bias"]
    status = ckf.restore({"model": second}, tmp_path, strict=False)
    assert list(status.report.missing) == ["model/c/kernel", "model/c/bias"]
    renamed = ckf.restore({"model": second}, tmp_path, rename={"model/b": "model/c"})
    renamed.assert_consumed()
    assert same(first, second)


def test_another_shape_is_never_skipped_unless_its_name_is_left_out(tmp_path: Path) -> None:
    first, second = named("a", units=2), named("a", units=5)
    ckf.save({"model": first}, tmp_path, step=1)
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"model/dense\S*/kernel: expected \[3, 5\]"):
            ckf.restore({"model": second}, tmp_path, strict=strict)
    status = ckf.restore({"model": second}, tmp_path, names="model/a", strict=False)
    assert sorted(status.report.matched) == ["model/a/bias", "model/a/kernel"]
    assert np.array_equal(first.layers[0].kernel, second.layers[0].kernel)


# -- case 17 ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_an_h5_file_with_split_attributes_has_every_weight_in_its_order(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    names = [f"{number:04d}_{'n' * 300}" for number in range(260)]
    first = keras.Sequential(
        [keras.Input((1,)), *(layers.Dense(1, use_bias=False, name=name) for name in names)]
    )
    for number, layer in enumerate(first.layers):
        layer.kernel.assign([[float(number)]])
    first.save_weights(tmp_path / "legacy.weights.h5")
    first.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        assert "layer_names1" in file["model_weights"].attrs  # it was split
    with ckptfmt.open_foreign(tmp_path / "model.h5") as foreign:
        kernels = [name for name in foreign if name.startswith("model/")]
        assert kernels == [f"model/{name}/kernel" for name in names]
        assert [float(foreign[n].read()[0, 0]) for n in kernels] == list(map(float, range(260)))


def test_five_thousand_long_names_and_one_of_64_kib(tmp_path: Path) -> None:
    tree = {f"{'x' * 290}{number:010d}": np.array([number]) for number in range(5000)}
    tree["y" * (64 << 10)] = np.array([-1])
    ckptfmt.save(tree, tmp_path, step=1, durable=False)
    back = ckptfmt.load(tmp_path)
    assert list(back) == list(tree)
    assert all(np.array_equal(back[name], tree[name]) for name in tree)
