"""A worker of test_distribution: run as `two_workers.py RANK PORTS FOLDER`, prints what it saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def make(strategy: Any, start: float) -> Any:
    import tensorflow as tf

    module = tf.Module()
    with strategy.scope():
        module.w = tf.Variable([start] * 2)
        module.counts = {
            kind: tf.Variable(
                start,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation[kind],
            )
            for kind in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
        }
    return module


def error_of(call: Any) -> str:
    import ckptfmt

    try:
        call()
    except ckptfmt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, ports: list[str], folder: Path) -> None:
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {job: [f"127.0.0.1:{p}"] for job, p in zip(("chief", "worker"), ports)},
            "task": {"type": ("chief", "worker")[rank], "index": 0},
        }
    )
    import tensorflow as tf

    import ckptfmt.tensorflow as ckf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    module, fresh = make(strategy, 0.0), make(strategy, 7.0)
    module.w.assign([1.0, 2.0])
    for variable in module.counts.values():
        variable.values[0].assign((1e8, 1.0)[rank])
    data, fresh_data = (iter(tf.data.Dataset.range(9)) for _ in range(2))
    for _ in range(1 + 2 * rank):
        next(data)
    state = {"m": module, "data": ckf.per_rank(data)}
    seen: dict[str, Any] = {"alone": error_of(lambda: ckf.save(state, folder, step=1))}
    ckf.save(state, folder, step=1, group=strategy)
    ckf.save_async(state, folder, step=2, group=strategy).result()
    seen["disagree"] = error_of(
        lambda: ckf.restore({"m": fresh}, folder, step=1 + rank, names="m", group=strategy)
    )
    seen["untouched"] = fresh.w.numpy().tolist()
    restored = {"m": fresh, "data": ckf.per_rank(fresh_data)}
    ckf.restore(restored, folder, group=strategy).assert_consumed()
    seen["w"] = fresh.w.numpy().tolist()
    seen["counts"] = {k: float(v.values[0]) for k, v in fresh.counts.items()}
    seen["next"] = int(next(fresh_data))
    bad = {"bad": object(), **state} if rank else state
    seen["failed"] = error_of(lambda: ckf.save(bad, folder, step=3, group=strategy))
    if not rank:
        seen["late"] = error_of(
            lambda: ckf.save(state, folder, step=4, group=strategy, timeout_s=0.2)
        )
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3]))
