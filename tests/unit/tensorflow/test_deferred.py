"""Variables that are made after the restore: they are given what waits for them, wherever they are
made."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError
from tests.unit.tensorflow.nets import Block, Lazy, train_step

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)


def compiled(**how: Any) -> Any:
    net = Block(**how)
    net.compile(keras.optimizers.Adam(0.05), "mse")
    return net


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of which every step was saved with its optimizer, and where."""
    net = compiled()
    net.fit(X, Y, epochs=2, verbose=0)
    path = tmp_path_factory.mktemp("trained")
    ckf.save({"model": net, "optimizer": net.optimizer}, path, step=2)
    return net, path


def same(one: Any, other: Any) -> bool:
    return len(one.variables) == len(other.variables) and all(
        np.array_equal(a.numpy(), b.numpy()) for a, b in zip(one.variables, other.variables)
    )


BUILDS: dict[str, Callable[[Any], object]] = {
    "an eager call": lambda net: net(X),
    "predict": lambda net: net.predict(X, verbose=0),
    "evaluate": lambda net: net.evaluate(X, Y, verbose=0),
    "a tf.function": lambda net: tf.function(net)(X),
    "build()": lambda net: [net.inner.build((None, 3)), net.head.build((None, 4))],
    "a symbolic call": lambda net: net(keras.Input((3,))),
}


@pytest.mark.parametrize("how", BUILDS)
def test_a_subclassed_model_gets_its_values_whatever_builds_it(
    trained: tuple[Any, Path], how: str
) -> None:
    net, path = trained
    fresh = compiled()
    status = ckf.restore({"model": fresh}, path, names="model")
    assert len(status.pending) == len(net.variables)
    assert not fresh.variables
    BUILDS[how](fresh)
    status.assert_consumed().assert_nontrivial_match()
    assert same(net, fresh)
    assert np.array_equal(net(X), fresh(X))


def test_fit_goes_on_from_a_restore_of_an_unbuilt_model_and_optimizer(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    net, path = trained
    fresh, control = compiled(), compiled()
    status = ckf.restore({"model": fresh, "optimizer": fresh.optimizer}, path)
    assert list(status.report.matched) == [
        "optimizer/iterations",
        "optimizer/learning_rate",
    ]
    control(X)
    ckf.restore({"model": control, "optimizer": control.optimizer}, path).assert_consumed()
    for one in (fresh, control):
        one.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    status.assert_consumed()
    assert same(control, fresh)
    assert same(control.optimizer, fresh.optimizer)
    assert not same(net, fresh)


def test_a_step_in_a_tf_function_goes_on_from_a_restore(trained: tuple[Any, Path]) -> None:
    _, path = trained
    nets = [Block(), Block()]
    optimizers = [keras.optimizers.Adam(0.05), keras.optimizers.Adam(0.05)]
    nets[1](X)
    statuses = [
        ckf.restore({"model": net, "optimizer": optimizer}, path)
        for net, optimizer in zip(nets, optimizers)
    ]
    for net, optimizer in zip(nets, optimizers):
        step = tf.function(train_step)
        step(net, optimizer, X, Y)
        step(net, optimizer, X, Y)
    for status in statuses:
        status.assert_consumed()
    assert same(*nets)
    assert same(*optimizers)


def test_pending_values_outlive_their_checkpoint(trained: tuple[Any, Path], tmp_path: Path) -> None:
    net, path = trained
    shutil.copytree(path, tmp_path / "copy")
    fresh = compiled()
    status = ckf.restore({"model": fresh}, tmp_path / "copy", names="model")
    shutil.rmtree(tmp_path / "copy")
    fresh(X)
    status.assert_consumed()
    assert same(net, fresh)


@pytest.mark.parametrize("how", ["an eager call", "predict", "evaluate"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"units": 5}, r"model/inner/kernel: expected float32 \[3, 5\], found float32 \[3, 4\]"),
        ({"bias": False}, "not in the target: model/head/bias"),
        ({"more": True}, "missing in the checkpoint: model/more/kernel"),
    ],
)
def test_what_does_not_fit_raises_where_it_is_built_and_again_at_the_next_try(
    trained: tuple[Any, Path], how: str, change: dict[str, Any], said: str
) -> None:
    _, path = trained
    fresh = compiled(**change)
    status = ckf.restore({"model": fresh}, path, names="model")
    with pytest.raises(MismatchError, match=said):
        BUILDS[how](fresh)
    with pytest.raises(MismatchError, match=said):  # not random weights at the second try
        fresh(X)
    with pytest.raises(MismatchError):
        status.assert_consumed()
    status.close()
    fresh(X)


