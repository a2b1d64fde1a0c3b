"""Made the folders beside with Orbax; run again only for new folders.

    python generate.py

`expected-*.json` says what Orbax restores of them: dtype, shape, and the bytes in memory in hex.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

HERE = Path(__file__).parent
RELEASE = "0.12.8"
DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"),
    *("complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"),
)


def tree() -> dict[str, Any]:
    return {
        "params": {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}},
        "every": {name: jnp.arange(6).reshape(2, 3).astype(name) for name in DTYPES},
        "list": [jnp.ones(2), {"x": jnp.zeros(1)}],
        "tuple": (jnp.zeros(2), jnp.ones(1)),
        "numpy": np.arange(4, dtype=np.float64),
        "step": 7,
        "rate": 0.5,
        "typed": np.int32(3),
        "text": "na\u00efve",
        "none": None,
        "nothing": {},
        "key.dot": jnp.ones(1),
        "~tilde/slash": jnp.ones(1),
    }


def expected(node: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict | list | tuple) and node:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, item in items:
                part = str(key).replace("~", "~0").replace("/", "~1")
                walk(item, f"{name}/{part}" if name else part)
        elif hasattr(node, "shape") and (node.shape or not isinstance(node, np.generic)):
            array = np.asarray(node)
            tensors[name] = {
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "hex": array.tobytes().hex(),
            }
        elif isinstance(node, np.generic):
            values[name] = {node.dtype.name: node.tobytes().hex()}
        else:
            values[name] = node

    walk(node, "")
    return {"tensors": tensors, "values": values}


def main() -> None:
    assert ocp.__version__ == RELEASE
    jax.config.update("jax_enable_x64", True)
    for stem, use_ocdbt, use_zarr3 in (
        ("ocdbt", True, False),
        ("ocdbt-zarr3", True, True),
        ("zarr", False, False),
        ("zarr3", False, True),
    ):
        folder = HERE / stem
        shutil.rmtree(folder, ignore_errors=True)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
        state = tree()
        if not use_ocdbt:
            # There a name is a folder's.
            del state["~tilde/slash"], state["every"]
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(state))
            found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore())
        found["typed"] = np.int32(found["typed"])
        (HERE / f"expected-{stem}.json").write_text(json.dumps(expected(found)) + "\n")
    folder = HERE / "manager"
    shutil.rmtree(folder, ignore_errors=True)
    with ocp.CheckpointManager(folder, item_names=("state", "notes")) as manager:
        for step in (2, 10):
            state = {"w": jnp.full(2, step, jnp.float32)}
            notes = {"step": step}
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)
            )
            manager.save(step, args=args)
            manager.wait_until_finished()


if __name__ == "__main__":
    main()
