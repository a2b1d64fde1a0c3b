"""TensorBundles that TensorFlow wrote are read as it reads them, without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
from ckptfmt import CkptWarning, CorruptError, NotFoundError, UnsupportedError, UsageError
from ckptfmt.foreign import detect_format, read_foreign

FIXED = [
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4", "uint4"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
]
QUANTIZED = {
    "qint8": "int8",
    "quint8": "uint8",
    "qint32": "int32",
    "qint16": "int16",
    "quint16": "uint16",
}


def every_pattern(dtype: Any) -> np.ndarray[Any, Any]:
    """All 256 bit patterns of the first bytes; of types under 8 bits, all values."""
    if dtype.name == "bool":
        return np.array([True, False, True])
    if dtype.name in ("int4", "uint4"):
        first = -8 if dtype.name == "int4" else 0
        return np.arange(first, first + 16).astype(dtype)
    count = 256 * dtype.itemsize
    return np.arange(count, dtype=np.int64).astype(np.uint8).view(dtype)


def save_v2(prefix: Path, tensors: dict[str, Any], slices: list[str] | None = None) -> str:
    """The raw op."""
    names = list(tensors)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=slices or [""] * len(names),
        tensors=[tf.constant(tensors[name]) for name in names],
    )
    return str(prefix)


def same_bits(a: Any, b: Any) -> bool:
    if np.asarray(a).dtype.kind == "O":
        return bool(np.array_equal(np.asarray(a, object), np.asarray(b, object)))
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def compare_with_tensorflow(prefix: str, *, but: tuple[str, ...] = ()) -> None:
    """Every tensor that TensorFlow lists, bit for bit, and no other."""
    reader = tf.train.load_checkpoint(prefix)
    tree = read_foreign(prefix)
    found = {tensor.foreign_name: tensor for tensor in tree.tensors.values()}
    wanted = {*reader.get_variable_to_shape_map()} - {"_CHECKPOINTABLE_OBJECT_GRAPH", *but}
    assert found.keys() == wanted
    for name in wanted:
        assert same_bits(found[name].fetch(), reader.get_tensor(name)), name
    assert set(tree.skipped) == set(but)


@pytest.mark.parametrize("name", FIXED)
def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    values = every_pattern(dtype)
    tensors = {
        "v": values,
        "matrix": values[: values.size // 2 * 2].reshape(2, -1),
        "scalar": values[1],
        "empty": values[:0].reshape(0, 3),
    }
    prefix = save_v2(tmp_path / "x", tensors)
    tree = read_foreign(prefix)
    for key, want in tensors.items():
        assert tree.tensors[key].dtype == name
        assert same_bits(tree.tensors[key].fetch(), want), key
    if name not in ("int4", "uint4"):
        compare_with_tensorflow(prefix)
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    for key, array in ckptfmt.load(tmp_path / "s").items():
        assert same_bits(array, tensors[key]), key


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_values_are_carried_as_the_integers_they_are(tmp_path: Path, name: str) -> None:
    integers = np.arange(-4, 4).astype(QUANTIZED[name])
    tensor = tf.bitcast(tf.constant(integers), getattr(tf, name))
    prefix = save_v2(tmp_path / "x", {"v": tensor})
    stored = read_foreign(prefix).tensors["v"]
    assert (stored.dtype, stored.attributes["tf.dtype"]) == (QUANTIZED[name], name)
    assert same_bits(stored.fetch(), integers)


def test_strings_are_bytes_of_any_length(tmp_path: Path) -> None:
    values = np.array([[b"", b"a\0b"], ["ä€".encode(), b"x" * 70_000]], object)
    prefix = save_v2(tmp_path / "x", {"s": values, "one": b"alone", "none": values[:0]})
    tree = read_foreign(prefix)
    assert tree.tensors["s"].dtype == "bytes"
    compare_with_tensorflow(prefix)
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    loaded = ckptfmt.load(tmp_path / "s")
    assert loaded["s"].tolist() == values.tolist()
    assert loaded["none"].shape == (0, 2)
    assert loaded["one"][()] == b"alone"


def test_what_has_no_values_is_listed_and_the_rest_is_carried(tmp_path: Path) -> None:
    variable, iterator = tf.Variable(1.0), iter(tf.data.Dataset.range(5))
    prefix = tf.train.Checkpoint(v=variable, it=iterator).write(str(tmp_path / "x"))
    tree = read_foreign(prefix)
    assert list(tree.tensors) == ["v"]
    (name,) = tree.skipped
    assert name.startswith("it/")
    assert "variant" in tree.skipped[name]
    with pytest.raises(UnsupportedError, match=r"it/.*dtype variant"):
        ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    report = ckptfmt.convert(prefix, tmp_path / "s", durable=False, allow_partial=True)
    assert list(report.skipped) == [name]
    assert ckptfmt.load(tmp_path / "s") == {"v": 1.0}


class Net(tf.Module):  # type: ignore[misc, unused-ignore]
    """Dicts with odd keys, a list, and a variable with two names."""

    def __init__(self) -> None:
        keys = ["a/b", "x.y", "é", "", "..S", ".S", "a.Sb", "~"]
        self.by_key = {key: tf.Variable([float(n)]) for n, key in enumerate(keys)}
        self.items = [tf.Variable([[7.0, 8.0]])]
        self.tied = self.items[0]


def test_object_names_are_unescaped_one_to_one(tmp_path: Path) -> None:
    net = Net()
    prefix = tf.train.Checkpoint(net=net).write(str(tmp_path / "x"))
    compare_with_tensorflow(prefix)
    loaded = ckptfmt.open_foreign(prefix).load()["net"]
    assert loaded["by_key"].keys() == net.by_key.keys()
    for key, variable in net.by_key.items():
        assert loaded["by_key"][key] == variable.numpy(), key
    assert len(ckptfmt.open_foreign(prefix)) == len(net.by_key) + 1


def test_a_tied_variable_has_all_its_paths_and_its_full_name(tmp_path: Path) -> None:
    net = Net()
    net.tied.assign([[1.0, 2.0]])
    prefix = tf.train.Checkpoint(net=net).write(str(tmp_path / "x"))
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    tensors = read_foreign(prefix).tensors
    paths = {name for name in tensors if "by_key" not in name}
    (name,) = paths
    assert {name, f"net/{tensors[name].attributes['tf.aliases'][0]}"} == {  # type: ignore[index]
        "net/tied",
        "net/items/0",
    }
    assert tensors[name].attributes["tf.full_name"] == "Variable"


def test_a_converted_module_restores_into_a_fresh_one(tmp_path: Path) -> None:
    import ckptfmt.tensorflow as ckf

    net = Net()
    net.tied.assign([[1.0, 2.0]])
    prefix = tf.train.Checkpoint(net=net).write(str(tmp_path / "x"))
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    fresh = Net()
    for variable in fresh.variables:
        variable.assign(tf.zeros_like(variable))
    ckf.restore({"net": fresh}, tmp_path / "s")
    for one, other in zip(net.variables, fresh.variables):
        assert same_bits(one.numpy(), other.numpy())
    for variable in fresh.variables:
        variable.assign(tf.zeros_like(variable))
    ckptfmt.restore({"net": fresh}, ckptfmt.open_foreign(prefix))
    assert same_bits(fresh.tied.numpy(), net.tied.numpy())


@pytest.fixture(scope="module")
def tf1(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A TF1 training state: a partitioned variable, slots of Adam that are cut alike."""
    folder = tmp_path_factory.mktemp("tf1")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        kernel = v1.get_variable(
            "dense/kernel",
            [5, 3],
            partitioner=v1.fixed_size_partitioner(2),
            initializer=v1.random_normal_initializer(seed=1),
        )
        columns = v1.get_variable(
            "columns",
            [2, 6],
            partitioner=v1.fixed_size_partitioner(3, axis=1),
            initializer=v1.random_normal_initializer(seed=2),
        )
        bias = v1.get_variable("bias", initializer=tf.ones([3]))
        whole = [tf.convert_to_tensor(x) for x in (kernel, columns)]
        loss = sum(tf.reduce_sum(x * x) for x in [*whole, bias])
        step = v1.train.AdamOptimizer().minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(step)
        saver = v1.train.Saver()
        saver.save(session, str(folder / "model"), global_step=1)
        session.run(step)
        return str(saver.save(session, str(folder / "model"), global_step=2))


