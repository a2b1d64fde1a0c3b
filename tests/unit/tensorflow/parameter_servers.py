"""A coordinator with two parameter servers and a worker, all in this process: see test_distribution."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf


def make(strategy: Any, start: float) -> Any:
    module = tf.Module()
    with strategy.scope():
        module.table = tf.Variable(tf.fill([5, 3], start), name="table")
        module.count = tf.Variable(start, aggregation=tf.VariableAggregation.SUM)
    return module


def cluster(ports: list[str]) -> Any:
    hosts = [f"127.0.0.1:{port}" for port in ports]
    spec = tf.train.ClusterSpec({"ps": hosts[:2], "worker": hosts[2:]})
    servers = [
        tf.distribute.Server(spec, job_name=job, task_index=task, protocol="grpc")
        for job, task in (("worker", 0), ("ps", 0), ("ps", 1))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    return resolver, servers


def main(ports: list[str], folder: Path) -> None:
    resolver, servers = cluster(ports)
    partitioners = tf.distribute.experimental.partitioners
    strategies = [
        tf.distribute.ParameterServerStrategy(
            resolver, variable_partitioner=partitioners.FixedShardsPartitioner(shards)
        )
        for shards in (2, 1)
    ]
    saved = make(strategies[0], 0.0)
    rows = tf.reshape(tf.range(15.0), [5, 3])
    saved.table.assign(rows)
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategies[0])

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        saved.count.assign_add(1.0)

    coordinator.schedule(step)
    coordinator.join()
    ckf.save({"m": saved}, folder, step=1, group=strategies[0])
    assert len(saved.table.variables) == 2, "one on each server"
    assert set(ckptfmt.open(folder).names()) == {"m/count", "m/table"}
    for strategy in strategies:
        fresh = make(strategy, 9.0)
        ckf.restore({"m": fresh}, folder, group=strategy).assert_consumed()
        assert bool(tf.reduce_all(tf.convert_to_tensor(fresh.table) == rows))
        assert float(fresh.count.read_value()) == 1.0
    plain = tf.Module()
    plain.table, plain.count = tf.Variable(tf.zeros([5, 3])), tf.Variable(0.0)
    ckf.restore({"m": plain}, folder).assert_consumed()
    assert bool(tf.reduce_all(plain.table == rows))
    print(f"restored from {len(servers)} servers", flush=True)
    os._exit(0)  # servers in one process with their client do not end by themselves


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