def test_the_words_of_the_restore_hold_for_what_comes_later(trained: tuple[Any, Path]) -> None:
    net, path = trained
    more = compiled(more=True)
    status = ckf.restore({"model": more}, path, names="model", allow_missing="model/more/**")
    more(X)
    with pytest.raises(MismatchError, match="model/more/kernel"):
        status.assert_existing_objects_matched()
    assert np.array_equal(more.inner.kernel, net.inner.kernel)

    less = compiled(bias=False)
    status = ckf.restore({"model": less}, path, names="model", allow_unexpected="**/bias")
    less(X)
    status.assert_existing_objects_matched()
    assert list(status.pending) == ["model/head/bias"]
    status.close()

    doubles = Block(dtype="float64")
    status = ckf.restore({"model": doubles}, path, names="model", allow_cast=True)
    doubles(X)
    status.assert_consumed()
    assert np.array_equal(doubles.head.kernel, net.head.kernel.numpy().astype("float64"))


def test_another_dtype_is_refused_where_the_layer_is_built(trained: tuple[Any, Path]) -> None:
    _, path = trained
    doubles = Block(dtype="float64")
    status = ckf.restore({"model": doubles}, path, names="model")
    with pytest.raises(MismatchError, match="another dtype: model/inner/kernel"):
        doubles(X)
    status.close()


def test_expect_partial_takes_what_comes(trained: tuple[Any, Path]) -> None:
    net, path = trained
    less = compiled(bias=False, more=True)
    status = ckf.restore({"model": less}, path, names="model").expect_partial()
    less(X)
    assert np.array_equal(less.inner.kernel, net.inner.kernel)
    assert list(status.pending) == ["model/head/bias"]
    with pytest.raises(MismatchError, match="model/more/kernel"):
        status.assert_consumed()  # it covers what is pending, not what was never filled


def test_expect_partial_covers_nothing_but_what_is_pending(tmp_path: Path) -> None:
    ckf.save({"m": tf.Variable(1.0), "n": tf.Variable(2.0)}, tmp_path, step=1)
    status = ckf.restore({"m": tf.Variable(0.0)}, tmp_path, strict=False).expect_partial()
    with pytest.raises(MismatchError, match="stored values were not used: n"):
        status.assert_consumed()


def test_a_closed_status_holds_nothing_and_the_hooks_are_gone(trained: tuple[Any, Path]) -> None:
    _, path = trained
    fresh = compiled()
    untouched = vars(fresh.inner)["build"]
    status = ckf.restore({"model": fresh}, path, names="model")
    assert vars(fresh.inner)["build"] is not untouched
    status.close()
    assert vars(fresh.inner)["build"] is untouched
    assert list(status.pending) == []
    initial = fresh.inner.kernel_initializer
    fresh.inner.kernel_initializer = "ones"
    fresh(X)
    assert np.all(fresh.inner.kernel.numpy() == 1)
    assert initial is not None


def test_the_hooks_are_gone_when_all_has_come(trained: tuple[Any, Path]) -> None:
    _, path = trained
    fresh = compiled()
    untouched = vars(fresh.inner)["build"], vars(fresh)["build"]
    ckf.restore({"model": fresh, "optimizer": fresh.optimizer}, path)
    fresh(X)
    fresh.optimizer.build(fresh.trainable_variables)
    assert (vars(fresh.inner)["build"], vars(fresh)["build"]) == untouched
    assert "build" not in vars(fresh.optimizer)