def test_tf1_names_and_partitioned_variables(tf1: str) -> None:
    compare_with_tensorflow(tf1)
    tree = read_foreign(tf1)
    assert tree.tensors["dense/kernel"].shape == (5, 3)
    assert tree.tensors["columns"].shape == (2, 6)
    # A tensor is no container: the slot's key is one that holds the slash.
    slot = tree.tensors["dense/kernel~1Adam"]
    assert slot.foreign_name == slot.attributes["tf.full_name"] == "dense/kernel/Adam"
    nested = ckptfmt.open_foreign(tf1).load()
    assert nested["dense"].keys() == {"kernel", "kernel/Adam", "kernel/Adam_1"}


def test_a_saved_model_is_read_by_its_folder(tmp_path: Path) -> None:
    net = Net()
    tf.saved_model.save(net, str(tmp_path / "m"))
    compare_with_tensorflow(str(tmp_path / "m/variables/variables"))
    for path in ("m", "m/variables", "m/variables/variables.index"):
        assert "by_key/a~1b" in read_foreign(tmp_path / path).tensors


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A prefix with two data files, as MergeV2Checkpoints leaves them, and odd characters."""
    folder = tmp_path / "run"
    parts = [
        save_v2(folder / f"part{n}", {f"v{n}": np.full((2, 2), float(n), np.float32)})
        for n in range(2)
    ]
    prefix = folder / "m[a-z]*?-5"
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=str(prefix), delete_old_dirs=False
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "m[a-z]*?-5.data-00000-of-00002",
        "m[a-z]*?-5.data-00001-of-00002",
        "m[a-z]*?-5.index",
    ]
    return prefix


def write_state(folder: Path, latest: str, *every: str) -> None:
    lines = [f'model_checkpoint_path: "{latest}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in every]
    (folder / "checkpoint").write_text("\n".join(lines) + "\n")


def test_one_checkpoint_by_all_its_names(two_shards: Path, tmp_path: Path) -> None:
    folder = two_shards.parent
    write_state(folder, two_shards.name)
    paths: list[str | Path] = [
        str(two_shards),
        f"{two_shards}.index",
        f"{two_shards}.data-00000-of-00002",
        f"{two_shards}.data-00001-of-00002",
        folder,
        folder / "checkpoint",
    ]
    digests = set()
    for number, path in enumerate(paths):
        assert detect_format(str(path)) == "tensorbundle"
        report = ckptfmt.convert(path, tmp_path / f"s{number}", durable=False)
        assert report.info is not None
        digests.add(report.info.digest)
    assert len(digests) == 1
    (folder / "checkpoint").unlink()
    assert list(read_foreign(folder).tensors) == ["v0", "v1"]
    assert ckptfmt.open_foreign(two_shards).info.tensors == 2


def test_a_missing_prefix_is_named(two_shards: Path) -> None:
    for path in (two_shards.parent / "other-7", two_shards.parent / "m[a-z]*?-6"):
        with pytest.raises(NotFoundError) as caught:
            ckptfmt.open_foreign(path)
        assert str(path) in str(caught.value)
    with pytest.raises(NotFoundError, match="other-7"):
        read_foreign(two_shards.parent / "other-7.index", source_format="tensorbundle")
    with pytest.raises(NotFoundError, match="other-7"):
        read_foreign(two_shards.parent / "other-7", source_format="tensorbundle")


def test_a_missing_data_file_is_named(two_shards: Path) -> None:
    Path(f"{two_shards}.data-00001-of-00002").unlink()
    with pytest.raises(NotFoundError) as caught:
        ckptfmt.open_foreign(two_shards)
    assert "1 of 2 data files are missing" in str(caught.value)
    assert "m[a-z]*?-5.data-00001-of-00002" in str(caught.value)


def test_a_folder_with_several_checkpoints_and_no_state_file_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_v2(tmp_path / name, {"v": 1.0})
    with pytest.raises(UsageError, match="a, b"):
        ckptfmt.open_foreign(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 8, 9 and 10 of a CheckpointManager; the variable holds its number."""
    variable = tf.Variable(0.0)
    checkpoint = tf.train.Checkpoint(v=variable)
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path / "run"), max_to_keep=3)
    for number in (8, 9, 10):
        variable.assign(float(number))
        manager.save(checkpoint_number=number)
    return tmp_path / "run"


