"""`tf.distribute`: a mirrored value once, replicas that differ bit for bit, shards as one tensor."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf

Sharded = tf.__internal__.distribute.ShardedVariable
KINDS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "docs/examples/tensorflow_workers.py"


def make(strategy: Any, start: float = 0.0) -> Any:
    module = tf.Module()
    with strategy.scope():
        module.w = tf.Variable([start] * 2)
        module.counts = {
            kind: tf.Variable(
                start,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation[kind],
            )
            for kind in KINDS
        }
    return module


def plain() -> Any:
    module = tf.Module()
    module.w = tf.Variable([0.0, 0.0])
    module.counts = {kind: tf.Variable(0.0) for kind in KINDS}
    return module


def counts(module: Any) -> dict[str, list[float]]:
    return {k: [float(part) for part in v.values] for k, v in module.counts.items()}


def both(first: float, second: float) -> dict[str, list[float]]:
    return {kind: [first, second] for kind in KINDS}


def uneven(strategy: Any) -> Any:
    """A small number beside one that swallows it in every sum."""
    module = make(strategy)
    module.w.assign([1.0, 2.0])
    for variable in module.counts.values():
        variable.values[0].assign(1e8)
        variable.values[1].assign(1.0)
    return module


def test_replicas_that_differ_come_back_bit_for_bit(tmp_path: Path, strategy: Any) -> None:
    ckf.save({"m": uneven(strategy)}, tmp_path)
    fresh = make(strategy, 7.0)
    ckf.restore({"m": fresh}, tmp_path).assert_consumed()
    assert counts(fresh) == both(1e8, 1.0)
    assert [part.numpy().tolist() for part in fresh.w.values] == [[1.0, 2.0]] * 2


def test_other_readers_find_the_value_that_tensorflow_reads(tmp_path: Path, strategy: Any) -> None:
    ckf.save({"m": uneven(strategy)}, tmp_path)
    tree = ckptfmt.load(tmp_path)["m"]
    assert tree["w"].tolist() == [1.0, 2.0]
    assert {k: float(tree["counts"][k]) for k in KINDS} == {
        "NONE": 1e8,
        "SUM": 1e8,
        "MEAN": 5e7,
        "ONLY_FIRST_REPLICA": 1e8,
    }
    assert tree["counts"]["SUM@replicas"].tolist() == [1e8, 1.0]
    alone = plain()
    ckf.restore({"m": alone}, tmp_path).assert_consumed()
    assert float(alone.counts["MEAN"]) == 5e7


@pytest.mark.parametrize("how", ["one process", "three replicas"])
def test_another_number_of_replicas_takes_the_value_as_tensorflow_does(
    tmp_path: Path, strategy: Any, how: str
) -> None:
    ckf.save({"m": uneven(strategy)}, tmp_path)
    source: Any = ckptfmt.load(tmp_path)
    for kind in KINDS:
        if how == "three replicas":
            source["m"]["counts"][f"{kind}@replicas"] = np.zeros(3, np.float32)
        else:
            del source["m"]["counts"][f"{kind}@replicas"]
    fresh = make(strategy, 7.0)
    ckf.restore({"m": fresh}, source).assert_consumed()
    assert counts(fresh) == {
        "NONE": [1e8, 1e8],
        "SUM": [5e7, 5e7],
        "MEAN": [5e7, 5e7],
        "ONLY_FIRST_REPLICA": [1e8, 1e8],
    }


def test_replicas_get_their_own_old_values_back_if_the_restore_fails(
    tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckf.save({"m": make(strategy, 3.0), "z": tf.Variable(1.0)}, tmp_path)
    target, last = uneven(strategy), tf.Variable(5.0)
    assign, calls = last.assign, []

    def fail_at_first(value: Any) -> None:
        calls.append(value)
        if len(calls) == 1:
            raise RuntimeError("no")
        assign(value)

    monkeypatch.setattr(last, "assign", fail_at_first)
    with pytest.raises(RuntimeError, match="no"):
        ckf.restore({"m": target, "z": last}, tmp_path)
    assert counts(target) == both(1e8, 1.0)
    assert target.w.numpy().tolist() == [1.0, 2.0]


def test_a_bare_variable_in_a_dict_comes_back_bit_for_bit(tmp_path: Path, strategy: Any) -> None:
    variable = uneven(strategy).counts["SUM"]
    ckf.save({"d": {"v": variable}}, tmp_path)
    assert ckptfmt.open(tmp_path).names() == ["d/v", "d/v@replicas"]
    variable.assign(0.0)
    ckf.restore({"d": {"v": variable}}, tmp_path).assert_consumed()
    assert [float(part) for part in variable.values] == [1e8, 1.0]
    alone, array = tf.Variable(0.0), {"d": {"v": np.zeros((), np.float32)}}
    ckf.restore({"d": {"v": alone}}, tmp_path).assert_consumed()
    report = ckptfmt.restore(array, tmp_path)
    assert (float(alone), float(array["d"]["v"])) == (1e8, 1e8)
    assert report.unexpected == report.spare == ("d/v@replicas",)


def test_a_bare_variable_in_a_list_is_saved_as_it_is_read_and_that_is_said(
    tmp_path: Path, strategy: Any
) -> None:
    variable = uneven(strategy).counts["SUM"]
    with pytest.warns(ckptfmt.CkptWarning, match=r"v/0: its one value is saved without .*@repl"):
        ckf.save({"v": [variable]}, tmp_path)
    ckf.restore({"v": [variable]}, tmp_path)
    assert [float(part) for part in variable.values] == [5e7, 5e7]


def test_a_bare_variable_gets_its_own_old_values_back_if_the_restore_fails(
    tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckf.save({"v": make(strategy, 3.0).counts["SUM"], "z": tf.Variable(1.0)}, tmp_path)
    target, last = uneven(strategy).counts["SUM"], tf.Variable(5.0)
    monkeypatch.setattr(last, "assign", lambda value: 1 / 0)
    with pytest.raises(Exception, match="division"):
        ckf.restore({"v": target, "z": last}, tmp_path)
    assert [float(part) for part in target.values] == [1e8, 1.0]


def averaged(strategy: Any, seed: int) -> Any:
    """A model whose replicas have made other averages, as each assigns its own in `fit`."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
        )
    norm, rows = model.get_layer("norm"), np.random.default_rng(seed)
    for variable in (norm.moving_mean, norm.moving_variance):
        for replica in variable.value.values:
            replica.assign(rows.random(3, np.float32))
    return model


