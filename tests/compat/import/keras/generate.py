"""Made the files beside with Keras; run again only for a new folder.

    python generate.py

HDF5 is mostly padding: `xz` keeps the files small. `expected-*.json` says what Keras reads of them, by the names that `ckptfmt.tensorflow` gives the
same model: dtype, shape, and the bytes in hex.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import keras
import numpy as np

import ckptfmt
import ckptfmt.tensorflow as ckf

HERE = Path(__file__).parent
RELEASE = "3.15.1"


def model() -> keras.Model:
    """Chosen names and Keras's own, layers within layers, parts, options, frozen and mixed dtypes."""
    layers = keras.layers
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(5, 3, name="words")(inputs)
    x = layers.Bidirectional(layers.GRU(2, return_sequences=True))(x)
    x = layers.LayerNormalization(center=False)(x)
    x = layers.RNN([layers.LSTMCell(2), layers.GRUCell(2)], return_sequences=True)(x)
    x = layers.Conv1D(3, 2)(x)
    x = layers.BatchNormalization(scale=False)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(2, dtype="bfloat16")(x)
    x = keras.Sequential([layers.Dense(2), layers.Dense(2, use_bias=False, trainable=False)])(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def trained(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    made = model()
    made.compile(keras.optimizers.Adam(0.01, amsgrad=True), "mse")
    made.fit(np.arange(8, dtype=np.int32).reshape(2, 4) % 5, np.ones((2, 1)), verbose=0)
    return made


def expected(found: keras.Model) -> dict[str, Any]:
    """The model and its optimizer, by the names of `ckptfmt.tensorflow`; generators left out."""
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        ckf.save({"model": found, "optimizer": found.optimizer}, folder)
        with ckptfmt.open(folder) as checkpoint:
            for name in checkpoint.names():
                if "seed_generator" not in name:
                    array = checkpoint[name].read()
                    tensors[name] = {
                        "dtype": array.dtype.name,
                        "shape": list(array.shape),
                        "hex": array.tobytes().hex(),
                    }
    return {"tensors": tensors}


def numbered(path: Path) -> dict[str, Any]:
    """An optimizer's variables as the file numbers them."""
    made = {}
    with h5py.File(path) as file:
        for number, item in file["optimizer/vars"].items():
            array = item[()]
            made[f"optimizer/vars/{number}"] = {
                "dtype": item.attrs.get("dtype", array.dtype.name),
                "shape": list(array.shape),
                "hex": array.tobytes().hex(),
            }
    return made


def main() -> None:
    assert keras.__version__ == RELEASE
    made = trained()
    made.save(HERE / "model.keras")
    made.save(HERE / "model.h5")
    made.save_weights(HERE / "model.weights.h5")
    # Without the configuration: a layer with one of gamma and beta does not say which it has.
    found = expected(keras.models.load_model(HERE / "model.keras"))
    (HERE / "expected-model.json").write_text(json.dumps(found) + "\n")
    renamed = {
        name: row for name, row in found["tensors"].items() if not name.startswith("optimizer")
    }
    for old, new in (
        ("layer_normalization/gamma", "layer_normalization/0"),
        ("batch_normalization/beta", "batch_normalization/0"),
        ("batch_normalization/moving_mean", "batch_normalization/1"),
        ("batch_normalization/moving_variance", "batch_normalization/2"),
        *(
            (f"rnn/cell/cells/{n}/{v}", f"rnn/cell/cells/{c}_cell/{v}")
            for n, c in enumerate(("lstm", "gru"))
            for v in ("kernel", "recurrent_kernel", "bias")
        ),
    ):
        renamed[f"model/{new}"] = renamed.pop(f"model/{old}")
    renamed |= numbered(HERE / "model.weights.h5")
    (HERE / "expected-weights.json").write_text(json.dumps({"tensors": renamed}) + "\n")
    for name in ("model.keras", "model.h5", "model.weights.h5"):
        (HERE / f"{name}.xz").write_bytes(lzma.compress((HERE / name).read_bytes(), preset=9))
        (HERE / name).unlink()


if __name__ == "__main__":
    main()
