"""Every dtype of TensorFlow goes to the host and back with its bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from ckptfmt import UnsupportedError, UsageError
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


def test_every_dtype_that_tensorflow_has_is_carried_or_refused_by_name() -> None:
    from tensorflow.python.framework import dtypes

    refused = set()
    for dtype in dtypes._INTERN_TABLE.values():
        if dtype.name.endswith("_ref"):
            continue
        if dtype.name not in {*DTYPES, "string"}:
            refused.add(dtype.name)
    assert refused == {"qint8", "quint8", "qint16", "quint16", "qint32", "resource", "variant"}
    quantized = tf.bitcast(tf.constant([1, 2], tf.int8), tf.qint8)
    with pytest.raises(UsageError, match=r"cannot be carried: model/q: found dtype qint8"):
        ADAPTER.source(quantized, "model/q")


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


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: tf.ragged.constant([[1], [2, 3]]), "row_splits"),
        (lambda: tf.sparse.from_dense([0, 1]), "indices"),
        (lambda: tf.IndexedSlices(tf.constant([1.0]), tf.constant([0])), "indices and values"),
    ],
)
def test_composite_tensors_are_refused_with_a_cure(make: object, cure: str) -> None:
    composite = make()  # type: ignore[operator]
    assert ADAPTER.kind(composite) == "tensor"
    with pytest.raises(UsageError, match=f"cannot be saved yet: a/b; .*{cure}"):
        ADAPTER.source(composite, "a/b")


def test_saving_while_a_function_is_traced_is_refused() -> None:
    variable = tf.Variable(1.0)

    step = tf.function(lambda: ADAPTER.source(variable, "w"), autograph=False)
    with pytest.raises(UsageError, match=r"while a tf\.function is traced: w"):
        step()


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
