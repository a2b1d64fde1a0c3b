"""What other libraries write today is read as they read it, and they read what is exported: Orbax,
Flax and llama.cpp's. `make test-peers` installs them beside the test tools and runs this."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import ckptfmt

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.peers]

IMPORT = Path(__file__).parents[2] / "compat/import"
MADE = {
    "flax": {"every-dtype.msgpack": "expected.json"},
    "gguf": {"every-type.gguf": "expected-every-type.json"},
    "orbax": {stem: f"expected-{stem}.json" for stem in ("ocdbt", "ocdbt-zarr3", "zarr", "zarr3")},
}


@pytest.mark.parametrize("format_", MADE)
def test_what_the_library_writes_is_read_as_it_reads_it(
    format_: str, tmp_path: Path, same_as_expected: Any
) -> None:
    """By the script that made the files of the default suite, with the library as installed."""
    pytest.importorskip("orbax.checkpoint" if format_ == "orbax" else format_)
    script = shutil.copy(IMPORT / format_ / "generate.py", tmp_path)
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path, timeout=250)
    for name, expected in MADE[format_].items():
        tree = same_as_expected(tmp_path / name, tmp_path / expected)
        assert tree.format == format_
        assert len(tree.tensors) > 5


def test_orbax_restores_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    rng = np.random.default_rng(0)
    kinds = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    tree: dict[str, Any] = {
        name: rng.integers(0, 256, 24 * np.dtype(name).itemsize, np.uint8).view(name).reshape(4, 6)
        for name in (*kinds, "float16", "float32", "float64", "complex64", bfloat16)
    }
    tree = {np.dtype(name).name: array for name, array in tree.items()}
    tree |= {"bool": np.array([True, False]), "scalar": np.array(2.5), "none": np.zeros((0, 3))}
    ckptfmt.save({"model": tree, "epoch": 3}, tmp_path / "s", step=7, durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "o", target_format="orbax")
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "o")
    assert found["epoch"] == 3
    assert found["model"].keys() == tree.keys()
    for name, array in tree.items():
        restored = np.asarray(found["model"][name])
        assert (restored.dtype, restored.shape) == (array.dtype, array.shape), name
        assert restored.tobytes() == array.tobytes(), name


def test_what_orbax_saves_again_is_what_was_exported(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "list": [np.ones(2), {"x": 1}]}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "o", target_format="orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "again", checkpointer.restore(tmp_path / "o"))
    again = ckptfmt.open_foreign(tmp_path / "again").load()
    assert again["w"].tobytes() == tree["w"].tobytes()  # type: ignore[attr-defined]
    assert again["list"][0].tolist() == [1, 1]
    assert again["list"][1] == {"x": 1}
