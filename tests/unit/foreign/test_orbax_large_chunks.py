"""An array that is one chunk, of any size: its parts are read without decoding all of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

import ckptfmt
from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign import flat, mapping, read_foreign, streaming
from ckptfmt.foreign.orbax import arrays, large_chunks

FILES = Path(__file__).parents[2] / "compat/import/orbax"
ZSTD2 = {"id": "zstd", "level": 1}
BYTES, ZSTD = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}


def shard(chunk: list[int], codecs: list[Any], **more: Any) -> list[Any]:
    inner = {"chunk_shape": chunk, "codecs": codecs, **more}
    return [{"name": "sharding_indexed", "configuration": inner}]


def grid(chunk: list[int]) -> dict[str, Any]:
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}}


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("zarr", {"compressor": None}),
    "zstd": ("zarr", {"compressor": ZSTD2}),
    "gzip": ("zarr", {"compressor": {"id": "gzip", "level": 1}}),
    "chunks": ("zarr", {"compressor": ZSTD2, "chunks": [7, 40], "dimension_separator": "/"}),
    "big": ("zarr", {"compressor": None, "dtype": ">f4"}),
    "zarr3": ("zarr3", {"codecs": [BYTES]}),
    "zarr3 zstd": ("zarr3", {"codecs": [BYTES, ZSTD], **grid([30, 40])}),
    "zarr3 big gzip": ("zarr3", {"codecs": [BIG, GZIP]}),
    "shard": ("zarr3", {"codecs": shard([50, 60], [BYTES, ZSTD]), **grid([50, 60])}),
    "shards": ("zarr3", {"codecs": shard([10, 20], [BYTES]), **grid([20, 40])}),
    "index first": (
        "zarr3",
        {"codecs": shard([25, 30], [BYTES, ZSTD], index_location="start"), **grid([50, 60])},
    ),
    "keys of zarr 2": (
        "zarr3",
        {"codecs": [BYTES], "chunk_key_encoding": {"name": "v2"}, **grid([20, 60])},
    ),
}  # fmt: skip
NOT_STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "blosc": ("zarr", {}),
    "columns": ("zarr", {"compressor": None, "order": "F"}),
    "checksum": ("zarr3", {"codecs": [BYTES, {"name": "crc32c"}]}),
    "transposed": (
        "zarr3",
        {"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES]},
    ),
}


def write(folder: Path, layout: tuple[str, dict[str, Any]], array: Any) -> Path:
    driver, metadata = layout
    store = tensorstore.open(
        {
            "driver": driver,
            "kvstore": {"driver": "file", "path": f"{folder}/w/"},
            "metadata": metadata,
        },
        create=True,
        shape=array.shape,
        **({} if "dtype" in metadata else {"dtype": array.dtype}),
    ).result()
    store.write(array).result()
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is a large one, and everything is streamed."""
    monkeypatch.setattr(arrays, "_BOX_CHUNK_NBYTES_MAX", 0)
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 1000)
    monkeypatch.setattr(large_chunks, "_INPUT_NBYTES", 100)
    monkeypatch.setattr(large_chunks, "_SKIP_NBYTES", 100)
    monkeypatch.setattr(large_chunks, "_STREAMS_MAX", 2)
    monkeypatch.setattr(flat, "_RUN_NUMEL_MAX", 50)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_box_is_that_of_the_array(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.random.default_rng(1).integers(0, 99, (50, 60)).astype(np.float32)
    write(tmp_path / "x", LAYOUTS[name], array)
    monkeypatch.setattr(arrays, "_read", lambda *_: pytest.fail("decoded whole"))
    tensor = read_foreign(tmp_path / "x", source_format="orbax").tensors["w"]
    assert tensor.box is not None
    rng = random.Random(name)
    for _ in range(25):
        ends = [sorted(rng.sample(range(n + 1), 2)) for n in array.shape]
        sides = tuple(slice(*pair) for pair in ends)
        assert np.array_equal(tensor.box(sides), array[sides])
    rules: tuple[Any, ...]
    for rules in ((), ({"transpose": "w"},)) if name in ("zstd", "shards") else ():
        ckptfmt.convert(
            tmp_path / "x",
            tmp_path / "s",
            source_format="orbax",
            rules=rules,
            durable=False,
            if_exists="replace",
        )
        assert np.array_equal(ckptfmt.load(tmp_path / "s")["w"], array.T if rules else array)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["raw", "gzip"])
