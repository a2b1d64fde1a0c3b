"""Made the files beside with the format's own library; run again only for a new folder.

    python generate.py

`expected.json` says what they hold: dtype in our names, shape, and the bytes in hex.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch

HERE = Path(__file__).parent
RELEASE = "0.8.0"
FLOAT8 = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
PLAIN = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "complex64": torch.complex64,
}


def tensors() -> dict[str, tuple[str, torch.Tensor]]:
    """Name -> (our dtype, tensor); the bytes are arbitrary bit patterns, NaN payloads among them."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, tuple[str, torch.Tensor]] = {}
    for name, dtype in (PLAIN | FLOAT8).items():
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (6 * width,), dtype=torch.uint8, generator=generator)
        made[f"every.{name}"] = (name, raw.view(dtype).reshape(2, 3))
    raw = torch.randint(0, 256, (4,), dtype=torch.uint8, generator=generator)
    made["every.float4"] = ("float4_e2m1fn", raw.view(torch.float4_e2m1fn_x2).reshape(2, 2))
    made["every.bool"] = ("bool", torch.tensor([True, False, True]))
    made["scalar"] = ("float32", torch.tensor(-0.0))
    made["empty"] = ("int64", torch.zeros(0, 3, dtype=torch.int64))
    made["a/slash~tilde"] = ("uint8", torch.tensor([1, 2], dtype=torch.uint8))
    made["ключ \u202e"] = ("uint8", torch.tensor([3], dtype=torch.uint8))
    return made


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def main() -> None:
    assert safetensors.__version__ == RELEASE, safetensors.__version__
    made = tensors()
    plain = {name: tensor for name, (_, tensor) in made.items()}
    metadata = {"format": "pt", "note": "escape \x1b[31m and \u202e"}
    safetensors.torch.save_file(plain, HERE / "every-dtype.safetensors", metadata=metadata)
    expected = {}
    for name, (dtype, tensor) in made.items():
        shape = list(tensor.shape)
        if dtype == "float4_e2m1fn":
            shape[-1] *= 2
        expected[name] = {"dtype": dtype, "shape": shape, "hex": raw_bytes(tensor).hex()}
    (HERE / "expected.json").write_text(
        json.dumps({"metadata": metadata, "tensors": expected}, indent=1, ensure_ascii=True) + "\n"
    )
    shards(HERE / "sharded")


def shards(folder: Path) -> None:
    """Three shards, one of them in a subfolder, and the index that names them."""
    (folder / "more").mkdir(parents=True, exist_ok=True)
    files = ["model-00001-of-00003.safetensors", "more/model-00002-of-00003.safetensors",
             "model-00003-of-00003.safetensors"]  # fmt: skip
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files):
        part = {f"layer.{number}.{key}": torch.full((2, 2), float(number)) for key in ("a", "b")}
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 96}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
