"""One tensor or variable: its dtype in the format, its bytes on the host, and the way back.

Reads share memory with TensorFlow where it allows that; nothing is ever converted by value.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from ckptfmt.engine import TensorSource
from ckptfmt.errors import UnsupportedError, UsageError
from ckptfmt.tensorflow.distributed import Sharded, is_sharded, is_sync_on_read, read_as_one
from ckptfmt.tensorflow.strategy_group import is_meeting, rank_of, read_together

if TYPE_CHECKING:
    from numpy.typing import NDArray

# DLPack shares memory. It must see these only: asked for a tf.string tensor, TensorFlow 2.21 aborts
# the process instead of raising.
_SHARED = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
_COPIED = frozenset(
    [
        "int2",
        "uint2",
        "int4",
        "uint4",
        "float4_e2m1fn",
        "float8_e5m2",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2fnuz",
    ]
)
_EXTENSION = {name: np.dtype(getattr(ml_dtypes, name)) for name in [*_COPIED, "bfloat16"]}
_BYTES = "bytes"
_ALIGNMENT = 64  # of memory that TensorFlow is handed
_ADOPT_NBYTES = 64 << 10  # below, a copy costs less than the handing over

FULL_NAME = "tf.full_name"
ALIASES = "tf.aliases"
AGGREGATION = "tf.aggregation"
DTYPE = "tf.dtype"

QUANTIZED = {
    "qint8": "int8",
    "quint8": "uint8",
    "qint16": "int16",
    "quint16": "uint16",
    "qint32": "int32",
}
"""TensorFlow's dtype -> that of its integers, as which it is stored."""


def is_variable(obj: object) -> bool:
    return isinstance(obj, (tf.Variable, keras.Variable, Sharded))


def is_optimizer(obj: object) -> bool:
    """True for Keras's, and for those of tf.compat.v1.train."""
    return isinstance(obj, (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer))


def is_tensor(obj: object) -> bool:
    """True for what has one dtype, and for a TensorArray, which `source` refuses."""
    return is_variable(obj) or isinstance(obj, (tf.Tensor, tf.TensorArray))


def raw_variable(variable: Any, name: str) -> Any:
    """The tf.Variable of a Keras variable; a tf.Variable is itself.

    Raises:
        UsageError: A Keras variable has no storage yet, or lives in a stateless scope; a tf.Variable
            belongs to a graph of TensorFlow 1.
    """
    if not isinstance(variable, keras.Variable):
        if tf.executing_eagerly() and _is_of_graph(variable):
            raise UsageError(_OF_GRAPH, reason="graph", where=name, do=_BY_SESSION)
        return variable
    raw = getattr(variable, "_value", None)
    if raw is None:
        raise UsageError(
            "a Keras variable has no value yet",
            reason="uninitialized",
            where=name,
            do="build the model first, outside of a stateless scope",
        )
    if not isinstance(raw, tf.Variable):
        raise UsageError(
            "a Keras variable of another backend cannot be carried",
            reason="backend",
            where=name,
            expected="the TensorFlow backend of Keras",
            found=type(raw).__name__,
            do="set KERAS_BACKEND=tensorflow, or save its value as an array",
        )
    return raw


_OF_GRAPH = "a variable of a graph has its value in a session"
_BY_SESSION = "save session.run(variables); restore with session.run(variable.assign(value))"


def _is_of_graph(variable: Any) -> bool:
    """True for a variable that was made by `tf.compat.v1`, in a graph that a session runs."""
    if is_sharded(variable) or isinstance(variable, tf.distribute.DistributedValues):
        return False
    handle = getattr(variable, "handle", None)
    return handle is None or tf.is_symbolic_tensor(handle)


def refuse_graph(name: str) -> None:
    """Values are read and assigned once, by a call, not by a graph that is run later.

    Raises:
        UsageError: A graph of TensorFlow 1 is built. (Where a tf.function is traced, the call that leads
            here has been refused.)
    """
    if not tf.executing_eagerly():
        raise UsageError(_OF_GRAPH, reason="graph", where=name, do=_BY_SESSION)


def identity_of(variable: Any) -> int:
    """Equal for two Python objects that are one variable."""
    raw = getattr(variable, "_value", None) if isinstance(variable, keras.Variable) else None
    return id(variable if raw is None else raw)


def full_name_of(variable: Any) -> str:
    """What the framework calls a variable: a Keras path, or a name without its `:0`."""
    if isinstance(variable, keras.Variable):
        return str(variable.path)
    return str(variable.name).removesuffix(":0")


