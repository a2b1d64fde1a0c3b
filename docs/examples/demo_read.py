"""Open the demo's checkpoint without PyTorch, and run the encoder on it.

    python demo_read.py numpy      --store runs/a --probe result.json --result numpy.json
    python demo_read.py tensorflow --store runs/a --probe result.json --result tensorflow.json

Importing any framework but the one that was asked for fails in this process, so that nothing can
sneak in. One function computes the encoder for both: TensorFlow speaks NumPy's names too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HEADS, LAYERS, EPSILON = 12, 6, 1e-12
FRAMEWORKS = ("torch", "tensorflow", "jax")


def encode(xp: Any, erf: Callable[[Any], Any], w: Mapping[str, Any], ids: Any) -> Any:
    """Unit vectors of sentences. `xp` is numpy, or TensorFlow's module of the same functions."""

    def linear(x: Any, name: str) -> Any:
        return xp.matmul(x, xp.transpose(w[f"{name}.weight"])) + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        x = x - xp.mean(x, axis=-1, keepdims=True)
        x = x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return xp.transpose(xp.reshape(x, (rows, width, HEADS, -1)), (0, 2, 1, 3))

    rows, width = ids.shape
    real = (ids != 0).astype("float32")
    mask = (1 - real)[:, None, None, :] * -1e9
    x = xp.take(w["embeddings.word_embeddings.weight"], ids, axis=0)
    x = x + w["embeddings.position_embeddings.weight"][:width]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for number in range(LAYERS):
        at = f"encoder.layer.{number}"
        query, key, value = (
            heads(linear(x, f"{at}.attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = xp.matmul(query, xp.transpose(key, (0, 1, 3, 2))) / math.sqrt(query.shape[-1])
        scores = xp.exp(scores + mask - xp.max(scores + mask, axis=-1, keepdims=True))
        mixed = xp.matmul(scores / xp.sum(scores, axis=-1, keepdims=True), value)
        mixed = xp.reshape(xp.transpose(mixed, (0, 2, 1, 3)), (rows, width, -1))
        x = norm(
            x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        inner = linear(x, f"{at}.intermediate.dense")
        inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    total = xp.sum(x * real[..., None], axis=1)
    return total / xp.sqrt(xp.sum(total * total, axis=-1, keepdims=True))


def with_numpy(store: str) -> tuple[Any, Callable[[Any], Any], dict[str, Any]]:
    import numpy as np

    import ckptfmt

    erf = np.vectorize(math.erf, otypes=["float32"])
    return np, erf, ckptfmt.load(store, names="model")["model"]


def with_tensorflow(store: str) -> tuple[Any, Callable[[Any], Any], dict[str, Any]]:
    import tensorflow as tf
    import tensorflow.experimental.numpy as tnp

    import ckptfmt.tensorflow as ckf

    tnp.experimental_enable_numpy_behavior()
    return tnp, tf.math.erf, ckf.load(store, names="model")["model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=("numpy", "tensorflow"))
    parser.add_argument("--store", required=True)
    parser.add_argument("--probe", type=Path, required=True, help="token ids to encode")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    for framework in FRAMEWORKS:
        if framework != options.reader:
            sys.modules[framework] = None  # type: ignore[assignment]

    xp, erf, weights = (with_numpy if options.reader == "numpy" else with_tensorflow)(options.store)

    import numpy as np

    ids = np.array(json.loads(options.probe.read_text())["ids"])
    vectors = np.asarray(encode(xp, erf, weights, ids))
    result = {
        "type": f"{type(next(iter(weights.values()))).__module__.split('.')[0]} arrays",
        "weights": {
            name: hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
            for name, value in weights.items()
        },
        "vectors": vectors.tolist(),
    }
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
