"""Made the files beside with the library of llama.cpp; run again only for a new folder.

    python generate.py

`expected-*.json` says what that library reads: dtype in our names, shape, and the bytes in hex.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

HERE = Path(__file__).parent
RELEASE = "0.19.0"
PLAIN = {
    "F32": "float32",
    "F16": "float16",
    "F64": "float64",
    "BF16": "bfloat16",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


def add_values(writer: gguf.GGUFWriter) -> dict[str, Any]:
    """Every type of value; what is expected of them."""
    writer.add_uint8("v.u8", 255)
    writer.add_int8("v.i8", -1)
    writer.add_uint16("v.u16", 65535)
    writer.add_int16("v.i16", -2)
    writer.add_uint32("v.u32", 1 << 31)
    writer.add_int32("v.i32", -3)
    writer.add_float32("v.f32", 0.1)
    writer.add_uint64("v.u64", (1 << 64) - 1)
    writer.add_int64("v.i64", -(1 << 62))
    writer.add_float64("v.f64", 0.1)
    writer.add_bool("v.bool", True)
    writer.add_string("v.text", "na\u00efve/~")
    writer.add_array("v.texts", ["a", "", "\u00e9"])
    writer.add_array("v.numbers", [1, 2, -3])
    writer.add_array("v.floats", [0.5, 1.5])
    scalars: dict[str, np.generic[Any]] = {
        "u8": np.uint8(255),
        "i8": np.int8(-1),
        "u16": np.uint16(65535),
        "i16": np.int16(-2),
        "u32": np.uint32(1 << 31),
        "i32": np.int32(-3),
        "f32": np.float32(0.1),
        "u64": np.uint64((1 << 64) - 1),
        "i64": np.int64(-(1 << 62)),
        "f64": np.float64(0.1),
    }
    made: dict[str, Any] = {
        f"metadata/v.{name}": {value.dtype.name: value.tobytes().hex()}
        for name, value in scalars.items()
    }
    made["metadata/v.bool"] = True
    made["metadata/v.text"] = "na\u00efve/~"
    made["metadata/v.texts"] = ["a", "", "\u00e9"]
    made["metadata/general.architecture"] = "test"
    return made


def add_tensors(writer: gguf.GGUFWriter) -> None:
    """A tensor of every type, of arbitrary bytes."""
    rng = np.random.default_rng(0)
    for kind in GGMLQuantizationType:
        if kind.name == "Q8_1":  # no file has it
            continue
        elements, nbytes = GGML_QUANT_SIZES[kind]
        blocks = 3 if elements == 1 else 1
        raw = rng.integers(0, 256, (2, blocks * nbytes), np.uint8)
        # Of bytes the library takes the shape apart again.
        writer.add_tensor(f"t.{kind.name}", raw, raw_dtype=kind)


def expected(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        elements, nbytes = GGML_QUANT_SIZES[tensor.tensor_type]
        name = tensor.tensor_type.name
        shape = [int(n) for n in reversed(tensor.shape)]
        shape[-1] //= elements
        data = np.ascontiguousarray(tensor.data)
        assert data.nbytes == np.prod(shape) * nbytes
        tensors[f"tensors/{tensor.name}"] = {
            "dtype": PLAIN.get(name, f"gguf.{name}"),
            "shape": shape,
            "hex": data.tobytes().hex(),
        }
    for key, dtype in (("v.numbers", "int32"), ("v.floats", "float32")):
        found = reader.get_field(key)
        assert found is not None
        array = np.array(found.contents(), dtype)
        tensors[f"metadata/{key}"] = {
            "dtype": dtype,
            "shape": [len(array)],
            "hex": array.tobytes().hex(),
        }
    return {"tensors": tensors, "values": values}


def write(path: Path, **options: Any) -> dict[str, Any]:
    writer = gguf.GGUFWriter(path, "test", **options)
    values = add_values(writer)
    if "endianess" in options:
        for name, dtype in (("a", "float32"), ("b", "int16"), ("c", "float64")):
            writer.add_tensor(f"t.{name}", np.arange(6).reshape(2, 3).astype(dtype))
    else:
        add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def main() -> None:
    assert version("gguf") == RELEASE
    values = write(HERE / "every-type.gguf")
    found = expected(HERE / "every-type.gguf", values)
    (HERE / "expected-every-type.json").write_text(json.dumps(found, indent=1) + "\n")
    write(HERE / "big-endian.gguf", endianess=gguf.GGUFEndian.BIG)
    writer = gguf.GGUFWriter(HERE / "split", "test", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"t.{number}", np.full(3, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