def dtype_name(dtype: tf.DType, name: str) -> str:
    """Name in the format of a TensorFlow dtype.

    Raises:
        UsageError: It has no bytes of its own (resource, variant).
    """
    text = str(dtype.base_dtype.name)
    text = QUANTIZED.get(text, text)
    if text in _SHARED or text in _EXTENSION:
        return text
    if text == "string":
        return _BYTES
    raise UsageError(
        "a tensor of this dtype cannot be carried",
        reason="dtype",
        where=name,
        found=f"dtype {text}",
        do="save what it stands for: it has no bytes of its own",
    )


def tensor_dtype(name: str) -> tf.DType | None:
    """The TensorFlow dtype of a format dtype, or None where there is none."""
    if name in (_BYTES, "string"):
        return tf.string
    if name in _SHARED or name in _EXTENSION:
        return tf.as_dtype(name)
    return None


def _refuse_special(obj: Any, name: str) -> None:
    if isinstance(obj, tf.TensorArray):
        raise UsageError(
            "a TensorArray cannot be saved",
            reason="composite",
            where=name,
            do="save its stack()",
        )
    if is_sync_on_read(obj) and not is_meeting(obj.distribute_strategy):
        raise UsageError(
            "a variable that is synchronized on read has parts on other workers",
            reason="sharded-alone",
            where=name,
            do="pass group=strategy, and let every worker call",
        )
    refuse_graph(name)


def read(variable: Any) -> tf.Tensor:
    """The value of now: later assignments do not reach it (TensorFlow copies on write)."""
    return read_as_one(variable)


def is_read_elsewhere(variable: Any) -> bool:
    """True where the first worker alone has the value that TensorFlow reads."""
    first = (tf.VariableAggregation.NONE, tf.VariableAggregation.ONLY_FIRST_REPLICA)
    return (
        is_sync_on_read(variable)
        and variable.aggregation in first
        and rank_of(variable.distribute_strategy) > 0
    )


def host_array(tensor: Any) -> NDArray[Any]:
    """The values of an eager tensor as a C-order array, sharing its memory where possible."""
    name = str(tensor.dtype.name)
    if name in QUANTIZED:
        return host_array(tf.bitcast(tensor, QUANTIZED[name]))
    on_host = tensor.dtype != tf.string and "CPU" in tensor.backing_device
    if name in _SHARED and on_host:
        shared: NDArray[Any] = np.from_dlpack(tensor)
        return shared
    if name == "bfloat16" and on_host:
        shared = np.from_dlpack(tf.bitcast(tensor, tf.uint16))
        return shared.view(_EXTENSION[name])
    values = tensor.numpy()
    if name != "string":
        return np.ascontiguousarray(values).reshape(tuple(tensor.shape))
    # A scalar comes as bytes, which np.asarray would turn into a fixed-width array.
    made = np.empty(tuple(tensor.shape), object)
    made[...] = values
    return made


def _read_now(raw: Any, name: str) -> NDArray[Any]:
    """A variable's values on the host.

    Raises:
        UsageError: It was never given any: TensorFlow reads an empty tensor then.
    """
    value = host_array(read(raw))
    if not value.size and not is_sharded(raw) and not raw.is_initialized():
        raise UsageError(
            "a variable was never given a value",
            reason="uninitialized",
            where=name,
            do="assign it first, or leave it out of the tree",
        )
    return value


def source_of(obj: Any, name: str) -> TensorSource:
    """A tensor leaf at save. Only a variable, or the same tensor object, can be tied.

    Raises:
        UsageError: The tensor cannot be carried; it names the leaf.
    """
    _refuse_special(obj, name)
    if is_variable(obj):
        raw = raw_variable(obj, name)
        _refuse_special(raw, name)
        shape = tuple(raw.shape) if raw.shape.is_fully_defined() else _read_now(raw, name).shape
        attributes: dict[str, object] = {FULL_NAME: full_name_of(obj)}
        fetch = lambda: _read_now(raw, name)  # noqa: E731
        if is_sync_on_read(raw):
            # All workers take part in a read: now, when all of them come by, in one order.
            attributes[AGGREGATION] = raw.aggregation.name.lower()
            value = host_array(read_together(raw.distribute_strategy, lambda: read(raw)))
            fetch = lambda: value  # noqa: E731
    else:
        if not hasattr(obj, "numpy"):
            raise UsageError(
                "a symbolic tensor has no value", reason="graph", where=name, do="save a variable"
            )
        raw, shape, attributes = obj, tuple(obj.shape), {}
        fetch = lambda: host_array(raw)  # noqa: E731
    if raw.dtype.base_dtype.name in QUANTIZED:
        attributes[DTYPE] = raw.dtype.base_dtype.name
    return TensorSource(
        dtype=dtype_name(raw.dtype, name),
        shape=shape,
        fetch=fetch,
        identity=tie_of(raw, shape),
        attributes=attributes,
        keep=raw,
        parts=[] if is_read_elsewhere(raw) else None,
    )