def test_a_restore_that_fails_leaves_nothing_waiting(
    trained: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, path = trained
    fresh = compiled()
    untouched = vars(fresh.inner)["build"]
    hooked = []

    def fail(target: Any, staged: Any) -> None:
        hooked.append(vars(fresh.inner)["build"] is not untouched)
        raise RuntimeError("no")

    monkeypatch.setattr("ckptfmt.tensorflow.targets.VariableTarget.bind", fail)
    source = {"model": ckptfmt.load(path, names="model")["model"], "last": np.array(1, np.float32)}
    with pytest.raises(RuntimeError, match="no"):
        ckf.restore({"model": fresh, "last": tf.Variable(0.0)}, source)
    assert hooked == [True]
    assert vars(fresh.inner)["build"] is untouched
    fresh(X)
    assert not same(fresh, net)


def test_a_later_restore_wins_over_one_that_still_waits(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    net, path = trained
    other = compiled()
    other(X)
    ckf.save({"model": other}, tmp_path, step=1)
    fresh = compiled()
    ckf.restore({"model": fresh}, path, names="model").expect_partial()
    status = ckf.restore({"model": fresh}, tmp_path)
    fresh(X)
    status.assert_consumed()
    assert same(fresh, other)
    assert not same(fresh, net)


def test_a_module_takes_variables_and_modules_as_they_are_assigned(tmp_path: Path) -> None:
    first = tf.Module()
    first.w = tf.Variable([1.0, 2.0])
    first.inner = tf.Module()
    first.inner.items = [tf.Variable(3.0), {"k": tf.Variable(4.0)}]
    ckf.save({"m": first}, tmp_path, step=1)

    fresh = tf.Module()
    status = ckf.restore({"m": fresh}, tmp_path)
    assert len(status.pending) == 3
    fresh.w = tf.Variable([0.0, 0.0])
    assert fresh.w.numpy().tolist() == [1.0, 2.0]
    fresh.inner = tf.Module()
    fresh.inner.items = []
    fresh.inner.items.append(tf.Variable(0.0))
    fresh.inner.items.append({"k": tf.Variable(0.0)})
    status.assert_consumed()
    assert float(fresh.inner.items[0]) == 3.0
    assert float(fresh.inner.items[1]["k"]) == 4.0


@pytest.mark.parametrize("traced", [False, True], ids=["eagerly", "while a function is traced"])
def test_a_module_that_makes_its_variable_at_its_first_call(tmp_path: Path, traced: bool) -> None:
    first, fresh = Lazy(), Lazy()
    first(X)
    first.w.assign(first.w * 3)
    ckf.save({"m": first}, tmp_path, step=1)
    status = ckf.restore({"m": fresh}, tmp_path)
    call = tf.function(fresh.__call__) if traced else fresh
    assert np.allclose(call(X), first(X))
    status.assert_consumed()
    assert np.allclose(call(X), first(X))


def test_a_late_variable_of_another_shape_raises_at_its_assignment(tmp_path: Path) -> None:
    first, fresh = tf.Module(), tf.Module()
    first.w = tf.Variable([1.0, 2.0])
    ckf.save({"m": first}, tmp_path, step=1)
    status = ckf.restore({"m": fresh}, tmp_path)
    with pytest.raises(MismatchError, match=r"m/w: expected float32 \[3\], found float32 \[2\]"):
        fresh.w = tf.Variable([0.0, 0.0, 0.0])
    status.close()


def test_a_late_variable_is_found_by_its_other_paths_and_its_full_name(tmp_path: Path) -> None:
    first = tf.Module()
    first.a = tf.Variable([1.0], name="one")
    first.b = tf.Module()
    first.b.again = first.a
    first.c = tf.Variable([2.0], name="two")
    ckf.save({"m": first}, tmp_path, step=1)
    fresh = tf.Module()
    status = ckf.restore({"m": fresh}, tmp_path)
    fresh.b = tf.Module()
    fresh.b.again = tf.Variable([0.0], name="other")  # stored as m/a, of which it is an alias
    fresh.renamed = tf.Variable([0.0], name="two")
    assert (float(fresh.b.again[0]), float(fresh.renamed[0])) == (1.0, 2.0)
    status.assert_consumed()


def test_a_counter_of_tensorflow_that_is_not_made_yet_is_made(tmp_path: Path) -> None:
    first = tf.train.Checkpoint(w=tf.Variable([1.0]))
    first.save(tmp_path / "theirs" / "c")
    first.save(tmp_path / "theirs" / "c")
    ckf.save({"c": first}, tmp_path / "ours", step=1)
    fresh = tf.train.Checkpoint(w=tf.Variable([0.0]))
    ckf.restore({"c": fresh}, tmp_path / "ours").assert_consumed()
    assert int(fresh.save_counter) == 2


def test_a_metric_that_makes_its_variables_at_its_first_update(tmp_path: Path) -> None:
    first, fresh = keras.metrics.F1Score(), keras.metrics.F1Score()
    true, guess = np.eye(3, dtype="float32"), np.full((3, 3), 0.4, "float32")
    first.update_state(true, guess)
    ckf.save({"metric": first}, tmp_path, step=1)
    status = ckf.restore({"metric": fresh}, tmp_path)
    assert status.pending
    fresh.update_state(true, guess)
    first.update_state(true, guess)
    status.assert_consumed()
    assert np.array_equal(fresh.result(), first.result())
    assert same(first, fresh)


def test_one_name_is_no_match_if_it_is_a_counter(tmp_path: Path) -> None:
    first = {"step": tf.Variable(3), "epoch": 2, "w": tf.Variable([1.0])}
    ckf.save(first, tmp_path, step=1)
    status = ckf.restore({"step": tf.Variable(0), "epoch": 0}, tmp_path, strict=False)
    assert len(status.report.matched) == 2
    with pytest.raises(MismatchError, match="nothing but counters was restored: step, epoch"):
        status.assert_nontrivial_match()
    ckf.restore(first, tmp_path).assert_nontrivial_match()
    alone = {"step": tf.Variable(0)}
    ckf.restore(alone, tmp_path, names="step").assert_nontrivial_match()  # nothing else was asked


def test_values_that_were_never_used_are_told_when_nobody_holds_them(
    trained: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = trained
    ckf.restore({"model": compiled()}, path, names="model")
    gc.collect()
    assert "4 restored values were never used" in capsys.readouterr().err
    ckf.restore({"model": compiled()}, path, names="model").close()
    gc.collect()
    assert capsys.readouterr().err == ""


def test_a_plan_says_what_would_be_pending_and_hooks_nothing(trained: tuple[Any, Path]) -> None:
    _, path = trained
    fresh = compiled()
    untouched = vars(fresh.inner)["build"]
    report = ckptfmt.plan({"model": fresh}, path, names="model")
    assert (report.error, len(report.pending)) == (None, 4)
    assert vars(fresh.inner)["build"] is untouched


def test_a_restore_without_a_status_defers_too(trained: tuple[Any, Path]) -> None:
    net, path = trained
    fresh = compiled()
    report = ckptfmt.restore({"model": fresh}, path, names="model")
    assert len(report.pending) == 4
    fresh(X)
    assert same(net, fresh)


def test_a_save_of_what_still_waits_says_that_it_lacks_it(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    net, path = trained
    fresh = compiled()
    status = ckf.restore({"model": fresh}, path, names="model")
    with pytest.warns(ckptfmt.CkptWarning, match="model: 4 restored values still wait"):
        ckf.save({"model": fresh}, tmp_path, step=1)
    fresh(X)
    ckf.save({"model": fresh}, tmp_path, step=2)
    status.assert_consumed()
    assert np.array_equal(ckptfmt.load(tmp_path)["model"]["head"]["kernel"], net.head.kernel)


@pytest.mark.parametrize("build", [False, True])
def test_a_variable_that_is_found_by_a_shorter_path_when_more_is_built_is_still_filled(
    tmp_path: Path, build: bool
) -> None:
    def make() -> Any:
        # It holds the kernel of the layer inside of it in an attribute of its own.
        return keras.Sequential([keras.layers.SpectralNormalization(keras.layers.Dense(2))])

    first, fresh = make(), make()
    first(X)
    ckf.save({"m": first}, tmp_path, step=1)
    status = ckf.restore({"m": fresh}, tmp_path, build=build)
    fresh(X)
    status.assert_consumed()
    assert same(first, fresh)


@pytest.mark.parametrize("eager", [False, True])
def test_a_model_is_of_use_again_once_what_did_not_fit_in_fit_is_let_go(
    trained: tuple[Any, Path], eager: bool
) -> None:
    """Each further fit raises the same, and the first one after `close` trains: no trace is left of
    those that failed, in the layers, in the optimizer or in what Keras has traced."""
    net = Block(units=5)
    net.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=eager)
    status = ckf.restore({"model": net, "optimizer": net.optimizer}, trained[1])
    tries: list[Callable[[], object]] = [
        lambda: net.fit(X, Y, epochs=1, verbose=0),
        lambda: net.evaluate(X, Y, verbose=0),
        lambda: net.predict(X, verbose=0),
        lambda: net.train_on_batch(X, Y),
    ]
    for one in tries:
        with pytest.raises(MismatchError, match=r"inner/kernel: expected float32 \[3, 5\]"):
            one()
    status.close()
    for one in tries:
        one()
    before, kernel = int(net.optimizer.iterations), net.head.kernel.numpy()
    net.fit(X, Y, epochs=3, batch_size=8, verbose=0)
    assert int(net.optimizer.iterations) == before + 3
    assert not np.array_equal(net.head.kernel, kernel)
    assert np.isfinite(net.head.kernel).all()
    assert {variable.shape[-1] for variable in net.inner.variables} == {5}
