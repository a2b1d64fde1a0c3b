"""Made the files beside with h5py; run again only for a new folder.

    python generate.py

HDF5 is mostly padding: `xz` keeps the files small. `expected*.json` says what h5py reads: dtype in our names, shape, and the bytes in memory in hex.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np

HERE = Path(__file__).parent
RELEASE = "3.14.0"
DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def fill(file: h5py.File) -> None:
    rng = np.random.default_rng(0)
    for name in DTYPES:
        dtype = np.dtype(name)
        raw = rng.integers(0, 256, 6 * dtype.itemsize, np.uint8).view(dtype).reshape(2, 3)
        file[f"plain/{name}"] = raw
        if name.startswith(("u", "f")):
            file[f"big/{name}"] = raw.astype(dtype.newbyteorder(">"))
    numbers = rng.integers(0, 9, (13, 7), np.int32)
    layouts: dict[str, dict[str, Any]] = {
        "raw": {},
        "gzip": {"compression": "gzip"},
        "shuffled": {"compression": "gzip", "shuffle": True},
        "checked": {"compression": "gzip", "fletcher32": True},
        "partial": {"maxshape": (None, 7)},
    }
    for name, options in layouts.items():
        file.create_dataset(f"chunked/{name}", data=numbers, chunks=(5, 3), **options)
    file["bool"] = np.array([[True, False], [False, True]])
    file["fixed text"] = np.array([b"ab", b"c"])
    file["text"] = np.array([b"any", b"", b"length \xff"], object)
    file["enum"] = np.array([0, 2], h5py.enum_dtype({"A": 0, "B": 2}, np.uint8))
    file["opaque"] = np.array([b"abc", b"\0\1\2"], "V3")
    half = file.create_dataset("bfloat16", data=np.arange(4).astype(ml_dtypes.bfloat16))
    half.attrs["dtype"] = "bfloat16"
    file["scalar"] = np.float32(-0.0)
    file["empty"] = np.zeros((0, 3), np.int64)
    file["tied"] = file["scalar"]
    file["many"] = np.zeros(0)
    for number in range(40):
        file[f"group/{number}"] = np.full(2, number, np.uint8)


def left_out(file: h5py.File) -> None:
    file["structure"] = np.zeros(2, [("a", "<f4"), ("b", "<i2")])
    file["nothing"] = h5py.Empty("f4")
    file["reference"] = np.array([file["scalar"].ref], h5py.ref_dtype)
    file["named"] = np.dtype("f4")


def expected(path: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}

    def note(name: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset) or name in ("structure", "nothing", "reference"):
            return
        array = np.asarray(item[()])
        dtype = array.dtype.newbyteorder("=")
        if array.dtype.kind == "O":
            shown = {"dtype": "bytes", "texts": [text.hex() for text in array]}
        else:
            array = array.astype(dtype)
            named = {"S": f"bytes{8 * dtype.itemsize}", "V": f"void{8 * dtype.itemsize}"}
            shown = {
                "dtype": "bfloat16" if name == "bfloat16" else named.get(dtype.kind, dtype.name),
                "hex": array.tobytes().hex(),
            }
        tensors[name] = {**shown, "shape": list(array.shape)}

    with h5py.File(path) as file:
        file.visititems(note)
        for name in ("tied", "scalar") if "tied" in file else ():
            note(name, file[name])
    return {"tensors": tensors, "skipped": ["structure", "nothing", "reference", "named"]}


def main() -> None:
    assert h5py.__version__ == RELEASE
    for libver in ("earliest", "v108"):
        path = HERE / f"{libver}.h5"
        with h5py.File(
            path, "w", libver=(libver, libver if libver != "earliest" else "latest")
        ) as f:
            if libver == "earliest":
                fill(f)
                left_out(f)
            else:
                for number in range(4):
                    f[f"new/{number}"] = np.full(3, number, np.float32)
                f["new"].attrs["name"] = "text"
        found = expected(path)
        if libver != "earliest":
            found["skipped"] = []
        (HERE / f"expected-{libver}.json").write_text(json.dumps(found) + "\n")
        (HERE / f"{libver}.h5.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
        path.unlink()


if __name__ == "__main__":
    main()
