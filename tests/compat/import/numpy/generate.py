"""Made the files beside with NumPy; run again only for a new folder.

    python generate.py

`expected-*.json` says what NumPy reads: dtype in our names, shape, and the bytes in memory in hex.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RELEASE = "2.4.6"
DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
NAMES = {"M8[ns]": "datetime64[ns]", "m8[25s]": "timedelta64[25s]", "U3": "str96", "S3": "bytes24"}


def arrays() -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Name -> (our dtype, array); arbitrary bit patterns, NaN payloads among them."""
    rng = np.random.default_rng(0)
    made: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    for name in DTYPES:
        dtype = np.dtype(name)
        raw = rng.integers(0, 256, 6 * dtype.itemsize, np.uint8).view(dtype).reshape(2, 3)
        made[f"every/{name}"] = (name, raw)
        made[f"big/{name}"] = (name, raw.byteswap().view(dtype.newbyteorder(">")))
        made[f"fortran/{name}"] = (name, np.asfortranarray(raw))
    made["bool"] = ("bool", np.array([[True, False, True]]))
    made["text"] = ("str96", np.array(["ab\u00e9", "", "\U0001f600"]))
    made["big text"] = ("str96", np.array(["ab\u00e9", "x"]).astype(">U3"))
    made["octets"] = ("bytes24", np.array([b"abc", b"\xff"]))
    made["void"] = ("void24", np.array([b"abc", b"\x00\x01\x02"], "V3"))
    made["time"] = ("datetime64[ns]", np.array(["2026-01-02", "NaT"], "M8[ns]"))
    made["span"] = ("timedelta64[25s]", np.array([1, -5], "m8[25s]"))
    made["scalar"] = ("float32", np.float32(-0.0) * np.ones((), np.float32))
    made["empty"] = ("int64", np.zeros((0, 3), np.int64))
    return made


def expected(path: Path, names: dict[str, str]) -> dict[str, Any]:
    """What NumPy reads of an archive. `names`: name -> our dtype."""
    tensors = {}
    with np.load(path) as found:
        for name, dtype in names.items():
            array = found[name].astype(found[name].dtype.newbyteorder("="))
            shown = name.replace("~", "~0").replace("/", "~1")
            tensors[shown] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "hex": array.tobytes().hex(),
            }
    return {"tensors": tensors}


def main() -> None:
    assert np.__version__ == RELEASE
    made = arrays()
    names = {name: dtype for name, (dtype, _) in made.items()}
    plain = {name: array for name, (_, array) in made.items()}
    objects = {"objects": np.array([{"a": 1}, None], object)}
    rows = np.zeros(2, [("a", "<f4"), ("b", "<i2")])
    np.savez(HERE / "every-dtype.npz", **plain)  # type: ignore[arg-type]
    np.savez_compressed(HERE / "deflated.npz", rows=rows, **plain, **objects)  # type: ignore[arg-type]
    for stem, skipped in (("every-dtype", []), ("deflated", ["rows", "objects"])):
        found = expected(HERE / f"{stem}.npz", names) | {"skipped": skipped}
        (HERE / f"expected-{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
    np.save(HERE / "fortran.npy", plain["fortran/float32"])
    np.lib.format.write_array((HERE / "version-3.npy").open("wb"), plain["text"], version=(3, 0))


if __name__ == "__main__":
    main()