def replica_values(model: Any) -> list[bytes]:
    return [part.numpy().tobytes() for v in model.variables for part in v.value.values]


def test_each_replica_gets_its_own_moving_averages_back(tmp_path: Path, strategy: Any) -> None:
    first, second = averaged(strategy, 1), averaged(strategy, 2)
    mean = first.get_layer("norm").moving_mean.value
    assert mean.values[0].numpy().tolist() != mean.values[1].numpy().tolist()
    ckf.save({"model": first}, tmp_path, step=1)
    kept = [name for name in ckptfmt.open(tmp_path).names() if "@" in name]
    assert kept == [f"model/norm/moving_{of}@replicas" for of in ("mean", "variance")]
    ckf.restore({"model": second}, tmp_path).assert_consumed()
    assert replica_values(second) == replica_values(first)
    alone = keras.models.clone_model(first)
    ckf.restore({"model": alone}, tmp_path).assert_consumed()
    assert np.array_equal(alone.get_layer("norm").moving_mean, mean.values[0].numpy())


def test_moving_averages_of_replicas_are_put_back_if_the_restore_fails(
    tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = averaged(strategy, 1), averaged(strategy, 2)
    alone, last = keras.models.clone_model(first), tf.Variable(1.0)
    for name, model in (("apart", first), ("equal", alone)):
        ckf.save({"model": model, "z": last}, tmp_path / name, step=1)
    monkeypatch.setattr(last, "assign", lambda value: 1 / 0)
    before = replica_values(second)
    for name in ("apart", "equal"):
        with pytest.raises(Exception, match="division"):
            ckf.restore({"model": second, "z": last}, tmp_path / name)
        assert replica_values(second) == before


def test_a_mirrored_value_is_stored_once_while_its_replicas_agree(
    tmp_path: Path, strategy: Any
) -> None:
    module = tf.Module()
    with strategy.scope():
        module.w = tf.Variable([np.nan, -0.0])
    ckf.save({"m": module}, tmp_path, step=1)
    assert ckptfmt.open(tmp_path).names() == ["m/w"]
    module.w.values[1].assign([np.nan, 0.0])
    ckf.save({"m": module}, tmp_path, step=2)
    assert ckptfmt.open(tmp_path).names() == ["m/w", "m/w@replicas"]


def keras_state() -> dict[str, Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    return {
        "model": model,
        "optimizer": keras.optimizers.Adam(),
        "metric": keras.metrics.MeanSquaredError(),
    }


def all_values(state: dict[str, Any]) -> list[Any]:
    variables = [v for part in state.values() for v in part.variables]
    return [variable.numpy() for variable in variables]


def test_a_keras_model_moves_between_strategies_with_its_optimizer_and_metric(
    tmp_path: Path, strategy: Any
) -> None:
    with strategy.scope():
        first, second = keras_state(), keras_state()
        first["model"].compile(first["optimizer"], "mse", metrics=[first["metric"]])
    data = np.arange(16, dtype=np.float32).reshape(8, 2)
    first["model"].fit(data, data[:, ::-1], batch_size=4, verbose=0)
    second["model"].compile(second["optimizer"], "mse")
    ckf.save(first, tmp_path)
    assert "metric/total@replicas" in ckptfmt.open(tmp_path).names()
    alone = keras_state()
    for state in (second, alone):
        ckf.restore(state, tmp_path).assert_consumed()
        assert all(map(np.array_equal, all_values(first), all_values(state)))
    kernel = second["model"].variables[0].value
    assert len(kernel.values) == 2
    assert all(
        np.array_equal(copy.numpy(), first["model"].variables[0].numpy()) for copy in kernel.values
    )


def test_a_sharded_variable_is_one_tensor_for_any_other_partitioning(tmp_path: Path) -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)

    def embedding(*sizes: int, scale: float = 0.0) -> Any:
        module, cuts = tf.Module(), np.cumsum((0, *sizes))
        shards = [tf.Variable(scale * rows[a:b]) for a, b in itertools.pairwise(cuts)]
        module.table = Sharded(shards, name="table") if len(sizes) > 1 else shards[0]
        return module

    ckf.save({"m": embedding(2, 3, scale=1.0)}, tmp_path)
    assert np.array_equal(ckptfmt.load(tmp_path)["m"]["table"], rows)
    for sizes in ((3, 1, 1), (2, 3), (5,)):
        target = embedding(*sizes)
        ckf.restore({"m": target}, tmp_path).assert_consumed()
        assert np.array_equal(tf.convert_to_tensor(target.table), rows)
    with pytest.raises(ckptfmt.MismatchError, match=r"m/table: expected \[4, 2\], found \[5, 2\]"):
        ckf.restore({"m": embedding(2, 2)}, tmp_path)


def test_a_new_sharded_variable_is_cut_like_the_one_it_is_modelled_on(tmp_path: Path) -> None:
    like = Sharded([tf.Variable([[0.0], [0.0]]), tf.Variable([[0.0]])], name="t")
    ckf.save(
        {"t": Sharded([tf.Variable([[1.0]]), tf.Variable([[2.0], [3.0]])], name="t")}, tmp_path
    )
    made = ckf.load(tmp_path, like={"t": like})["t"]
    assert [shard.numpy().tolist() for shard in made.variables] == [[[1.0], [2.0]], [[3.0]]]


def test_a_strategy_of_one_process_is_a_group_of_one(tmp_path: Path, strategy: Any) -> None:
    ckf.save({"m": uneven(strategy)}, tmp_path, group=strategy)
    fresh = make(strategy)
    ckf.restore({"m": fresh}, tmp_path, group=strategy).assert_consumed()
    assert counts(fresh)["SUM"] == [1e8, 1.0]


def test_what_is_no_strategy_is_refused_as_a_group(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.UsageError, match=r"no group of ranks.*tf\.distribute\.Strategy"):
        ckf.save({"v": tf.Variable(1.0)}, tmp_path, group=tf.constant([1.0]))


def free_ports(count: int) -> str:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = ",".join(str(one.getsockname()[1]) for one in sockets)
    for one in sockets:
        one.close()
    return ports


@pytest.mark.slow
def test_the_example_of_several_workers_goes_on_where_all_of_them_were(tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> list[list[str]]:
        ports = [f"127.0.0.1:{port}" for port in free_ports(2).split(",")]
        config = {"cluster": {"worker": ports}}
        command = [sys.executable, EXAMPLE, "--store", tmp_path / folder, "--steps", str(steps)]
        return together(
            [
                (
                    command,
                    {"TF_CONFIG": json.dumps({**config, "task": {"type": "worker", "index": n}})},
                )
                for n in range(2)
            ]
        )

    straight = run("straight", 20)
    assert straight[0] == straight[1], "both have the same weights"
    assert straight[0][0] == "starts at step 0"
    run("two parts", 16)
    assert ckptfmt.Store(tmp_path / "two parts").steps() == [7, 14]
    assert run("two parts", 20) == [["starts at step 14", straight[0][1]]] * 2


def run_workers(script: Path, folder: Path, *more: str) -> list[Any]:
    """What two workers printed, as JSON on their last line."""
    ports = free_ports(2)
    commands = [[sys.executable, script, str(rank), ports, folder, *more] for rank in range(2)]
    said = together([(command, {}) for command in commands])
    return [json.loads(lines[-1]) if lines else None for lines in said]


def together(commands: Sequence[tuple[Sequence[Any], Mapping[str, str]]]) -> list[list[str]]:
    """The lines that processes print which run at one time: (command, more of the environment)."""
    workers = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for command, environment in commands
    ]
    said = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=240)
            assert worker.returncode == 0, err[-3000:]
            said.append(out.splitlines())
    finally:
        for worker in workers:
            worker.kill()
    return said


