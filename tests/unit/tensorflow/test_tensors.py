"""Every dtype of TensorFlow goes to the host and back with its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError, UnsupportedError, UsageError
from ckptfmt.tensorflow import ADAPTER
from ckptfmt.tensorflow.tensors import make_tensor

DTYPES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)),
    *("bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
    "float4_e2m1fn",
]


def all_patterns(name: str) -> np.ndarray:
    """Every bit pattern of a narrow dtype, random ones (NaN payloads, infinities) of a wide one."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if name == "bool":
        return np.array([False, True, True])
    if dtype.itemsize == 1:
        bits = int("".join(c for c in name.split("_")[0] if c.isdigit()))
        count = 1 << bits
        return np.arange(count, dtype=np.uint8).view(dtype).reshape(2, -1)
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(4, -1)
    random = np.random.default_rng(7)
    return np.frombuffer(random.bytes(dtype.itemsize * 60), dtype).reshape(3, 4, 5)


@pytest.mark.parametrize("name", DTYPES)
def test_every_pattern_of_every_dtype_survives_both_ways(name: str) -> None:
    array = all_patterns(name)
    tensor = make_tensor(array)
    assert tensor.dtype.name == name
    source = ADAPTER.source(tensor, "x")
    fetched = source.fetch()
    assert (source.dtype, source.shape) == (name, array.shape)
    assert fetched.dtype == array.dtype
    assert fetched.tobytes() == array.tobytes()


# TensorFlow 2.21 makes no variables of these on the CPU.
NO_VARIABLES = ("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz")


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in NO_VARIABLES])
def test_a_variable_of_every_dtype_comes_back_with_its_bits(tmp_path: Path, name: str) -> None:
    array = all_patterns(name)
    saved, fresh = tf.Module(), tf.Module()
    saved.v, fresh.v = (tf.Variable(make_tensor(a)) for a in (array, np.zeros_like(array)))
    ckf.save({"m": saved}, tmp_path)
    ckf.restore({"m": fresh}, tmp_path).assert_consumed()
    assert fresh.v.numpy().tobytes() == array.tobytes()


def test_every_dtype_that_tensorflow_has_is_carried_or_refused_by_name() -> None:
    from tensorflow.python.framework import dtypes

    refused = set()
    for dtype in dtypes._INTERN_TABLE.values():
        if dtype.name.endswith("_ref"):
            continue
        if dtype.name not in {*DTYPES, *QUANTIZED, "string"}:
            refused.add(dtype.name)
    assert refused == {"resource", "variant"}
    with pytest.raises(UsageError, match=r"cannot be carried: model/q: found dtype variant"):
        ADAPTER.source(tf.data.Dataset.range(1)._variant_tensor, "model/q")


QUANTIZED = {"qint8": 8, "quint8": 8, "qint16": 16, "quint16": 16, "qint32": 32}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_tensor_is_stored_as_its_integers_with_its_dtype(
    tmp_path: Path, name: str
) -> None:
    integers = all_patterns(name.replace("q", ""))
    tensor = tf.bitcast(tf.constant(integers), name)
    ckf.save({"q": tensor}, tmp_path)
    plain = ckptfmt.load(tmp_path)["q"]
    assert plain.dtype == integers.dtype
    assert plain.tobytes() == integers.tobytes()
    for made in (ckf.load(tmp_path)["q"], ckf.load(tmp_path, like={"q": tensor})["q"]):
        assert made.dtype.name == name
        assert tf.bitcast(made, integers.dtype.name).numpy().tobytes() == integers.tobytes()
    held = {"q": tf.bitcast(tf.zeros_like(integers), name)}
    ckf.restore(held, tmp_path).assert_consumed()
    assert tf.bitcast(held["q"], integers.dtype.name).numpy().tobytes() == integers.tobytes()


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32"])  # of the others there are none
def test_a_quantized_variable_is_filled_by_one_of_its_dtype_only(tmp_path: Path, name: str) -> None:
    stored = name.replace("q", "")

    def variable(values: list[int]) -> Any:
        return tf.Variable(tf.bitcast(tf.constant(values, stored), name))

    ckf.save({"q": variable([1, 2])}, tmp_path)
    ckf.save({"q": tf.Variable(tf.constant([1, 2], stored))}, tmp_path / "plain")
    target, plain = variable([0, 0]), tf.Variable(tf.constant([7, 7], stored))
    ckf.restore({"q": target}, tmp_path).assert_consumed()
    assert tf.bitcast(target.read_value(), stored).numpy().tolist() == [1, 2]
    with pytest.raises(MismatchError, match=rf"q: expected {stored}, found {name}"):
        ckf.restore({"q": plain}, tmp_path)
    with pytest.raises(MismatchError, match=rf"q: expected {name}, found {stored}"):
        ckf.restore({"q": target}, tmp_path / "plain")
    assert plain.numpy().tolist() == [7, 7]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 3), (3,), (2, 1, 2)])
def test_strings_keep_their_bytes_and_shape(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, object)
    count = int(np.prod(shape))
    array.reshape(-1)[:] = [b"", b"\xff\x00", "é".encode(), b"tail\x00"][:count]
    variable = tf.Variable(make_tensor(array))
    source = ADAPTER.source(variable, "x")
    assert (source.dtype, source.shape) == ("bytes", shape)
    fetched = source.fetch()
    assert fetched.dtype == object
    assert fetched.shape == shape
    assert fetched.tolist() == array.tolist()