def tie_of(raw: Any, shape: tuple[int, ...] | None = None) -> Hashable | None:
    """Equal for two names of one tensor; None where there are no elements to share."""
    if shape is None:
        shape = tuple(raw.shape) if raw.shape.rank is not None else ()
    return None if 0 in shape else ("tensorflow", id(raw))


def make_tensor(array: NDArray[Any], name: str = "") -> tf.Tensor:
    """A tensor with these values, in memory of its own.

    Raises:
        UnsupportedError: TensorFlow has no such dtype.
    """
    text = "string" if array.dtype.kind in "OT" else array.dtype.name
    dtype = tensor_dtype(text)
    if dtype is None:
        raise UnsupportedError(
            "TensorFlow has no such dtype",
            reason="dtype",
            where=name,
            found=f"dtype {text}",
            do="read it as NumPy: ckptfmt.load, or names= to leave it out",
        )
    if dtype == tf.string:
        return tf.constant(_as_bytes(array), dtype, shape=array.shape)
    return tf.constant(array, dtype)


def tensor_of(dtype: tf.DType, array: NDArray[Any], name: str = "") -> tf.Tensor:
    """The same for a target of a dtype: the stored integers of a quantized one are such again."""
    made = make_tensor(array, name)
    return tf.bitcast(made, dtype) if dtype.base_dtype.name in QUANTIZED else made


def stored_tensor(
    array: NDArray[Any], attributes: Mapping[str, object], name: str = ""
) -> tf.Tensor:
    """A new tensor of a stored leaf.

    Raises:
        UnsupportedError: TensorFlow has no such dtype.
    """
    quantized = attributes.get(DTYPE)
    if isinstance(quantized, str) and QUANTIZED.get(quantized) == array.dtype.name:
        return tensor_of(tf.as_dtype(quantized), array, name)
    return make_tensor(array, name)


def adopt(array: NDArray[Any], name: str = "") -> tf.Tensor:
    """A tensor with these values that takes over the array's memory where TensorFlow allows that.

    The caller gives the array away. A large variable that is assigned it has no copy made.

    Raises:
        UnsupportedError: TensorFlow has no such dtype.
    """
    return _shared(array) if _can_share(array) else make_tensor(array, name)


def copy_of(array: NDArray[Any], name: str = "") -> tf.Tensor:
    """The same in memory of TensorFlow's own.

    Large ones are copied by an op: `tf.constant` holds the GIL meanwhile, and whoever reads the next
    values in other threads waits.
    """
    if _can_share(array):
        return tf.raw_ops.DeepCopy(x=_shared(array))
    return make_tensor(array, name)


def _can_share(array: NDArray[Any]) -> bool:
    # TensorFlow 2.21 aborts the process at the first use of memory that is not aligned for it.
    fits = array.ctypes.data % _ALIGNMENT == 0 and array.flags.c_contiguous
    known = array.dtype.name in _SHARED or array.dtype.name == "bfloat16"
    return bool(known and array.nbytes >= _ADOPT_NBYTES and fits and array.flags.writeable)


def _shared(array: NDArray[Any]) -> tf.Tensor:
    if array.dtype.name == "bfloat16":
        words = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(words, tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    made = np.empty(array.shape, object)
    flat = array.reshape(-1).tolist()
    made.reshape(-1)[:] = [item.encode() if isinstance(item, str) else item for item in flat]
    return made


def make_like(like: Any, array: NDArray[Any]) -> object:
    """A new tensor or variable of `like`'s kind, on its device."""
    value = tensor_of(like.dtype, array) if isinstance(like.dtype, tf.DType) else make_tensor(array)
    if is_sharded(like):
        return _make_sharded(like, value)
    if is_variable(like):
        raw = raw_variable(like, "")
        with tf.device(raw.device):
            if isinstance(like, keras.Variable):
                return keras.Variable(
                    value, trainable=like.trainable, dtype=like.dtype, name=like.name
                )
            return tf.Variable(
                value, trainable=raw.trainable, name=full_name_of(raw).split("/")[-1]
            )
    with tf.device(like.device):
        return tf.identity(value)


def _make_sharded(like: Any, value: tf.Tensor) -> Any:
    made, at = [], 0
    for shard in like.variables:
        rows = shard.shape[0]
        with tf.device(shard.device):
            made.append(tf.Variable(value[at : at + rows], trainable=shard.trainable))
        at += rows
    return Sharded(made, name=like.name)


def expected_shape(variable: Any, stored: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape a variable asks for: where it leaves dimensions open, those that are stored."""
    shape = variable.shape
    if shape.is_fully_defined():
        return tuple(shape)
    if stored is not None and shape.is_compatible_with(stored):
        return stored
    return tuple(read(variable).shape)