def test_two_workers_save_and_restore_one_checkpoint_together(tmp_path: Path) -> None:
    said = run_workers(HERE / "two_workers.py", tmp_path / "run")
    store = ckptfmt.Store(tmp_path / "run")
    assert store.steps() == [1, 2]
    tree = ckptfmt.load(tmp_path / "run", step=1)
    assert tree["m"]["w"].tolist() == [1.0, 2.0]
    assert {k: tree["m"]["counts"][f"{k}@replicas"].tolist() for k in KINDS} == both(1e8, 1.0)
    assert float(tree["m"]["counts"]["MEAN"]) == 5e7
    assert len(list((tmp_path / "run" / "data").iterdir())) >= 2, "a file of each worker"
    for rank, seen in enumerate(said):
        assert "pass group=strategy, and let every worker call" in seen["alone"]
        assert "step-0000000000000001" in seen["disagree"]
        assert "step-0000000000000002" in seen["disagree"]
        assert "on rank 0" in seen["disagree"]
        assert "on rank 1" in seen["disagree"]
        assert seen["untouched"] == [7.0, 7.0]
        assert seen["w"] == [1.0, 2.0]
        assert seen["counts"] == dict.fromkeys(KINDS, (1e8, 1.0)[rank])
        assert seen["next"] == 1 + 2 * rank, "each has its own position in the data"
        assert "object of this type cannot be saved: bad: found object" in seen["failed"]
    assert said[0]["failed"].startswith("ConflictError: another worker failed: found rank 1: ")
    assert "did not answer in time: rank 1" in said[0]["late"]


