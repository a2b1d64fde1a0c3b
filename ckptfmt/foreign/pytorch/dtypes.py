"""torch's dtypes and storage classes, by name, without torch."""

from __future__ import annotations

from dataclasses import dataclass

_NATIVE = {
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16, "bfloat16": 2, "complex32": 4, "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int1": 1, "int2": 1, "int4": 1, "uint1": 1, "uint2": 1, "uint4": 1,
}  # fmt: skip
_TORCH_ONLY = {
    "int3": "int8", "int5": "int8", "int6": "int8", "int7": "int8",
    "uint3": "uint8", "uint5": "uint8", "uint6": "uint8", "uint7": "uint8",
    "bits1x8": "uint8", "bits2x4": "uint8", "bits4x2": "uint8", "bits8": "uint8",
    "bits16": "uint16",
}  # fmt: skip
_QUANTIZED = {
    "qint8": ("int8", 1), "quint8": ("uint8", 1), "qint32": ("int32", 4),
    "quint4x2": ("uint4", 1), "quint2x4": ("uint2", 1),
}  # fmt: skip
X2 = "float4_e2m1fn_x2"
NARROW = ("int1", "int2", "int4", "uint1", "uint2", "uint4")


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """One dtype of torch.

    Attributes:
        name: torch's name, without `torch.`.
        stored: The name in a checkpoint (spec 04).
        itemsize: Bytes of one element in a storage; of a packed quantized one, of a byte of several.
        component: Bytes of what changes its order with the byte order.
        packed: Elements in a byte, where they are several.
    """

    name: str
    stored: str
    itemsize: int
    component: int
    packed: int = 1

    @property
    def attributes(self) -> dict[str, object]:
        """What is kept with a leaf, so that torch gets its own type back."""
        return {"torch.dtype": self.name} if self.name in _TORCH_ONLY else {}

    @property
    def is_quantized(self) -> bool:
        return self.name in _QUANTIZED


def _rows() -> dict[str, TorchDtype]:
    rows = [
        TorchDtype(name, name, size, size // 2 if name.startswith("complex") else size)
        for name, size in _NATIVE.items()
    ]
    for name, stored in _TORCH_ONLY.items():
        rows.append(TorchDtype(name, stored, _NATIVE[stored], _NATIVE[stored]))
    for name, (stored, size) in _QUANTIZED.items():
        rows.append(TorchDtype(name, stored, size, size, {"uint4": 2, "uint2": 4}.get(stored, 1)))
    rows.append(TorchDtype(X2, "float4_e2m1fn", 1, 1, 2))
    return {row.name: row for row in rows}


DTYPES = _rows()

_STORAGES = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "Float": "float32", "Double": "float64", "BFloat16": "bfloat16",
    "Bool": "bool", "ComplexHalf": "complex32", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "QInt8": "qint8", "QUInt8": "quint8", "QInt32": "qint32",
    "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4", "Untyped": "uint8", "_Untyped": "uint8",
    "UntypedByte": "uint8",
}  # fmt: skip
_PREFIXES = ("torch.", "torch.cuda.", "torch.storage.", "torch.xpu.", "torch.mps.", "torch.hpu.")


def storage_dtype(name: str) -> tuple[TorchDtype, bool] | None:
    """(dtype, whether it is untyped: counted in bytes) of a storage class; None for other names."""
    prefix, dot, last = name.rpartition(".")
    if f"{prefix}{dot}" not in _PREFIXES or not last.endswith("Storage"):
        return None
    kind = last.removesuffix("Storage")
    found = _STORAGES.get(kind)
    return None if found is None else (DTYPES[found], "Untyped" in kind)
