"""How torch has tensors in a file: dtypes, storages, strides, and the calls that rebuild them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.exporters.pickle_writer import Call, Named, Persistent
from ckptfmt.foreign.exporters.stream import ExportStream
from ckptfmt.foreign.exporters.tree import PIECE_NBYTES, ExportTensor, packed_halves, raw_bytes
from ckptfmt.foreign.exporters.zip_writer import ALIGN_NBYTES, ZipWriter
from ckptfmt.foreign.pytorch.dtypes import DTYPES, X2, TorchDtype
from ckptfmt.foreign.tree_record import RECORD_KEY
from ckptfmt.format import pack_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STORAGES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long",
    "float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16",
    "bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
    "qint8": "QInt8", "quint8": "QUInt8", "qint32": "QInt32", "quint4x2": "QUInt4x2",
    "quint2x4": "QUInt2x4",
}  # fmt: skip
"""Dtypes with a storage class; torch gives all others an untyped one, and the dtype beside it."""
_SIGNED_NARROW = ("int2", "int4")
_TENSOR, _OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"


def torch_dtype(tensor: ExportTensor, quantized: str = "") -> TorchDtype | str:
    """The dtype that torch has for a tensor, or why it has none.

    Args:
        quantized: The dtype of a quantized tensor whose integers these are.
    """
    dtype = DTYPES.get(quantized or str(tensor.attributes.get("torch.dtype") or ""))
    if dtype is None or dtype.stored != tensor.dtype:
        dtype = DTYPES.get(X2 if tensor.dtype == "float4_e2m1fn" else tensor.dtype)
    if dtype is None or (dtype.is_quantized and not quantized):
        return f"torch has no dtype {tensor.dtype}"
    if dtype.name == X2 and (not tensor.shape or tensor.shape[-1] % 2):
        return "torch packs elements of 4 bits in pairs along the last axis, which is odd here"
    if dtype.is_quantized and dtype.packed > 1 and tensor.nbytes > PIECE_NBYTES:
        return "a quantized tensor of over 64 MiB with several elements a byte"
    return dtype


def torch_shape(shape: tuple[int, ...], dtype: TorchDtype) -> tuple[int, ...]:
    """In torch's elements: half the last axis where a byte holds two."""
    return (*shape[:-1], shape[-1] // 2) if dtype.name == X2 else shape


class Layout:
    """How a tensor, or a piece of one, lies in a storage of its own.

    Args:
        shape: In our elements.
        memory_format: "" for C order.
    """

    __slots__ = ("dtype", "format", "nbytes", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: TorchDtype, memory_format: str = "") -> None:
        self.dtype, self.format = dtype, memory_format
        self.shape = torch_shape(shape, dtype)
        self.strides = _strides(self.shape, memory_format)
        self.nbytes = -(-math.prod(self.shape) * dtype.itemsize // _per_byte(dtype))

    def place(self, key: str) -> tuple[Any, ...]:
        """The first arguments of a rebuild: the storage of this key, and where the tensor is."""
        known = _STORAGES.get(self.dtype.name)
        if known is None:
            kind, count = Named("torch.storage.UntypedStorage"), self.nbytes
        else:
            numel = math.prod(self.shape)
            kind, count = Named(f"torch.{known}Storage"), -(-numel // _per_byte(self.dtype))
        storage = Persistent(("storage", kind, key, "cpu", count))
        return storage, 0, self.shape, self.strides

    def call(self, key: str, *, requires_grad: bool = False) -> Call:
        """What rebuilds the tensor."""
        hooks = OrderedDict[str, Any]()
        if self.dtype.name in _STORAGES:
            return Call(_TENSOR, (*self.place(key), requires_grad, hooks))
        dtype = Named(f"torch.{self.dtype.name}")
        return Call(_OF_DTYPE, (*self.place(key), requires_grad, hooks, dtype))

    def bytes_of(self, pieces: Iterable[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
        """Its storage's bytes, of its values in C order."""
        if self.dtype.packed > 1:
            if self.dtype.name == X2:
                yield from packed_halves(pieces)
            else:
                for piece in pieces:  # all of it: a quantized tensor is planned as one piece
                    yield np.frombuffer(pack_array(piece), np.uint8)
            return
        for piece in pieces:
            if self.dtype.name in _SIGNED_NARROW:
                # The sign is in all of torch's byte; here only in the bits that count.
                piece = piece.astype(np.int8)
            yield raw_bytes(np.moveaxis(piece, 1, -1) if self.format else piece)


def _per_byte(dtype: TorchDtype) -> int:
    return 1 if dtype.name == X2 else dtype.packed


def _strides(shape: tuple[int, ...], memory_format: str) -> tuple[int, ...]:
    """In elements; as torch has them for tensors without elements too."""
    order = list(range(len(shape)))
    if memory_format:
        order = [0, *order[2:], 1]
    made, step = [0] * len(shape), 1
    for axis in reversed(order):
        made[axis] = step
        step *= max(shape[axis], 1)
    return tuple(made)


def write_archive(
    stream: ExportStream,
    top: str,
    pickle: bytes,
    storages: Iterable[tuple[int, Iterable[NDArray[np.uint8]]]],
    record: str = "",
) -> None:
    """A file of `torch.save`, from the stream's position on.

    Args:
        top: The archive's folder.
        storages: Bytes and pieces of each, which the pickle knows by their numbers.
        record: What imports of ours read beside (`tree_record`); torch passes it over.
    """
    archive = ZipWriter(stream)

    def add(name: str, data: bytes) -> None:
        archive.add(f"{top}/{name}", len(data), [data])

    # This order, and the aligned bytes, let torch compute where a storage is.
    add("data.pkl", pickle)
    add(".format_version", b"1")
    add(".storage_alignment", str(ALIGN_NBYTES).encode())
    add("byteorder", b"little")
    for number, (nbytes, pieces) in enumerate(storages):
        archive.add(f"{top}/data/{number}", nbytes, pieces)
    if record:
        add(RECORD_KEY, record.encode())
    add("version", b"3\n")
    archive.finish()