@pytest.mark.slow
def test_training_by_two_workers_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = HERE / "training_workers.py"
    expected = run_workers(script, tmp_path / "whole", "-1")
    assert run_workers(script, tmp_path / "broken", "5") == [None, None]
    assert ckptfmt.Store(tmp_path / "broken").steps() in ([2], [2, 4]), "4 was in flight"
    assert run_workers(script, tmp_path / "broken", "-1") == expected
    assert expected[0]["w"] == expected[1]["w"]
    assert expected[0]["seen"] != expected[1]["seen"]


@pytest.mark.slow
def test_fit_of_keras_does_not_run_among_workers_with_or_without_a_callback(tmp_path: Path) -> None:
    """Why the callbacks refuse them. Once this fails, they can be asked to serve workers too."""
    for seen in run_workers(HERE / "fitting_workers.py", tmp_path / "run"):
        assert seen["alone"].startswith("ValueError: Attempt to convert a value (PerReplica")
        assert seen["past the first batch"].startswith("ValueError: ")
        assert "Invalid reduction dimension" in seen["past the first batch"]
        for name in ("BackupAndRestore", "ModelCheckpoint"):
            assert seen[name].startswith("UsageError: Keras 3.")
            assert f"so {name} cannot serve one" in seen[name]
            assert "with 2 workers" in seen[name]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_parameter_servers_are_saved_and_restored_by_their_coordinator(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "parameter_servers.py", free_ports(3), tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "restored from 3 servers" in done.stdout, done.stderr[-3000:]