def value_of(path: Path) -> float:
    return float(ckptfmt.open_foreign(path)["v"].read())


def test_the_state_file_says_which_is_the_latest(run: Path) -> None:
    assert value_of(run) == 10.0
    state = (run / "checkpoint").read_text()
    (run / "checkpoint").write_text(state.replace('path: "ckpt-10"', 'path: "ckpt-8"', 1))
    assert value_of(run) == value_of(run / "checkpoint") == 8.0


def test_a_moved_or_copied_folder_keeps_working(run: Path, tmp_path: Path) -> None:
    write_state(run, f"{run}/ckpt-9", f"{run}/ckpt-8", f"{run}/ckpt-9")
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "moved")
    assert value_of(tmp_path / "copy") == value_of(tmp_path / "moved") == 9.0


@pytest.mark.parametrize(
    "text",
    ["", "garbage \0\xff", 'model_checkpoint_path: "checkpoint"\n', 'model_checkpoint_path: "x"'],
)
def test_a_broken_state_file_falls_back_to_the_newest_with_a_warning(run: Path, text: str) -> None:
    (run / "checkpoint").write_text(text)
    (run / "ckpt-11.index.tempstate123").write_bytes((run / "ckpt-10.index").read_bytes())
    with pytest.warns(CkptWarning, match="ckpt-10 is read instead"):
        assert value_of(run) == 10.0