def test_text_arrays_of_numpy_become_utf8() -> None:
    array = np.array(["a", "é"], np.dtypes.StringDType())
    assert make_tensor(array).numpy().tolist() == [b"a", "é".encode()]


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16", "int4", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 3)])
def test_empty_and_scalar_keep_shape_and_dtype_and_empties_are_no_tie(
    dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.zeros(shape, getattr(ml_dtypes, dtype, dtype))
    source = ADAPTER.source(tf.Variable(make_tensor(array)), "x")
    assert source.shape == source.fetch().shape == shape
    assert source.fetch().dtype == array.dtype
    assert (source.identity is None) == (0 in shape)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.complex64, tf.int64])
def test_a_fetch_shares_memory_and_does_not_change_with_the_variable(dtype: tf.DType) -> None:
    variable = tf.Variable(tf.ones([1000], dtype))
    source = ADAPTER.source(variable, "x")
    first, second = source.fetch(), source.fetch()
    assert first.ctypes.data == second.ctypes.data
    variable.assign_add(tf.ones([1000], dtype))
    assert np.array_equal(first, np.ones(1000))
    assert np.array_equal(source.fetch(), np.full(1000, 2))


def test_a_made_tensor_does_not_change_with_the_array() -> None:
    array = np.zeros(1 << 16, np.float32)
    tensor = make_tensor(array)
    variable = tf.Variable(tensor)
    array[:] = 7
    variable.assign_add(tf.ones([1 << 16]))
    assert float(tf.reduce_max(tensor)) == 0
    assert array.min() == 7


@pytest.mark.parametrize("dtype", ["datetime64[s]", "S3", "float6_e2m3fn", "V2"])
def test_a_dtype_that_tensorflow_lacks_is_refused_on_the_way_in(dtype: str) -> None:
    array = np.zeros(2, getattr(ml_dtypes, dtype, dtype))
    with pytest.raises(UnsupportedError, match="TensorFlow has no such dtype: data/x"):
        make_tensor(array, "data/x")


def test_a_variable_without_a_value_is_refused_at_save_and_filled_at_restore(
    tmp_path: Path,
) -> None:
    """TensorFlow reads an empty tensor from it."""
    made = [
        resource_variable_ops.UninitializedVariable(shape=s, dtype=tf.float32) for s in ([2], None)
    ]
    for variable in made:
        with pytest.raises(UsageError, match="was never given a value: w"):
            ckf.save({"w": variable}, tmp_path / "none", step=1)
    ckf.save({"w": tf.Variable([1.0, 2.0])}, tmp_path, step=1)
    for variable in made:
        ckf.restore({"w": variable}, tmp_path)
        assert variable.numpy().tolist() == [1.0, 2.0]
    empty = tf.Variable(tf.zeros([0, 3]))
    ckf.save({"w": empty}, tmp_path, step=2)


def test_a_variable_of_a_graph_is_refused_in_it_and_outside_with_the_way_through_a_session(
    tmp_path: Path,
) -> None:
    ckf.save({"w": tf.Variable([1.0, 2.0])}, tmp_path, step=1)
    v1, text = tf.compat.v1, r"its value in a session: w; save session\.run"
    with v1.Graph().as_default(), v1.Session() as session:
        made = {"w": v1.get_variable("w", initializer=[0.0, 0.0])}
        session.run(v1.global_variables_initializer())
        with pytest.raises(UsageError, match=text):
            ckf.save(made, tmp_path, step=2)
        with pytest.raises(UsageError, match=text):
            ckf.restore(made, tmp_path)
        session.run(made["w"].assign(ckptfmt.load(tmp_path)["w"]))
        ckptfmt.save(session.run(made), tmp_path, step=2)
    assert ckptfmt.load(tmp_path)["w"].tolist() == [1.0, 2.0]
    with pytest.raises(UsageError, match=text):
        ckf.save(made, tmp_path, step=3)
    with pytest.raises(UsageError, match=text):
        ckf.restore(made, tmp_path)


def test_dtypes_and_shapes_are_values() -> None:
    for value in (tf.bfloat16, tf.string, tf.TensorShape([2, None]), tf.TensorShape(None)):
        assert ADAPTER.kind(value) == "value"
        back = ADAPTER.unpack_value(*ADAPTER.pack_value(value))
        assert type(back) is type(value)
        assert str(back) == str(value)
    with pytest.raises(UnsupportedError, match="does not know"):
        ADAPTER.unpack_value("tensorflow.DType", "float3")
    with pytest.raises(UnsupportedError, match="does not know"):
        ADAPTER.unpack_value("tensorflow.Strategy", None)


def test_make_gives_the_kind_of_its_example() -> None:
    array = np.arange(3, dtype=np.float32)
    tensor = ADAPTER.make(tf.zeros([3]), array)
    assert isinstance(tensor, tf.Tensor)
    made = ADAPTER.make(tf.Variable(tf.zeros([3]), trainable=False, name="w"), array)
    assert isinstance(made, tf.Variable)
    assert (made.trainable, made.name) == (False, "w:0")
    assert made.numpy().tolist() == array.tolist()
