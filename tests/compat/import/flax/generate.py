"""Made the files beside with Flax; run again only for a new folder.

    python generate.py

`expected.json` says what `flax.serialization.msgpack_restore` reads: dtype, shape, bytes in hex.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import serialization

HERE = Path(__file__).parent
RELEASE = "0.12.8"
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
EXTENSION = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    *("int4", "uint4", "int2", "float4_e2m1fn"),
)


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    every: dict[str, Any] = {}
    for name in DTYPES:
        if name == "bool":
            every[name] = np.array([[True, False], [False, True]])
        else:
            width = np.dtype(name).itemsize
            every[name] = rng.integers(0, 256, 6 * width, np.uint8).view(name).reshape(2, 3)
    for name in EXTENSION:
        dtype = np.dtype(getattr(ml_dtypes, name))
        every[name] = np.arange(6).reshape(2, 3).astype(dtype)
    return {
        "params": {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}},
        "every": every,
        "scalars": {"np": np.float32(0.1), "int": np.int64(-7), "complex": 1 - 2j},
        "plain": {"step": 7, "lr": 0.1, "name": "run", "none": None, "flag": True, "raw": b"\xff"},
        "list": {"0": np.zeros((), np.int32), "1": np.zeros((0, 4), np.float32)},
        "a/b~c": np.arange(3),
        "chunked": np.arange(4000, dtype=np.uint16).reshape(40, 100) % 7,
    }


def expected(data: bytes) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict):
            for key, item in node.items():
                part = key.replace("~", "~0").replace("/", "~1")
                walk(item, f"{name}/{part}" if name else part)
        elif isinstance(node, np.ndarray):
            tensors[name] = {
                "dtype": node.dtype.name,
                "shape": list(node.shape),
                "hex": node.tobytes().hex(),
            }
        elif isinstance(node, np.generic):
            values[name] = {node.dtype.name: node.tobytes().hex()}
        elif isinstance(node, complex):
            values[name] = {"complex": [node.real, node.imag]}
        else:
            values[name] = {"bytes": node.hex()} if isinstance(node, bytes) else node

    walk(serialization.msgpack_restore(data), "")
    return {"tensors": tensors, "values": values}


def main() -> None:
    assert flax.__version__ == RELEASE
    jax.config.update("jax_enable_x64", True)
    # So that a small file has an array in chunks.
    serialization.MAX_CHUNK_SIZE = 3000
    data = serialization.msgpack_serialize(tree())
    (HERE / "every-dtype.msgpack").write_bytes(data)
    (HERE / "expected.json").write_text(json.dumps(expected(data), indent=1) + "\n")


if __name__ == "__main__":
    main()