def test_a_chunk_that_goes_while_it_is_read_is_said_to_be_gone(name: str, tmp_path: Path) -> None:
    array = np.random.default_rng(1).random((50, 60), np.float32)
    write(tmp_path / "x", LAYOUTS[name], array)
    box = read_foreign(tmp_path / "x", source_format="orbax").tensors["w"].box
    assert box is not None
    assert np.array_equal(box((slice(0, 1), slice(0, 9))), array[:1, :9])
    (tmp_path / "x/w/0.0").unlink()
    with pytest.raises(CorruptError, match=r"gone, or was cut off: .*0 of \d+ bytes"):
        box((slice(40, 50), slice(0, 60)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NOT_STREAMED)
def test_what_cannot_be_streamed_is_decoded_by_tensorstore(name: str, tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.float32).reshape(20, 30)
    write(tmp_path / "x", NOT_STREAMED[name], array)
    tensor = read_foreign(tmp_path / "x", source_format="orbax").tensors["w"]
    assert tensor.box is None
    assert np.array_equal(tensor.fetch(), array)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("stem", ["ocdbt", "ocdbt-zarr3", "zarr", "zarr3"])
def test_what_orbax_writes_is_streamed(stem: str, tmp_path: Path) -> None:
    want = json.loads((FILES / f"expected-{stem}.json").read_text())["tensors"]
    tree = read_foreign(FILES / stem)
    streamed = 0
    for name, tensor in tree.tensors.items():
        if tensor.box is not None:
            made = tensor.box(tuple(slice(0, n) for n in tensor.shape))
            assert made.tobytes().hex() == want[name]["hex"], name
            streamed += 1
    assert streamed >= 5


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["chunks", "shards"])
def test_parts_that_are_not_stored_are_the_fill_value(name: str, tmp_path: Path) -> None:
    array = np.zeros((50, 60), np.float32)
    array[:7, :20] = 3
    write(tmp_path / "x", LAYOUTS[name], array)
    for path in tmp_path.rglob("*"):
        if path.is_file() and "zar" not in path.name and path.parts[-2:] != ("0", "0"):
            path.unlink()
    tensor = read_foreign(tmp_path / "x", source_format="orbax").tensors["w"]
    assert tensor.box is not None
    assert np.array_equal(tensor.box((slice(3, 50), slice(1, 60))), array[3:, 1:])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", LAYOUTS)
def test_damaged_chunks_are_typed_errors(name: str, tmp_path: Path, seed: int) -> None:
    array = np.random.default_rng(1).integers(0, 99, (50, 60)).astype(np.float32)
    write(tmp_path / "x", LAYOUTS[name], array)
    paths = [p for p in tmp_path.rglob("*") if p.is_file() and "zar" not in p.name]
    rng, errors = random.Random(seed), 0
    for number in range(20):
        path = rng.choice(paths)
        good = path.read_bytes()
        spoiled = bytearray(good)
        at = rng.randrange(len(good))
        if number % 2:
            del spoiled[at:]
        else:
            spoiled[at:] = rng.randbytes(len(good) - at + rng.randrange(2))
        path.write_bytes(spoiled)
        tensor = read_foreign(tmp_path / "x", source_format="orbax").tensors["w"]
        assert tensor.box is not None
        try:
            tensor.box((slice(0, 50), slice(0, 60)))
        except CorruptError:
            errors += 1
        path.write_bytes(good)
    assert errors >= 8


CONVERT = """
    import sys, ckptfmt
    from pathlib import Path
    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(key))
    ckptfmt.convert(*sys.argv[1:3], durable=False, source_format="orbax")
    print(status("VmHWM"))
"""


COUNT = 1 << 28
GIGABYTES: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("zarr", {"compressor": None, "chunks": [COUNT]}),
    "zstd": ("zarr", {"compressor": ZSTD2, "chunks": [COUNT]}),
    "shard": ("zarr3", {"codecs": shard([COUNT], [BYTES, ZSTD]), **grid([COUNT])}),
    "small chunks": ("zarr", {"compressor": ZSTD2, "chunks": [1 << 20]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GIGABYTES)
def test_an_array_of_a_gigabyte_is_converted_in_half_of_it(name: str, tmp_path: Path) -> None:
    part = np.random.default_rng(0).integers(0, 1000, 1 << 20, np.int32)
    write(tmp_path / "x", GIGABYTES[name], np.tile(part, COUNT // len(part)))
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CONVERT), tmp_path / "x", tmp_path / "s"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(run.stdout) < 512, run.stdout  # MiB, of 1024
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert checkpoint["w"].shape == (COUNT,)
        for start in (0, COUNT // 2, COUNT - len(part)):
            assert np.array_equal(checkpoint["w"].read(np.s_[start : start + len(part)]), part)


@pytest.mark.parametrize("name", ["blosc", "columns", "transposed", "zstd"])
def test_a_chunk_that_only_tensorstore_decodes_is_refused_beyond_the_memory_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    folder = write(tmp_path / "o", {**LAYOUTS, **NOT_STREAMED}[name], array)
    monkeypatch.setattr(arrays, "_BOX_CHUNK_NBYTES_MAX", 1)
    monkeypatch.setattr(mapping, "WHOLE_CHUNKS_NBYTES_FREE", 1)
    with ckptfmt.configure(staging_nbytes=2 * array.nbytes - 1):
        if name == "zstd":  # read as a stream
            assert ckptfmt.open_foreign(folder).load()["w"].tolist() == array.tolist()
            return
        with pytest.raises(UnsupportedError, match=r"decoded whole .* CKPTFMT_STAGING_BYTES"):
            ckptfmt.open_foreign(folder)
    with ckptfmt.configure(staging_nbytes=2 * array.nbytes):
        assert ckptfmt.open_foreign(folder).load()["w"].tolist() == array.tolist()