def test_a_checkpoint_that_is_not_complete_is_no_latest(run: Path) -> None:
    (run / "ckpt-10.data-00000-of-00001").unlink()
    with pytest.warns(CkptWarning, match="ckpt-9 is read instead"):
        assert value_of(run) == 9.0
    for name in ("ckpt-8", "ckpt-9"):
        (run / f"{name}.index").write_bytes(b"cut")
    with pytest.raises(NotFoundError, match="no complete checkpoint"):
        ckptfmt.open_foreign(run)


def test_a_state_file_leads_nowhere_else(run: Path, tmp_path: Path) -> None:
    save_v2(tmp_path / "secret/ckpt-1", {"v": 66.0})
    write_state(run, f"{tmp_path}/secret/ckpt-1")
    with pytest.warns(CkptWarning, match="ckpt-10 is read instead"):
        assert value_of(run) == 10.0


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_a_data_file_may_not_be_a_link_that_leads_elsewhere(run: Path, tmp_path: Path) -> None:
    data = run / "ckpt-10.data-00000-of-00001"
    (tmp_path / "blobs").mkdir()
    shutil.move(data, tmp_path / "blobs/x")
    data.symlink_to(tmp_path / "blobs/x")
    with pytest.raises(CorruptError, match="a link leads out of the folder"):
        ckptfmt.open_foreign(run / "ckpt-10")
    # A hub's cache: all of them are links into one folder.
    shutil.move(run / "ckpt-10.index", tmp_path / "blobs/y")
    (run / "ckpt-10.index").symlink_to(tmp_path / "blobs/y")
    assert value_of(run / "ckpt-10") == 10.0


def test_show_cat_and_convert_take_a_bundle(tf1: str, tmp_path: Path) -> None:
    def ckptfmt_command(*arguments: str) -> str:
        command = [sys.executable, "-m", "ckptfmt", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    assert "kernel~1Adam_1 " in ckptfmt_command("show", tf1)
    assert "dense/kernel" in ckptfmt_command("cat", tf1, "dense/kernel", "--json")
    ckptfmt_command("convert", tf1, str(tmp_path / "s"))
    assert "kernel~1Adam_1 " in ckptfmt_command("show", str(tmp_path / "s"))
    assert ckptfmt.load(tmp_path / "s")["bias"].shape == (3,)
    ckptfmt_command("diff", "--read", tf1, str(tmp_path / "s"))


def test_nothing_is_copied_and_tensorflow_is_not_needed(tf1: str) -> None:
    array = ckptfmt.open_foreign(tf1)["bias"].mmap()
    assert not array.flags.writeable
    assert not array.flags.owndata
    code = (
        "import sys, ckptfmt; f = ckptfmt.open_foreign(sys.argv[1]); f.verify();"
        "assert not {'tensorflow', 'keras', 'google.protobuf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tf1], check=True)
