"""A worker that trains under a Manager: `training_workers.py RANK PORTS FOLDER STOP`, see
test_distribution. It ends without a word at step STOP, and at step 9 prints what it has."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
TOTAL = 9


def main(rank: int, ports: list[str], folder: Path, stop: int) -> None:
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": rank},
        }
    )
    import tensorflow as tf

    import ckptfmt
    import ckptfmt.tensorflow as ckf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    module = tf.Module()
    with strategy.scope():
        module.w = tf.Variable(tf.ones([1000]) / 3)
        module.seen = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        module.rng = tf.random.Generator.from_seed(5)
    data = iter(tf.data.Dataset.range(100).shuffle(20, seed=rank + 1))
    state = {"m": module, "data": ckf.per_rank(data)}

    def count(x: Any) -> Any:
        module.seen.assign_add(x)
        return x * 0.1

    with ckptfmt.Manager(folder, keep=2, save_when=2, group=strategy) as manager:
        for step in range(manager.restore(state).step, TOTAL):
            if step == stop:
                os._exit(0)  # as a machine does that goes away
            gain = strategy.run(count, args=(tf.cast(next(data), tf.float32),))
            noise = module.rng.normal([1000])
            module.w.assign(module.w * 0.9 + noise * strategy.reduce("SUM", gain, axis=None))
            saved = manager.save(state, step=step + 1)
            if saved is not None and step + 1 == stop:
                saved.result()
    own = {"w": module.w.numpy().tobytes().hex()[:4000], "seen": float(module.seen.values[0])}
    print(json.dumps({**own, "next": int(next(data))}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3]), int(sys.argv[4]))
